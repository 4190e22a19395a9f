"""The metrics' definitions as `hoptrace explain` prints them: formula, unit, words, and a DuckDB query over the tables.

A test holds each query equal to what :mod:`hoptrace.metrics` computes with Polars.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FINISHED", "GAPS", "METRICS", "RATE", "STAT", "Metric"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``sql`` is one query over the trace's tables (``hoptrace sql T.trace "…"``): for a latency it gives n,
    mean_ns, p50_ns, p95_ns, p99_ns; for a rate or a count one column named ``value``."""

    name: str
    title: str
    unit: str
    formula: str
    doc: str
    sql: str


FINISHED = "finish_ns IS NOT NULL AND error IS NULL"
STAT = """\
SELECT count(v) AS n,
       try_cast(floor(avg(v) + 0.5) AS BIGINT) AS mean_ns,
       try_cast(floor(quantile_cont(v, 0.50) + 0.5) AS BIGINT) AS p50_ns,
       try_cast(floor(quantile_cont(v, 0.95) + 0.5) AS BIGINT) AS p95_ns,
       try_cast(floor(quantile_cont(v, 0.99) + 0.5) AS BIGINT) AS p99_ns
FROM """


def _per_request(expression: str, where: str = "") -> str:
    return f"{STAT}(\n  SELECT {expression} AS v\n  FROM requests\n  WHERE {FINISHED}{where}\n)"


_QUEUE = f"""{STAT}(
  SELECT coalesce(r.scheduled_ns, s.scheduled_ns) - coalesce(r.queued_ns, r.received_ns, r.arrival_ns) AS v
  FROM requests r
  LEFT JOIN (SELECT request, min(scheduled_ns) AS scheduled_ns FROM stages GROUP BY request) s USING (request)
  WHERE r.finish_ns IS NOT NULL AND r.error IS NULL
)"""

# Requests of several sequences: how many there are, and the sum of their spans where all were seen.
SPANS = """\
(
    WITH k AS (
      SELECT request, max(sequence) + 1 AS sequences
      FROM (SELECT request, sequence FROM tokens UNION ALL SELECT request, sequence FROM stages)
      WHERE sequence > 0 GROUP BY request
    ), t AS (
      SELECT request, max(time_ns) - min(time_ns) AS span FROM tokens
      WHERE request IN (SELECT request FROM k) GROUP BY request, coalesce(sequence, 0)
    )
    SELECT k.request, k.sequences, CASE WHEN count(t.span) = k.sequences THEN sum(t.span) END AS span
    FROM k LEFT JOIN t USING (request) GROUP BY k.request, k.sequences
  )"""
TPOT = """\
CASE WHEN output_tokens > coalesce(sequences, 1)
              THEN floor(CASE WHEN sequences IS NULL THEN last_token_ns - first_token_ns
                              WHEN last_token_ns - first_token_ns IS NOT NULL THEN span END
                         / (output_tokens - coalesce(sequences, 1)) + 0.5) END"""

GAPS = """\
WITH seen AS (
  SELECT t.request, coalesce(t.sequence, 0) AS sequence, t.index, t.time_ns, t.count, coalesce(t.coalesced, false) AS coalesced,
         r.output_tokens
  FROM tokens t JOIN requests r USING (request)
  WHERE r.finish_ns IS NOT NULL AND r.error IS NULL
), numbered AS (  -- emissions that came in one read belong together
  SELECT *, coalesce(count, lead(index) OVER w - index) AS told,
         sum(CASE WHEN coalesced THEN 0 ELSE 1 END) OVER (w ROWS UNBOUNDED PRECEDING) AS read
  FROM seen WINDOW w AS (PARTITION BY request, sequence ORDER BY index)
), held AS (  -- counts that do not add up to the server's total are not known
  SELECT *, coalesce(CASE WHEN count(told) OVER r = count(*) OVER r THEN sum(told) OVER r END <> output_tokens, false) AS doubted
  FROM numbered WINDOW r AS (PARTITION BY request)
), reads AS (
  SELECT request, sequence, read, min(time_ns) AS begin_ns, max(time_ns) AS time_ns, bool_or(doubted) AS doubted,
         CASE WHEN count(told) = count(*) AND NOT bool_or(doubted) THEN sum(told)::BIGINT END AS n
  FROM held GROUP BY request, sequence, read
), timed AS (
  SELECT request, sequence, read, n, doubted,
         CASE WHEN read = min(read) OVER (PARTITION BY request, sequence) THEN begin_ns ELSE time_ns END AS time_ns
  FROM reads
), gaps AS (
  SELECT request, n, doubted, time_ns - lag(time_ns) OVER (PARTITION BY request, sequence ORDER BY read) AS gap_ns FROM timed
)"""

_ITL = f"""{GAPS}, each AS (
  SELECT gap_ns, n, unnest(range(n)) AS j FROM gaps WHERE gap_ns IS NOT NULL AND n > 0
)
{STAT}(SELECT gap_ns * (j + 1) // n - gap_ns * j // n AS v FROM each)"""

