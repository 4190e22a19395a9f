-- What a shared cache without a limit would have given: per hash space, model and block size, the prompts' leading blocks that an
-- earlier request had. Look-up before insert: a request does not find its own blocks. A hit counts only while the prefix is unbroken.
-- Only equal hash spaces are joined. Tokens of a hit: its blocks, at most the prompt; of character blocks the prompt's tokens in
-- proportion. mean_ratio: mean over requests of hit blocks ÷ blocks.
WITH p AS (
  SELECT row_number() OVER (ORDER BY arrival_ns, request) AS turn,
         dense_rank() OVER (ORDER BY hash_space, model, adapter, block_size, block_unit) AS kin,
         hash_space, model, adapter, block_size, coalesce(block_unit, 'tokens') AS block_unit, prompt_tokens, prompt_chars, prefix_blocks
  FROM requests WHERE len(prefix_blocks) > 0
), b AS (
  SELECT turn, kin, unnest(prefix_blocks) AS hash, unnest(range(1, len(prefix_blocks) + 1))::INTEGER AS position FROM p
), first AS (
  SELECT kin, hash, min(turn) AS turn FROM b GROUP BY kin, hash
), missed AS (
  SELECT b.turn, min(b.position) AS position
  FROM b JOIN first ON first.hash = b.hash AND first.kin = b.kin
  WHERE first.turn = b.turn GROUP BY b.turn
), found AS (
  SELECT p.*, len(prefix_blocks) AS blocks, coalesce(missed.position - 1, len(prefix_blocks)) AS hits
  FROM p LEFT JOIN missed USING (turn)
), sized AS (
  SELECT *, CASE WHEN block_unit = 'tokens' THEN least(hits::HUGEINT * block_size, prompt_tokens)
                 WHEN prompt_chars > 0 THEN round(prompt_tokens * least(1.0, hits * block_size::DOUBLE / prompt_chars)) END AS hit_tokens
  FROM found
)
SELECT hash_space, model, adapter, block_size, block_unit, count(*) AS requests, sum(blocks)::BIGINT AS blocks,
       (SELECT count(*) FROM first WHERE first.kin = sized.kin) AS distinct_blocks,
       sum(hits)::BIGINT AS hit_blocks, count(*) FILTER (hit_tokens IS NULL OR prompt_tokens IS NULL) AS tokens_unknown,
       TRY_CAST(sum(prompt_tokens) FILTER (hit_tokens IS NOT NULL) AS BIGINT) AS prompt_tokens,
       TRY_CAST(sum(hit_tokens) AS BIGINT) AS hit_tokens,
       avg(hits / blocks) AS mean_ratio
FROM sized
GROUP BY kin, hash_space, model, adapter, block_size, block_unit
ORDER BY kin
