-- Output tokens of the requests that finished without error: what the parts of latency are divided by.
SELECT count(*) AS requests, CASE WHEN count(output_tokens) = count(*) THEN try_cast(sum(output_tokens) AS BIGINT) END AS output_tokens
FROM requests
WHERE finish_ns IS NOT NULL AND error IS NULL AND finish_ns >= arrival_ns
