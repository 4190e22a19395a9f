"""The server's threads by what they did: on a CPU, waiting for one, switched away, faulting, moved, calling the kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from hoptrace.manifest import Manifest

__all__ = ["CALLS", "COUNTS", "CYCLES", "NAMES", "UNREAD", "Did", "Threads", "threads_of"]

CALLS = ("futex_calls", "poll_calls", "ioctl_calls", "yield_calls")
"""System calls, counted through tracepoints."""
CYCLES = ("cpu_cycles", "instructions", "llc_misses", "stalled_cycles")
"""Hardware events, where the machine has them."""
COUNTS = (
    "on_cpu_ns", "run_delay_ns", "timeslices", "voluntary_switches", "involuntary_switches", "migrations", "minor_faults",
    "major_faults", *CALLS, *CYCLES,
)  # fmt: skip
UNREAD = "unread_cpu_ns"
"""CPU time of threads that ended between two samples: nobody knows what else those did."""
NAMES = frozenset((*COUNTS, UNREAD))

_MOST = 64
_LITTLE = 0.01  # of the CPU time: threads that ended did no more that is worth a word
_ENDS_TOLD = ("on_cpu_ns", "minor_faults", "major_faults")  # which the process's own files keep of threads that ended


@dataclass(frozen=True, slots=True)
class Did:
    """What one thread or process did over the trace: ``figures`` by name of :data:`COUNTS`, null where nobody counted it."""

    entity: str
    process: str
    figures: dict[str, int | None]

    @property
    def wanted_ns(self) -> int:
        return (self.figures["on_cpu_ns"] or 0) + (self.figures["run_delay_ns"] or 0)

    def as_dict(self) -> dict[str, Any]:
        return {"entity": self.entity, **self.figures}


@dataclass(frozen=True)
class Threads:
    """``threads``: the busiest first, at most 64; ``left_out``: how many more. ``sums``: of all the server's processes, with
    ``sums_of``: process (its collector summed all threads up), threads (at least so much: those that were looked at) or machine
    (at most so much: all that runs there). Per step
    and output token: ``per_step``, ``per_token``, null without something to divide by. ``missing``: why a figure is not there."""

    threads: list[Did]
    left_out: int
    sums: dict[str, int | None]
    sums_of: dict[str, str]
    steps: int | None
    output_tokens: int | None
    missing: dict[str, str] = field(default_factory=dict)

    def per(self, name: str, n: int | None) -> float | None:
        total = self.sums.get(name)
        return None if total is None or not n else total / n

    def as_dict(self) -> dict[str, Any]:
        figures = {
            name: {
                "total": self.sums[name], "of": self.sums_of.get(name), "why_unknown": self.missing.get(name),
                "per_step": _digits(self.per(name, self.steps)), "per_output_token": _digits(self.per(name, self.output_tokens)),
            }
            for name in COUNTS
        }  # fmt: skip
        return {
            "figures": figures, "busiest": [t.as_dict() for t in self.threads], "left_out": self.left_out, "steps": self.steps,
            "output_tokens": self.output_tokens,
        }  # fmt: skip


def threads_of(
    totals: pl.DataFrame, processes: Sequence[str], manifest: Manifest, steps: int | None, output_tokens: int | None
) -> Threads:
    """From :func:`hoptrace.analysis.counters.counter_totals` of at least :data:`NAMES`; ``processes``: the servers' entities."""
    mine = totals.filter(pl.col("name").is_in(list(NAMES)) & pl.col("total").is_not_null())
    pids = [p.removeprefix("process:") for p in processes]
    of_threads = mine.filter(pl.col("entity").str.extract(r"^thread:(\d+)/").is_in(pids))
    of_processes = mine.filter(pl.col("entity").is_in(list(processes)))
    # Tracepoints by CPU tell of all that runs on the machine.
    whole = mine.filter((pl.col("entity") == "cpu") & pl.col("name").is_in(list(CALLS)))
    found = [
        Did(str(entity), f"process:{str(entity).removeprefix('thread:').split('/')[0]}", _figures(rows))
        for (_, entity), rows in of_threads.group_by("host", "entity", maintain_order=True)
    ]
    found.sort(key=lambda d: (-d.wanted_ns, d.entity))
    sums: dict[str, int | None] = {}
    sums_of: dict[str, str] = {}
    for name in COUNTS:
        for rows, what in ((of_processes, "process"), (of_threads, "threads"), (whole, "machine")):
            some = rows.filter(pl.col("name") == name)
            if some.height:
                sums[name], sums_of[name] = round(some["total"].sum()), what
                break
        else:
            sums[name] = None
    unread = mine.filter((pl.col("name") == UNREAD) & pl.col("entity").is_in(list(processes)))["total"].sum() or 0
    if unread > _LITTLE * (sums["on_cpu_ns"] or 0):
        sums_of |= {name: "threads" for name, of in sums_of.items() if of == "process" and name not in _ENDS_TOLD}
    missing = {name: _why(name, manifest) for name in COUNTS if sums[name] is None}
    return Threads(found[:_MOST], max(0, len(found) - _MOST), sums, sums_of, steps, output_tokens, missing)


def _figures(rows: pl.DataFrame) -> dict[str, int | None]:
    known: Mapping[str, float] = dict(rows.select("name", "total").iter_rows())
    return {name: round(known[name]) if name in known else None for name in COUNTS}


def _why(name: str, manifest: Manifest) -> str:
    """Why nobody counted it, as the collectors told when they were looked for."""
    word = "tracepoint" if name in CALLS else "perf-hardware" if name in CYCLES else "perf-software"
    asked = [c for c in manifest.collectors if word in c.name] if name in (*CALLS, *CYCLES, "migrations") else []
    refused = next((c for c in asked if not c.available), None)
    if refused is None and name in CALLS and not asked:
        return "tracepoints were not asked for: attach --tracepoints"
    if refused is None:
        return "it is not among what was counted" if asked else "no collector recorded it"
    return f"{refused.reason or 'its collector was not there'}{f' ({refused.remedy})' if refused.remedy else ''}"


def _digits(v: float | None) -> float | None:
    return None if v is None else round(v, 6)
