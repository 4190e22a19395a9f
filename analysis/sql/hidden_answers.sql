-- Messages in which answers reach clients, beside their tokens and bytes, over requests of which both are known.
SELECT count(*) AS answers, try_cast(sum(m.messages) AS BIGINT) AS messages, try_cast(sum(m.bytes) AS BIGINT) AS bytes,
       try_cast(sum(r.output_tokens) AS BIGINT) AS output_tokens, m.basis
FROM (
  SELECT request, coalesce(basis, 'unstated') AS basis, sum(greatest(transfers, 0)) AS messages, sum(bytes) AS bytes
  FROM moves
  WHERE object = 'tokens' AND dst = 'client' AND request IS NOT NULL
  GROUP BY request, coalesce(basis, 'unstated')
  HAVING count(transfers) = count(*) AND count(bytes) = count(*)
) m JOIN requests r USING (request)
WHERE r.output_tokens IS NOT NULL AND r.error IS NULL
GROUP BY m.basis
ORDER BY messages DESC, basis
