-- The same wait over and over: waits of one request (else one step) of one kind on one thing are one scope.
WITH told AS (
  SELECT hash(kind, "on", basis) AS what, request, CASE WHEN request IS NULL THEN hash(server, step) END AS owner,
         greatest(coalesce(count, 1), 0) AS n
  FROM waits
  WHERE kind IN ('doorbell', 'poll', 'interrupt', 'serialize', 'sync', 'lock', 'switch')
), scopes AS (
  SELECT what, count(*) AS scopes, sum(n) AS operations, max(n) AS most
  FROM (SELECT what, sum(n) AS n FROM told GROUP BY what, request, owner)
  GROUP BY what
), kinds AS (
  SELECT DISTINCT hash(kind, "on", basis) AS what, kind, "on", coalesce(basis, 'unstated') AS basis FROM waits
)
SELECT kind, "on", basis, sum(scopes)::BIGINT AS scopes, try_cast(sum(operations) AS BIGINT) AS operations,
       try_cast(max(most) AS BIGINT) AS most
FROM scopes JOIN kinds USING (what)
GROUP BY ALL
ORDER BY kind, "on" NULLS FIRST, basis
