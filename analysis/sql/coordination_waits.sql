-- Recorded waits of coordination kinds and queues; transfer, recompute and capacity are other classes. A row without a count is one.
SELECT kind, "on", coalesce(basis, 'unstated') AS basis, server, count(*) AS waits,
       try_cast(sum(greatest(coalesce(count, 1), 0)) AS BIGINT) AS operations,
       count(*) - count(count) AS uncounted,
       try_cast(sum(greatest(end_ns::HUGEINT - start_ns, 0)) AS BIGINT) AS wait_ns
FROM waits
WHERE kind NOT IN ('transfer', 'recompute', 'capacity')
GROUP BY ALL
ORDER BY kind, "on" NULLS FIRST, basis, server NULLS FIRST
