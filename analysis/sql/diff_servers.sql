-- diff_servers
-- What requests waited for and got on each server: time in its queue and in its hands, over the stays that know their times.
SELECT coalesce(server, '?') AS server,
       count(*) AS stays,
       count(DISTINCT (request, coalesce(sequence, 0))) AS answers,  -- that came by: once, however often one lost its place there
       count(*) FILTER (WHERE enqueued_ns IS NULL OR scheduled_ns IS NULL) AS queue_unknown,
       sum(greatest(scheduled_ns - enqueued_ns, 0)::HUGEINT)::DOUBLE AS queue_ns,
       count(*) FILTER (WHERE scheduled_ns IS NULL OR end_ns IS NULL) AS service_unknown,
       sum(greatest(end_ns - scheduled_ns, 0)::HUGEINT)::DOUBLE AS service_ns
FROM stages
WHERE request IN (SELECT request FROM requests WHERE finish_ns IS NOT NULL AND error IS NULL)
GROUP BY ALL
ORDER BY server
