-- Byte counters (no gauges): when each has values, and the longest time between two of them.
WITH s AS (
  SELECT coalesce(host, '') AS host, entity, name, coalesce(direction, '') AS direction, coalesce(source, '') AS source, time_ns,
         time_ns - lag(time_ns) OVER (PARTITION BY host, entity, name, direction, source ORDER BY time_ns) AS apart_ns
  FROM counters
  WHERE unit IN ('bytes', 'bytes/s', 'B', 'B/s', 'By', 'By/s') AND semantics IN ('cumulative', 'delta', 'rate')
    AND coalesce(status, 'ok') = 'ok' AND coalesce(value_int::DOUBLE, value_float) >= 0
)
SELECT host, entity, name, direction, source, min(time_ns) AS from_ns, max(time_ns) AS to_ns, max(apart_ns) AS apart_ns
FROM s
GROUP BY ALL
ORDER BY ALL
