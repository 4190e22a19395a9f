"""One thread's rows, once a second: what it ran and waited, its switches and faults."""

from __future__ import annotations

from pathlib import Path

from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.sink import Sink

__all__ = ["ThreadRows", "faults_and_start", "switches"]

_NAMES = (
    ("on_cpu_ns", "ns"), ("run_delay_ns", "ns"), ("timeslices", "times"), ("minor_faults", "faults"), ("major_faults", "faults"),
    ("voluntary_switches", "switches"), ("involuntary_switches", "switches"),
)  # fmt: skip
_SWITCHES = (b"\nvoluntary_ctxt_switches:", b"\nnonvoluntary_ctxt_switches:")


class ThreadRows:
    """Of one life of one thread. OSError, ValueError if it is gone already."""

    def __init__(self, folder: Path, pid: int, tid: int, boot: str, out: Sink) -> None:
        self._stat, self._status = KeptFile(folder / "stat"), KeptFile(folder / "status")
        self.start_ticks = faults_and_start(self._stat.read())[2]
        life = f"{boot}/{self.start_ticks}"
        told = switches(self._status.read()) is not None
        self.numbers = [
            out.series(f"thread:{pid}/{tid}", name, unit, "cumulative", incarnation=life, width_bits=64)
            for name, unit in (_NAMES if told else _NAMES[:5])
        ]
        self._last: tuple[int, int, int] | None = None
        self._values: tuple[int, ...] = ()

    def sample(self, times: tuple[int, int, int], out: Sink) -> bool:
        """Put its rows; whether it is still the same thread. ``times``: its schedstat of now."""
        before = out.now_ns()
        if times != self._last:
            # What has not run has neither switched nor faulted: its other files need no reading.
            try:
                minor, major, start_ticks = faults_and_start(self._stat.read())
                switched = switches(self._status.read()) or ()
            except (OSError, ValueError):
                return False
            if start_ticks != self.start_ticks:
                return False
            self._last = times
            self._values = (*times, minor, major, *switched)
        out.at(before, out.now_ns())
        for number, value in zip(self.numbers, self._values, strict=False):
            out.put(number, value)
        return True

    def close(self) -> None:
        self._stat.close()
        self._status.close()


def faults_and_start(stat: bytes) -> tuple[int, int, int]:
    """Minor faults, major faults, start in ticks since boot (fields 10, 12, 22 of proc_pid_stat(5)). ValueError if it is not in
    the kernel's format."""
    # The command may hold spaces and parentheses: the last one ends it. Its three fields are taken of 50: nothing else is parsed.
    words = stat[stat.rindex(b")") + 2 :].split(None, 20)
    if len(words) < 20:
        raise ValueError(f"a stat file with {len(words)} fields")
    return int(words[7]), int(words[9]), int(words[19])


def switches(status: bytes) -> tuple[int, int] | None:
    """Voluntary and involuntary context switches; null if the kernel does not tell."""
    found = []
    for key in _SWITCHES:
        at = status.rfind(key)  # the last lines
        word = status[at + len(key) : at + len(key) + 24].split(b"\n")[0].strip() if at >= 0 else b""
        if not word.isdigit():
            return None
        found.append(int(word))
    return found[0], found[1]
