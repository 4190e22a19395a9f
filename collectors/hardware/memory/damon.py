"""Whether the kernel has DAMON, which tells how often memory is accessed. It is not used: it samples by clearing access bits of
the memory that it watches, which is an influence on it (Documentation/admin-guide/mm/damon/usage.rst)."""

from __future__ import annotations

from hoptrace.collectors.hardware.file import read_int
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots

__all__ = ["DamonSource"]

_BASE = "kernel/mm/damon/admin/kdamonds"


class DamonSource:
    """Only a probe; it starts nothing and records nothing."""

    name = "damon"
    answers = "how often which memory is accessed (not recorded: DAMON samples actively)"
    pace: Pace = "slow"
    every_s = 60.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()

    def probe(self) -> Found:
        if not (self._roots.sys / _BASE).is_dir():
            return Found("absent", "this kernel has no DAMON that sysfs shows", "a kernel with CONFIG_DAMON_SYSFS")
        running = read_int(self._roots.sys / _BASE / "nr_kdamonds") or 0
        return Found(
            "unsupported",
            f"the kernel has it ({running} set up), hoptrace does not use it: it samples actively, which is an influence",
            "run damo (PyPI) beside the capture",
        )

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        return None

    def close(self) -> None:
        return None
