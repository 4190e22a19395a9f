-- How much some cumulative counters grew in each bin. Relations `grid`: from_ns, width_ns, bins; `wanted`: what, host, entity, name,
-- source: the counters that are added up as `what`. Each increase within one incarnation is spread evenly between its samples; a fall
-- counts nothing. counted_ns: the part of the bin in which all counters of `what` have samples (the least of them).
WITH s AS (
  SELECT w.what, w.host, w.entity, w.name, c.time_ns, coalesce(c.incarnation, '') AS life, c.value_int, coalesce(c.value_int::DOUBLE, c.value_float) AS value
  FROM counters c JOIN wanted w ON w.entity = c.entity AND w.name = c.name AND w.host = coalesce(c.host, '') AND w.source = c.source
  WHERE coalesce(c.status, 'ok') = 'ok' AND coalesce(c.value_int::DOUBLE, c.value_float) IS NOT NULL
), pairs AS (
  SELECT what, host, entity, name, time_ns AS end_ns, lag(time_ns) OVER w AS start_ns,
         CASE WHEN life = lag(life) OVER w THEN
              CASE WHEN value_int IS NOT NULL AND lag(value_int) OVER w IS NOT NULL THEN (value_int::HUGEINT - lag(value_int) OVER w)::DOUBLE
                   ELSE value - lag(value) OVER w END END AS grown
  FROM s
  WINDOW w AS (PARTITION BY what, host, entity, name ORDER BY time_ns)
), spans AS (
  SELECT pairs.*, grid.*, greatest(start_ns, from_ns) AS low, least(end_ns, from_ns + bins * width_ns) AS high
  FROM pairs, grid WHERE grown >= 0 AND end_ns > start_ns AND end_ns > from_ns AND start_ns < from_ns + bins * width_ns
), pieces AS (
  SELECT *, unnest(range((low - from_ns) // width_ns, (high - 1 - from_ns) // width_ns + 1)) AS bin FROM spans
), cut AS (
  SELECT what, host, entity, name, bin, grown,
         least(high, from_ns + (bin + 1) * width_ns) - greatest(low, from_ns + bin * width_ns) AS part_ns, end_ns - start_ns AS whole_ns
  FROM pieces
), each AS (
  SELECT what, host, entity, name, bin, sum(grown * part_ns / whole_ns) AS grown, sum(part_ns) AS counted_ns FROM cut GROUP BY ALL
)
SELECT what, bin::BIGINT AS bin, sum(grown) AS grown, min(counted_ns)::BIGINT AS counted_ns, count(*) AS counters
FROM each
GROUP BY ALL
ORDER BY what, bin
