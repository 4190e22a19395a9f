-- How many messages one operation takes. An operation is what one request sends or gets of one object over one way; without a
-- request, what one step moves; without a step, one recorded move. A row of the result is a number of transfers that operations
-- take, with how many take so many. Moves that do not say their transfers are `untold`.
WITH operations AS (
  SELECT object, mechanism, coalesce(basis, 'unstated') AS basis, (src = 'client' OR dst = 'client') AS client,
         sum(greatest(transfers, 0)) AS transfers, count(*) - count(transfers) AS untold, sum(bytes) AS bytes,
         count(*) - count(bytes) AS bytes_unknown
  FROM moves
  GROUP BY object, mechanism, coalesce(basis, 'unstated'), src, dst, request,
           CASE WHEN request IS NULL THEN server END, CASE WHEN request IS NULL THEN step END,
           CASE WHEN request IS NULL AND step IS NULL THEN start_ns END, CASE WHEN request IS NULL AND step IS NULL THEN end_ns END
)
SELECT object, mechanism, basis, client, CASE WHEN untold = 0 THEN try_cast(transfers AS BIGINT) END AS transfers,
       count(*) AS operations, try_cast(sum(bytes) AS BIGINT) AS bytes, sum(bytes_unknown)::BIGINT AS bytes_unknown
FROM operations
GROUP BY ALL
ORDER BY object, mechanism NULLS FIRST, basis, client, transfers NULLS LAST
