"""What the sources of one GPU have in common: each in a thread of its own, so that a GPU that hangs stops no other."""

from __future__ import annotations

import time
from typing import Any

from hoptrace.collectors.hardware.nvidia.errors import GONE, MISMATCH, NvmlError, found_by_code
from hoptrace.collectors.hardware.nvidia.library import within
from hoptrace.collectors.hardware.nvidia.seat import Seat
from hoptrace.collectors.hardware.sink import ALL_ONES, Direction, Semantics, Sink, Status
from hoptrace.collectors.hardware.source import Found, Pace

__all__ = ["PerGpu"]

_AGAIN_S, _HANGS_S = 3600.0, 5.0
_BLANK = (0xFFFFFFFF, ALL_ONES)
"""NVML_VALUE_NOT_AVAILABLE of unsigned numbers: (unsigned) -1."""


class PerGpu:
    """A source fills in ``_found`` (what it would read), ``_begin`` (series of a life) and ``_read``."""

    pace: Pace = "own"
    every_s: float | None = None
    kind = ""

    def __init__(self, seat: Seat) -> None:
        self.name = f"nvml{self.kind}-{seat.gpu.index}"
        self._seat, self._nvml, self._gpu = seat, seat.nvml, seat.gpu
        self._lives = -1
        self._numbers: dict[tuple[str, str, Direction | None, int | None, str | None], int] = {}
        self._without: dict[str, tuple[float, Status]] = {}
        self._said: dict[int, Status] = {}
        self._told_gone = False
        self._blanks = 0
        self._probing = False

    def probe(self) -> Found:
        if self._probing:  # one thread may be left behind, not one every half a minute
            return Found(
                "error", f"{self._gpu.entity}: a call to the driver has still not returned", "see dmesg; reset or reboot"
            )
        self._probing = True
        try:
            return within(_HANGS_S, self._gpu.entity, self._probed)
        except NvmlError as e:
            return found_by_code(e)

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        handle = self._seat.handle(self.name, out)
        if handle is None:
            self._gone(out)
            return
        try:
            with self._nvml.using(self.name):
                if self._seat.stale:
                    return  # started anew between the two lines: the handle is an old one
                if self._lives != (lives := self._seat.lives):
                    self._numbers.clear()
                    self._said.clear()
                    self._begin(handle, out)
                    self._lives = lives  # not what it is by now: it may have been lost and found meanwhile
                self._read(handle, out)
            self._told_gone = False
            if self._blanks:
                out.drop("answers without a value (all ones)", self._blanks)
                self._blanks = 0
        except NvmlError as e:
            if not self._seat.lose(e, out):
                out.at(at := out.now_ns(), at)
                out.fail(self._declared(), e.status)
                raise
            self._gone(out)

    def close(self) -> None:
        # Nothing is shut down: a call on a lost GPU may hang in another thread, and the process ends soon.
        return None

    def _probed(self) -> Found:
        try:
            handle = self._seat.take(self.name)
            with self._nvml.using(self.name):
                return self._found(handle)
        finally:
            self._probing = False

    # -- for the sources ------------------------------------------------------------------------------------------------

    def _found(self, handle: Any) -> Found:
        raise NotImplementedError

    def _begin(self, handle: Any, out: Sink) -> None:
        return None

    def _read(self, handle: Any, out: Sink) -> None:
        raise NotImplementedError

    def _declared(self) -> list[int]:
        return list(self._numbers.values())

    def _gone(self, out: Sink) -> None:
        if self._told_gone:
            return
        self._told_gone = True
        out.at(at := out.now_ns(), at)
        out.fail(self._declared(), self._seat.status if self._seat.status != "ok" else "lost")

    def _ask(self, name: str, handle: Any, *more: Any) -> tuple[Any, Status]:
        """A call's answer and `ok`, or null and why. What is not supported is asked for again after an hour. NvmlError if the GPU
        is gone."""
        key = f"{name} {more}"
        if (known := self._without.get(key)) is not None:
            if time.monotonic() < known[0]:
                return None, known[1]
            del self._without[key]
        try:
            told = self._nvml.call(name, handle, *more)
            if isinstance(told, int) and told in _BLANK:
                self._blanks += 1
                return None, "unsupported"
            return told, "ok"
        except NvmlError as e:
            if e.code in GONE or e.code == MISMATCH:
                raise
            if e.status in ("unsupported", "denied"):
                self._without[key] = (time.monotonic() + _AGAIN_S, e.status)
            return None, e.status

    def _put(
        self, out: Sink, entity: str, name: str, unit: str, value: Any, status: Status = "ok", *,
        semantics: Semantics = "gauge", direction: Direction | None = None, window_ns: int | None = None,
        incarnation: str | None = None,
    ) -> None:  # fmt: skip
        key = (entity, name, direction, window_ns, incarnation)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = out.series(
                entity, name, unit, semantics, direction=direction, window_ns=window_ns, incarnation=incarnation
            )
        if value is not None:
            self._said.pop(number, None)
            out.put(number, value)
        elif self._said.get(number) != status:
            # Why there is none is said once: rates are written at each beat.
            self._said[number] = status
            out.put(number, None, status)
