-- Semantic density of the moves that say both their bytes and their control operations, by object, mechanism and basis.
SELECT object, mechanism, coalesce(basis, 'unstated') AS basis,
       try_cast(sum(bytes) AS BIGINT) AS payload_bytes,
       try_cast(sum(control_ops::HUGEINT * greatest(coalesce(transfers, 1), 0)) AS BIGINT) AS control_ops,
       sum(bytes)::DOUBLE / nullif(sum(control_ops::HUGEINT * greatest(coalesce(transfers, 1), 0))::DOUBLE, 0) AS bytes_per_op
FROM moves
WHERE bytes IS NOT NULL AND control_ops IS NOT NULL
GROUP BY ALL
ORDER BY object, mechanism NULLS FIRST, basis
