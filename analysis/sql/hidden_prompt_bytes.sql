-- Bytes of the clients' prompts on the wire beside their length, over requests of which both are known.
SELECT try_cast(sum(m.bytes) FILTER (r.prompt_tokens > 0) AS BIGINT) AS token_bytes,
       try_cast(sum(r.prompt_tokens) FILTER (m.bytes IS NOT NULL AND r.prompt_tokens > 0) AS BIGINT) AS tokens,
       try_cast(sum(m.bytes) FILTER (r.prompt_chars > 0) AS BIGINT) AS char_bytes,
       try_cast(sum(r.prompt_chars) FILTER (m.bytes IS NOT NULL AND r.prompt_chars > 0) AS BIGINT) AS characters
FROM (SELECT request, sum(bytes) AS bytes FROM moves WHERE object = 'prompt' AND src = 'client' GROUP BY request) m
JOIN requests r USING (request)
