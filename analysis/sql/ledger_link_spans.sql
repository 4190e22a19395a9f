-- What the byte counters of links counted between neighbouring samples. Table `series` (ledger_link_series).
-- cumulative: the increase within one incarnation. Where the counter could have passed its whole range between the two samples
-- (time × most_per_ns > 2^width) the increase is not known (`ambiguous`), unless the value stands still. Else a fall is a wrap where the
-- width is known and the wrapped increase is one that the link can carry; any other fall counts nothing (`fall`).
-- delta: the value since the sample before. rate: the value times its window, else times the time since the sample before; of a
-- window that reaches behind the sample before, what lies behind it has been counted.
-- A value below 0 is none (some sources write -1 for unknown). Integers are subtracted as integers: a double holds only 53 bits.
WITH s AS (
  SELECT q.id, q.most_per_ns, hash(coalesce(incarnation, '')) AS life, time_ns,
         CASE coalesce(semantics, 'gauge') WHEN 'cumulative' THEN 1 WHEN 'delta' THEN 2 WHEN 'rate' THEN 3 ELSE 0 END::TINYINT AS kind,
         CASE WHEN width_bits BETWEEN 8 AND 64 THEN width_bits END AS width_bits, window_ns,
         CASE WHEN coalesce(status, 'ok') <> 'ok' THEN status END AS why,
         CASE WHEN coalesce(status, 'ok') = 'ok' AND coalesce(value_int::DOUBLE, value_float) >= 0 THEN value_int END AS whole,
         CASE WHEN coalesce(status, 'ok') = 'ok' AND coalesce(value_int::DOUBLE, value_float) >= 0
              THEN coalesce(value_int::DOUBLE, value_float) END AS value
  FROM counters c JOIN series q ON q.entity = c.entity AND q.name = c.name AND q.host = coalesce(c.host, '')
    AND q.source = coalesce(c.source, '') AND q.direction = coalesce(c.direction, '')
  WHERE unit IN ('bytes', 'bytes/s', 'B', 'B/s', 'By', 'By/s')
), known AS (
  SELECT *, lag(value) OVER w AS before, lag(whole) OVER w AS whole_before, lag(time_ns) OVER w AS since_ns, lag(life) OVER w AS old_life
  FROM s WHERE value IS NOT NULL
  WINDOW w AS (PARTITION BY id ORDER BY time_ns)
), paired AS (
  SELECT *, kind = 1 AND before IS NOT NULL AND life = old_life AS paired,
         CASE WHEN whole IS NOT NULL AND whole_before IS NOT NULL THEN (whole::HUGEINT - whole_before)::DOUBLE ELSE value - before END AS change
  FROM known
), grown AS (
  SELECT *, paired AND change <> 0 AND (time_ns - since_ns) * most_per_ns > 2.0 ^ width_bits AS ambiguous,
         CASE WHEN kind = 2 THEN value
              WHEN kind = 3 THEN value * least(coalesce(window_ns, time_ns - since_ns), coalesce(time_ns - since_ns, window_ns)) / 1e9
              WHEN NOT paired THEN NULL
              WHEN change <> 0 AND (time_ns - since_ns) * most_per_ns > 2.0 ^ width_bits THEN NULL
              WHEN change >= 0 THEN change
              WHEN whole IS NOT NULL AND whole_before IS NOT NULL
                   THEN CASE WHEN (whole::HUGEINT - whole_before + (2.0 ^ width_bits)::HUGEINT)::DOUBLE <= (time_ns - since_ns) * most_per_ns
                             THEN (whole::HUGEINT - whole_before + (2.0 ^ width_bits)::HUGEINT)::DOUBLE END
              WHEN change + 2.0 ^ width_bits <= (time_ns - since_ns) * most_per_ns THEN change + 2.0 ^ width_bits END AS bytes
  FROM paired
)
SELECT id, kind, NULL::VARCHAR AS why,
       CASE WHEN kind = 3 AND window_ns IS NOT NULL THEN greatest(time_ns - window_ns, since_ns) ELSE since_ns END AS start_ns, time_ns AS end_ns,
       bytes, paired AND bytes IS NULL AND NOT coalesce(ambiguous, false) AS fall,
       kind = 1 AND old_life IS NOT NULL AND life <> old_life AS anew, coalesce(ambiguous, false) AS ambiguous
FROM grown
UNION ALL
SELECT id, kind, coalesce(why, 'no value'), NULL, time_ns, NULL, false, false, false FROM s WHERE value IS NULL