# Null where nobody covers arrivals: an import of durations.
RATE = """(CASE WHEN (SELECT coalesce(bool_or("columns" IS NULL OR list_contains("columns", 'arrival_ns')), true)
                   FROM coverage WHERE "table" = 'requests') THEN max(finish_ns) - min(arrival_ns) END)"""

METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric(
            "ttft",
            "Time to first token (TTFT)",
            "ns",
            "first_token_ns − arrival_ns",
            "From arrival to the first generated token of any kind, reasoning included. Arrival is the earliest of intended, "
            "sent and "
            "received, so a load generator that falls behind does not hide the wait (coordinated omission).",
            _per_request("first_token_ns - arrival_ns"),
        ),
        Metric(
            "visible_ttft",
            "Time to first visible token",
            "ns",
            "first_visible_ns − arrival_ns",
            "From arrival to the first token that a user sees: reasoning does not count. Equal to TTFT for a model that does "
            "not reason.",
            _per_request("first_visible_ns - arrival_ns"),
        ),
        Metric(
            "itl",
            "Inter-token latency (ITL)",
            "ns",
            "gap since the emission before ÷ tokens in the emission, one value per token after the first",
            "An emission may hold several tokens (a chunk, accepted drafts): its gap is shared out evenly among them, so a "
            "request's ITLs add "
            "up to its decode time. Emissions that came in one read count as one, since the gap between them is the "
            "network's. Tokens are read at one vantage per request. A request whose counts do not add up to the server's total "
            "is left out: see itl_left_out.",
            _ITL,
        ),
        Metric(
            "itl_left_out",
            "Requests left out of ITL",
            "requests",
            "finished requests with a gap and Σ tokens.count ≠ output_tokens, both known",
            "Where the server does not tell how many tokens a chunk holds, it is taken as one. If these do not add up to the "
            "server's total, some chunks held several, and a gap can't be shared out: the request is in no ITL. TPOT, which "
            "needs the total alone, keeps it.",
            f"{GAPS}\nSELECT count(DISTINCT request) AS value\nFROM gaps\nWHERE doubted AND gap_ns IS NOT NULL",
        ),
        Metric(
            "tpot",
            "Time per output token (TPOT)",
            "ns",
            "(last_token_ns − first_token_ns) ÷ (output_tokens − 1)",
            "A request's mean time per token after the first; one value per request, null under two tokens. Long answers weigh "
            "as much as short ones, unlike in ITL. Of several sequences in one request (n > 1) each has a first token: Σ of "
            "their spans ÷ (output_tokens − sequences), null where not all of them were seen.",
            f"{STAT}(\n  SELECT {TPOT} AS v\n  FROM requests LEFT JOIN {SPANS} USING (request)\n  WHERE {FINISHED}\n)",
        ),
        Metric(
            "e2e",
            "End-to-end latency",
            "ns",
            "finish_ns − arrival_ns",
            "From arrival to the end of the request as seen from outside.",
            _per_request("finish_ns - arrival_ns"),
        ),
        Metric(
            "queue",
            "Queueing time",
            "ns",
            "scheduled_ns − (queued_ns, else received_ns, else arrival_ns)",
            "From the request's entry into the server's queue, as far as that was seen, to the engine's first work on it.",
            _QUEUE,
        ),
        Metric(
            "output_tokens_per_s",
            "Output throughput",
            "tokens/s",
            "Σ output_tokens ÷ (last finish_ns − first arrival_ns), over finished requests",
            "Includes the ramp at both ends; null if the length of any finished request, or when requests arrived, is unknown.",
            f"SELECT CASE WHEN count(output_tokens) = count(*) THEN sum(output_tokens) END * 1e9 / nullif({RATE}, 0) AS value\n"
            f"FROM requests\nWHERE {FINISHED}",
        ),
        Metric(
            "requests_per_s",
            "Request throughput",
            "requests/s",
            "finished requests ÷ (last finish_ns − first arrival_ns)",
            "Includes the ramp at both ends; null if it is not known when requests arrived.",
            f"SELECT count(*) * 1e9 / nullif({RATE}, 0) AS value\nFROM requests\nWHERE {FINISHED}",
        ),
        Metric(
            "failed",
            "Failed requests",
            "requests",
            "requests whose error is not null",
            "They are in no average.",
            "SELECT count(*) AS value\nFROM requests\nWHERE error IS NOT NULL",
        ),
        Metric(
            "unfinished",
            "Unfinished requests",
            "requests",
            "requests without finish_ns and without error",
            "Still running when the trace ended. They are in no average, which flatters a server that is falling behind: "
            "watch this number.",
            "SELECT count(*) AS value\nFROM requests\nWHERE finish_ns IS NULL AND error IS NULL",
        ),
    )
}
