"""At which level a trace can be accounted for: what was recorded, what each table adds, and what stays hidden without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.reader import Trace

__all__ = ["Level", "Levels", "levels"]


@dataclass(frozen=True)
class Level:
    """``adds``: what this level shows. ``without``: what cannot be seen where it is missing."""

    name: str
    present: bool
    adds: str
    without: str

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "present": self.present, "adds": self.adds, "without": self.without}


@dataclass(frozen=True)
class Levels:
    """All levels of one trace, from the least to the most."""

    levels: tuple[Level, ...]

    @property
    def name(self) -> str:
        """What the accounting rests on, in a few words: "observed steps, residency, waits"."""
        have = {x.name for x in self.levels if x.present}
        base = next((x for x in ("observed steps", "reconstructed steps", "tokens") if x in have), "stamps")
        rest = [x for x in ("residency", "waits", "moves") if x in have and (x != "residency" or base == "observed steps")]
        return ", ".join([base, *rest])

    @property
    def missing(self) -> list[str]:
        """What the levels that are missing would have shown, a sentence each; of two kinds of steps one is enough."""
        observed = any(x.present for x in self.levels if x.name == "observed steps")
        lost = [x for x in self.levels if not x.present and not (observed and x.name in ("reconstructed steps", "tokens"))]
        return [x.without for x in lost]

    def __contains__(self, name: object) -> bool:
        return any(x.name == name and x.present for x in self.levels)

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "levels": [x.as_dict() for x in self.levels]}


def levels(trace: Trace, *, origin: str | None) -> Levels:
    """``origin``: of the trace's steps (observed, replayed, reconstructed, or several of them), null where there are none."""
    kinds = {x.strip() for x in (origin or "").split(",")}
    seen = bool(kinds & {"observed", "replayed"})
    guessed = "reconstructed" in kinds
    return Levels((
        Level(
            "stamps", trace.has("requests"),
            "End-to-end time; from the stamps that were seen: client, network, proxy, queue, prefill and decode as wholes.",
            "Requests: nothing was recorded of them, so there is no latency to account for.",
        ),
        Level(
            "tokens", trace.has("tokens"),
            "When each token came: the first and the last, and from them steps, where the engine tells none.",
            "Tokens: the first token and the steps that tokens tell are known only as far as stamps and engine say them.",
        ),
        Level(
            "reconstructed steps", guessed,
            "Who shared a step with whom: interference, and time in which a request was left out of steps.",
            "Steps: interference, gaps between steps, repeated work and preemption are inside prefill and decode.",
        ),
        Level(
            "observed steps", seen,
            "When each step really began and ended: time between steps; KV use and budget, so what a full server was full of.",
            "Observed steps: host time between steps counts as work, waiting for KV space or budget as queueing with room.",
        ),
        Level(
            "residency", seen and _any(trace, "residency", pl.lit(True)),
            "Who was in which observed step and from what context: preemption and repeated work of each request.",
            "Residency: who was preempted and what was computed twice is not told, so it is inside other parts.",
        ),
        Level(
            "waits", _any(trace, "waits", pl.col("request").is_not_null()),
            "What a request waited on where no stamp tells: transfers, confirmations, locks.",
            "Waits: arranging and transfers outside steps show only as far as stamps tell them.",
        ),
        Level(
            "moves", _any(trace, "moves", _CARRIED),
            "When a request's KV was carried from one place to another, and how much of it.",
            "Moves of KV: time in which a request's state was carried is inside queueing, hand-over or time between steps.",
        ),
    ))  # fmt: skip


# A client's message is no move of a request's state.
_CARRIED = (
    pl.col("request").is_not_null() & (pl.col("object") == "kv") & (pl.col("src") != "client") & (pl.col("dst") != "client")
)


def _any(trace: Trace, table: str, which: pl.Expr) -> bool:
    return trace.has(table) and not trace.table(table).filter(which).head(1).collect().is_empty()
