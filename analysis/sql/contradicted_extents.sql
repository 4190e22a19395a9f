-- The longest time between two values of byte counters. Relation `suspects`: host, entity, name, direction, source.
WITH s AS (
  SELECT w.*, time_ns - lag(time_ns) OVER (PARTITION BY w.host, w.entity, w.name, w.direction, w.source ORDER BY time_ns) AS apart_ns
  FROM counters c JOIN suspects w ON w.entity = c.entity AND w.name = c.name AND w.host = coalesce(c.host, '')
    AND w.direction = coalesce(c.direction, '') AND w.source = coalesce(c.source, '')
  WHERE unit IN ('bytes', 'bytes/s', 'B', 'B/s', 'By', 'By/s') AND semantics IN ('cumulative', 'delta', 'rate')
    AND coalesce(status, 'ok') = 'ok' AND coalesce(value_int::DOUBLE, value_float) >= 0
)
SELECT host, entity, name, direction, source, max(apart_ns) AS apart_ns
FROM s
GROUP BY ALL
ORDER BY ALL
