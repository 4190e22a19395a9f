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


@dataclass(frozen=True)
class Parent:
    """The parent trace and what its rows show. ``sent``, ``received``, ``queued``: whether `requests` ever tells that time;
    ``enqueued``: whether anybody saw requests being handed to the engine; ``vantages``: of its tokens; ``message_on``: what its
    waits of kind message are for, null without any; ``messages``: whether it has moves of prompts or tokens."""

    trace: Trace
    sent: bool
    received: bool
    queued: bool
    enqueued: bool
    vantages: tuple[str, ...]
    message_on: str | None
    messages: bool

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
    )


def one_rank(trace: Trace) -> None:
    """InputError if a server of the trace has several data-parallel ranks: a replay models one."""
    each = trace.table("steps").group_by("server").agg(pl.col("dp_rank").drop_nulls().n_unique().alias("ranks"))
    ranks = each.select(pl.col("ranks").max()).collect(engine="streaming").item()
    if ranks is not None and ranks > 1:
        raise InputError(f"{trace.path} has {ranks} data-parallel ranks; a replay models one.")


def observed(trace: Trace) -> bool:
    """Whether the trace says how long its requests took."""
    known = pl.col("finish_ns").is_not_null() & pl.col("first_token_ns").is_not_null() & pl.col("error").is_null()
    return bool(trace.table("requests").select(known.any()).collect(engine="streaming").item())
