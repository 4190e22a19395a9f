-- Counters of prefix-cache hits that engines publish, by their names without labels (relation `named`: name), with the last value.
SELECT counters.name AS full_name, n.name, counters.entity, arg_max(coalesce(value_int::DOUBLE, value_float), time_ns) AS last
FROM counters JOIN named n ON n.name = split_part(counters.name, '{', 1)
WHERE coalesce(status, 'ok') = 'ok' AND coalesce(value_int::DOUBLE, value_float) IS NOT NULL
GROUP BY ALL
ORDER BY counters.entity, counters.name
