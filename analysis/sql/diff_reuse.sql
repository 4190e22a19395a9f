-- diff_reuse
-- Of each finished request: prompt tokens that were looked up in caches, those found by tier, and those computed a second time.
-- A stay that says more came from caches than its prompt has is left out; one that only decodes got its KV handed over: no reuse.
SELECT request, sum(prompt)::BIGINT AS prompt, sum(cached_tokens)::BIGINT AS cached, sum(cached_device_tokens)::BIGINT AS device,
       sum(cached_host_tokens)::BIGINT AS host, sum(cached_peer_tokens)::BIGINT AS peer, sum(cached_pool_tokens)::BIGINT AS pool,
       sum(cached_disk_tokens)::BIGINT AS disk, sum(resumed_tokens)::BIGINT AS resumed, sum(recomputed_tokens)::BIGINT AS recomputed,
       any_value(output_tokens) AS output, count(DISTINCT coalesce(sequence, 0)) AS sequences
FROM (
    SELECT s.* REPLACE (
               CASE WHEN s.role IS DISTINCT FROM 'decode' THEN s.cached_tokens END AS cached_tokens,
               CASE WHEN s.role IS DISTINCT FROM 'decode' THEN s.cached_device_tokens END AS cached_device_tokens,
               CASE WHEN s.role IS DISTINCT FROM 'decode' THEN s.cached_host_tokens END AS cached_host_tokens,
               CASE WHEN s.role IS DISTINCT FROM 'decode' THEN s.cached_peer_tokens END AS cached_peer_tokens,
               CASE WHEN s.role IS DISTINCT FROM 'decode' THEN s.cached_pool_tokens END AS cached_pool_tokens,
               CASE WHEN s.role IS DISTINCT FROM 'decode' THEN s.cached_disk_tokens END AS cached_disk_tokens
           ),
           r.output_tokens,
           CASE WHEN s.cached_tokens IS NOT NULL AND s.role IS DISTINCT FROM 'decode'
                THEN coalesce(s.prompt_tokens, r.prompt_tokens) END AS prompt
    FROM stages s JOIN requests r USING (request)
    WHERE r.finish_ns IS NOT NULL AND r.error IS NULL
)
WHERE cached_tokens IS NULL OR prompt IS NULL OR cached_tokens <= prompt
GROUP BY request
ORDER BY request
