"""The field metrics' definitions, like those of :mod:`hoptrace.metrics_sql`; a test holds each query equal to
:mod:`hoptrace.field_metrics`."""

from __future__ import annotations

from collections.abc import Mapping

from hoptrace.metrics_sql import FINISHED, GAPS, RATE, SPANS, STAT, TPOT, Metric

__all__ = ["EXAMPLE_SLO", "FIELD_METRICS", "goodput_sql"]

EXAMPLE_SLO = {"ttft": 500_000_000, "tpot": 50_000_000}


def _difference(later: str, earlier: str, stays: bool = False) -> str:
    """Statistics of a difference of two moments over finished requests; one that no int64 holds is unknown."""
    join = (
        "\n  LEFT JOIN (SELECT request, min(enqueued_ns) AS enqueued_ns FROM stages GROUP BY request) USING (request)"
        if stays
        else ""
    )
    return (
        f"{STAT}(\n  SELECT try_cast({later}::HUGEINT - {earlier} AS BIGINT) AS v\n  FROM requests{join}\n  WHERE {FINISHED}\n)"
    )


# Per request; `itl_…` needs the tokens, the others the requests alone. A limit on tpot or itl is met by an answer of one token.
_LIMIT_SQL = {
    "ttft": "first_token_ns - arrival_ns",
    "visible_ttft": "first_visible_ns - arrival_ns",
    "e2e": "finish_ns - arrival_ns",
    "queue": "coalesce(r.scheduled_ns, s.scheduled_ns) - coalesce(queued_ns, received_ns, arrival_ns)",
    "tpot": f"CASE WHEN output_tokens <= 1 THEN 0 ELSE {TPOT} END",
}


_RATE_DONE = RATE.replace("max(finish_ns) - min(arrival_ns)", "max(finish_ns) FILTER (done) - min(arrival_ns) FILTER (done)")


def goodput_sql(slo: Mapping[str, int] = EXAMPLE_SLO) -> str:
    """The query for limits in ns; KeyError for a limit on ``itl_…``, which is not computed by a query."""
    met = "\n           AND ".join(f"coalesce({_LIMIT_SQL[n]} <= {limit}, false)" for n, limit in slo.items())
    return f"""\
SELECT sum(met::INT) / nullif(count(*) * any_value(ran), 0) AS share_at_least,
       sum(met::INT) * 1e9 / nullif({_RATE_DONE}, 0) AS per_s_at_least,
       sum(met::INT)::BIGINT AS met, count(*) AS arrived
FROM (
  SELECT arrival_ns, finish_ns, {FINISHED} AS done, max((finish_ns IS NOT NULL OR error IS NOT NULL)::INT) OVER () AS ran,
         {FINISHED}
           AND {met} AS met
  FROM requests r LEFT JOIN (SELECT request, min(scheduled_ns) AS scheduled_ns FROM stages GROUP BY request) s USING (request)
  LEFT JOIN {SPANS} USING (request)
)"""


# Only where steps say that nobody lost a place, or somebody is seen to have lost one, is the number of requests known.
PREEMPTED = """\
SELECT told.*,
       CASE WHEN seen.requests > 0 THEN seen.requests WHEN told.preemptions = 0 THEN 0 END AS requests,
       seen.requests AS seen
FROM (
  SELECT CASE WHEN count(preempted) > 0 THEN try_cast(sum(preempted) AS BIGINT) END AS preemptions,
         count(*) > count(preempted)
         OR (SELECT coalesce(bool_or(fraction < 1), false) FROM coverage WHERE "table" = 'steps') AS partly
  FROM steps
  WHERE coalesce(pp_rank, 0) = 0
) told, (
  SELECT count(*) AS requests
  FROM (
    SELECT request FROM residency WHERE phase = 'preempted'
    UNION
    SELECT request FROM stages WHERE end_reason = 'preempted'
  )
) seen"""

DRAFTS = """\
SELECT try_cast(sum(draft_accepted) AS BIGINT) AS accepted, try_cast(sum(draft_proposed) AS BIGINT) AS proposed,
       sum(draft_accepted) / nullif(sum(draft_proposed), 0) AS value
FROM steps
WHERE coalesce(pp_rank, 0) = 0 AND draft_accepted IS NOT NULL AND draft_proposed IS NOT NULL"""

