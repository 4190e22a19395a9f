-- Pages that the kernel moved between memory nodes: increases of its counters within one incarnation. Where nodes tell, theirs are
-- taken; the machine's own totals are of the same pages, and are taken where the nodes' files lack more than a tenth of them.
WITH s AS (
  SELECT coalesce(host, '') AS host, entity, name, source, coalesce(incarnation, '') AS life, time_ns, value_int
  FROM counters
  WHERE unit = 'pages' AND semantics = 'cumulative' AND coalesce(status, 'ok') = 'ok' AND value_int >= 0
    AND (name = 'pgpromote_success' OR starts_with(name, 'pgdemote_'))
), grown AS (
  SELECT *, CASE WHEN life = lag(life) OVER w AND value_int >= lag(value_int) OVER w THEN value_int - lag(value_int) OVER w END AS pages
  FROM s
  WINDOW w AS (PARTITION BY host, entity, name, source ORDER BY time_ns)
), summed AS (
  SELECT host, entity, name, source, sum(pages)::BIGINT AS pages
  FROM grown
  GROUP BY host, entity, name, source
  QUALIFY row_number() OVER (PARTITION BY host, entity, name ORDER BY max(time_ns) - min(time_ns) DESC, source) = 1
)
SELECT host, entity, name, CASE name WHEN 'pgpromote_success' THEN 'in' ELSE 'out' END AS direction, pages,
       CASE WHEN NOT starts_with(entity, 'node:') THEN sum(pages) FILTER (starts_with(entity, 'node:')) OVER (PARTITION BY host, name) END::BIGINT AS nodes_pages
FROM summed
WHERE pages IS NOT NULL
QUALIFY starts_with(entity, 'node:') = (
  coalesce(sum(pages) FILTER (starts_with(entity, 'node:')) OVER (PARTITION BY host, name), -1)
  >= 0.9 * coalesce(max(pages) FILTER (NOT starts_with(entity, 'node:')) OVER (PARTITION BY host, name), 0)
)
ORDER BY host, entity, name
