"""``--scheduler-cls hoptrace.collectors.inside.vllm_scheduler.RecordingScheduler``: vLLM's own scheduler, watched.

Every step's exact composition and the times of scheduling, model and update go into a channel of the engine's process. The class
asked for becomes a recording AsyncScheduler where asynchronous scheduling is on, else a recording Scheduler: what vLLM would have
taken itself. :func:`recording` wraps any other scheduler class.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from hoptrace.collectors.inside.vllm_steps import StepRecorder

__all__ = ["RecordingAsyncScheduler", "RecordingScheduler", "RecordingSyncScheduler", "recording"]

_now = time.monotonic_ns


def recording(base: Any) -> Any:
    """A subclass of a vLLM scheduler class that records. Its methods do what ``base`` does, whatever the recorder does."""

    class Recording(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._hoptrace = StepRecorder.of(self)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            start = _now()
            output = super().schedule(*args, **kwargs)
            self._hoptrace.scheduled(self, output, start, _now())
            return output

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
            drafts = self._hoptrace.sampled(scheduler_output, model_runner_output)
            start = _now()
            outputs = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
            self._hoptrace.updated(scheduler_output, model_runner_output, outputs, start, _now(), drafts)
            return outputs

        def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            self._hoptrace.added(request, _now())
            return super().add_request(request, *args, **kwargs)

        def finish_requests(self, request_ids: Any, finished_status: Any, *args: Any, **kwargs: Any) -> Any:
            finished = super().finish_requests(request_ids, finished_status, *args, **kwargs)
            self._hoptrace.finished(finished, finished_status, _now())
            return finished

    Recording.__name__ = Recording.__qualname__ = f"Recording{base.__name__}"
    Recording.__doc__ = base.__doc__
    return Recording


RecordingSyncScheduler: Any = recording(import_module("vllm.v1.core.sched.scheduler").Scheduler)
try:
    RecordingAsyncScheduler: Any = recording(import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler)
except ImportError:  # a vLLM from before asynchronous scheduling
    RecordingAsyncScheduler = None


class RecordingScheduler(RecordingSyncScheduler):  # type: ignore[misc]
    """Makes the recording scheduler that fits the configuration."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("vllm_config") or (args[0] if args else None)
        asynchronous = getattr(getattr(config, "scheduler_config", None), "async_scheduling", False)
        if cls is RecordingScheduler and asynchronous and RecordingAsyncScheduler is not None:
            return RecordingAsyncScheduler(*args, **kwargs)
        return super().__new__(cls)
