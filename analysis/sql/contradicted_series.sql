-- Byte counters (no gauges), roughly: when each has values, and by how much it can have moved (of a cumulative one largest less least; a
-- restart makes that more, never less).
SELECT coalesce(host, '') AS host, entity, name, coalesce(direction, '') AS direction, coalesce(source, '') AS source, min(time_ns) AS from_ns,
       max(time_ns) AS to_ns,
       CASE any_value(semantics) WHEN 'cumulative' THEN max(coalesce(value_int::DOUBLE, value_float)) - min(coalesce(value_int::DOUBLE, value_float))
                                 ELSE sum(coalesce(value_int::DOUBLE, value_float)) END AS moved
FROM counters
WHERE unit IN ('bytes', 'bytes/s', 'B', 'B/s', 'By', 'By/s') AND semantics IN ('cumulative', 'delta', 'rate')
  AND coalesce(status, 'ok') = 'ok' AND coalesce(value_int::DOUBLE, value_float) >= 0
GROUP BY host, entity, name, direction, source
ORDER BY host, entity, name, direction, source
