"""What the operating system counted of the servers' processes: CPU time, run-queue delay, switches; what the capture and
others took. The question behind it: is another process stealing my step?"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from hoptrace.analysis.counters import counter_totals
from hoptrace.platform import graph_of
from hoptrace.reader import Trace

__all__ = ["OsFigures", "Process", "os_figures"]

# Names of the counters, as the process collector writes them. Linux counts on-CPU time to the ns and user/system time in ticks.
_CPU = (("on_cpu_ns",), ("cpu_user_ns", "cpu_system_ns"))
_DELAY = (("run_delay_ns",),)
_SLICES = (("timeslices",),)
_VOLUNTARY = (("voluntary_switches",),)
_INVOLUNTARY = (("involuntary_switches",),)
# Stolen time is what the hypervisor gave to others.
_MACHINE_BUSY = (("user_ns", "nice_ns", "system_ns", "irq_ns", "softirq_ns", "steal_ns"),)
_PRESSURE = (("cpu_some_ns",),)
_INTERRUPTS = (("interrupts",),)
_CALLS = ("futex_calls", "poll_calls", "ioctl_calls", "yield_calls")
_OUTBOUND = "outbound_write_bytes"
_NAMES = {_OUTBOUND, *_CALLS} | {
    n for choices in (_CPU, _DELAY, _SLICES, _VOLUNTARY, _INVOLUNTARY, _MACHINE_BUSY, _PRESSURE, _INTERRUPTS) for c in choices
    for n in c
}  # fmt: skip
# Every switch ends a time slice. Fewer of them seen than this share of the slices: not all threads were looked at.
_ENOUGH = 0.97
_ROLE = re.compile(r"process (\d+) is the server's: (\w+)")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a server. ``role``: api, engine, worker as far as the process was told apart, else null."""

    entity: str
    role: str | None
    cpu_ns: int | None
    run_delay_ns: int | None

    @property
    def run_delay_share(self) -> float | None:
        """Run-queue delay ÷ (delay + CPU time)."""
        return _share(self.run_delay_ns, self.cpu_ns)

    def as_dict(self) -> dict[str, Any]:
        return {
            "entity": self.entity, "role": self.role, "cpu_ns": self.cpu_ns, "run_delay_ns": self.run_delay_ns,
            "run_delay_share": _digits(self.run_delay_share),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class OsFigures:
    """Sums over the server's processes during the trace; null where it was not counted.

    ``window_ns``: the time over which the CPU time was counted. ``timeslices``: how often a thread was put on a CPU.
    ``switches_at_least``: not all threads were looked at (the time slices of the processes are more than those of the threads).
    ``hoptrace_cpu_ns``: what the capture itself took (collectors, proxy, and what else runs in that process), and
    ``hoptrace_cpu_share`` its share of the machine's busy CPU time; both null where the capture runs in the server's own process.
    ``foreign_cpu_share``: share that was neither the servers' nor the capture's. ``pressure_share``: of the window, how long some
    thread of the machine wanted a CPU and had none (pressure stall information). ``interrupts``: of the whole machine.
    ``calls``: system calls by name, as far as they were counted, of the servers' processes or (``calls_of_machine``) of all that
    runs there. ``outbound_write_bytes``: what CPUs wrote to devices (Intel IIO). ``gpus``: whether the host has any.
    ``breaks``: restarts of a process or resets of a counter; with any of them sums are lower bounds. ``steps``: what the figures
    per step are divided by.
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
    steps: int | None = None
    timeslices: int | None = None
    switches_at_least: bool = False
    pressure_share: float | None = None
    interrupts: int | None = None
    by_process: tuple[Process, ...] = field(default_factory=tuple)
    calls: dict[str, int] = field(default_factory=dict)
    calls_of_machine: bool = False
    outbound_write_bytes: int | None = None
    gpus: bool = False

    @property
    def run_delay_share(self) -> float | None:
        """Run-queue delay ÷ (delay + CPU time): of the time in which the process wanted a CPU, how much it waited for one."""
        return _share(self.run_delay_ns, self.cpu_ns)

    @property
    def longest_waiting(self) -> Process | None:
        """The process whose threads waited longest for a CPU, all in all."""
        known = [p for p in self.by_process if p.run_delay_ns]
        return max(known, key=lambda p: p.run_delay_ns or 0) if known else None

    def per_token(self, value: int | None) -> float | None:
        """A figure ÷ output tokens."""
        return None if value is None or not self.output_tokens else value / self.output_tokens

    def per_step(self, value: int | None) -> float | None:
        """A figure ÷ steps."""
        return None if value is None or not self.steps else value / self.steps

    def as_dict(self) -> dict[str, Any]:
        switches = _add(self.voluntary_switches, self.involuntary_switches)
        return {
            "processes": self.processes,
            "window_ns": self.window_ns,
            "cpu_ns": self.cpu_ns,
            "run_delay_ns": self.run_delay_ns,
            "run_delay_share": _digits(self.run_delay_share),
            "timeslices": self.timeslices,
            "voluntary_switches": self.voluntary_switches,
            "involuntary_switches": self.involuntary_switches,
            "switches_at_least": self.switches_at_least,
            "cpu_ns_per_output_token": _digits(self.per_token(self.cpu_ns)),
            "run_delay_ns_per_output_token": _digits(self.per_token(self.run_delay_ns)),
            "switches_per_output_token": _digits(self.per_token(switches)),
            "cpu_ns_per_step": _digits(self.per_step(self.cpu_ns)),
            "run_delay_ns_per_step": _digits(self.per_step(self.run_delay_ns)),
            "switches_per_step": _digits(self.per_step(switches)),
            "involuntary_switches_per_step": _digits(self.per_step(self.involuntary_switches)),
            "by_process": [p.as_dict() for p in self.by_process],
            "hoptrace_cpu_ns": self.hoptrace_cpu_ns,
            "hoptrace_cpu_ns_per_output_token": _digits(self.per_token(self.hoptrace_cpu_ns)),
            "hoptrace_cpu_share": _digits(self.hoptrace_cpu_share),
            "foreign_cpu_share": _digits(self.foreign_cpu_share),
            "pressure_share": _digits(self.pressure_share),
            "interrupts": self.interrupts,
            "calls": self.calls,
            "calls_of_machine": self.calls_of_machine,
            "outbound_write_bytes": self.outbound_write_bytes,
            "breaks": self.breaks,
        }


def os_figures(trace: Trace, output_tokens: int | None, steps: int | None = None) -> OsFigures | None:
    """The figures, or null where no counters of a process were recorded. ``steps``: how many are known, or null."""
    totals = counter_totals(trace, _NAMES)
    own = totals.filter(pl.col("entity").str.starts_with("process:"))
    if not own.height:
        return None
    threads = totals.filter(pl.col("entity").str.starts_with("thread:"))
    cpu, delay, slices = _sum(own, _CPU), _sum(own, _DELAY), _sum(own, _SLICES)
    window = own.filter(pl.col("name").is_in([n for names in _CPU for n in names]))["counted_ns"].max()
    busy = _sum(totals.filter(pl.col("entity") == "cpu"), _MACHINE_BUSY)
    # A server inside the capturing process (a test, a notebook) has the time already.
    within = pl.col("entity").str.replace("hoptrace:", "process:", literal=True).is_in(own["entity"].unique().to_list())
    capture = _sum(totals.filter(pl.col("entity").str.starts_with("hoptrace:") & ~within), _CPU)
    foreign = None
    if busy and cpu is not None:
        # The machine's time comes in ticks of 10 ms and is read at a slightly different moment: a small negative rest is none.
        foreign = max(0.0, (busy - cpu - (capture or 0)) / busy)
    of_threads = _sum(threads, _SLICES)
    # Where the collector sums all threads of a process up itself, nothing is missing; else only the busiest were looked at.
    whole = _sum(own, _VOLUNTARY) is not None
    switched = own if whole else threads
    calls, of_machine = _calls(totals, own, threads)
    return OsFigures(
        processes=own.select("host", "entity").unique().height,
        window_ns=window if isinstance(window, int) else None,
        cpu_ns=cpu,
        run_delay_ns=delay,
        voluntary_switches=_sum(switched, _VOLUNTARY),
        involuntary_switches=_sum(switched, _INVOLUNTARY),
        hoptrace_cpu_ns=capture,
        hoptrace_cpu_share=capture / busy if busy and capture is not None else None,
        foreign_cpu_share=foreign,
        output_tokens=output_tokens,
        breaks=int(own["breaks"].sum()) + int(own["falls"].sum()),
        steps=steps,
        timeslices=slices,
        switches_at_least=not whole and bool(slices and of_threads is not None and of_threads < _ENOUGH * slices),
        pressure_share=_pressure(totals),
        interrupts=_interrupts(totals),
        by_process=_by_process(trace, own),
        calls=calls,
        calls_of_machine=of_machine,
        outbound_write_bytes=_sum(totals, ((_OUTBOUND,),)),
        gpus=_gpus(trace),
    )


def _calls(totals: pl.DataFrame, own: pl.DataFrame, threads: pl.DataFrame) -> tuple[dict[str, int], bool]:
    """System calls by name, and whether they are of the whole machine."""
    for rows, whole in ((own, False), (threads, False), (totals.filter(pl.col("entity") == "cpu"), True)):
        found = {name: n for name in _CALLS if (n := _sum(rows, ((name,),))) is not None}
        if found:
            return found, whole
    return {}, False


def _gpus(trace: Trace) -> bool:
    """Whether the platform graph has a GPU."""
    return any(n.name.startswith("gpu") or n.kind in ("gpu", "hbm") for n in graph_of(trace.manifest).nodes.values())


def _by_process(trace: Trace, own: pl.DataFrame) -> tuple[Process, ...]:
    """Each process of the servers, those that wanted a CPU longest first."""
    told = trace.table("events").filter(pl.col("kind") == "process").select(pl.col("host").fill_null(""), "detail").collect()
    roles = {(host, m[1]): m[2] for host, text in told.drop_nulls().rows() if (m := _ROLE.match(text))}
    found = []
    for (host, entity), rows in own.group_by("host", "entity", maintain_order=True):
        role = roles.get((host, str(entity).removeprefix("process:")))
        found.append(Process(str(entity), role, _sum(rows, _CPU), _sum(rows, _DELAY)))
    return tuple(sorted(found, key=lambda p: (-((p.cpu_ns or 0) + (p.run_delay_ns or 0)), p.entity)))


def _pressure(totals: pl.DataFrame) -> float | None:
    rows = totals.filter((pl.col("entity") == "pressure") & pl.col("name").is_in(_PRESSURE[0]) & (pl.col("counted_ns") > 0))
    total, window = rows["total"].drop_nulls(), rows["counted_ns"]
    # Of several hosts the mean: each has its own pressure over its own time.
    return float(total.sum()) / int(window.sum()) if total.len() else None


def _interrupts(totals: pl.DataFrame) -> int | None:
    """Of the whole machine; where that was not counted, of its devices' vectors (irq:45). Timers and calls between CPUs (irq:LOC,
    irq:CAL) are no interrupts by a device."""
    whole = _sum(totals.filter(~pl.col("entity").str.starts_with("irq:")), _INTERRUPTS)
    devices = totals.filter(pl.col("entity").str.contains(r"^irq:\d+$"))
    return whole if whole is not None else _sum(devices, _INTERRUPTS)


def _sum(totals: pl.DataFrame, choices: tuple[tuple[str, ...], ...]) -> int | None:
    """Sum over entities of the first choice of names that was recorded; null if none was, or none has two samples."""
    for names in choices:
        values: list[float] = totals.filter(pl.col("name").is_in(names))["total"].drop_nulls().to_list()
        if values:
            return round(sum(values))
    return None


def _share(delay: int | None, cpu: int | None) -> float | None:
    return None if delay is None or cpu is None or delay + cpu == 0 else delay / (delay + cpu)


def _digits(v: float | None) -> float | None:
    return None if v is None else round(v, 6)


def _add(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b
