-- What figures per request, token and second are divided by. All requests count, also failed and unfinished ones: they moved data too.
SELECT count(*) AS requests, count(*) FILTER (output_tokens IS NULL) AS output_unknown,
       TRY_CAST(sum(output_tokens) AS BIGINT) AS output_tokens, count(*) FILTER (finish_ns IS NULL) AS unfinished,
       min(arrival_ns) AS first_ns, max(finish_ns) AS last_ns
FROM requests
