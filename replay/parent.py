"""What a replay takes over from the trace that it replays: names, lengths, and which of its times anybody saw."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from hoptrace.errors import InputError
from hoptrace.reader import Trace

__all__ = ["CARRIED", "Parent", "observed", "one_rank", "parent_of"]

CARRIED = (
    "request", "request_id", "session", "parent_request", "think_ns", "client_slot", "tenant", "model", "adapter", "arrival_of",
    "prompt_tokens", "output_tokens", "max_tokens", "prefix_blocks", "hash_space", "block_size", "block_unit", "prompt_chars",
    "priority", "finish_reason",
)  # fmt: skip

_LOOKED_AT = 5_000
_ENOUGH = 5  # requests that came during a step, at least, before anything is said of stamps
_STRAYS = 0.02


@dataclass(frozen=True)
class Parent:
    """The parent trace and what its rows show. ``sent``, ``received``, ``queued``: whether `requests` ever tells that time;
    ``enqueued``: whether anybody saw requests being handed to the engine; ``vantages``: of its tokens; ``message_on``: what its
    waits of kind message are for, null without any; ``messages``: whether it has moves of prompts or tokens; ``between``: the
    engine stamps ``queued_ns`` when it looks for requests between two steps (vLLM does)."""

    trace: Trace
    sent: bool
    received: bool
    queued: bool
    enqueued: bool
    vantages: tuple[str, ...]
    message_on: str | None
    messages: bool
    between: bool = False

    def carried(self, low: int, high: int) -> pl.DataFrame:
        """The columns that a replay keeps, of the requests ``low ≤ request < high``, ascending; ``visible_first``: whether their
        first token was one that a user sees."""
        rows = self.trace.of_requests("requests", low, high).select(
            *CARRIED, (pl.col("first_visible_ns") == pl.col("first_token_ns")).alias("visible_first")
        )
        return rows.collect().sort("request")

    def vantage(self, low: int, high: int) -> pl.DataFrame | None:
        """request, vantage of its tokens, where the parent's differ; else null: it is ``vantages[0]``, or the engine's."""
        if len(self.vantages) < 2:
            return None
        rows = self.trace.of_requests("tokens", low, high).group_by("request").agg(pl.col("vantage").drop_nulls().first())
        return rows.drop_nulls().collect()


def parent_of(trace: Trace) -> Parent:
    """Look once at what the trace shows."""
    r = trace.table("requests").select(pl.col("sent_ns", "received_ns", "queued_ns").is_not_null().any())
    sent, received, queued = r.collect(engine="streaming").row(0)
    stays = trace.table("stages").select(pl.col("enqueued_ns").is_not_null().any()).collect(engine="streaming").item()
    seen = trace.table("tokens").select(pl.col("vantage").drop_nulls().unique()).collect(engine="streaming")
    message = trace.table("waits").filter(pl.col("kind") == "message").select(pl.col("on").drop_nulls().first())
    on = message.collect(engine="streaming")
    moves = trace.table("moves").select(pl.col("object").is_in(["prompt", "tokens"]).any()).collect(engine="streaming")
    return Parent(
        trace,
        bool(sent),
        bool(received),
        bool(queued),
        bool(stays or queued),
        tuple(sorted(seen["vantage"])),
        on["on"][0] if on.height else None,
        bool(moves.item()),
        bool(queued) and _between_steps(trace),
    )


def _between_steps(trace: Trace) -> bool:
    """Whether requests that came while a step ran were all stamped as queued at its end: that of the engine, not of the front."""
    server = trace.table("stages").sort("request", "attempt", "stage", nulls_last=False).group_by("request").first()
    came = pl.coalesce("received_ns", "sent_ns", "arrival_ns").alias("came_ns")
    asked = (
        trace.table("requests")
        .select("request", "queued_ns", came)
        .drop_nulls()
        .join(server.select("request", "server"), on="request", how="left")
        .sort("queued_ns")
        .head(_LOOKED_AT)
        .collect(engine="streaming")
    )
    if not asked.height:
        return False
    until = int(asked["queued_ns"].max())  # type: ignore[arg-type]
    steps = (
        trace.table("steps")
        .filter((pl.col("start_ns") <= until) & (pl.col("origin").fill_null("") != "reconstructed"))
        .filter(pl.col("pp_rank").fill_null(0) == 0)
        .select("server", "start_ns", "end_ns")
        .sort("start_ns")
        .collect(engine="streaming")
    )
    # The step that was running, or the last one that had begun, when each came and when it was stamped.
    at_came = _step_at(asked, steps, "came_ns")
    at_stamp = _step_at(asked, steps, "queued_ns")
    met = (at_came["end_ns"] > at_came["came_ns"]).fill_null(False)
    inside = ((at_stamp["start_ns"] < at_stamp["queued_ns"]) & (at_stamp["end_ns"] > at_stamp["queued_ns"])).fill_null(False)
    return int(met.sum()) >= _ENOUGH and int(inside.sum()) <= _STRAYS * asked.height


def _step_at(asked: pl.DataFrame, steps: pl.DataFrame, time: str) -> pl.DataFrame:
    return asked.sort(time).join_asof(
        steps, left_on=time, right_on="start_ns", by="server", strategy="backward", check_sortedness=False
    )


def one_rank(trace: Trace) -> None:
    """InputError if one of several servers of the trace has several data-parallel ranks: a replay models the ranks of one server,
    or servers of one rank each."""
    if len(trace.manifest.servers) <= 1:
        return
    each = trace.table("steps").group_by("server").agg(pl.col("dp_rank").drop_nulls().n_unique().alias("ranks"))
    ranks = each.select(pl.col("ranks").max()).collect(engine="streaming").item()
    if ranks is not None and ranks > 1:
        raise InputError(f"{trace.path} has {ranks} data-parallel ranks; a replay models one a server.")


def observed(trace: Trace) -> bool:
    """Whether the trace says how long its requests took."""
    known = pl.col("finish_ns").is_not_null() & pl.col("first_token_ns").is_not_null() & pl.col("error").is_null()
    return bool(trace.table("requests").select(known.any()).collect(engine="streaming").item())
