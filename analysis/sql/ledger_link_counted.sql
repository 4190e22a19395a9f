-- Totals of each byte counter of a link: over all its samples (all_bytes, all_ns); over the spans that lie within the time in which
-- moves were recorded (bytes, covered_ns); and what the recorded moves say crossed the link in those very spans. Relation `span`
-- (from_ns, to_ns: the stretches, apart, in which moves were recorded); view `crossings`, tables `series`, `spans`.
-- Spans that touch are one stretch. A move's bytes are spread evenly over its time: at an edge of a stretch the moves that have ended
-- count whole, those under way in proportion; what happens at one instant belongs to the stretch that begins there.
WITH inside AS (
  SELECT id, start_ns, end_ns, bytes FROM spans, span WHERE bytes IS NOT NULL AND start_ns IS NOT NULL AND end_ns > start_ns
     AND start_ns >= span.from_ns AND end_ns <= span.to_ns
), marked AS (
  SELECT *, start_ns IS DISTINCT FROM lag(end_ns) OVER (PARTITION BY id ORDER BY start_ns) AS apart FROM inside
), numbered AS (
  SELECT *, sum(apart::INTEGER) OVER (PARTITION BY id ORDER BY start_ns ROWS UNBOUNDED PRECEDING) AS part
  FROM marked
), stretches AS MATERIALIZED (
  SELECT link, id, part, min(start_ns) AS start_ns, max(end_ns) AS end_ns, sum(bytes) AS bytes, sum(end_ns - start_ns) AS covered_ns
  FROM numbered JOIN series USING (id)
  GROUP BY ALL
), edges AS MATERIALIZED (
  SELECT link, t, row_number() OVER (PARTITION BY link ORDER BY t) AS k
  FROM (SELECT DISTINCT link, unnest([start_ns, end_ns]) AS t FROM stretches)
), sized AS (
  SELECT link, way, start_ns, end_ns, bytes FROM crossings WHERE bytes > 0 AND link IN (SELECT link FROM edges)
), begun AS (
  SELECT s.*, coalesce(e.k, 0) AS k_start FROM sized s ASOF LEFT JOIN edges e ON e.link = s.link AND s.start_ns >= e.t
), placed AS MATERIALIZED (
  -- the first edge at or behind its end; of an instant the first behind it
  SELECT b.link, b.way, b.start_ns, b.end_ns, b.bytes, k_start,
         CASE WHEN b.end_ns > b.start_ns THEN coalesce(e.k, 0) ELSE k_start END + 1 AS k_done
  FROM begun b ASOF LEFT JOIN edges e ON e.link = b.link AND b.end_ns > e.t
), done AS (
  SELECT link, way, k_done AS k, sum(bytes) AS bytes FROM placed GROUP BY ALL
), under_way AS (
  SELECT p.link, p.way, e.k, sum(p.bytes::DOUBLE * (e.t - p.start_ns) / (p.end_ns - p.start_ns)) AS bytes
  FROM (SELECT *, unnest(range(k_start + 1, k_done)) AS k FROM placed WHERE k_done > k_start + 1) p
  JOIN edges e ON e.link = p.link AND e.k = p.k
  GROUP BY ALL
), summed AS (
  SELECT e.link, w.way, e.t, coalesce(sum(d.bytes) OVER (PARTITION BY e.link, w.way ORDER BY e.k), 0)::DOUBLE + coalesce(u.bytes, 0) AS moved
  FROM edges e JOIN (SELECT DISTINCT link, way FROM placed) w ON w.link = e.link
  LEFT JOIN done d ON d.link = e.link AND d.way = w.way AND d.k = e.k
  LEFT JOIN under_way u ON u.link = e.link AND u.way = w.way AND u.k = e.k
), each AS (
  SELECT i.id, z.way, sum(z.moved - a.moved) AS moved
  FROM stretches i
  JOIN summed a ON a.link = i.link AND a.t = i.start_ns
  JOIN summed z ON z.link = i.link AND z.t = i.end_ns AND z.way = a.way
  GROUP BY ALL
), moved AS (
  SELECT id, sum(moved) FILTER (way = 'ab') AS moved_ab, sum(moved) FILTER (way = 'ba') AS moved_ba, sum(moved) FILTER (way = '') AS moved_either
  FROM each GROUP BY ALL
), told AS (
  SELECT id, sum(bytes) AS bytes, TRY_CAST(sum(covered_ns) AS BIGINT) AS covered_ns FROM stretches GROUP BY ALL
), quality AS (
  SELECT id, any_value(kind) AS kind, count(*) AS samples, count(*) FILTER (why IS NOT NULL) AS unknown_samples,
         count(*) FILTER (fall) AS falls, count(*) FILTER (anew) AS restarts, count(*) FILTER (ambiguous) AS ambiguous,
         median(end_ns - start_ns) FILTER (ambiguous)::BIGINT AS apart_ns, sum(bytes) AS all_bytes,
         TRY_CAST(sum(end_ns - start_ns) FILTER (bytes IS NOT NULL AND end_ns > start_ns) AS BIGINT) AS all_ns,
         string_agg(DISTINCT why, ', ' ORDER BY why) AS why
  FROM spans GROUP BY id
)
SELECT link, host, source, name, direction, way, ['gauge', 'cumulative', 'delta', 'rate'][kind + 1] AS semantics, samples, unknown_samples,
       falls, restarts, ambiguous, apart_ns, all_bytes, all_ns, why, t.bytes, t.covered_ns, m.moved_ab, m.moved_ba, m.moved_either
FROM quality q
JOIN series USING (id)
LEFT JOIN told t USING (id)
LEFT JOIN moved m USING (id)
ORDER BY link, host, source, name, direction
