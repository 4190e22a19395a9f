-- Output tokens per second by bin. A bin with an emission of unknown size has no rate.
-- Parameters: $from_ns, $to_ns, $width_ns. Relation `emitted`: one vantage per request.
WITH sized AS (
  SELECT time_ns, coalesce(count, lead(index) OVER (PARTITION BY request, sequence ORDER BY index) - index) AS n FROM emitted
), binned AS (
  SELECT (time_ns - $from_ns) // $width_ns AS bin, sum(n) AS n, count(*) = count(n) AS known
  FROM sized WHERE time_ns >= $from_ns AND time_ns < $to_ns GROUP BY 1
), grid AS (
  SELECT bin, $from_ns + bin * $width_ns AS from_ns, least($from_ns + (bin + 1) * $width_ns, $to_ns) AS to_ns
  FROM (SELECT unnest(range(0, ($to_ns - 1 - $from_ns) // $width_ns + 1)) AS bin)
)
SELECT from_ns, to_ns, CASE WHEN coalesce(known, true) THEN coalesce(n, 0) * 1e9 / (to_ns - from_ns) END AS tokens_per_s
FROM grid LEFT JOIN binned USING (bin)
ORDER BY bin
