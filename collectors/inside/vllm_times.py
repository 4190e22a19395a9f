"""The engine's own times of a finished request, which vLLM has but does not hand to stat loggers: only intervals between them.

``IterationStats.update_from_finished_request`` is wrapped once per process: it is called with the request's RequestStateStats
(``queued_ts``, ``scheduled_ts``, ``first_token_ts``, ``last_token_ts``: seconds of CLOCK_MONOTONIC in the engine's process, which
is this host's). Where the method or its argument is missing nothing is wrapped and the times are derived from the intervals.
"""

from __future__ import annotations

import functools
from typing import Any

from hoptrace.collectors.inside.vllm_record import ns

__all__ = ["install", "take"]

_KEPT = "_hoptrace_times"
_TIMES = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")


def install(cls: Any) -> bool:
    """Wrap the method of the class IterationStats; false if it has none. Done once."""
    method = getattr(cls, "update_from_finished_request", None)
    if method is None:
        return False
    if getattr(method, _KEPT, False):
        return True

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        try:
            stats = kwargs.get("req_stats") or next((a for a in args if hasattr(a, "last_token_ts")), None)
            if stats is not None:
                kept = self.__dict__.setdefault(_KEPT, {})
                # 0.0 is vLLM's "never happened".
                kept[len(self.finished_requests) - 1] = [ns(getattr(stats, name, None) or None) for name in _TIMES]
        except Exception:  # vLLM goes on; the times are derived
            pass
        return result

    setattr(wrapped, _KEPT, True)
    cls.update_from_finished_request = wrapped
    return True


def take(iteration: Any) -> dict[int, list[int | None]]:
    """The times by position in ``finished_requests``; empty where they were not kept."""
    found: dict[int, list[int | None]] = getattr(iteration, _KEPT, None) or {}
    return found
