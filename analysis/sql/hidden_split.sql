-- How many messages one operation takes. An operation is what one request sends or gets of one object over one way; without a
-- request, what one step moves; without a step, one recorded move. A row of the result is a number of transfers that operations
-- take, with how many take so many; it is null where one of their moves does not say its transfers.
WITH told AS (
  -- ways and owners by their hash: groups of strings would take many times the memory
  SELECT hash(object, mechanism, basis, src, dst) AS way, request,
         CASE WHEN request IS NULL THEN hash(server, step, CASE WHEN step IS NULL THEN start_ns END, CASE WHEN step IS NULL THEN end_ns END)
         END AS owner, transfers, bytes
  FROM moves
), operations AS (
  SELECT way, sum(greatest(transfers, 0)) AS transfers, count(*) - count(transfers) AS untold, sum(bytes) AS bytes,
         count(*) - count(bytes) AS bytes_unknown
  FROM told
  GROUP BY way, request, owner
), counted AS (
  SELECT way, CASE WHEN untold = 0 THEN try_cast(transfers AS BIGINT) END AS transfers, count(*) AS operations, sum(bytes) AS bytes,
         sum(bytes_unknown) AS bytes_unknown
  FROM operations
  GROUP BY ALL
), ways AS (
  SELECT DISTINCT hash(object, mechanism, basis, src, dst) AS way, object, mechanism, coalesce(basis, 'unstated') AS basis,
         (src = 'client' OR dst = 'client') AS client
  FROM moves
)
SELECT object, mechanism, basis, client, transfers, sum(operations)::BIGINT AS operations, try_cast(sum(bytes) AS BIGINT) AS bytes,
       sum(bytes_unknown)::BIGINT AS bytes_unknown
FROM counted JOIN ways USING (way)
GROUP BY ALL
ORDER BY object, mechanism NULLS FIRST, basis, client, transfers NULLS LAST
