-- Waits of telling and asking that belong to a transfer of state: same request, else same step, else same server, and the two touch
-- in time. Clients' messages (prompt, tokens) are no such transfers: they last as long as the request does. A sync counts only with
-- a request: a step has syncs of its own.
WITH carried AS (
  SELECT CASE WHEN request IS NOT NULL THEN 'r' || request WHEN step IS NOT NULL THEN 's' || step || ' ' || coalesce(server, '')
              ELSE 'v' || coalesce(server, '') END AS key,
         start_ns, greatest(coalesce(end_ns, start_ns), start_ns) AS end_ns
  FROM moves WHERE object NOT IN ('prompt', 'tokens')
), reaches AS (
  SELECT key, start_ns, max(end_ns) OVER (PARTITION BY key ORDER BY start_ns ROWS UNBOUNDED PRECEDING) AS reach_ns FROM carried
), asked AS (
  SELECT CASE WHEN request IS NOT NULL THEN 'r' || request WHEN step IS NOT NULL THEN 's' || step || ' ' || coalesce(server, '')
              ELSE 'v' || coalesce(server, '') END AS key,
         kind, "on", coalesce(basis, 'unstated') AS basis, start_ns, greatest(end_ns, start_ns) AS end_ns,
         greatest(coalesce(count, 1), 0) AS n
  FROM waits
  WHERE kind IN ('doorbell', 'poll', 'interrupt', 'serialize') OR (kind = 'sync' AND request IS NOT NULL)
), matched AS (
  SELECT asked.* FROM asked ASOF JOIN reaches ON asked.key = reaches.key AND asked.end_ns >= reaches.start_ns
  WHERE reaches.reach_ns >= asked.start_ns
), mine AS (
  SELECT key, start_ns, end_ns FROM carried WHERE key IN (SELECT key FROM matched WHERE kind <> 'serialize')
), edges AS (
  SELECT key, start_ns AS t, 1 AS m, 0 AS c FROM mine
  UNION ALL SELECT key, end_ns, -1, 0 FROM mine
  UNION ALL SELECT key, start_ns, 0, 1 FROM matched WHERE kind <> 'serialize'
  UNION ALL SELECT key, end_ns, 0, -1 FROM matched WHERE kind <> 'serialize'
), spans AS (
  SELECT lead(t) OVER (PARTITION BY key ORDER BY t) - t::HUGEINT AS ns, sum(m) OVER (PARTITION BY key ORDER BY t) AS m,
         sum(c) OVER (PARTITION BY key ORDER BY t) AS c
  FROM edges
)
SELECT kind, "on", basis, count(*) AS waits, try_cast(sum(n) AS BIGINT) AS operations,
       try_cast(sum(end_ns::HUGEINT - start_ns) AS BIGINT) AS wait_ns, NULL::BIGINT AS transfers
FROM matched GROUP BY kind, "on", basis
UNION ALL
-- of those transfers: their time less that in which somebody asked or told, and the time in which somebody did
SELECT '(moving)', NULL, 'counted', NULL, NULL, try_cast(coalesce(sum(ns) FILTER (m > 0 AND c = 0), 0) AS BIGINT),
       (SELECT count(*) FROM mine)
FROM spans WHERE (SELECT count(*) FROM mine) > 0
UNION ALL
SELECT '(confirming)', NULL, 'counted', NULL, NULL, try_cast(coalesce(sum(ns) FILTER (c > 0), 0) AS BIGINT), (SELECT count(*) FROM mine)
FROM spans WHERE (SELECT count(*) FROM mine) > 0
ORDER BY kind, "on" NULLS FIRST, basis
