"""The field's metrics beside latency and output throughput: who saw the first token when, total throughput, goodput,
preemption, acceptance of drafts, and whether the load was an open or a closed loop.

Definitions and queries: :mod:`hoptrace.field_metrics_sql`. The rules of :mod:`hoptrace.metrics` hold here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from hoptrace.chunk_gaps import chunk_gaps, request_itl
from hoptrace.field_metrics_sql import DRAFTS, FIELD_METRICS, PREEMPTED
from hoptrace.load_loop import LoadLoop, load_loop
from hoptrace.metrics import Stat, arrivals_known, request_metrics, stat
from hoptrace.reader import Trace
from hoptrace.slo import ITL_LIMITS, Goodput, goodput

__all__ = ["FIELD_METRICS", "Drafts", "FieldMetrics", "Preemption", "field_metrics", "preemption"]

TIMES = ("client_ttft", "server_ttft", "engine_ttft", "client_lateness", "way_in", "first_token_way_out")


@dataclass(frozen=True, slots=True)
class Preemption:
    """``preemptions``: how often requests lost their place (``at_least``: some steps do not say); ``requests``: how many of
    ``of`` requests did; null where nothing tells."""

    preemptions: int | None
    at_least: bool
    requests: int | None
    of: int

    @property
    def per_request(self) -> float | None:
        return self.preemptions / self.of if self.preemptions is not None and self.of else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "preemptions": self.preemptions,
            "at_least": self.at_least,
            "requests": self.requests,
            "of": self.of,
            "per_request": _rounded(self.per_request),
        }


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that drafts proposed, and those of them that were kept, over steps that know both; null where none does."""

    proposed: int | None
    accepted: int | None

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.proposed if self.proposed and self.accepted is not None else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "proposed": self.proposed,
            "accepted": self.accepted,
            "acceptance": _rounded(self.acceptance),
            "by_position": None,
        }


@dataclass(frozen=True)
class FieldMetrics:
    """See the module.

    Attributes:
        itl_chunk: gaps between reads, ns.
        times: statistics in ns by name: client_ttft, server_ttft, engine_ttft (who saw the first token after how long) and
            client_lateness, way_in, first_token_way_out (what lies between their clocks).
        seen_from: requests by the vantage at which their first token was seen; null for an unnamed one.
        prompt_tokens: Σ over finished requests; total_tokens_per_s: prompt and output tokens a second; null if unknown.
        preemption, drafts, loop: see there. goodput: null without limits.
        unseen: what this trace cannot show. notes: what to know of the figures.
    """

    itl_chunk: Stat
    times: dict[str, Stat]
    seen_from: dict[str | None, int]
    prompt_tokens: int | None
    total_tokens_per_s: float | None
    preemption: Preemption
    drafts: Drafts
    loop: LoadLoop
    goodput: Goodput | None = None
    unseen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "itl_chunk": self.itl_chunk.as_dict(),
            "times": {k: s.as_dict() for k, s in self.times.items()},
            "first_tokens_seen_from": {k or "unknown": n for k, n in self.seen_from.items()},
            "prompt_tokens": self.prompt_tokens,
            "total_tokens_per_s": self.total_tokens_per_s,
            "preemption": self.preemption.as_dict(),
            "drafts": self.drafts.as_dict(),
            "load": self.loop.as_dict(),
            "goodput": None if self.goodput is None else self.goodput.as_dict(),
            "notes": self.notes,
            "unseen": self.unseen,
        }


