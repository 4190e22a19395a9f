-- Recorded waits (all kinds but the transfer) between a stay that was handed over and the first work of the next one.
WITH stays AS (
  SELECT request, end_ns, end_reason,
         lead(scheduled_ns) OVER (PARTITION BY request ORDER BY coalesce(attempt, 0), stage, coalesce(sequence, 0)) AS next_ns
  FROM stages
), gaps AS (
  SELECT request, end_ns, next_ns FROM stays WHERE end_reason = 'handed over' AND next_ns > end_ns
)
SELECT (SELECT count(*) FROM gaps) AS handovers,
       (SELECT try_cast(sum(greatest(coalesce(w.count, 1), 0)) AS BIGINT) FROM gaps g JOIN waits w USING (request)
        WHERE w.kind <> 'transfer' AND w.start_ns >= g.end_ns AND w.end_ns <= g.next_ns) AS operations
