-- What crossed each link in each direction by the recorded moves. View `crossings`.
SELECT link, way, object, basis, count(*) AS moves, TRY_CAST(sum(bytes) AS BIGINT) AS bytes, count(*) - count(bytes) AS bytes_unknown,
       TRY_CAST(sum(transfers) AS BIGINT) AS transfers
FROM crossings
GROUP BY ALL
ORDER BY link, way, object, basis
