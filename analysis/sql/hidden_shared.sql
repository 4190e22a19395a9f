-- Looks at the server's shared state from outside (each sample of its metrics is one; values that did not change are not always
-- written, so at least so many), and events that it published of its KV blocks.
SELECT 'metrics' AS what, source, count(DISTINCT time_ns) AS n FROM counters
WHERE entity LIKE 'server:%' AND (source LIKE '%-metrics' OR source LIKE '%-slots')
GROUP BY source
UNION ALL
SELECT 'kv events', source, count(*) FROM blocks GROUP BY source
ORDER BY what, source
