-- Each move by link of its path, with its direction: from the link's end a to b, or back. Where the path starts and ends tells it,
-- else the link before; null where neither does. Relation `ends`: link, a, b (of the platform graph).
WITH c AS (
  SELECT unnest(path) AS link, unnest(range(1, len(path) + 1)) AS i, len(path) AS n, path, src, dst, start_ns,
         greatest(coalesce(end_ns, start_ns), start_ns) AS end_ns, bytes, greatest(coalesce(transfers, 1), 1) AS transfers,
         coalesce(basis, 'unstated') AS basis, object
  FROM moves WHERE len(path) > 0
)
SELECT c.link, c.start_ns, c.end_ns, CASE WHEN c.bytes >= 0 THEN c.bytes END AS bytes, c.transfers, c.basis, c.object,
       CASE WHEN i = 1 AND src = k.a THEN 'ab' WHEN i = 1 AND src = k.b THEN 'ba'
            WHEN i = n AND dst = k.b THEN 'ab' WHEN i = n AND dst = k.a THEN 'ba'
            WHEN k.a IN (p.a, p.b) THEN 'ab' WHEN k.b IN (p.a, p.b) THEN 'ba' ELSE '' END AS way
FROM c LEFT JOIN ends k ON k.link = c.link LEFT JOIN ends p ON p.link = c.path[i - 1]
