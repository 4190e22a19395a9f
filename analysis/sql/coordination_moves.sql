-- Transfers by object, mechanism and basis: what says its control operations (told) beside what does not (untold). Control
-- operations are those of one transfer's access path, so they count once a transfer; a move without a number of transfers is one.
SELECT object, mechanism, coalesce(basis, 'unstated') AS basis, server, greatest(coalesce(len(path), 1), 1) AS links,
       count(*) AS moves,
       try_cast(sum(greatest(coalesce(transfers, 1), 0)) AS BIGINT) AS transfers,
       count(*) - count(transfers) AS transfers_unknown,
       try_cast(sum(CASE WHEN control_ops IS NOT NULL AND bytes IS NOT NULL THEN bytes END) AS BIGINT) AS told_bytes,
       try_cast(sum(CASE WHEN control_ops IS NOT NULL AND bytes IS NOT NULL
                         THEN control_ops::HUGEINT * greatest(coalesce(transfers, 1), 0) END) AS BIGINT) AS told_ops,
       try_cast(sum(CASE WHEN control_ops IS NULL THEN bytes END) AS BIGINT) AS untold_bytes,
       try_cast(sum(CASE WHEN control_ops IS NULL AND bytes IS NOT NULL
                         THEN greatest(coalesce(transfers, 1), 0) END) AS BIGINT) AS untold_transfers,
       count(*) FILTER (control_ops IS NULL AND bytes IS NULL) AS untold_without_bytes
FROM moves
GROUP BY ALL
ORDER BY object, mechanism NULLS FIRST, basis, server NULLS FIRST, links