def field_metrics(trace: Trace, *, slo: Mapping[str, int] | None = None) -> FieldMetrics:
    """The field metrics of any trace. ``slo``: limits in ns, as :func:`hoptrace.slo.parse_slo` gives them.

    Raises:
        InputError: a table is damaged.
    """
    seen = _moments(trace)
    done = seen.filter(pl.col("finish_ns").is_not_null() & pl.col("error").is_null())
    known = arrivals_known(trace)
    times = {name: stat(done[name]) for name in TIMES}
    preempted = preemption(trace, seen.height)
    unseen: list[str] = []
    notes: list[str] = []
    if done.height:
        missing = [n for n in ("client_ttft", "server_ttft", "engine_ttft") if not times[n].n]
        if missing:
            who = {
                "client_ttft": "the client (sent_ns)",
                "server_ttft": "proxy or server (received_ns)",
                "engine_ttft": "the engine",
            }
            unseen.append(f"First tokens as seen by {_joined([who[n] for n in missing])}: not recorded.")
    if known and (late := _hidden(done)):
        notes.append(late)
    if apart := _apart(done):
        notes.append(apart)
    if preempted.preemptions is None:
        unseen.append("No step says whether it preempted anyone: preemption is unknown.")
    drafts = _drafts(trace)
    duration = _duration(done) if known else None
    held = None
    if slo and not done.height and seen["error"].null_count() == seen.height:
        unseen.append("None of its requests is known to have ended: goodput is unknown.")
    elif slo:
        held = goodput(_figures(trace, slo), slo, arrived=seen.height, duration_ns=duration)
        for name, n in held.not_recorded.items():
            if n and held.unknown:
                unseen.append(f"{name} of {n:,} finished request{'' if n == 1 else 's'} is unknown: goodput is a lower bound.")
    whole = done.height and not done["prompt_tokens"].null_count()
    prompt = int(done["prompt_tokens"].sum()) if whole else None
    output = int(done["output_tokens"].sum()) if done.height and not done["output_tokens"].null_count() else None
    total = prompt + output if prompt is not None and output is not None else None
    return FieldMetrics(
        itl_chunk=chunk_gaps(trace),
        times=times,
        seen_from=_seen_from(trace),
        prompt_tokens=prompt,
        total_tokens_per_s=total * 1e9 / duration if total is not None and duration else None,
        preemption=preempted,
        drafts=drafts,
        loop=_loop(trace, seen, known),
        goodput=held,
        unseen=unseen,
        notes=notes,
    )


def _moments(trace: Trace) -> pl.DataFrame:
    """One row per request: its moments, lengths, and the differences of moments named in ``TIMES`` (null where no int64 holds
    one)."""
    stays = trace.table("stages").group_by("request").agg(pl.col("enqueued_ns").min().alias("_enqueued_ns"))

    def minus(later: str, *earlier: str) -> pl.Expr:
        return (pl.col(later).cast(pl.Int128) - pl.coalesce(earlier).cast(pl.Int128)).cast(pl.Int64, strict=False)

    return (
        trace.table("requests")
        .join(stays, on="request", how="left")
        .select(
            "arrival_ns",
            "intended_ns",
            "sent_ns",
            "finish_ns",
            "error",
            "client_slot",
            "parent_request",
            "prompt_tokens",
            "output_tokens",
            minus("first_token_ns", "arrival_ns").alias("ttft"),
            minus("first_token_ns", "sent_ns").alias("client_ttft"),
            minus("first_token_ns", "received_ns").alias("server_ttft"),
            minus("engine_first_token_ns", "queued_ns", "_enqueued_ns").alias("engine_ttft"),
            minus("sent_ns", "intended_ns").alias("client_lateness"),
            minus("received_ns", "sent_ns").alias("way_in"),
            minus("first_token_ns", "engine_first_token_ns").alias("first_token_way_out"),
        )
        .collect(engine="streaming")
    )


def _duration(done: pl.DataFrame) -> int | None:
    """First arrival to last finish, as for the throughputs; null unless positive."""
    first, last = done["arrival_ns"].min(), done["finish_ns"].max()
    return last - first if isinstance(first, int) and isinstance(last, int) and last > first else None


