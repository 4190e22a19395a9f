-- Recorded waits of coordination kinds; transfer, recompute and capacity are other classes.
SELECT kind, "on", coalesce(basis, 'unstated') AS basis, count(*) AS waits, sum(coalesce(count, 1))::BIGINT AS operations,
       sum(greatest(end_ns - start_ns, 0))::BIGINT AS wait_ns
FROM waits
WHERE kind NOT IN ('transfer', 'recompute', 'capacity', 'queue')
GROUP BY ALL
ORDER BY kind, "on" NULLS FIRST, basis
