"""What an all-reduce among tensor-parallel ranks costs: measured times by size, between which is interpolated."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from hoptrace.access import ACCESS
from hoptrace.errors import InputError
from hoptrace.paths_system import System

__all__ = ["Collective", "collective"]


@dataclass(frozen=True, slots=True)
class Collective:
    """An all-reduce over ``ranks`` devices of one scale-up domain.

    Attributes:
        sizes, times_ns: measured (where a larger message took less time, that of the smaller stands); empty for one rank.
        payload_hops, control_ops: of one all-reduce as a ring, all ranks together.
        source: whence the times are.
    """

    ranks: int
    sizes: tuple[int, ...]
    times_ns: tuple[float, ...]
    payload_hops: int
    control_ops: int
    source: str

    @property
    def latency_ns(self) -> float:
        """Time of the smallest message: what an all-reduce takes besides its bytes."""
        return self.times_ns[0] if self.times_ns else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bus bandwidth of the largest message: 2 (n − 1) ÷ n × bytes ÷ time. 0 for one rank.

        ``latency_ns + 2 (n − 1) ÷ n × bytes ÷ bytes_per_s`` is an estimate with two figures: between 64 KB and 16 MB the measured
        times are up to three times as long (A100 and B200, 8 ranks), which :meth:`time_ns` follows.
        """
        if not self.sizes:
            return 0.0
        return 2 * (self.ranks - 1) / self.ranks * self.sizes[-1] * 1e9 / self.times_ns[-1]

    def time_ns(self, nbytes: int) -> int:
        """Time of one all-reduce of ``nbytes`` on each rank: on straight lines between the measured points in the logarithms.

        Below the smallest point its time; beyond the largest at its bandwidth.
        """
        if not self.sizes or nbytes <= 0:
            return 0
        if nbytes <= self.sizes[0]:
            return math.ceil(self.times_ns[0])
        if nbytes >= self.sizes[-1]:
            return math.ceil(self.times_ns[-1] * (nbytes / self.sizes[-1]))
        i = bisect_right(self.sizes, nbytes)
        share = math.log(nbytes / self.sizes[i - 1]) / math.log(self.sizes[i] / self.sizes[i - 1])
        between = float(self.times_ns[i - 1] * (self.times_ns[i] / self.times_ns[i - 1]) ** share)
        return math.ceil(between)


def collective(system: System, ranks: int) -> Collective:
    """The all-reduce of a machine's device over ``ranks`` ranks, as its platform file has it measured.

    Raises:
        InputError: it was not measured for that many.
    """
    if ranks < 1:
        raise InputError(f"An all-reduce needs at least one rank, not {ranks}.")
    path = ACCESS["collective"]
    times = 2 * (ranks - 1) * ranks
    counts = (times * path.payload_hops(), times * path.control_ops())
    if ranks == 1:
        return Collective(1, (), (), *counts, "no communication")
    rows = system.parts.get("device", {}).get("allreduce", [])
    for row in rows:
        if row["ranks"] == ranks:
            # A larger message is never quicker here: the measurements have dips where another algorithm takes over.
            sizes, spent = tuple(int(b) for b in row["bytes"]), tuple(accumulate((float(t) for t in row["ns"]), max))
            return Collective(ranks, sizes, spent, *counts, str(row.get("source", f"as given ({system.name})")))
    known = ", ".join(str(r["ranks"]) for r in rows) or "none"
    raise InputError(
        f"{system.name}: the all-reduce over {ranks} ranks is not known (measured for: {known}).",
        hint=f"Measure it and give it in a platform file: base = {system.name!r} and [[allreduce]] with ranks, bytes, ns.",
    )
