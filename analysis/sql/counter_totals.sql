-- What each counter counted during the trace: one row per (host, entity, name, direction). Of several sources that tell of the same
-- the one whose samples cover most is taken (`source`): their values are never mixed.
--
-- cumulative: the sum of the increases between neighbouring samples of one incarnation. A fall is a wrap where the width is known
-- and the wrapped increase is under half of the range; else the counter was reset and its value since then is the increase.
-- A new incarnation only sets a new baseline: what was counted between the two is unknown, so the total is a lower bound (`breaks`).
-- delta: the sum. gauge: the time-weighted mean, each value holding until the next sample, and the largest.
WITH samples AS (
  SELECT coalesce(host, '') AS host, entity, name, coalesce(direction, '') AS direction, source, incarnation, time_ns, unit, width_bits,
         coalesce(semantics, 'gauge') AS semantics, value_int, coalesce(value_int::DOUBLE, value_float) AS value
  FROM counters
  WHERE coalesce(status, 'ok') = 'ok' AND coalesce(value_int::DOUBLE, value_float) IS NOT NULL
), pairs AS (
  SELECT *,
         lag(value) OVER w AS before, lag(value_int) OVER w AS before_int, lag(time_ns) OVER w AS before_ns,
         lead(time_ns) OVER w AS next_ns,
         coalesce(incarnation, '') IS DISTINCT FROM coalesce(lag(incarnation) OVER w, incarnation, '') AS anew
  FROM samples
  WINDOW w AS (PARTITION BY host, entity, name, direction, source ORDER BY time_ns)
), increases AS (
  SELECT *,
         CASE WHEN semantics <> 'cumulative' OR before IS NULL OR anew THEN NULL
              -- integers stay integers: a double holds only 53 bits of a byte counter
              WHEN value_int IS NOT NULL AND before_int IS NOT NULL AND value_int >= before_int THEN (value_int::HUGEINT - before_int)::DOUBLE
              WHEN value >= before THEN value - before
              WHEN width_bits IS NOT NULL AND value - before + pow(2.0, width_bits) < pow(2.0, width_bits - 1)
                   THEN value - before + pow(2.0, width_bits)
              ELSE value END AS increase
  FROM pairs
)
SELECT host, entity, name, direction, any_value(unit) AS unit, any_value(semantics) AS semantics, count(*) AS samples,
       min(time_ns) AS from_ns, max(time_ns) AS to_ns,
       CASE any_value(semantics) WHEN 'cumulative' THEN sum(increase) WHEN 'delta' THEN sum(value) END AS total,
       sum(CASE WHEN increase IS NOT NULL THEN time_ns - before_ns END)::BIGINT AS counted_ns,
       count(*) FILTER (anew) AS breaks,
       count(*) FILTER (semantics = 'cumulative' AND NOT anew AND value < before) AS falls,
       CASE WHEN any_value(semantics) = 'gauge' THEN
            coalesce(sum(value * (next_ns - time_ns)) / nullif(sum(next_ns - time_ns), 0), avg(value)) END AS mean,
       CASE WHEN any_value(semantics) = 'gauge' THEN max(value) END AS largest, source, arg_max(incarnation, time_ns) AS incarnation
FROM increases
GROUP BY host, entity, name, direction, source
QUALIFY row_number() OVER (PARTITION BY host, entity, name, direction ORDER BY coalesce(counted_ns, to_ns - from_ns) DESC, samples DESC, source) = 1
ORDER BY host, entity, name, direction
