-- What byte counters saw between from_ns and to_ns of relation `window` (host, entity, name, direction, source, from_ns, to_ns): a
-- cumulative one its increases within one incarnation (a fall counts as the value since then: that it moved is what matters), a
-- delta its values, a rate its value times its window.
WITH s AS (
  SELECT w.*, time_ns, semantics, window_ns, incarnation, value_int, coalesce(value_int::DOUBLE, value_float) AS value
  FROM counters c JOIN "window" w ON w.entity = c.entity AND w.name = c.name AND w.host = coalesce(c.host, '')
    AND w.direction = coalesce(c.direction, '') AND w.source = coalesce(c.source, '')
  WHERE unit IN ('bytes', 'bytes/s', 'B', 'B/s', 'By', 'By/s') AND semantics IN ('cumulative', 'delta', 'rate')
    AND coalesce(status, 'ok') = 'ok' AND coalesce(value_int::DOUBLE, value_float) >= 0
), pairs AS (
  SELECT *, lag(value) OVER w AS before, lag(value_int) OVER w AS before_int, lag(time_ns) OVER w AS since_ns,
         coalesce(incarnation, '') IS DISTINCT FROM coalesce(lag(incarnation) OVER w, incarnation, '') AS anew
  FROM s
  WINDOW w AS (PARTITION BY host, entity, name, direction, source ORDER BY time_ns)
), grown AS (
  SELECT *, CASE semantics WHEN 'delta' THEN value
                 WHEN 'rate' THEN value * least(coalesce(window_ns, time_ns - since_ns), time_ns - since_ns) / 1e9
                 ELSE CASE WHEN anew OR before IS NULL THEN NULL
                           WHEN value_int >= before_int THEN (value_int::HUGEINT - before_int)::DOUBLE
                           WHEN value >= before THEN value - before ELSE value END END AS bytes,
         CASE semantics WHEN 'rate' THEN least(coalesce(window_ns, time_ns - since_ns), time_ns - since_ns) ELSE time_ns - since_ns END AS took_ns
  FROM pairs
)
SELECT host, entity, name, direction, source, any_value(from_ns) AS from_ns, any_value(to_ns) AS to_ns,
       coalesce(sum(bytes) FILTER (since_ns >= from_ns AND time_ns <= to_ns), 0) AS bytes,
       coalesce(sum(took_ns) FILTER (bytes IS NOT NULL AND since_ns >= from_ns AND time_ns <= to_ns), 0)::BIGINT AS covered_ns
FROM grown
GROUP BY host, entity, name, direction, source
ORDER BY ALL
