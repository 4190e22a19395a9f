-- Bytes of the recorded moves by link of their paths.
SELECT link, object, count(*) AS moves, sum(bytes)::BIGINT AS bytes
FROM (SELECT unnest(path) AS link, object, bytes FROM moves WHERE path IS NOT NULL)
GROUP BY ALL
ORDER BY link, object
