"""Which parts a trace can show, and, in words, which it cannot: a part that nobody could have seen is null, not 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from hoptrace.analysis.latency.parts import FULL, PARTS
from hoptrace.platform import graph_of
from hoptrace.reader import Trace
from hoptrace.step_source import StepSource

__all__ = ["Sight", "facts_of", "sentences", "shown", "sight_of", "unseen_too"]

_STORES = ("dram", "dram_pageable", "peer_hbm", "cxl_expander", "cxl_pool", "remote_dram", "nvme")
"""Kinds of places that KV is kept in below a server's own memory (the kinds of tiers)."""
_CAUSES = {"kv": "KV use", "budget": "token budget"}
_CLIENT = (pl.col("src") == "client") | (pl.col("dst") == "client")
_CARRIED = ~_CLIENT.fill_null(False) & (pl.col("object") == "kv")


@dataclass(frozen=True)
class Sight:
    """What the trace as a whole can show.

    ``modelled``: phases whose interference a step cost tells. ``gaps``: whether the steps show the time between them
    (reconstructed ones touch, so they cannot). ``transfers``, ``preempts``, ``repeats``: whether such time would show. ``told``:
    of each (server, rank), whether its number of slots is known, and the causes of being full that it could tell.
    """

    modelled: frozenset[str]
    gaps: bool
    transfers: bool
    preempts: bool
    repeats: bool
    told: Mapping[tuple[str, int], tuple[bool, frozenset[str]]]


def sight_of(
    trace: Trace,
    found: StepSource,
    modelled: frozenset[str],
    told: Mapping[tuple[str, int], tuple[bool, frozenset[str]]],
) -> Sight:
    """Look at the trace's tables; ``found``: its steps."""
    gaps = found.origin != "reconstructed"
    return Sight(modelled, gaps, _transfers(trace), _preempts(found, gaps), _repeats(trace, found, gaps), told)


def facts_of(parts: pl.DataFrame, requests: pl.DataFrame, stays: pl.DataFrame, runs: pl.DataFrame, sight: Sight) -> pl.DataFrame:
    """What was recorded of each request, in booleans; all frames are of the same requests, ``parts`` before :func:`shown`."""
    keys = list(sight.told)
    certain = _of_server({k: known for k, (known, _) in sight.told.items()}, keys)
    told = {cause: _of_server({k: cause in causes for k, (_, causes) in sight.told.items()}, keys) for cause in FULL}
    first = (
        # A router's stay is no queue.
        stays.filter((pl.col("role") != "route").fill_null(True))
        .sort("request", "order")
        .group_by("request", maintain_order=True)
        .agg(
            pl.col("enqueued_ns").first().is_not_null().alias("enqueued"),
            # Who was refused was never worked on there.
            (pl.col("scheduled_ns").is_not_null() | (pl.col("end_reason") == "refused").fill_null(False))
            .all()
            .alias("scheduled"),
            (pl.len() > 1).alias("several"),
            certain.all().alias("certain"),
            *(told[cause].all().alias(f"told_{cause}") for cause in FULL),
        )
    )
    in_steps = runs.select("request").unique().with_columns(pl.lit(True).alias("steps"))
    facts = (
        requests.select(
            "request",
            pl.col("intended_ns").is_not_null().alias("intended"),
            pl.col("sent_ns").is_not_null().alias("sent"),
            pl.col("received_ns").is_not_null().alias("received"),
            pl.col("first_token_ns").is_not_null().alias("first"),
            pl.col("last_token_ns").is_not_null().alias("last"),
        )
        .join(first, on="request", how="left", maintain_order="left")
        .join(in_steps, on="request", how="left", maintain_order="left")
        .with_columns(
            pl.col("enqueued", "scheduled", "several", "certain", "steps", *(f"told_{x}" for x in FULL)).fill_null(False)
        )
    )
    return facts.with_columns(
        # Queueing that is not told apart may be of either kind: no 0 beside it.
        (parts["queue_unknown_ns"] == 0).alias("split"),
        # A handed-over request has its prefill and decode from the roles of its stays.
        (parts["prefill_ns"] + parts["decode_ns"] > 0).alias("worked"),
        (parts["queue_room_ns"] + parts["handover_ns"] > 0).alias("waited"),
    )


