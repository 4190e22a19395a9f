-- Bytes that cross each link in each bin: by the recorded moves (`moves`), and by its counters (`counter`), each spread evenly over
-- its time. Relations `grid`: from_ns, width_ns, bins; `rated`: links of known capacity; `chosen`: their counters that are taken (link,
-- host, source, name, direction). View `crossings`, tables `series`, `spans`. What lies within one bin is added up there; of the others
-- what starts adds its rate, what ends takes it off, and a bin holds what was carried into it and what changes in it: linear in moves
-- and bins. counted_ns: the part of a bin that the counter's samples cover.
WITH each AS (
  SELECT 'moves' AS told_by, link, way, start_ns, end_ns, bytes::DOUBLE AS bytes FROM crossings
  WHERE bytes > 0 AND link IN (SELECT link FROM rated)
  UNION ALL
  SELECT 'counter', link, way, start_ns, end_ns, bytes
  FROM spans JOIN (SELECT id, series.link, way FROM series JOIN chosen USING (link, host, source, name, direction)) USING (id)
  WHERE bytes IS NOT NULL AND start_ns IS NOT NULL AND end_ns > start_ns AND link IN (SELECT link FROM rated)
), placed AS (
  SELECT each.*, greatest(least((start_ns - from_ns) // width_ns, bins), -1) AS first,
         greatest(least((greatest(end_ns, start_ns + 1) - 1 - from_ns) // width_ns, bins), -1) AS last
  FROM each, grid
), change AS (
  SELECT told_by, link, way, first AS bin, start_ns AS at_ns, bytes / (end_ns - start_ns) AS rate, 1 AS live FROM placed WHERE first < last
  UNION ALL
  SELECT told_by, link, way, greatest(least((end_ns - from_ns) // width_ns, bins), -1), end_ns, -bytes / (end_ns - start_ns), -1
  FROM placed, grid WHERE first < last
), binned AS (
  SELECT told_by, link, way, bin, sum(rate) AS rate, sum(live) AS live,
         sum(rate * (from_ns + ((at_ns - from_ns) // width_ns + 1) * width_ns - at_ns)) AS inside,
         sum(live * (from_ns + ((at_ns - from_ns) // width_ns + 1) * width_ns - at_ns)) AS live_inside
  FROM change, grid GROUP BY ALL
), whole AS (
  SELECT told_by, link, way, first AS bin, sum(bytes) AS bytes, sum(end_ns - start_ns) AS live_ns FROM placed WHERE first = last GROUP BY ALL
), frames AS (
  SELECT told_by, link, way, bin
  FROM (SELECT DISTINCT told_by, link, way FROM placed), (SELECT unnest(range(-1, bins)) AS bin FROM grid)
), filled AS (
  SELECT f.*, coalesce(h.bytes, 0) + coalesce(b.inside, 0) AS inside, coalesce(h.live_ns, 0) + coalesce(b.live_inside, 0) AS live_inside,
         coalesce(sum(b.rate) OVER w, 0) AS carried, coalesce(sum(b.live) OVER w, 0) AS live
  FROM frames f LEFT JOIN binned b USING (told_by, link, way, bin) LEFT JOIN whole h USING (told_by, link, way, bin)
  WINDOW w AS (PARTITION BY told_by, link, way ORDER BY f.bin ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
SELECT told_by, link, way, from_ns + bin * width_ns AS from_ns, from_ns + (bin + 1) * width_ns AS to_ns,
       greatest(inside + carried * width_ns, 0) AS bytes, (live_inside + live * width_ns)::BIGINT AS counted_ns
FROM filled, grid
WHERE bin >= 0
ORDER BY told_by, link, way, bin
