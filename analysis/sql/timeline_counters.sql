-- Counters by bin, as the mean over the part of the bin that their samples cover; what no sample covers has no value.
-- A cumulative counter is a rate per second between two samples of one incarnation: a wrap of known width is undone, a step back
-- without one counts as a restart and covers nothing. A delta is a rate per second since the sample before. A gauge or a rate holds
-- from its sample to the next one, whether that has a value or says why not; the last one covers nothing beyond its own instant.
-- Parameters: $from_ns, $to_ns, $width_ns.
WITH sampled AS (
  SELECT entity, name, coalesce(direction, '') AS direction, unit, coalesce(semantics, 'gauge') AS semantics, time_ns, width_bits,
         coalesce(incarnation, '') AS life,
         CASE WHEN coalesce(status, 'ok') = 'ok' THEN coalesce(value_int::DOUBLE, value_float) END AS value
  FROM counters
), growing AS (
  SELECT *, lag(time_ns) OVER w AS since_ns, lag(value) OVER w AS before
  FROM sampled WHERE semantics IN ('cumulative', 'delta') AND value IS NOT NULL
  WINDOW w AS (PARTITION BY entity, name, direction, life ORDER BY time_ns)
), grown AS (
  SELECT entity, name, direction, unit, since_ns AS start_ns, time_ns AS end_ns,
         CASE WHEN semantics = 'delta' THEN value
              WHEN value < before AND width_bits IS NOT NULL THEN value - before + 2.0 ^ width_bits
              ELSE value - before END AS delta
  FROM growing WHERE time_ns > since_ns
), spans AS (
  SELECT entity, name, direction, unit, true AS per_second, start_ns, end_ns, delta * 1e9 / (end_ns - start_ns) AS value
  FROM grown WHERE delta >= 0
  UNION ALL
  SELECT entity, name, direction, unit, false, time_ns,
         coalesce(lead(time_ns) OVER (PARTITION BY entity, name, direction ORDER BY time_ns), time_ns + 1), value
  FROM sampled WHERE semantics NOT IN ('cumulative', 'delta')
), cut AS (
  SELECT *, unnest(range((greatest(start_ns, $from_ns) - $from_ns) // $width_ns,
                         (least(end_ns, $to_ns) - 1 - $from_ns) // $width_ns + 1)) AS bin
  FROM spans WHERE value IS NOT NULL AND end_ns > start_ns AND end_ns > $from_ns AND start_ns < $to_ns
), shared AS (
  SELECT *, (least(end_ns, $to_ns, $from_ns + (bin + 1) * $width_ns) - greatest(start_ns, $from_ns + bin * $width_ns))::DOUBLE AS inside_ns
  FROM cut
)
SELECT entity, name, direction, any_value(unit) AS unit, bool_or(per_second) AS per_second, $from_ns + bin * $width_ns AS from_ns,
       least($from_ns + (bin + 1) * $width_ns, $to_ns) AS to_ns, sum(value * inside_ns) / sum(inside_ns) AS value
FROM shared
GROUP BY entity, name, direction, bin
ORDER BY entity, name, direction, bin
