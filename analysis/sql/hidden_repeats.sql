-- The same wait over and over: waits of one request (else one step) of one kind on one thing are one scope.
SELECT kind, "on", basis, count(*) AS scopes, try_cast(sum(n) AS BIGINT) AS operations, try_cast(max(n) AS BIGINT) AS most
FROM (
  SELECT kind, "on", coalesce(basis, 'unstated') AS basis, sum(greatest(coalesce(count, 1), 0)) AS n
  FROM waits
  WHERE kind IN ('doorbell', 'poll', 'interrupt', 'serialize', 'sync', 'lock', 'switch')
  GROUP BY kind, "on", coalesce(basis, 'unstated'), request, CASE WHEN request IS NULL THEN server END,
           CASE WHEN request IS NULL THEN step END
)
GROUP BY ALL
ORDER BY kind, "on" NULLS FIRST, basis
