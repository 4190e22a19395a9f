-- Requests and prompt tokens that arrive, per second, by bin. Parameters: $from_ns, $to_ns, $width_ns.
WITH binned AS (
  SELECT (arrival_ns - $from_ns) // $width_ns AS bin, count(*) AS n,
         CASE WHEN count(*) = count(prompt_tokens) THEN sum(prompt_tokens) END AS prompt
  FROM requests WHERE arrival_ns >= $from_ns AND arrival_ns < $to_ns GROUP BY 1
), grid AS (
  SELECT bin, $from_ns + bin * $width_ns AS from_ns, least($from_ns + (bin + 1) * $width_ns, $to_ns) AS to_ns
  FROM (SELECT unnest(range(0, ($to_ns - 1 - $from_ns) // $width_ns + 1)) AS bin)
)
SELECT from_ns, to_ns, coalesce(n, 0) * 1e9 / (to_ns - from_ns) AS requests_per_s,
       CASE WHEN n IS NULL THEN 0 ELSE prompt * 1e9 / (to_ns - from_ns) END AS prompt_tokens_per_s
FROM grid LEFT JOIN binned USING (bin)
ORDER BY bin
