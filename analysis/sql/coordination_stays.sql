-- Entries into the engines' queues: each stay that was enqueued or scheduled is one. A stay that ended preempted and came back is
-- a stay of its own, so `preempted` says whether preemptions are among the rows.
SELECT server, count(*) AS stays, count(*) FILTER (end_reason = 'preempted') AS preempted,
       count(*) FILTER (end_reason = 'handed over') AS handed_over
FROM stages
WHERE (enqueued_ns IS NOT NULL OR scheduled_ns IS NOT NULL) AND coalesce(end_reason, '') <> 'refused'
GROUP BY server
ORDER BY server NULLS FIRST
