-- Cached KV blocks in a device's memory over time: stored less evicted since the last clear, in 480 parts of the recorded time.
-- `blocks` and `bytes` are the change within the part; a part's level is the sum of the changes since the last clear (`clears`).
WITH span AS (
  SELECT min(time_ns) AS from_ns, greatest((max(time_ns) - min(time_ns)) // 480 + 1, 1) AS width_ns FROM blocks
), cleared AS (
  SELECT server, coalesce(dp_rank, 0) AS dp_rank, list(time_ns) AS times FROM blocks WHERE event = 'cleared' GROUP BY ALL
), changes AS (
  SELECT b.server, coalesce(b.dp_rank, 0) AS dp_rank, (b.time_ns - span.from_ns) // span.width_ns AS part,
         coalesce(len(list_filter(c.times, lambda x: x <= b.time_ns)), 0) AS clears,
         CASE b.event WHEN 'stored' THEN 1 ELSE -1 END AS change, b.bytes
  FROM blocks b CROSS JOIN span LEFT JOIN cleared c ON c.server = b.server AND c.dp_rank = coalesce(b.dp_rank, 0)
  WHERE b.event IN ('stored', 'evicted') AND coalesce(b.medium, 'device') = 'device' AND b.server IS NOT NULL
)
SELECT server, dp_rank, clears, part, (SELECT from_ns + (part + 1) * width_ns FROM span) AS to_ns,
       sum(change)::BIGINT AS blocks, sum(change * bytes)::BIGINT AS bytes
FROM changes
GROUP BY server, dp_rank, clears, part
ORDER BY server, dp_rank, clears, part
