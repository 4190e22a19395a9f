-- Counters by bin. A cumulative counter becomes a rate per second: the difference of two samples of one incarnation is shared out
-- over the time between them; a wrap of known width is undone; a step back without one counts as a restart and gives nothing.
-- A gauge, a rate and a delta are the mean of the samples in the bin. No sample, no value.
-- Parameters: $from_ns, $to_ns, $width_ns.
WITH sampled AS (
  SELECT entity, name, coalesce(direction, '') AS direction, unit, semantics, time_ns, width_bits, coalesce(incarnation, '') AS life,
         coalesce(value_int::DOUBLE, value_float) AS value
  FROM counters
  WHERE coalesce(status, 'ok') = 'ok' AND coalesce(value_int::DOUBLE, value_float) IS NOT NULL
), paired AS (
  SELECT *, lag(time_ns) OVER w AS since_ns,
         value - lag(value) OVER w + CASE WHEN value < lag(value) OVER w AND width_bits IS NOT NULL THEN 2.0 ^ width_bits ELSE 0 END AS delta
  FROM sampled WHERE semantics = 'cumulative'
  WINDOW w AS (PARTITION BY entity, name, direction, life ORDER BY time_ns)
), cut AS (
  SELECT *, unnest(range((greatest(since_ns, $from_ns) - $from_ns) // $width_ns,
                         (least(time_ns, $to_ns) - 1 - $from_ns) // $width_ns + 1)) AS bin
  FROM paired WHERE delta >= 0 AND time_ns > since_ns AND time_ns > $from_ns AND since_ns < $to_ns
), shared AS (
  SELECT *, (least(time_ns, $to_ns, $from_ns + (bin + 1) * $width_ns) - greatest(since_ns, $from_ns + bin * $width_ns))::DOUBLE AS inside_ns
  FROM cut
), rates AS (
  SELECT entity, name, direction, any_value(unit) AS unit, bin, true AS per_second,
         sum(delta * inside_ns / (time_ns - since_ns)) * 1e9 / sum(inside_ns) AS value
  FROM shared GROUP BY entity, name, direction, bin
), levels AS (
  SELECT entity, name, direction, any_value(unit) AS unit, (time_ns - $from_ns) // $width_ns AS bin, false AS per_second, avg(value) AS value
  FROM sampled
  WHERE coalesce(semantics, 'gauge') <> 'cumulative' AND time_ns >= $from_ns AND time_ns < $to_ns
  GROUP BY entity, name, direction, bin
)
SELECT entity, name, direction, unit, per_second, $from_ns + bin * $width_ns AS from_ns,
       least($from_ns + (bin + 1) * $width_ns, $to_ns) AS to_ns, value
FROM (SELECT * FROM rates UNION ALL SELECT * FROM levels)
ORDER BY entity, name, direction, bin
