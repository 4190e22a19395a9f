-- Block hashes of the prompts in the order in which requests arrived, for caches of limited capacity. kin: requests that can share.
SELECT dense_rank() OVER (ORDER BY hash_space, model, adapter, block_size, block_unit) AS kin, coalesce(prompt_tokens, -1) AS prompt_tokens,
       CASE WHEN coalesce(block_unit, 'tokens') = 'tokens' THEN block_size::DOUBLE
            WHEN prompt_chars > 0 THEN block_size::DOUBLE * prompt_tokens / prompt_chars END AS block_tokens,
       prefix_blocks
FROM requests
WHERE len(prefix_blocks) > 0
ORDER BY arrival_ns, request
