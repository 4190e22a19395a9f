-- Payload bytes and control operations of the moves that know both, by basis.
SELECT coalesce(basis, 'unstated') AS basis, sum(bytes)::BIGINT AS payload_bytes, sum(control_ops * coalesce(transfers, 1))::BIGINT AS control_ops
FROM moves
WHERE bytes IS NOT NULL AND control_ops IS NOT NULL
GROUP BY ALL
ORDER BY basis
