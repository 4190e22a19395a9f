"""One GPU and whether it answers: shared by its sources, so that its loss is told once and its return is looked for once.

A GPU is known by its UUID: indexes move when another one falls off the bus. What comes back counts on in another life, since
nobody knows whether its counters were set to 0 meanwhile.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from hoptrace.collectors.hardware.nvidia.errors import GONE, MISMATCH, NvmlError
from hoptrace.collectors.hardware.nvidia.gpus import Gpu, handle_of
from hoptrace.collectors.hardware.nvidia.library import Nvml
from hoptrace.collectors.hardware.sink import Sink, Status

__all__ = ["Seat"]

_FIRST_REST_S, _LONGEST_REST_S = 1.0, 60.0


class Seat:
    """``lives``: how often it has come back. ``status``: why there is nothing to read, while that is so."""

    def __init__(self, nvml: Nvml, gpu: Gpu, boot: str = "") -> None:
        self.nvml, self.gpu, self.boot = nvml, gpu, boot
        self.lives = 0
        self.status: Status = "ok"
        self._state = threading.RLock()
        self._looking = threading.Lock()
        self._handle: Any = None
        self._generation = -1
        self._for_good = False
        self._since_s = self._due_s = 0.0
        self._rest_s, self._back_s = _FIRST_REST_S, -_LONGEST_REST_S

    @property
    def who(self) -> str:
        return f"{self.gpu.entity} ({self.gpu.name}, {self.gpu.bdf or 'no PCI address'})"

    @property
    def stale(self) -> bool:
        """Whether the library was started anew since the handle was taken."""
        return self._generation != self.nvml.generation

    @property
    def incarnation(self) -> str:
        """Of counters: boot, driver, and how often this GPU has come back."""
        return f"{self.boot}/{self.nvml.driver}/{self.lives}"

    def take(self, who: str) -> Any:
        """The handle for calls, of the library's present start. NvmlError."""
        with self._state:
            if self.stale:
                with self.nvml.using(f"{who} (handle)"):
                    self._handle = handle_of(self.nvml, self.gpu.uuid)
                    self._generation = self.nvml.generation
            return self._handle

    def handle(self, who: str, out: Sink) -> Any | None:
        """The same, or null while the GPU does not answer; ever less often, it is looked for. Not within `using`."""
        if self.status == "ok":
            try:
                return self.take(who)
            except NvmlError as e:
                self.lose(e, out, whatever=True)
                return None
        if self._for_good or time.monotonic() < self._due_s or not self._looking.acquire(blocking=False):
            return None
        try:
            return self._look(who, out)
        finally:
            self._looking.release()

    def lose(self, e: NvmlError, out: Sink, *, whatever: bool = False) -> bool:
        """Note that it does not answer, by this error; false if the error does not say that."""
        if e.code not in GONE and e.code != MISMATCH and not whatever:
            return False
        with self._state:
            if self.status == "ok":
                self.status = "error" if e.code == MISMATCH else "lost"
                self._since_s = time.monotonic()
                # One that comes and goes is looked for as seldom as one that stays away.
                soon = self._since_s - self._back_s < _LONGEST_REST_S
                self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S) if soon else _FIRST_REST_S
                self._due_s = self._since_s + self._rest_s
                # The library of this process stays the one that it has loaded: starting it anew can't mend that.
                self._for_good = e.code == MISMATCH
                after = ", until hoptrace is started again" if self._for_good else ""
                out.event("device error", f"{self.who}: {e}; nothing is known of it from here on{after}")
        return True

    def _look(self, who: str, out: Sink) -> Any | None:
        try:
            handle = self._alive(who)
        except NvmlError:
            # The library keeps what it found when it was started.
            self.nvml.restart()
            try:
                handle = self._alive(who)
            except NvmlError:
                self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
                self._due_s = time.monotonic() + self._rest_s
                return None
        with self._state:
            self._handle, self._generation = handle, self.nvml.generation
            self.lives += 1
            self._back_s = time.monotonic()
            self.status = "ok"
        out.event("device", f"{self.who} answers again after {time.monotonic() - self._since_s:.1f} s; its counters begin anew")
        return handle

    def _alive(self, who: str) -> Any:
        with self.nvml.using(f"{who} (is it back)"):
            handle = handle_of(self.nvml, self.gpu.uuid)
            try:
                self.nvml.call("nvmlDeviceGetMemoryInfo", handle)
            except NvmlError as e:
                if e.code in GONE or e.code == MISMATCH:
                    raise
            return handle
