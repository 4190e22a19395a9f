"""/proc/stat beyond CPU times: switches, forks, threads that run or are blocked, interrupts by vector, softirqs by kind.

Format: proc_stat(5), fs/proc/stat.c. The kernel adds over all possible CPUs, also those that are offline, so nothing falls when
one goes: that, and that it is short, is why vectors are read here and not from /proc/interrupts.
"""

from __future__ import annotations

from typing import Final

__all__ = ["TOTALS", "U32_BITS", "softirqs", "total", "vectors"]

TOTALS: Final = (
    (b"ctxt", "context_switches", "switches", True),
    (b"processes", "forks", "threads", True),
    (b"intr", "interrupts_and_timers", "interrupts", True),
    (b"procs_running", "running_threads", "threads", False),
    (b"procs_blocked", "blocked_threads", "threads", False),
)
"""Key, name of the series, unit, whether it is cumulative. ``intr`` counts local timers and calls between CPUs too: what devices
did is in the vectors (``irq:N``). Blocked: waiting for a disk."""

U32_BITS: Final = 32
"""Counts of one vector and of one softirq are unsigned int in the kernel (kstat_irqs, kstat_softirqs): they wrap there."""


def total(data: bytes, key: bytes) -> int | None:
    """The first number behind ``key``; null where there is none."""
    at = data.find(b"\n" + key + b" ")
    if at < 0:
        return None
    at += len(key) + 2
    end = min((e for e in (data.find(b" ", at), data.find(b"\n", at)) if e >= 0), default=len(data))
    word = data[at:end]
    return int(word) if word.isdigit() else None


def vectors(data: bytes) -> list[bytes]:
    """The counts of vectors 0, 1, 2, … as words: most are b"0". Empty where the line is missing or broken off."""
    return _line(data, b"intr")


def softirqs(data: bytes) -> list[bytes]:
    """The counts of the softirqs in the order of /proc/softirqs, as words."""
    return _line(data, b"softirq")


def _line(data: bytes, key: bytes) -> list[bytes]:
    at = data.find(b"\n" + key + b" ")
    end = data.find(b"\n", at + 1) if at >= 0 else -1
    # Without its end the line is cut, and its last number with it.
    return data[at:end].split()[2:] if end >= 0 else []
