-- Bytes that cross each link in each bin: by the recorded moves (`moves`), and by its counters (`counter`), each spread evenly over
-- its time. Relations `grid`: from_ns, width_ns, bins; `rated`: links of known capacity; `chosen`: their
-- counters that are taken (link, host, source, name, direction). Views `crossings`, `spans`. What starts adds its rate, what ends takes it off;
-- a bin holds what was carried into it and what changes in it: linear in moves and bins. counted_ns: the part of a bin that
-- the counter's samples cover.
WITH each AS (
  SELECT 'moves' AS told_by, '' AS host, '' AS source, '' AS name, link, way, start_ns, end_ns, bytes::DOUBLE AS bytes FROM crossings
  WHERE bytes > 0 AND link IN (SELECT link FROM rated)
  UNION ALL
  SELECT 'counter', host, source, name, link, way, start_ns, end_ns, bytes FROM spans JOIN chosen USING (link, host, source, name, direction)
  WHERE bytes IS NOT NULL AND start_ns IS NOT NULL AND end_ns > start_ns AND link IN (SELECT link FROM rated)
), change AS (
  SELECT told_by, host, source, name, link, way, start_ns AS at_ns, bytes / (end_ns - start_ns) AS rate, 1 AS live, 0.0 AS at_once
  FROM each WHERE end_ns > start_ns
  UNION ALL
  SELECT told_by, host, source, name, link, way, end_ns, -bytes / (end_ns - start_ns), -1, 0.0 FROM each WHERE end_ns > start_ns
  UNION ALL
  SELECT told_by, host, source, name, link, way, start_ns, 0.0, 0, bytes FROM each WHERE end_ns <= start_ns
), binned AS (
  SELECT told_by, host, source, name, link, way, greatest(least((at_ns - from_ns) // width_ns, bins), -1) AS bin,
         sum(rate) AS rate, sum(live) AS live, sum(at_once) AS at_once,
         sum(rate * (from_ns + ((at_ns - from_ns) // width_ns + 1) * width_ns - at_ns)) AS inside,
         sum(live * (from_ns + ((at_ns - from_ns) // width_ns + 1) * width_ns - at_ns)) AS live_inside
  FROM change, grid GROUP BY ALL
), frames AS (
  SELECT told_by, host, source, name, link, way, bin
  FROM (SELECT DISTINCT told_by, host, source, name, link, way FROM binned), (SELECT unnest(range(-1, bins)) AS bin FROM grid)
), filled AS (
  SELECT f.*, coalesce(b.at_once, 0) + coalesce(b.inside, 0) AS inside, coalesce(b.live_inside, 0) AS live_inside,
         coalesce(sum(b.rate) OVER w, 0) AS carried, coalesce(sum(b.live) OVER w, 0) AS live
  FROM frames f LEFT JOIN binned b USING (told_by, host, source, name, link, way, bin)
  WINDOW w AS (PARTITION BY told_by, host, source, name, link, way ORDER BY f.bin ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
SELECT told_by, host, source, name, link, way, from_ns + bin * width_ns AS from_ns, from_ns + (bin + 1) * width_ns AS to_ns,
       greatest(inside + carried * width_ns, 0) AS bytes, (live_inside + live * width_ns)::BIGINT AS counted_ns
FROM filled, grid
WHERE bin >= 0
ORDER BY told_by, host, source, name, link, way, bin