def shown(parts: pl.DataFrame, facts: pl.DataFrame, sight: Sight) -> pl.DataFrame:
    """``parts`` with null where a part is 0 only since nothing could show it."""
    c = pl.col
    queue = c("scheduled") & (c("enqueued") | c("received") | c("sent") | c("intended"))
    seen = {
        "client": c("intended") & c("sent"),
        "network_in": c("received") & (c("sent") | c("intended")),
        "proxy": c("received") & c("enqueued"),
        "queue_room": queue & c("certain") & c("split"),
        **{f"queue_{cause}": queue & c("certain") & c("split") & c(f"told_{cause}") for cause in FULL},
        "handover": c("several") | c("scheduled"),
        "queue_unknown": queue,
        "host_gap": c("steps") & sight.gaps,
        "prefill": c("steps") | (c("scheduled") & c("first")),
        "prefill_interference": c("steps") & ("prefill" in sight.modelled),
        "decode": c("steps") | c("first"),
        "decode_interference": c("steps") & ("decode" in sight.modelled),
        "skipped": c("steps"),
        "preempted": c("steps") & sight.preempts,
        "recompute": c("steps") & sight.repeats,
        "transfer": pl.lit(sight.transfers),
        "delivery": c("last") | c("steps"),
        "unexplained": pl.lit(True),
    }
    flags = facts.select(seen[p.name].alias(p.name) for p in PARTS)
    return parts.with_columns(
        pl.when(flags[p.name] | (pl.col(p.column) > 0)).then(pl.col(p.column)).alias(p.column) for p in PARTS
    )


def sentences(facts: pl.DataFrame, trace: Trace, sight: Sight, why_no_cost: str | None) -> list[str]:
    """What the trace cannot show, from the facts of all requests."""
    if not facts.height:
        return ["No finished request was recorded: there is no latency to account for."]
    said = _sentences(facts, bool(sight.modelled), why_no_cost, sight.gaps)
    waited = facts["waited"] & facts["certain"]
    if blind := [what for cause, what in _CAUSES.items() if (waited & ~facts[f"told_{cause}"]).any()]:
        said.append(f"Queueing: their server's {' and '.join(blind)} unknown, so waiting for it counts as queueing with room.")
    if not sight.transfers:
        said.append(
            "Transfers: no wait for one and no move between servers or memories was recorded, so time spent carrying data, if "
            "any, is in other parts."
        )
    lost = [name for name, seen in (("preemption", sight.preempts), ("repeated work", sight.repeats)) if not seen]
    if lost and facts["steps"].any():
        said.append(f"{' and '.join(lost).capitalize()}: these steps do not tell, so such time, if any, is in other parts.")
    if nameless := _nameless(trace) if facts["several"].any() else 0:
        said.append(
            f"Transfers: {nameless:,} moves of KV do not say whose they are (several ended in one step), so time that was spent "
            "waiting for them is in the hand-over."
        )
    return said


def _of_server(values: dict[tuple[str, int], bool], keys: list[tuple[str, int]]) -> pl.Expr:
    """The value of a stay's server; false where it is not known which, unless there is only one."""
    out = pl.lit(False)
    for (server, rank), value in values.items():
        out = pl.when((pl.col("server") == server) & (pl.col("dp_rank") == rank)).then(pl.lit(value)).otherwise(out)
    if len(keys) == 1:
        out = pl.when(pl.col("server").is_null()).then(pl.lit(values[keys[0]])).otherwise(out)
    return out


