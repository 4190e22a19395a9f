-- The recorded moves by link of their paths: each link is charged the bytes.
SELECT link, object, src, dst, mechanism, basis, count(*) AS moves, TRY_CAST(sum(bytes) AS BIGINT) AS bytes,
       count(*) - count(bytes) AS bytes_unknown, TRY_CAST(sum(transfers) AS BIGINT) AS transfers
FROM (
  SELECT unnest(path) AS link, object, src, dst, mechanism, coalesce(basis, 'unstated') AS basis,
         CASE WHEN bytes >= 0 THEN bytes END AS bytes, CASE WHEN transfers >= 0 THEN transfers END AS transfers
  FROM moves WHERE path IS NOT NULL
)
GROUP BY ALL
ORDER BY link, object, src, dst, mechanism, basis
