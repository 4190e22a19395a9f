-- Leading blocks of prompts that had been sent before: each hash stands for its block and all before it, so a hash that was seen
-- before is a prefix that was. `repeated`: by any request; `repeated_in_session`: by an earlier one of the same session.
-- `WHERE true` is replaced to read a part of the hashes at a time, which bounds the memory.
WITH sent AS (
  -- spaces and sessions by their hash: groups of strings would take many times the memory
  SELECT hash(hash_space, block_unit, block_size) AS space, block_unit, block_size,
         CASE WHEN session IS NOT NULL THEN hash(session) END AS session, unnest(prefix_blocks) AS hash
  FROM requests
  WHERE prefix_blocks IS NOT NULL
), seen AS (
  SELECT space, session, hash, count(*) AS n FROM sent WHERE true AND hash IS NOT NULL GROUP BY space, session, hash
), blocks AS (
  SELECT space, sum(n) AS n, sum(n) FILTER (session IS NOT NULL) AS in_session, sum(n - 1) FILTER (session IS NOT NULL) AS again
  FROM seen GROUP BY space, hash
), sums AS (
  SELECT space, sum(n) AS n, count(*) AS distinct_hashes, sum(in_session) AS in_session, sum(again) AS again
  FROM blocks GROUP BY space
)
SELECT block_unit, block_size, sum(n)::BIGINT AS blocks, sum(n - distinct_hashes)::BIGINT AS repeated,
       coalesce(sum(in_session), 0)::BIGINT AS session_blocks, coalesce(sum(again), 0)::BIGINT AS repeated_in_session
FROM sums JOIN (SELECT DISTINCT hash(hash_space, block_unit, block_size) AS space, block_unit, block_size FROM requests) USING (space)
GROUP BY ALL
ORDER BY block_unit NULLS FIRST, block_size NULLS FIRST
