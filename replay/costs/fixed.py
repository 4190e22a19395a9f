"""Constants: so long for the prompt part of a step, so long for its decode part."""

from __future__ import annotations

from hoptrace.errors import UsageError
from hoptrace.stepcost import StepCost
from hoptrace.stepcost import fixed as made

__all__ = ["fixed"]


def fixed(text: str) -> StepCost:
    """``PREFILL_MS,DECODE_MS``: ms of a step that holds prompt tokens, plus ms of one that holds decode tokens."""
    try:
        prefill, decode = (float(x) for x in text.split(","))
        if not (0 <= prefill < 1e9 and 0 <= decode < 1e9 and prefill + decode > 0):
            raise ValueError
    except ValueError:
        raise UsageError(f"{f'fixed:{text}'!r} is not a fixed cost.", hint="Write fixed:50,12 for 50 ms and 12 ms.") from None
    return made(any_prefill_ns=prefill * 1e6, any_decode_ns=decode * 1e6)
