"""The field metrics' definitions, like those of :mod:`hoptrace.metrics_sql`; a test holds each query equal to
:mod:`hoptrace.field_metrics`."""

from __future__ import annotations

from collections.abc import Mapping

from hoptrace.metrics_sql import FINISHED, GAPS, RATE, STAT, Metric

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
    "tpot": "CASE WHEN output_tokens > 1 THEN floor((last_token_ns - first_token_ns) / (output_tokens - 1) + 0.5) "
    "WHEN output_tokens <= 1 THEN 0 END",
}


_RATE_DONE = RATE.replace("max(finish_ns) - min(arrival_ns)", "max(finish_ns) FILTER (done) - min(arrival_ns) FILTER (done)")


def goodput_sql(slo: Mapping[str, int] = EXAMPLE_SLO) -> str:
    """The query for limits in ns; KeyError for a limit on ``itl_…``, which is not computed by a query."""
    met = "\n           AND ".join(f"coalesce({_LIMIT_SQL[n]} <= {limit}, false)" for n, limit in slo.items())
    return f"""\
SELECT sum(met::INT) / nullif(count(*) * any_value(ran), 0) AS share, sum(met::INT) * 1e9 / nullif({_RATE_DONE}, 0) AS per_s,
       sum(met::INT)::BIGINT AS met, count(*) AS arrived
FROM (
  SELECT arrival_ns, finish_ns, {FINISHED} AS done, max((finish_ns IS NOT NULL OR error IS NOT NULL)::INT) OVER () AS ran,
         {FINISHED}
           AND {met} AS met
  FROM requests r LEFT JOIN (SELECT request, min(scheduled_ns) AS scheduled_ns FROM stages GROUP BY request) s USING (request)
)"""


_STAYS = """\
WITH stays AS (
  SELECT s.*, coalesce(s.prompt_tokens, r.prompt_tokens) AS prompt
  FROM stages s LEFT JOIN requests r USING (request)
), known AS (
  SELECT * FROM stays WHERE NOT coalesce(cached_tokens > prompt, false)
)"""

_TIERS = ",\n         ".join(
    f"try_cast(sum(cached_{t}_tokens) AS BIGINT) AS {t}" for t in ("device", "host", "peer", "pool", "disk")
)

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

# Engines write of resumption only where it happened: without any preemption it is 0, with fewer stays than preempted requests
# it is unknown.
_RESUMED = (
    "CASE WHEN p.preemptions = 0 AND NOT p.partly THEN coalesce({0}, 0) WHEN k.resumed_stays >= p.requests THEN {0} END AS {0}"
)
REUSE = f"""{_STAYS}, told AS (
  SELECT (SELECT count(*) FROM stays) - count(*) AS impossible,
         CASE WHEN count(*) FILTER (cached_tokens IS NOT NULL AND prompt IS NULL) = 0
              THEN try_cast(sum(prompt) FILTER (cached_tokens IS NOT NULL) AS BIGINT) END AS prompt_tokens,
         try_cast(sum(cached_tokens) AS BIGINT) AS cached_tokens,
         {_TIERS},
         count(resumed_tokens) AS resumed_stays,
         try_cast(sum(resumed_tokens) AS BIGINT) AS resumed_tokens,
         try_cast(sum(recomputed_tokens) AS BIGINT) AS recomputed_tokens
  FROM known
)
SELECT k.impossible, k.prompt_tokens, k.cached_tokens, k.device, k.host, k.peer, k.pool, k.disk,
       {_RESUMED.format("resumed_tokens")},
       {_RESUMED.format("recomputed_tokens")}
FROM told k, (
{PREEMPTED}
) p"""

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
            "that arrived. Where a figure of some request is unknown, only lower bounds are given.",
            goodput_sql(),
        ),
        Metric(
            "cached_token_rate",
            "Cached-token rate",
            "share of prompt tokens",
            "Σ cached_tokens ÷ Σ prompt_tokens, over stays that know both",
            "Prompt tokens that a cache gave, of all that were looked up. Own tokens that a preempted request finds again are no "
            "reuse: see resumed_tokens.",
            f"SELECT cached_tokens / nullif(prompt_tokens, 0) AS value\nFROM ({REUSE})",
        ),
        Metric(
            "prefix_hit_by_tier",
            "Prefix hits by tier",
            "tokens",
            "Σ cached_device_tokens, cached_host_tokens, cached_peer_tokens, cached_pool_tokens, cached_disk_tokens",
            "Which memory the cached tokens came from, where the engine tells. What it does not tell is in cached_tokens alone.",
            f"SELECT prompt_tokens, cached_tokens, device, host, peer, pool, disk\nFROM ({REUSE})",
        ),
        Metric(
            "resumed_tokens",
            "Tokens found again after a preemption",
            "tokens",
            "Σ resumed_tokens",
            "A request that lost its place looks up its own tokens when it gets one again. Engines count that as prefix hits; "
            "here it is apart, since no other request's work is saved.",
            f"SELECT resumed_tokens AS value\nFROM ({REUSE})",
        ),
        Metric(
            "hit_rate_with_resumption",
            "Hit rate as engines count it",
            "share of tokens looked up",
            "Σ (cached_tokens + resumed_tokens) ÷ Σ (prompt_tokens + resumed_tokens + recomputed_tokens)",
            "What a counter shows that does not tell reuse from resumption. If it is far above the cached-token rate, the cache "
            "serves preempted requests, not shared prefixes.",
            "SELECT (cached_tokens + resumed_tokens) / nullif(prompt_tokens + resumed_tokens + recomputed_tokens, 0) AS value\n"
            f"FROM ({REUSE})",
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