def _hidden(done: pl.DataFrame) -> str | None:
    """Coordinated omission: how much less TTFT is if the clock starts when a request is sent, where that was later than meant."""
    both = done.filter(pl.col("client_lateness").is_not_null() & pl.col("client_ttft").is_not_null())
    late = stat(both["client_lateness"])
    meant, sent = stat(both["ttft"]), stat(both["client_ttft"])
    if late.p99_ns is None or meant.p99_ns is None or sent.p99_ns is None:
        return None
    hidden = meant.p99_ns - sent.p99_ns
    if hidden <= max(0.01 * meant.p99_ns, 1_000_000):
        return None
    return (
        f"The load generator was late by {late.p50_ns / 1e6:,.1f} ms at the median and {late.p99_ns / 1e6:,.1f} ms at p99: timed "  # type: ignore[operator]
        f"from sending, p99 of TTFT would be {hidden / 1e6:,.1f} ms less (coordinated omission); TTFT here counts from arrival."
    )


def _apart(done: pl.DataFrame) -> str | None:
    """Client and server side by side, where they did not see the same requests."""
    client, server = stat(done["client_ttft"]), stat(done["server_ttft"])
    both = done.filter(pl.col("client_ttft").is_not_null() & pl.col("server_ttft").is_not_null())
    sent, received = stat(both["client_ttft"]), stat(both["server_ttft"])
    if sent.mean_ns is None or received.mean_ns is None or client.n == server.n == sent.n:
        return None
    return (
        f"TTFT from sending is of {client.n:,} requests, from receiving of {server.n:,}; of the {sent.n:,} in both it is "
        f"{sent.mean_ns / 1e6:,.1f} and {received.mean_ns / 1e6:,.1f} ms at the mean."
    )


def preemption(trace: Trace, requests: int) -> Preemption:
    """How often requests lost their place, of ``requests`` that there are."""
    row = trace.sql(PREEMPTED).row(0, named=True)
    if row["preemptions"] is None and row["seen"]:  # stays tell of some, steps of none
        return Preemption(row["seen"], True, row["requests"], requests)
    return Preemption(row["preemptions"], row["preemptions"] is not None and row["partly"], row["requests"], requests)


def _drafts(trace: Trace) -> Drafts:
    row = trace.sql(DRAFTS).row(0, named=True)
    return Drafts(row["proposed"], row["accepted"])


def _seen_from(trace: Trace) -> dict[str | None, int]:
    found = (
        trace.table("tokens")
        .filter((pl.col("index") == 0) & (pl.col("sequence").fill_null(0) == 0))
        .group_by("vantage")
        .agg(pl.len().cast(pl.Int64))
        .sort("vantage")
        .collect(engine="streaming")
    )
    return dict(found.rows())


def _loop(trace: Trace, seen: pl.DataFrame, arrivals: bool) -> LoadLoop:
    ended = seen.filter(pl.col("arrival_ns").is_not_null() & pl.col("finish_ns").is_not_null())
    if not arrivals:
        ended = ended.clear()
    meant = ended.height and not ended["client_lateness"].null_count() and bool((ended["client_lateness"] != 0).any())
    return load_loop(
        ended["arrival_ns"].to_numpy().astype(np.int64),
        ended["sent_ns"].to_numpy().astype(np.int64) if meant else None,
        ended["finish_ns"].to_numpy().astype(np.int64),
        requests=seen.height,
        slots=seen["client_slot"].drop_nulls().n_unique(),
        in_slots=seen["client_slot"].len() - seen["client_slot"].null_count(),
        turns=seen["parent_request"].len() - seen["parent_request"].null_count(),
    )


def _figures(trace: Trace, slo: Mapping[str, int]) -> pl.DataFrame:
    """What limits are set on, one row per finished request."""
    frame = request_metrics(trace).rename({f"{n}_ns": n for n in ("ttft", "visible_ttft", "tpot", "e2e", "queue")})
    if any(n in ITL_LIMITS for n in slo):
        frame = frame.join(request_itl(trace), on="request", how="left", maintain_order="left")
    return frame


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _rounded(x: float | None) -> float | None:
    return None if x is None else round(x, 6)