def unseen_too(ttft: pl.DataFrame, parts: pl.DataFrame) -> pl.DataFrame:
    """``ttft`` with null where ``parts`` has null: what could not be seen up to the end could not up to the first token."""
    hidden = parts.select("request", *(pl.col(p.column).is_null().alias(p.name) for p in PARTS))
    whole = ttft.join(hidden, on="request", how="left", maintain_order="left")
    return whole.select(
        *ttft.columns[: -len(PARTS)], *(pl.when(~pl.col(p.name) | (pl.col(p.column) > 0)).then(p.column) for p in PARTS)
    )


def _transfers(trace: Trace) -> bool:
    """Whether something recorded shows transfers of requests: a wait for one, or a move that is not just a client's message."""
    own = pl.col("request").is_not_null()
    if not trace.table("waits").filter((pl.col("kind") == "transfer") & own).head(1).collect().is_empty():
        return True
    return not trace.table("moves").filter(_CARRIED & own).head(1).collect().is_empty()


def _nameless(trace: Trace) -> int:
    """Moves of KV that no request is known of, and that one may have waited for: not what is put into a store below the
    servers' memory (the platform graph tells), which nobody waits for."""
    stores = [n.name for n in graph_of(trace.manifest).nodes.values() if n.kind in _STORES]
    kept = _CARRIED & pl.col("request").is_null() & ~pl.col("dst").is_in(stores)
    return int(trace.table("moves").filter(kept).select(pl.len()).collect().item())


def _preempts(found: StepSource, gaps: bool) -> bool:
    """Whether the steps would show a preemption: they count them, or residency has one."""
    if gaps:
        n, counted = found.steps.select(pl.len(), pl.col("preempted").count()).collect(engine="streaming").row(0)
        if n and n == counted:
            return True
    return bool(found.residency.select((pl.col("phase") == "preempted").any()).collect(engine="streaming").item())


def _repeats(trace: Trace, found: StepSource, gaps: bool) -> bool:
    """Whether tokens computed twice would show: from the context of each run as the engine tells it, or as waits."""
    if not trace.table("waits").filter(pl.col("kind") == "recompute").head(1).collect().is_empty():
        return True
    chunks = found.residency.filter(pl.col("phase") == "chunk")
    n, known = chunks.select(pl.len(), pl.col("context_at_start").count()).collect(engine="streaming").row(0)
    return gaps and n > 0 and n == known


def _sentences(facts: pl.DataFrame, modelled: bool, why_no_cost: str | None, gaps: bool) -> list[str]:
    n = facts.height
    said: list[str] = []

    def say(missing: pl.Series, text: str) -> None:
        k = int(missing.sum())
        if k:
            said.append(f"{'All' if k == n else f'{k} of {n}'} requests: {text}")

    f = facts
    say(~(f["intended"] & f["sent"]), "intended or sent is unknown, so a late client shows as network, or not at all.")
    say(~f["received"], "nobody saw them arrive at a proxy or server, so network and proxy are one.")
    say(~f["scheduled"], "when the engine first worked on them is unknown, so queueing and prefill cannot be told apart.")
    say(
        f["scheduled"] & ~f["certain"],
        "their server's number of slots is unknown, so queueing for room and for capacity cannot be told apart.",
    )
    say(
        f["scheduled"] & f["certain"] & ~f["split"],
        "for part of their queueing nobody knows whether their server was full (it was away, may have worked for clients "
        "that had gone, or its KV use or a prompt's length is unknown), so it is not told apart.",
    )
    say(
        ~f["steps"] & (f["worked"] | f["first"]),
        "no steps are known, so gaps between steps, interference and repeated work are inside prefill and decode.",
    )
    say(
        ~f["steps"] & ~f["worked"] & ~f["first"],
        "neither steps nor a first token are known, so their time in the engine is unexplained.",
    )
    if f["steps"].any() and not modelled:
        said.append(f"Interference: no step cost can be fitted, so mixed steps count as work whole. {why_no_cost or ''}".strip())
    if f["steps"].any() and not gaps:
        said.append("Time between steps: the steps were reconstructed from token times and touch, so host time counts as work.")
    return said
