-- Prompt tokens by where they came from, over stays that say so. A prompt is looked up once per stay: the denominator is counted as
-- often as the numerator; of several prompts in one request each sequence has its own. Stays that say more came from caches than
-- their prompt has are left out (impossible). Where the stays of several sequences do not tell their own prompts, the context at a
-- sequence's first decode does; without that nobody knows whether each had the whole prompt (n = 2) or one of several (a list of
-- prompts): left out (unsure). A stay that only decodes got its KV from the server that had computed it: that is a hand-over
-- (handed_over), no look-up and no re-use.
WITH several AS (
  SELECT request FROM stages GROUP BY request HAVING max(coalesce(sequence, 0)) > 0 AND count(*) > count(prompt_tokens)
), own AS (
  SELECT request, coalesce(sequence, 0) AS sequence, min(context_at_start) AS prompt
  FROM residency WHERE phase = 'decode' AND request IN (SELECT request FROM several) GROUP BY ALL
), s AS (
  SELECT stages.* REPLACE (CASE WHEN role IS DISTINCT FROM 'decode' THEN cached_tokens END AS cached_tokens),
         role IS NOT DISTINCT FROM 'decode' AS decodes, CASE WHEN role = 'decode' THEN cached_tokens END AS handed_over_tokens,
         several.request IS NOT NULL AND stages.prompt_tokens IS NULL AND own.prompt IS NULL AS unsure,
         coalesce(stages.prompt_tokens, own.prompt, requests.prompt_tokens) AS prompt
  FROM stages LEFT JOIN requests ON requests.request = stages.request
  LEFT JOIN several ON several.request = stages.request
  LEFT JOIN own ON own.request = stages.request AND own.sequence = coalesce(stages.sequence, 0)
), fit AS (
  SELECT *, coalesce(cached_tokens > prompt, false) OR unsure AS bad FROM s
)
SELECT coalesce(server, '') AS server, count(*) FILTER (bad AND NOT unsure) AS impossible,
       count(*) FILTER (unsure AND cached_tokens IS NOT NULL) AS unsure,
       count(*) FILTER (NOT bad AND cached_tokens IS NOT NULL) AS stays,
       count(*) FILTER (NOT bad AND cached_tokens > 0) AS stays_with_a_hit,
       count(*) FILTER (NOT bad AND cached_tokens IS NOT NULL AND prompt IS NULL) AS prompt_unknown,
       TRY_CAST(sum(prompt) FILTER (NOT bad AND cached_tokens IS NOT NULL) AS BIGINT) AS prompt_tokens,
       TRY_CAST(sum(cached_tokens) FILTER (NOT bad) AS BIGINT) AS cached_tokens,
       TRY_CAST(sum(cached_device_tokens) FILTER (NOT bad AND NOT decodes) AS BIGINT) AS device,
       TRY_CAST(sum(cached_host_tokens) FILTER (NOT bad AND NOT decodes) AS BIGINT) AS host,
       TRY_CAST(sum(cached_peer_tokens) FILTER (NOT bad AND NOT decodes) AS BIGINT) AS peer,
       TRY_CAST(sum(cached_pool_tokens) FILTER (NOT bad AND NOT decodes) AS BIGINT) AS pool,
       TRY_CAST(sum(cached_disk_tokens) FILTER (NOT bad AND NOT decodes) AS BIGINT) AS disk,
       TRY_CAST(sum(handed_over_tokens) AS BIGINT) AS handed_over,
       TRY_CAST(sum(resumed_tokens) FILTER (NOT bad) AS BIGINT) AS resumed_tokens,
       TRY_CAST(sum(recomputed_tokens) FILTER (NOT bad) AS BIGINT) AS recomputed_tokens,
       min(coalesce(scheduled_ns, enqueued_ns)) FILTER (NOT bad AND cached_tokens IS NOT NULL) AS from_ns,
       max(coalesce(scheduled_ns, enqueued_ns)) FILTER (NOT bad AND cached_tokens IS NOT NULL) AS to_ns
FROM fit
GROUP BY ALL
ORDER BY server
