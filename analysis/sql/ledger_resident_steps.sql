-- What the steps say of the KV cache against its block events, per server and rank, over the steps that both cover.
-- Blocks in use are at most those in the device's cache and one unfinished block for each running request (a block enters the cache
-- when it is full). Tokens computed are those of the blocks stored, and less than one block for each stay.
-- Relation `sizes`: server, block_tokens, from_ns, to_ns (where block events were recorded).
WITH e AS (
  SELECT coalesce(server, '') AS server, coalesce(dp_rank, 0) AS dp_rank, time_ns,
         CASE event WHEN 'cleared' THEN 0 WHEN 'evicted' THEN 1 ELSE 2 END AS turn,
         sum(CASE event WHEN 'stored' THEN 1 WHEN 'copied' THEN 1 WHEN 'evicted' THEN -1 ELSE 0 END) AS change
  FROM blocks WHERE event = 'cleared' OR coalesce(medium, 'device') = 'device' GROUP BY ALL
), lives AS (
  SELECT *, sum((turn = 0)::INTEGER) OVER (PARTITION BY server, dp_rank ORDER BY time_ns, turn ROWS UNBOUNDED PRECEDING) AS life
  FROM e
), held AS (
  SELECT server, dp_rank, time_ns, turn, life,
         sum(change) OVER (PARTITION BY server, dp_rank, life ORDER BY time_ns, turn ROWS UNBOUNDED PRECEDING) AS n
  FROM lives
), at_last AS (
  SELECT server, dp_rank, time_ns, arg_max(n, turn) AS n FROM held GROUP BY ALL
), s AS (
  SELECT steps.server, coalesce(dp_rank, 0) AS dp_rank, end_ns, running, block_tokens, kv_used_tokens, kv_capacity_tokens,
         prefill_tokens + decode_tokens AS computed
  FROM steps JOIN sizes ON sizes.server = steps.server AND end_ns >= sizes.from_ns AND end_ns <= sizes.to_ns
  WHERE coalesce(pp_rank, 0) = 0 AND block_tokens > 0
), pairs AS (
  SELECT s.*, coalesce(at_last.n, 0) AS cached
  FROM s ASOF LEFT JOIN at_last ON s.server = at_last.server AND s.dp_rank = at_last.dp_rank AND s.end_ns >= at_last.time_ns
)
SELECT server, dp_rank, any_value(block_tokens) AS block_tokens,
       count(*) FILTER (kv_used_tokens IS NOT NULL AND running IS NOT NULL) AS steps,
       count(*) FILTER (kv_used_tokens > (cached + running) * block_tokens) AS steps_beyond,
       max(ceil(kv_used_tokens / block_tokens) - cached - running)::BIGINT AS most_beyond_blocks,
       count(*) FILTER (cached * block_tokens > kv_capacity_tokens) AS steps_over_capacity,
       CASE WHEN count(*) = count(computed) THEN TRY_CAST(sum(computed) AS BIGINT) END AS computed_tokens
FROM pairs
GROUP BY server, dp_rank
ORDER BY server, dp_rank
