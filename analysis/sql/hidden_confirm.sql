-- Waits of telling and asking that belong to a transfer of state: same request, else same step, else same server, and the two touch
-- in time. Clients' messages (prompt, tokens) are no such transfers: they last as long as the request does. A sync counts only with
-- a request: a step has syncs of its own.
WITH owned AS (
  SELECT CASE WHEN request IS NOT NULL THEN 0 WHEN step IS NOT NULL THEN 1 ELSE 2 END AS scope, coalesce(request, step, 0) AS number,
         CASE WHEN request IS NULL THEN coalesce(server, '') ELSE '' END AS place,
         NULL AS kind, NULL AS "on", NULL AS basis, start_ns, greatest(coalesce(end_ns, start_ns), start_ns) AS end_ns, NULL AS n
  FROM moves
  WHERE object NOT IN ('prompt', 'tokens')
  UNION ALL
  SELECT CASE WHEN request IS NOT NULL THEN 0 WHEN step IS NOT NULL THEN 1 ELSE 2 END, coalesce(request, step, 0),
         CASE WHEN request IS NULL THEN coalesce(server, '') ELSE '' END,
         kind, "on", coalesce(basis, 'unstated'), start_ns, greatest(end_ns, start_ns), greatest(coalesce(count, 1), 0)
  FROM waits
  WHERE kind IN ('doorbell', 'poll', 'interrupt', 'serialize') OR (kind = 'sync' AND request IS NOT NULL)
), reached AS (
  -- a wait touches one of the moves that began before its end if the latest end of these is not before its start
  SELECT *, max(CASE WHEN kind IS NULL THEN end_ns END) OVER (
           PARTITION BY scope, number, place ORDER BY CASE WHEN kind IS NULL THEN start_ns ELSE end_ns END, kind NULLS FIRST
           ROWS UNBOUNDED PRECEDING) AS reach_ns
  FROM owned
), touching AS MATERIALIZED (
  SELECT *, bool_or(kind <> 'serialize') OVER (PARTITION BY scope, number, place) AS asked
  FROM reached
  WHERE kind IS NULL OR reach_ns >= start_ns
), best AS (
  -- of several bases the best known alone: what was counted and what was assumed is never one number
  SELECT arg_min(basis, list_position(['counted', 'derived', 'assumed', 'unstated'], basis)) AS basis
  FROM touching WHERE kind <> 'serialize'
), edges AS (
  SELECT scope, number, place, start_ns AS t, (kind IS NULL)::INT AS m, (kind IS NOT NULL)::INT AS c
  FROM touching, best WHERE asked AND (kind IS NULL OR kind <> 'serialize' AND touching.basis = best.basis)
  UNION ALL
  SELECT scope, number, place, end_ns, -(kind IS NULL)::INT, -(kind IS NOT NULL)::INT
  FROM touching, best WHERE asked AND (kind IS NULL OR kind <> 'serialize' AND touching.basis = best.basis)
), spans AS (
  SELECT lead(t) OVER w - t::HUGEINT AS ns, sum(m) OVER (w RANGE UNBOUNDED PRECEDING) AS m, sum(c) OVER (w RANGE UNBOUNDED PRECEDING) AS c
  FROM edges WINDOW w AS (PARTITION BY scope, number, place ORDER BY t)
), summed AS (
  SELECT try_cast(coalesce(sum(ns) FILTER (m > 0 AND c = 0), 0) AS BIGINT) AS moving_ns,
         try_cast(coalesce(sum(ns) FILTER (c > 0), 0) AS BIGINT) AS asking_ns,
         (SELECT count(*) FROM touching WHERE asked AND kind IS NULL) AS transfers
  FROM spans
)
SELECT kind, "on", basis, count(*) AS waits, try_cast(sum(n) AS BIGINT) AS operations,
       try_cast(sum(end_ns::HUGEINT - start_ns) AS BIGINT) AS wait_ns, NULL::BIGINT AS transfers
FROM touching
WHERE kind IS NOT NULL
GROUP BY kind, "on", basis
-- of those transfers: their time less that in which somebody asked or told, and the time in which somebody did
UNION ALL SELECT '(moving)', NULL, 'counted', NULL, NULL, moving_ns, transfers FROM summed WHERE transfers > 0
UNION ALL SELECT '(confirming)', NULL, 'counted', NULL, NULL, asking_ns, transfers FROM summed WHERE transfers > 0
ORDER BY kind, "on" NULLS FIRST, basis
