-- How much of its steps each server's host and collectives took, by what the steps hold.
-- Where the device's time is known, the rest of the step is the host's; else choosing the batch, launching and bookkeeping are
-- (not under asynchronous scheduling, where they may run beside the device: the manifest's servers say `async_scheduling`).
WITH told AS (
    SELECT
        server,
        CASE
            WHEN prefill_tokens IS NULL OR decode_requests IS NULL THEN 'unknown'
            WHEN prefill_tokens > 0 AND decode_requests > 0 THEN 'mixed'
            WHEN prefill_tokens > 0 THEN 'prefill'
            WHEN decode_requests > 0 THEN 'decode'
            ELSE 'empty'
        END AS kind,
        end_ns - start_ns AS took_ns,
        CASE
            WHEN device_ns >= 0 THEN greatest(end_ns - start_ns - device_ns, 0)
            ELSE greatest(schedule_ns, 0) + coalesce(greatest(launch_ns, 0), 0) + coalesce(greatest(update_ns, 0), 0)
        END AS idle_ns,
        greatest(collective_ns, 0) AS collective_ns
    FROM steps
    WHERE end_ns >= start_ns AND coalesce(pp_rank, 0) = 0
)
SELECT
    server,
    kind,
    count(*) AS steps,
    sum(took_ns) AS took_ns,
    count(coalesce(idle_ns, collective_ns)) AS host_steps,
    sum(least(coalesce(idle_ns, 0) + coalesce(collective_ns, 0), took_ns)) FILTER (coalesce(idle_ns, collective_ns) IS NOT NULL)
        AS host_ns
FROM told
GROUP BY server, kind
ORDER BY server, kind
