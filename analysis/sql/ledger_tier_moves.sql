-- Recorded moves of KV by source and destination: those between the tiers of a cache are what keeps it.
SELECT src, dst, coalesce(basis, 'unstated') AS basis, count(*) AS moves, TRY_CAST(sum(bytes) AS BIGINT) AS bytes,
       count(*) - count(bytes) AS bytes_unknown
FROM (SELECT src, dst, basis, CASE WHEN bytes >= 0 THEN bytes END AS bytes FROM moves WHERE object = 'kv')
GROUP BY ALL
ORDER BY src, dst, basis
