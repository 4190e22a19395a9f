-- Totals of each byte counter of a link over the spans that lie within the time in which moves were recorded, and what the recorded
-- moves say crossed the link in those very spans. Relations: `span` (from_ns, to_ns: the moves' coverage); views `crossings`, `spans`.
-- A move's bytes are spread evenly over its time: their running sum, taken at both ends of each span.
WITH inside AS (
  SELECT spans.* FROM spans, span WHERE bytes IS NOT NULL AND start_ns IS NOT NULL AND end_ns > start_ns
     AND start_ns >= span.from_ns AND end_ns <= span.to_ns
), change AS (
  SELECT link, way, start_ns AS at_ns, bytes::DOUBLE / (end_ns - start_ns) AS rate, 0.0 AS at_once FROM crossings
  WHERE bytes > 0 AND end_ns > start_ns
  UNION ALL
  SELECT link, way, end_ns, -bytes::DOUBLE / (end_ns - start_ns), 0.0 FROM crossings WHERE bytes > 0 AND end_ns > start_ns
  UNION ALL
  SELECT link, way, start_ns, 0.0, bytes::DOUBLE FROM crossings WHERE bytes > 0 AND end_ns <= start_ns
), moments AS (
  SELECT link, way, at_ns, sum(rate) AS rate, sum(at_once) AS at_once FROM change GROUP BY ALL
), paced AS (
  SELECT *, sum(rate) OVER w AS pace, coalesce(lead(at_ns) OVER w - at_ns, 0) AS lasts_ns FROM moments
  WINDOW w AS (PARTITION BY link, way ORDER BY at_ns)
), gone AS (
  SELECT link, way, at_ns, pace,
         -- before the moment; what happens at once belongs to the span that begins there
         sum(at_once + pace * lasts_ns) OVER w - (at_once + pace * lasts_ns) AS so_far, at_once
  FROM paced WINDOW w AS (PARTITION BY link, way ORDER BY at_ns ROWS UNBOUNDED PRECEDING)
), edges AS (
  SELECT DISTINCT link, unnest([start_ns, end_ns]) AS t FROM inside
), ways AS (
  SELECT DISTINCT link, way FROM moments
), wanted AS (
  SELECT edges.link, ways.way, t FROM edges JOIN ways ON ways.link = edges.link
), summed AS (
  SELECT wanted.link, wanted.way, t,
         CASE WHEN g.at_ns IS NULL THEN 0.0 WHEN g.at_ns = t THEN g.so_far ELSE g.so_far + g.at_once + g.pace * (t - g.at_ns) END AS moved
  FROM wanted ASOF LEFT JOIN gone g ON g.link = wanted.link AND g.way = wanted.way AND wanted.t >= g.at_ns
), each AS (
  SELECT i.link, i.host, i.name, i.direction, i.way, i.start_ns, i.end_ns, i.bytes,
         sum(z.moved - a.moved) FILTER (z.way = 'ab') AS moved_ab, sum(z.moved - a.moved) FILTER (z.way = 'ba') AS moved_ba,
         sum(z.moved - a.moved) FILTER (z.way = '') AS moved_either
  FROM inside i
  LEFT JOIN summed a ON a.link = i.link AND a.t = i.start_ns
  LEFT JOIN summed z ON z.link = i.link AND z.t = i.end_ns AND z.way = a.way
  GROUP BY ALL
), told AS (
  SELECT link, host, name, direction, way, sum(bytes) AS bytes, TRY_CAST(sum(end_ns - start_ns) AS BIGINT) AS covered_ns,
         min(start_ns) AS from_ns, max(end_ns) AS to_ns, coalesce(sum(moved_ab), 0) AS moved_ab, coalesce(sum(moved_ba), 0) AS moved_ba,
         coalesce(sum(moved_either), 0) AS moved_either
  FROM each GROUP BY ALL
), quality AS (
  SELECT link, host, name, direction, max(way) AS way, any_value(semantics) AS semantics, count(*) AS samples,
         count(*) FILTER (status <> 'ok') AS unknown_samples, count(*) FILTER (fall) AS falls, count(*) FILTER (anew) AS restarts,
         string_agg(DISTINCT status, ', ' ORDER BY status) FILTER (status <> 'ok') AS why
  FROM spans GROUP BY ALL
)
SELECT q.link, q.host, q.name, q.direction, q.way, q.semantics, samples, unknown_samples, falls, restarts, why, t.bytes, t.covered_ns,
       t.from_ns, t.to_ns, t.moved_ab, t.moved_ba, t.moved_either
FROM quality q
LEFT JOIN told t ON t.link = q.link AND t.host = q.host AND t.name = q.name AND t.direction = q.direction
ORDER BY q.link, q.host, q.name, q.direction
