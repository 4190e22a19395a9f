"""Times in the engine, from durations that it tells in its answer, counted back from what was seen outside."""

from __future__ import annotations

from typing import NamedTuple

from hoptrace.openai_stream import Timings

__all__ = ["EngineTimes", "count_back"]

_CONTRADICTION_NS = 1_000_000


class EngineTimes(NamedTuple):
    """ns on the trace clock; null where it did not tell enough."""

    queued_ns: int | None
    began_ns: int
    first_ns: int | None


def count_back(
    told: Timings | None, began_ns: int | None, first_token_ns: int | None, ended_ns: int | None, not_before_ns: int
) -> EngineTimes | None:
    """``began_ns``: the begin by the progress of the prompt, if it was told; first token and end as they were seen.

    The prompt time ends, and the generation time begins, with the first token; the latter runs to the latest token. News can only
    arrive late, so of the ways to count back the earliest is nearest to the truth. Null where that contradicts ``not_before_ns``,
    when the request was handed over, by more than 1 ms.
    """
    first = None
    if told is not None and told.prompt_ms is not None:
        seen = [] if first_token_ns is None else [first_token_ns]
        if ended_ns is not None and told.predicted_ms is not None:
            seen.append(ended_ns - round(told.predicted_ms * 1e6))
        if seen:
            first = min(seen)
            counted = first - round(told.prompt_ms * 1e6)
            began_ns = counted if began_ns is None else min(began_ns, counted)
    if began_ns is None or not_before_ns - began_ns > _CONTRADICTION_NS:
        return None
    began_ns = max(began_ns, not_before_ns)
    queued = None
    if told is not None and told.queue_ms is not None:
        queued = began_ns - round(told.queue_ms * 1e6)
        queued = max(queued, not_before_ns) if not_before_ns - queued <= _CONTRADICTION_NS else None
    return EngineTimes(queued, began_ns, first)
