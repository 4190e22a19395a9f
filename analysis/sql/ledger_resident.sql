-- Law 2 for the KV cache: per server, rank and medium resident = before + produced + copied in - freed, in blocks.
-- produced: stored; copied in: copied from another medium; freed: evicted, or dropped when the whole cache was cleared (an event
-- without a medium clears them all). before: blocks that must have been there when the recording began, since more were freed than
-- had come: at least so many, and 0 after a clearing. At one instant what is freed comes before what is stored.
-- An engine tells the events of one step at one instant: they are summed first.
WITH e AS (
  SELECT coalesce(server, '') AS server, coalesce(dp_rank, 0) AS dp_rank, medium, event, time_ns, count(*) AS n,
         sum(bytes) FILTER (bytes >= 0) AS bytes, count(*) FILTER (bytes IS NULL OR bytes < 0) AS unsized
  FROM blocks GROUP BY ALL
), places AS (
  SELECT DISTINCT server, dp_rank, coalesce(medium, 'unstated') AS medium FROM e WHERE event <> 'cleared'
), events AS MATERIALIZED (
  SELECT server, dp_rank, coalesce(medium, 'unstated') AS medium, event, time_ns, n, bytes, unsized FROM e WHERE event <> 'cleared'
  UNION ALL
  SELECT p.server, p.dp_rank, p.medium, 'cleared', e.time_ns, 0, NULL, 0
  FROM e JOIN places p ON p.server = e.server AND p.dp_rank = e.dp_rank AND coalesce(e.medium, p.medium) = p.medium
  WHERE e.event = 'cleared'
), turns AS (
  SELECT server, dp_rank, medium, time_ns, CASE event WHEN 'cleared' THEN 0 WHEN 'evicted' THEN 1 ELSE 2 END AS turn,
         sum(CASE event WHEN 'stored' THEN n WHEN 'copied' THEN n WHEN 'evicted' THEN -n ELSE 0 END) AS change
  FROM events GROUP BY ALL
), lives AS (
  SELECT *, sum((turn = 0)::INTEGER) OVER (PARTITION BY server, dp_rank, medium ORDER BY time_ns, turn ROWS UNBOUNDED PRECEDING) AS life
  FROM turns
), held AS (
  SELECT *, sum(change) OVER (PARTITION BY server, dp_rank, medium, life ORDER BY time_ns, turn ROWS UNBOUNDED PRECEDING) AS n
  FROM lives
), ends AS (
  SELECT server, dp_rank, medium, life, greatest(-min(n), 0) AS before, max(n) AS peak, sum(change) AS last
  FROM held GROUP BY ALL
), whole AS (
  SELECT server, dp_rank, medium,
         TRY_CAST(sum(before) FILTER (life = 0) AS BIGINT) AS before_blocks,
         TRY_CAST(sum(before) FILTER (life > 0) AS BIGINT) AS freed_unseen,
         TRY_CAST(max(peak + before) AS BIGINT) AS peak_blocks,
         TRY_CAST(arg_max(last + before, life) AS BIGINT) AS resident_blocks,
         TRY_CAST(coalesce(sum(last + before) FILTER (life < final), 0) AS BIGINT) AS dropped_blocks
  FROM (SELECT *, max(life) OVER (PARTITION BY server, dp_rank, medium) AS final FROM ends)
  GROUP BY ALL
), counts AS (
  SELECT server, dp_rank, medium,
         TRY_CAST(coalesce(sum(n) FILTER (event = 'stored'), 0) AS BIGINT) AS produced_blocks,
         TRY_CAST(coalesce(sum(n) FILTER (event = 'copied'), 0) AS BIGINT) AS copied_in_blocks,
         TRY_CAST(coalesce(sum(n) FILTER (event = 'evicted'), 0) AS BIGINT) AS evicted_blocks,
         TRY_CAST(coalesce(sum(n) FILTER (event = 'hit'), 0) AS BIGINT) AS hit_blocks,
         TRY_CAST(sum(bytes) FILTER (event = 'stored') AS BIGINT) AS produced_bytes,
         TRY_CAST(sum(bytes) FILTER (event = 'copied') AS BIGINT) AS copied_in_bytes,
         TRY_CAST(sum(bytes) FILTER (event = 'evicted') AS BIGINT) AS evicted_bytes,
         TRY_CAST(sum(bytes) FILTER (event = 'hit') AS BIGINT) AS hit_bytes,
         TRY_CAST(sum(unsized) AS BIGINT) AS bytes_unknown,
         min(time_ns) AS from_ns, max(time_ns) AS to_ns
  FROM events GROUP BY ALL
)
SELECT server, dp_rank, medium, coalesce(before_blocks, 0) AS before_blocks, produced_blocks, copied_in_blocks, evicted_blocks,
       dropped_blocks, resident_blocks, peak_blocks, coalesce(freed_unseen, 0) AS freed_unseen_blocks, hit_blocks, produced_bytes,
       copied_in_bytes, evicted_bytes, hit_bytes, bytes_unknown, from_ns, to_ns
FROM counts JOIN whole USING (server, dp_rank, medium)
ORDER BY server, dp_rank, medium
