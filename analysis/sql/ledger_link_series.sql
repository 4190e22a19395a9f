-- The byte counters of links, numbered: one row per link, host, source, name and direction. Relation `watched`: link, entity,
-- bytes_per_s. most_per_ns: 1.2 times what the link can carry in a ns (of unknown rate 10^12 bytes/s, more than any carries). way: sent
-- and written go from the link's end a to b.
SELECT row_number() OVER (ORDER BY link, host, source, name, direction)::INTEGER AS id, *,
       CASE direction WHEN 'tx' THEN 'ab' WHEN 'write' THEN 'ab' WHEN 'rx' THEN 'ba' WHEN 'read' THEN 'ba' ELSE '' END AS way
FROM (
  SELECT DISTINCT w.link, w.entity, coalesce(w.bytes_per_s, 1e12) * 1.2 / 1e9 AS most_per_ns, coalesce(c.host, '') AS host,
         coalesce(c.source, '') AS source, c.name, coalesce(c.direction, '') AS direction
  FROM (SELECT DISTINCT host, entity, source, name, direction FROM counters WHERE unit IN ('bytes', 'bytes/s', 'B', 'B/s', 'By', 'By/s')) c
  JOIN watched w ON w.entity = c.entity
)
