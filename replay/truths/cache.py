"""Cache decisions as recorded: what each admission found."""

from __future__ import annotations

import polars as pl

from hoptrace.replay.plain.parts import RequestView
from hoptrace.replay.truths.recorded import Recorded
from hoptrace.replay.workload import Workload

__all__ = ["RecordedCache", "untold"]


class RecordedCache:
    """A :class:`hoptrace.replay.plain.parts.CachedTokens`. The first admission: ``stages.cached_tokens``, or where its first
    prompt tokens began (`residency`). Those after a preemption: where its tokens began again. Later ones than were recorded are
    looked up."""

    def __init__(self, recorded: Recorded, work: Workload) -> None:
        first = _first(recorded)
        again = _again(recorded)
        self._found: list[list[int | None]] = [[first.get(r), *again.get(r, [])] for r in work.request.tolist()]

    def cached_tokens(self, request: RequestView, again: int) -> int | None:
        """See :class:`CachedTokens`."""
        told = self._found[request.number]
        return told[again] if again < len(told) else None


def untold(recorded: Recorded, work: Workload) -> int:
    """Of how many requests the recording does not tell what the first admission found."""
    first = _first(recorded)
    return sum(first.get(r) is None for r in work.request.tolist())


def _first(recorded: Recorded) -> dict[int, int | None]:
    stays = recorded.trace.table("stages").filter(pl.col("sequence").fill_null(0) == 0).sort("request", "attempt", "stage")
    told = stays.group_by("request", maintain_order=True).agg(pl.col("cached_tokens").first()).collect()
    found: dict[int, int | None] = dict(told.iter_rows())
    for request, began in (
        _chunks(recorded).group_by("request", maintain_order=True).agg(pl.col("context_at_start").first()).rows()
    ):
        if found.get(request) is None:
            found[request] = began
    return found


def _again(recorded: Recorded) -> dict[int, list[int | None]]:
    """Of each request, in order: the context at the first tokens after each time that it lost its place."""
    found: dict[int, list[int | None]] = {}
    lost: set[int] = set()
    for request, phase, context in _runs(recorded).select("request", "phase", "context_at_start").iter_rows():
        if phase == "preempted":
            lost.add(request)
        elif phase in ("chunk", "decode") and request in lost:
            lost.discard(request)
            found.setdefault(request, []).append(context)
    return found


def _runs(recorded: Recorded) -> pl.DataFrame:
    if not recorded.residency.height:
        return pl.DataFrame(schema={"request": pl.Int64, "phase": pl.String, "context_at_start": pl.Int64})
    return recorded.residency.filter(pl.col("sequence").fill_null(0) == 0).sort("request", "first_step", "last_step")


def _chunks(recorded: Recorded) -> pl.DataFrame:
    return _runs(recorded).filter(pl.col("phase") == "chunk")
