"""One thread's rows, once a second: what it ran and waited, its switches and faults."""

from __future__ import annotations

from pathlib import Path

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.sink import Sink

__all__ = ["ThreadRows"]

_NAMES = (
    ("on_cpu_ns", "ns"), ("run_delay_ns", "ns"), ("timeslices", "times"), ("minor_faults", "faults"), ("major_faults", "faults"),
    ("voluntary_switches", "switches"), ("involuntary_switches", "switches"),
)  # fmt: skip
_SWITCHES = (b"\nvoluntary_ctxt_switches:", b"\nnonvoluntary_ctxt_switches:")


class ThreadRows:
    """Of one life of one thread. OSError, ValueError if it is gone already."""

    def __init__(self, folder: Path, pid: int, tid: int, boot: str, out: Sink) -> None:
        self._stat, self._status = KeptFile(folder / "stat"), KeptFile(folder / "status")
        self.start_ticks = procfs.stat_of(self._stat.read()).start_ticks
        life = f"{boot}/{self.start_ticks}"
        told = _switches(self._status.read()) is not None
        self.numbers = [
            out.series(f"thread:{pid}/{tid}", name, unit, "cumulative", incarnation=life, width_bits=64)
            for name, unit in (_NAMES if told else _NAMES[:5])
        ]
        self._last: procfs.SchedStat | None = None
        self._values: list[int] = []

    def sample(self, read: procfs.SchedStat, out: Sink) -> bool:
        """Put its rows; whether it is still the same thread. ``read``: its schedstat of now."""
        before = out.now_ns()
        if read != self._last or not self._values:
            # What has not run has neither switched nor faulted: its other files need no reading.
            try:
                stat = procfs.stat_of(self._stat.read())
                switched = _switches(self._status.read()) or ()
            except (OSError, ValueError):
                return False
            if stat.start_ticks != self.start_ticks:
                return False
            self._last = read
            self._values = [
                read.on_cpu_ns, read.run_delay_ns, read.timeslices, stat.minor_faults, stat.major_faults, *switched,
            ]  # fmt: skip
        out.at(before, out.now_ns())
        for number, value in zip(self.numbers, self._values, strict=False):
            out.put(number, value)
        return True

    def close(self) -> None:
        self._stat.close()
        self._status.close()


def _switches(status: bytes) -> tuple[int, int] | None:
    """Voluntary and involuntary context switches; null if the kernel does not tell."""
    found = []
    for key in _SWITCHES:
        at = status.find(key)
        word = status[at + len(key) : at + len(key) + 24].split(b"\n")[0].strip() if at >= 0 else b""
        if not word.isdigit():
            return None
        found.append(int(word))
    return found[0], found[1]
