-- What the byte counters of links counted between neighbouring samples. Relation `watched`: link, entity, bytes_per_s.
-- cumulative: the increase within one incarnation. Where the counter could have passed its whole range between the two samples
-- (time × 1.2 × the link's rate > 2^width; of a link of unknown rate 10^12 bytes/s, more than any carries) the increase is not known
-- (`ambiguous`), unless the value stands still. Else a fall is a wrap where the width is known and the wrapped increase is one that the
-- link can carry (1.2 times its rate); any other fall counts nothing (`fall`).
-- delta: the value since the sample before. rate: the value times its window, else times the time since the sample before; of a
-- window that reaches behind the sample before, what lies behind it has been counted.
-- A value below 0 is none (some sources write -1 for unknown). way: sent and written go from the link's end a to b.
-- Integers are subtracted as integers: a double holds only 53 bits.
WITH s AS (
  SELECT w.link, coalesce(w.bytes_per_s, 1e12) * 1.2 / 1e9 AS most_per_ns, coalesce(host, '') AS host, name, coalesce(source, '') AS source,
         coalesce(direction, '') AS direction, coalesce(incarnation, '') AS life,
         time_ns, coalesce(semantics, 'gauge') AS semantics, width_bits, window_ns, coalesce(status, 'ok') AS status,
         CASE WHEN coalesce(status, 'ok') = 'ok' AND coalesce(value_int::DOUBLE, value_float) >= 0 THEN value_int END AS whole,
         CASE WHEN coalesce(status, 'ok') = 'ok' AND coalesce(value_int::DOUBLE, value_float) >= 0
              THEN coalesce(value_int::DOUBLE, value_float) END AS value
  FROM counters JOIN watched w ON w.entity = counters.entity
  WHERE unit IN ('bytes', 'bytes/s', 'B', 'B/s', 'By', 'By/s')
), known AS (
  SELECT *, lag(value) OVER w AS before, lag(whole) OVER w AS whole_before, lag(time_ns) OVER w AS since_ns, lag(life) OVER w AS old_life
  FROM s WHERE value IS NOT NULL
  WINDOW w AS (PARTITION BY link, host, source, name, direction ORDER BY time_ns)
), paired AS (
  SELECT *, semantics = 'cumulative' AND before IS NOT NULL AND life = old_life AS paired,
         CASE WHEN whole IS NOT NULL AND whole_before IS NOT NULL THEN (whole::HUGEINT - whole_before)::DOUBLE ELSE value - before END AS change,
         CASE WHEN whole IS NOT NULL AND whole_before IS NOT NULL THEN (whole::HUGEINT - whole_before + (2.0 ^ width_bits)::HUGEINT)::DOUBLE
              ELSE value - before + 2.0 ^ width_bits END AS wrapped
  FROM (SELECT * REPLACE (CASE WHEN width_bits BETWEEN 8 AND 64 THEN width_bits END AS width_bits) FROM known)
), grown AS (
  SELECT *, paired AND change <> 0 AND (time_ns - since_ns) * most_per_ns > 2.0 ^ width_bits AS ambiguous,
         CASE WHEN semantics = 'delta' THEN value
              WHEN semantics = 'rate' THEN value * least(coalesce(window_ns, time_ns - since_ns), coalesce(time_ns - since_ns, window_ns)) / 1e9
              WHEN NOT paired THEN NULL
              WHEN change <> 0 AND (time_ns - since_ns) * most_per_ns > 2.0 ^ width_bits THEN NULL
              WHEN change >= 0 THEN change
              WHEN wrapped <= (time_ns - since_ns) * most_per_ns THEN wrapped END AS bytes
  FROM paired
)
SELECT link, host, source, name, direction, CASE direction WHEN 'tx' THEN 'ab' WHEN 'write' THEN 'ab' WHEN 'rx' THEN 'ba' WHEN 'read' THEN 'ba'
            ELSE '' END AS way, semantics, 'ok' AS status,
       CASE WHEN semantics = 'rate' AND window_ns IS NOT NULL THEN greatest(time_ns - window_ns, since_ns) ELSE since_ns END AS start_ns, time_ns AS end_ns, bytes,
       paired AND bytes IS NULL AND NOT coalesce(ambiguous, false) AS fall,
       semantics = 'cumulative' AND old_life IS NOT NULL AND life <> old_life AS anew, coalesce(ambiguous, false) AS ambiguous
FROM grown
UNION ALL
SELECT link, host, source, name, direction, '', semantics, CASE status WHEN 'ok' THEN 'no value' ELSE status END, NULL, time_ns, NULL, false, false, false
FROM s WHERE value IS NULL
