-- Steps by bin, each step shared out by its overlap: what the batch held (mean over step time), how long a step took, how busy.
-- Parameters: $from_ns, $to_ns, $width_ns.
WITH cut AS (
  SELECT *, unnest(range((greatest(start_ns, $from_ns) - $from_ns) // $width_ns,
                         (least(end_ns, $to_ns) - 1 - $from_ns) // $width_ns + 1)) AS bin
  FROM steps
  WHERE end_ns > start_ns AND end_ns > $from_ns AND start_ns < $to_ns
), shared AS (
  SELECT *,
         (least(end_ns, $to_ns, $from_ns + (bin + 1) * $width_ns) - greatest(start_ns, $from_ns + bin * $width_ns))::DOUBLE AS inside_ns
  FROM cut
)
SELECT $from_ns + bin * $width_ns AS from_ns,
       least($from_ns + (bin + 1) * $width_ns, $to_ns) AS to_ns,
       count(*) AS steps,
       sum(prefill_tokens * inside_ns) / sum(inside_ns) FILTER (prefill_tokens IS NOT NULL) AS prefill_tokens,
       sum(decode_tokens * inside_ns) / sum(inside_ns) FILTER (decode_tokens IS NOT NULL) AS decode_tokens,
       sum(kv_used_tokens * inside_ns) / sum(inside_ns) FILTER (kv_used_tokens IS NOT NULL) AS kv_used_tokens,
       sum((end_ns - start_ns) * inside_ns) / sum(inside_ns) AS step_ns,
       max(end_ns - start_ns) AS longest_ns
FROM shared
GROUP BY bin
ORDER BY bin
