-- When requests waited for KV space, as far as waits were recorded: overlapping waits of a server joined to one interval.
WITH kv AS (
  SELECT server, start_ns, end_ns,
         max(end_ns) OVER (PARTITION BY server ORDER BY start_ns, end_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reach_ns
  FROM waits WHERE kind = 'capacity' AND "on" = 'kv' AND server IS NOT NULL AND end_ns > start_ns
), numbered AS (
  SELECT *, sum(CASE WHEN reach_ns IS NULL OR start_ns > reach_ns THEN 1 ELSE 0 END)
            OVER (PARTITION BY server ORDER BY start_ns, end_ns ROWS UNBOUNDED PRECEDING) AS island
  FROM kv
)
SELECT server, min(start_ns) AS start_ns, max(end_ns) AS end_ns
FROM numbered
GROUP BY server, island
ORDER BY server, start_ns
