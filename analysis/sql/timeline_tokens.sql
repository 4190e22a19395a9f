-- Output tokens per second by bin, over the reads of known size: where a bin has others too, the rate is a lower bound; where it has
-- only those, it has no rate. Parameters: $from_ns, $to_ns, $width_ns. Relation `reads`: time_ns, count.
WITH binned AS (
  SELECT (time_ns - $from_ns) // $width_ns AS bin, sum(count) AS n
  FROM reads WHERE time_ns >= $from_ns AND time_ns < $to_ns GROUP BY 1
), grid AS (
  SELECT bin, $from_ns + bin * $width_ns AS from_ns, least($from_ns + (bin + 1) * $width_ns, $to_ns) AS to_ns
  FROM (SELECT unnest(range(0, ($to_ns - 1 - $from_ns) // $width_ns + 1)) AS bin)
)
SELECT from_ns, to_ns, CASE WHEN binned.bin IS NULL THEN 0.0 ELSE n * 1e9 / (to_ns - from_ns) END AS tokens_per_s
FROM grid LEFT JOIN binned USING (bin)
ORDER BY from_ns
