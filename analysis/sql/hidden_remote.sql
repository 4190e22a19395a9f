-- What was moved between places, with the time that it took (moves that overlap are not taken together).
SELECT object, src, dst, mechanism, coalesce(basis, 'unstated') AS basis, count(*) AS moves, count(DISTINCT request) AS requests,
       try_cast(sum(greatest(coalesce(transfers, 1), 0)) AS BIGINT) AS transfers,
       try_cast(sum(bytes) AS BIGINT) AS bytes, count(*) - count(bytes) AS bytes_unknown,
       try_cast(sum(greatest(end_ns::HUGEINT - start_ns, 0)) AS BIGINT) AS move_ns, count(*) - count(end_ns) AS unended
FROM moves
WHERE object NOT IN ('prompt', 'tokens')
GROUP BY ALL
ORDER BY object, src, dst, mechanism NULLS FIRST, basis
