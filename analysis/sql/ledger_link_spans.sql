-- What the byte counters of links counted between neighbouring samples. Relation `watched`: link, entity, bytes_per_s.
-- cumulative: the increase within one incarnation. A fall is a wrap where the width is known and the wrapped increase is one that the
-- link can carry (1.2 times its rate; of a link of unknown rate: under half of the range); any other fall counts nothing (`fall`).
-- delta: the value since the sample before. rate: the value times its window, else times the time since the sample before; of a
-- window that reaches behind the sample before, what lies behind it has been counted.
-- A value below 0 is none (some sources write -1 for unknown). way: sent and written go from the link's end a to b.
WITH s AS (
  SELECT w.link, w.bytes_per_s, coalesce(host, '') AS host, name, coalesce(direction, '') AS direction, coalesce(incarnation, '') AS life,
         time_ns, coalesce(semantics, 'gauge') AS semantics, width_bits, window_ns, coalesce(status, 'ok') AS status,
         CASE WHEN coalesce(status, 'ok') = 'ok' AND coalesce(value_int::DOUBLE, value_float) >= 0 THEN value_int END AS whole,
         CASE WHEN coalesce(status, 'ok') = 'ok' AND coalesce(value_int::DOUBLE, value_float) >= 0
              THEN coalesce(value_int::DOUBLE, value_float) END AS value
  FROM counters JOIN watched w ON w.entity = counters.entity
  WHERE unit IN ('bytes', 'bytes/s', 'B', 'B/s', 'By', 'By/s')
), known AS (
  SELECT *, lag(value) OVER w AS before, lag(whole) OVER w AS whole_before, lag(time_ns) OVER w AS since_ns, lag(life) OVER w AS old_life
  FROM s WHERE value IS NOT NULL
  WINDOW w AS (PARTITION BY link, host, name, direction ORDER BY time_ns)
), grown AS (
  SELECT *,
         CASE WHEN semantics = 'delta' THEN value
              WHEN semantics = 'rate' THEN value * least(coalesce(window_ns, time_ns - since_ns), coalesce(time_ns - since_ns, window_ns)) / 1e9
              WHEN semantics <> 'cumulative' OR before IS NULL OR life <> old_life THEN NULL
              WHEN whole >= whole_before THEN (whole::HUGEINT - whole_before)::DOUBLE
              WHEN value >= before THEN value - before
              WHEN width_bits BETWEEN 8 AND 64 AND value - before + 2.0 ^ width_bits
                   <= coalesce(bytes_per_s * 1.2 * (time_ns - since_ns) / 1e9, 2.0 ^ (width_bits - 1))
                   THEN value - before + 2.0 ^ width_bits END AS bytes
  FROM known
)
SELECT link, host, name, direction, CASE direction WHEN 'tx' THEN 'ab' WHEN 'write' THEN 'ab' WHEN 'rx' THEN 'ba' WHEN 'read' THEN 'ba'
            ELSE '' END AS way, semantics, 'ok' AS status,
       CASE WHEN semantics = 'rate' AND window_ns IS NOT NULL THEN greatest(time_ns - window_ns, since_ns) ELSE since_ns END AS start_ns, time_ns AS end_ns, bytes,
       semantics = 'cumulative' AND before IS NOT NULL AND life = old_life AND bytes IS NULL AS fall,
       semantics = 'cumulative' AND old_life IS NOT NULL AND life <> old_life AS anew
FROM grown
UNION ALL
SELECT link, host, name, direction, '', semantics, CASE status WHEN 'ok' THEN 'no value' ELSE status END, NULL, time_ns, NULL, false, false
FROM s WHERE value IS NULL
