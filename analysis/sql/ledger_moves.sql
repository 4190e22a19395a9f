-- Moves by object, way, mechanism and basis. A sum is null where no move knows the value; *_unknown counts the moves that do not.
SELECT object, src, dst, mechanism, coalesce(basis, 'unstated') AS basis,
       count(*) AS moves,
       sum(bytes)::BIGINT AS bytes,
       count(*) - count(bytes) AS bytes_unknown,
       -- each link of the path is charged the bytes; a move without a path crosses one
       sum(bytes * greatest(coalesce(len(path), 1), 1))::BIGINT AS link_bytes,
       sum(transfers)::BIGINT AS transfers,
       -- hops and control operations of a row are those of its access path: each of its transfers makes them
       sum(payload_hops * coalesce(transfers, 1))::BIGINT AS payload_hops,
       sum(control_ops * coalesce(transfers, 1))::BIGINT AS control_ops,
       count(*) - count(control_ops) AS control_ops_unknown
FROM moves
GROUP BY ALL
ORDER BY object, src, dst, mechanism, basis
