"""What the operating system counted of the servers' processes: CPU time, run-queue delay, switches; what the capture and
others took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.analysis.counters import counter_totals
from hoptrace.reader import Trace

__all__ = ["OsFigures", "os_figures"]

# Names of the counters, as the process collector writes them. Linux counts on-CPU time to the ns and user/system time in ticks.
_CPU = (("on_cpu_ns",), ("cpu_user_ns", "cpu_system_ns"))
_DELAY = (("run_delay_ns",),)
_VOLUNTARY = (("voluntary_switches",),)
_INVOLUNTARY = (("involuntary_switches",),)
# Stolen time is what the hypervisor gave to others.
_MACHINE_BUSY = (("user_ns", "nice_ns", "system_ns", "irq_ns", "softirq_ns", "steal_ns"),)


@dataclass(frozen=True, slots=True)
class OsFigures:
    """Sums over the server's processes during the trace; null where it was not counted.

    ``window_ns``: the time over which the CPU time was counted. ``hoptrace_cpu_ns``: what the capture itself took (collectors,
    proxy, and what else runs in that process), and ``hoptrace_cpu_share`` its share of the machine's busy CPU time; both null
    where the capture runs in the server's own process. ``foreign_cpu_share``: share that was neither the servers' nor the
    capture's. ``breaks``: restarts of a process or resets of a counter; with any of them sums are lower bounds.
    """

    processes: int
    window_ns: int | None
    cpu_ns: int | None
    run_delay_ns: int | None
    voluntary_switches: int | None
    involuntary_switches: int | None
    hoptrace_cpu_ns: int | None
    hoptrace_cpu_share: float | None
    foreign_cpu_share: float | None
    output_tokens: int | None
    breaks: int

    @property
    def run_delay_share(self) -> float | None:
        """Run-queue delay ÷ (delay + CPU time): of the time in which the process wanted a CPU, how much it waited for one."""
        if self.run_delay_ns is None or self.cpu_ns is None or self.run_delay_ns + self.cpu_ns == 0:
            return None
        return self.run_delay_ns / (self.run_delay_ns + self.cpu_ns)

    def per_token(self, value: int | None) -> float | None:
        """A figure ÷ output tokens."""
        return None if value is None or not self.output_tokens else value / self.output_tokens

    def as_dict(self) -> dict[str, Any]:
        def digits(v: float | None) -> float | None:
            return None if v is None else round(v, 6)

        return {
            "processes": self.processes,
            "window_ns": self.window_ns,
            "cpu_ns": self.cpu_ns,
            "run_delay_ns": self.run_delay_ns,
            "run_delay_share": digits(self.run_delay_share),
            "voluntary_switches": self.voluntary_switches,
            "involuntary_switches": self.involuntary_switches,
            "cpu_ns_per_output_token": digits(self.per_token(self.cpu_ns)),
            "run_delay_ns_per_output_token": digits(self.per_token(self.run_delay_ns)),
            "switches_per_output_token": digits(self.per_token(_add(self.voluntary_switches, self.involuntary_switches))),
            "hoptrace_cpu_ns": self.hoptrace_cpu_ns,
            "hoptrace_cpu_ns_per_output_token": digits(self.per_token(self.hoptrace_cpu_ns)),
            "hoptrace_cpu_share": digits(self.hoptrace_cpu_share),
            "foreign_cpu_share": digits(self.foreign_cpu_share),
            "breaks": self.breaks,
        }


def os_figures(trace: Trace, output_tokens: int | None) -> OsFigures | None:
    """The figures, or null where no counters of a process were recorded."""
    totals = counter_totals(trace)
    own = totals.filter(pl.col("entity").str.starts_with("process:"))
    if not own.height:
        return None
    threads = totals.filter(pl.col("entity").str.starts_with("thread:"))
    cpu, delay = _sum(own, _CPU), _sum(own, _DELAY)
    window = own.filter(pl.col("name").is_in([n for names in _CPU for n in names]))["counted_ns"].max()
    busy = _sum(totals.filter(pl.col("entity") == "cpu"), _MACHINE_BUSY)
    # A server inside the capturing process (a test, a notebook) has the time already.
    within = pl.col("entity").str.replace("hoptrace:", "process:", literal=True).is_in(own["entity"].unique().to_list())
    capture = _sum(totals.filter(pl.col("entity").str.starts_with("hoptrace:") & ~within), _CPU)
    foreign = None
    if busy and cpu is not None:
        # The machine's time comes in ticks of 10 ms and is read at a slightly different moment: a small negative rest is none.
        foreign = max(0.0, (busy - cpu - (capture or 0)) / busy)
    return OsFigures(
        processes=own["entity"].n_unique(),
        window_ns=window if isinstance(window, int) else None,
        cpu_ns=cpu,
        run_delay_ns=delay,
        voluntary_switches=_sum(threads, _VOLUNTARY),
        involuntary_switches=_sum(threads, _INVOLUNTARY),
        hoptrace_cpu_ns=capture,
        hoptrace_cpu_share=capture / busy if busy and capture is not None else None,
        foreign_cpu_share=foreign,
        output_tokens=output_tokens,
        breaks=int(own["breaks"].sum()) + int(own["falls"].sum()),
    )


def _sum(totals: pl.DataFrame, choices: tuple[tuple[str, ...], ...]) -> int | None:
    """Sum over entities of the first choice of names that was recorded; null if none was, or none has two samples."""
    for names in choices:
        values: list[float] = totals.filter(pl.col("name").is_in(names))["total"].drop_nulls().to_list()
        if values:
            return round(sum(values))
    return None


def _add(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b