FIELD_METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric(
            "itl_chunk",
            "Inter-token latency per chunk",
            "ns",
            "gap since the read before, one value per read after the first",
            "What client libraries call ITL: the time between the pieces in which an answer arrives, however many tokens a piece "
            "holds. With several tokens a chunk (multi-step scheduling, accepted drafts) it is larger than ITL per token, and "
            "fewer. Pieces that came in one read count as one; a client that stamps each of them also counts gaps of about 0.",
            f"{GAPS}\n{STAT}(SELECT gap_ns AS v FROM gaps)",
        ),
        Metric(
            "client_ttft",
            "TTFT from sending",
            "ns",
            "first_token_ns − sent_ns",
            "As a client measures that starts its clock when it sends. Where it sends later than it meant to, this hides the "
            "wait (coordinated omission): TTFT counts from arrival.",
            _difference("first_token_ns", "sent_ns"),
        ),
        Metric(
            "server_ttft",
            "TTFT from receiving",
            "ns",
            "first_token_ns − received_ns",
            "As proxy or server sees it: neither the client's delay nor the way in is in it.",
            _difference("first_token_ns", "received_ns"),
        ),
        Metric(
            "engine_ttft",
            "TTFT inside the engine",
            "ns",
            "engine_first_token_ns − (queued_ns, else the first stay's enqueued_ns)",
            "From the engine's queue to its first token, by the engine's own word: tokenizing, the way to the engine and out of "
            "it are not in it.",
            _difference("engine_first_token_ns", "coalesce(queued_ns, enqueued_ns)", stays=True),
        ),
        Metric(
            "client_lateness",
            "Lateness of the load generator",
            "ns",
            "sent_ns − intended_ns",
            "How much later than meant a request was sent. What a load generator owes its schedule is the user's wait all the "
            "same.",
            _difference("sent_ns", "intended_ns"),
        ),
        Metric(
            "way_in",
            "Way in",
            "ns",
            "received_ns − sent_ns",
            "From sending to proxy or server having the request whole.",
            _difference("received_ns", "sent_ns"),
        ),
        Metric(
            "first_token_way_out",
            "Way out of the first token",
            "ns",
            "first_token_ns − engine_first_token_ns",
            "From the engine's first token to where tokens were seen: detokenizing, the server's front, the network.",
            _difference("first_token_ns", "engine_first_token_ns"),
        ),
        Metric(
            "total_tokens_per_s",
            "Total throughput",
            "tokens/s",
            "Σ (prompt_tokens + output_tokens) ÷ (last finish_ns − first arrival_ns), over finished requests",
            "Prompts count whole, cached tokens included: a prompt read from a cache makes this figure grow and costs little. "
            "Null if a length or the arrivals are unknown.",
            "SELECT CASE WHEN count(output_tokens) = count(*) AND count(prompt_tokens) = count(*)\n"
            f"            THEN sum(prompt_tokens) + sum(output_tokens) END * 1e9 / nullif({RATE}, 0) AS value\n"
            f"FROM requests\nWHERE {FINISHED}",
        ),
        Metric(
            "goodput",
            "Goodput",
            "requests/s",
            "requests that met every limit ÷ (last finish_ns − first arrival_ns)",
            "Requests a second that met the service level objective: `hoptrace report T.trace --slo ttft=500ms,tpot=50ms`. "
            "Failed and unfinished requests met nothing; an answer of one token has no time between tokens, so it meets limits "
            "on TPOT and ITL. A limit on ITL is one on a statistic of the request's own ITLs (itl_p99). Share: of all requests "
            "that arrived. Where a figure of some request is unknown, only lower bounds are given; the query gives no others.",
            goodput_sql(),
        ),
        Metric(
            "preemptions",
            "Preemptions",
            "preemptions",
            "Σ steps.preempted",
            "How often a request lost its place. A lower bound where some steps do not say.",
            f"SELECT preemptions AS value, partly AS at_least\nFROM ({PREEMPTED})",
        ),
        Metric(
            "preempted_requests",
            "Preempted requests",
            "requests",
            "requests with a preempted run of steps or a stay that ended preempted",
            "How many requests lost their place at least once.",
            f"SELECT requests AS value\nFROM ({PREEMPTED})",
        ),
        Metric(
            "draft_acceptance",
            "Acceptance of drafts",
            "share of proposed tokens",
            "Σ draft_accepted ÷ Σ draft_proposed, over steps that know both",
            "How many of the tokens that a draft proposed were kept. By position in the draft it is unknown: steps hold sums.",
            DRAFTS,
        ),
    )
}
