-- Leading blocks of prompts that had been sent before: each hash stands for its block and all before it, so a hash that was seen
-- before is a prefix that was. `repeated`: by any request; `repeated_in_session`: by an earlier one of the same session.
-- `WHERE true` is replaced to read a part of the hashes at a time, which bounds the memory.
WITH sent AS (
  SELECT coalesce(hash_space, '') AS space, block_unit, block_size, session, unnest(prefix_blocks) AS hash
  FROM requests
  WHERE prefix_blocks IS NOT NULL
), seen AS (
  SELECT space, block_unit, block_size, session, hash, count(*) AS n FROM sent WHERE true AND hash IS NOT NULL GROUP BY ALL
)
SELECT block_unit, block_size, sum(n)::BIGINT AS blocks, (sum(n) - count(DISTINCT (space, hash)))::BIGINT AS repeated,
       coalesce(sum(n) FILTER (session IS NOT NULL), 0)::BIGINT AS session_blocks,
       coalesce(sum(n - 1) FILTER (session IS NOT NULL), 0)::BIGINT AS repeated_in_session
FROM seen
GROUP BY ALL
ORDER BY block_unit NULLS FIRST, block_size NULLS FIRST
