-- Moves by object, way (source, path of links, destination), mechanism and basis. A sum is null where no move knows the value (or
-- it is beyond 64 bits); *_unknown counts the moves that do not. A negative size or count is damage: unknown.
-- *_untold: what the moves that do not say their control operations (their hops) have: for the access path of the mechanism.
WITH m AS (
  SELECT source, object, src, dst, path, mechanism, coalesce(basis, 'unstated') AS basis, CASE WHEN bytes >= 0 THEN bytes END AS bytes,
         CASE WHEN transfers >= 0 THEN transfers END AS transfers, CASE WHEN payload_hops >= 0 THEN payload_hops END AS payload_hops,
         CASE WHEN control_ops >= 0 THEN control_ops END AS control_ops
  FROM moves
)
SELECT object, src, dst, path, mechanism, basis,
       count(*) AS moves,
       list(DISTINCT source ORDER BY source) AS sources,
       TRY_CAST(sum(bytes) AS BIGINT) AS bytes,
       count(*) - count(bytes) AS bytes_unknown,
       -- each link of the path is charged the bytes; a move without a path crosses one
       TRY_CAST(sum(bytes::HUGEINT * greatest(coalesce(len(path), 1), 1)) AS BIGINT) AS link_bytes,
       TRY_CAST(sum(transfers) AS BIGINT) AS transfers,
       -- hops and control operations of a row are those of its access path: each of its transfers makes them
       TRY_CAST(sum(payload_hops::HUGEINT * coalesce(transfers, 1)) AS BIGINT) AS payload_hops,
       TRY_CAST(sum(control_ops::HUGEINT * coalesce(transfers, 1)) AS BIGINT) AS control_ops,
       count(*) - count(control_ops) AS control_ops_unknown,
       count(*) - count(transfers) AS transfers_unknown,
       count(*) - count(payload_hops) AS payload_hops_unknown,
       TRY_CAST(sum(coalesce(transfers, 1)) FILTER (payload_hops IS NULL) AS BIGINT) AS hops_untold,
       TRY_CAST(sum(coalesce(transfers, 1)) FILTER (control_ops IS NULL) AS BIGINT) AS ops_untold,
       TRY_CAST(sum(coalesce(transfers, 1)) FILTER (control_ops IS NULL AND bytes IS NOT NULL) AS BIGINT) AS sized_ops_untold,
       TRY_CAST(sum(bytes) FILTER (control_ops IS NULL) AS BIGINT) AS bytes_untold
FROM m
GROUP BY ALL
ORDER BY object, src, dst, path, mechanism, basis
