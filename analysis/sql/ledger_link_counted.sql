-- Totals of each byte counter of a link: over all its samples (all_bytes, all_ns); over the spans that lie within the time in which
-- moves were recorded (bytes, covered_ns); and what the recorded moves say crossed the link in those very spans. Relation `span`
-- (from_ns, to_ns: the stretches, apart, in which moves were recorded); views `crossings`, `spans`.
-- Spans that touch are one stretch. A move's bytes are spread evenly over its time: at an edge of a stretch the moves that have ended
-- count whole, those under way in proportion; what happens at one instant belongs to the stretch that begins there.
WITH inside AS (
  SELECT spans.* FROM spans, span WHERE bytes IS NOT NULL AND start_ns IS NOT NULL AND end_ns > start_ns
     AND start_ns >= span.from_ns AND end_ns <= span.to_ns
), marked AS (
  SELECT *, start_ns IS DISTINCT FROM lag(end_ns) OVER (PARTITION BY link, host, source, name, direction ORDER BY start_ns) AS apart FROM inside
), numbered AS (
  SELECT *, sum(apart::INTEGER) OVER (PARTITION BY link, host, source, name, direction ORDER BY start_ns ROWS UNBOUNDED PRECEDING) AS part
  FROM marked
), stretches AS MATERIALIZED (
  SELECT link, host, source, name, direction, part, min(start_ns) AS start_ns, max(end_ns) AS end_ns, sum(bytes) AS bytes,
         sum(end_ns - start_ns) AS covered_ns
  FROM numbered GROUP BY ALL
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
  SELECT i.link, i.host, i.source, i.name, i.direction, z.way, sum(z.moved - a.moved) AS moved
  FROM stretches i
  JOIN summed a ON a.link = i.link AND a.t = i.start_ns
  JOIN summed z ON z.link = i.link AND z.t = i.end_ns AND z.way = a.way
  GROUP BY ALL
), moved AS (
  SELECT link, host, source, name, direction, sum(moved) FILTER (way = 'ab') AS moved_ab, sum(moved) FILTER (way = 'ba') AS moved_ba,
         sum(moved) FILTER (way = '') AS moved_either
  FROM each GROUP BY ALL
), told AS (
  SELECT link, host, source, name, direction, sum(bytes) AS bytes, TRY_CAST(sum(covered_ns) AS BIGINT) AS covered_ns, min(start_ns) AS from_ns,
         max(end_ns) AS to_ns
  FROM stretches GROUP BY ALL
), quality AS (
  SELECT link, host, source, name, direction, max(way) AS way, any_value(semantics) AS semantics, count(*) AS samples,
         count(*) FILTER (status <> 'ok') AS unknown_samples, count(*) FILTER (fall) AS falls, count(*) FILTER (anew) AS restarts,
         count(*) FILTER (ambiguous) AS ambiguous, median(end_ns - start_ns) FILTER (ambiguous)::BIGINT AS apart_ns,
         sum(bytes) AS all_bytes,
         TRY_CAST(sum(end_ns - start_ns) FILTER (bytes IS NOT NULL AND end_ns > start_ns) AS BIGINT) AS all_ns,
         string_agg(DISTINCT status, ', ' ORDER BY status) FILTER (status <> 'ok') AS why
  FROM spans GROUP BY ALL
)
SELECT q.link, q.host, q.source, q.name, q.direction, q.way, q.semantics, samples, unknown_samples, falls, restarts, ambiguous, apart_ns,
       all_bytes, all_ns, why, t.bytes, t.covered_ns,
       t.from_ns, t.to_ns, m.moved_ab, m.moved_ba, m.moved_either
FROM quality q
LEFT JOIN told t USING (link, host, source, name, direction)
LEFT JOIN moved m USING (link, host, source, name, direction)
ORDER BY q.link, q.host, q.source, q.name, q.direction
