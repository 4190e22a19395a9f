"""What the hardware and the operating system did beside the steps: who had the CPUs, what the threads did, what devices told,
what the collecting cost, and which counters contradict each other. Read from `counters`, `events` and `steps` alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from hoptrace.analysis.contradicted import contradictions_of
from hoptrace.analysis.counters import counter_totals
from hoptrace.analysis.hardware import collecting as costs
from hoptrace.analysis.hardware import devices, stealing, threads
from hoptrace.analysis.hardware.collecting import Cost, collecting
from hoptrace.analysis.hardware.devices import Devices, devices_of
from hoptrace.analysis.hardware.stealing import Stealing
from hoptrace.analysis.hardware.threads import Threads, threads_of
from hoptrace.contradictions import Contradiction
from hoptrace.manifest import CollectorInfo
from hoptrace.reader import Trace
from hoptrace.step_source import StepSource, step_source
from hoptrace.stepcost import StepCost

__all__ = ["Hardware", "hardware"]

_ROLE = re.compile(r"process (\d+) is the server's: (\w+)")
_MAIN = re.compile(r"the server's process is (\d+)")
_WORKERS = ("engine", "worker")


@dataclass(frozen=True)
class Hardware:
    """``stealing``: one answer for each server whose processes were looked at. ``threads``: null where no counters of processes
    were recorded. ``contradictions``: counters of the same thing of which one stands still. ``absent``: sources of counters that
    were not there, with the reason and what would change it. ``unseen``: what cannot be shown."""

    stealing: list[Stealing]
    threads: Threads | None
    devices: Devices
    collecting: Cost
    contradictions: list[Contradiction]
    absent: list[CollectorInfo] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before the figures."""
        return [c.says for c in self.contradictions]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "stealing": [s.as_dict() for s in self.stealing],
            "threads": None if self.threads is None else self.threads.as_dict(),
            "devices": self.devices.as_dict(),
            "collecting": self.collecting.as_dict(),
            "contradictions": [c.as_dict() for c in self.contradictions],
            "absent": [{"name": c.name, "reason": c.reason, "remedy": c.remedy} for c in self.absent],
            "notes": self.notes,
            "unseen": self.unseen,
        }


def hardware(
    trace: Trace,
    *,
    steps: StepSource | None = None,
    cost: StepCost | None = None,
    n_steps: int | None = None,
    output_tokens: int | None = None,
) -> Hardware:
    """The section of any trace. What has been computed already may be handed in: the steps, their cost, how many they are.

    Raises:
        InputError: a table is damaged.
    """
    names = {n for of in stealing.NAMES.values() for n in of} | threads.NAMES
    totals = counter_totals(trace, names, kinds=(costs.KIND, *devices.KINDS), but=devices.BUT)
    source = steps if steps is not None else step_source(trace)
    by_server, roles = _processes(trace, totals)
    unseen, answers = [], []
    if not by_server:
        unseen.append("Who had the CPUs: no counters of the servers' processes were recorded.")
    for server, processes in by_server.items():
        # Whoever computes the steps is the one whose waiting delays them.
        mine = [p for p in processes if roles.get(p) in _WORKERS] or processes
        answers.append(stealing.stealing(trace, server, source.steps, totals, mine, cost))
    every = [p for processes in by_server.values() for p in processes]
    did = threads_of(totals, every, trace.manifest, n_steps, output_tokens) if every else None
    told = devices_of(trace, totals)
    unseen += told.lacking()
    cost_of_it = collecting(totals)
    notes = []
    if source.origin and "observed" not in source.origin and answers:
        notes.append(f"Steps are {source.origin}: how long they took is as sure as that.")
    absent = [c for c in trace.manifest.collectors if not c.available and c.remedy]
    if absent:
        named = ", ".join(c.name for c in absent[:6]) + (" …" if len(absent) > 6 else "")
        unseen.append(f"Sources of counters that were not there: {named}; why: --section hardware.")
    return Hardware(answers, did, told, cost_of_it, contradictions_of(trace), absent, unseen, notes)


def _processes(trace: Trace, totals: pl.DataFrame) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The entities of each server's processes, and what each process is, as far as it was told."""
    seen = totals.filter(pl.col("entity").str.starts_with("process:"))["entity"].unique().sort().to_list()
    servers = trace.manifest.servers
    roles: dict[str, str] = {}
    owner: dict[str, str] = {f"process:{s.pid}": s.name for s in servers if s.pid is not None}
    told = trace.table("events").filter(pl.col("kind").is_in(["process", "start"])).select("server", "detail").collect()
    for server, detail in told.rows():
        if server is not None and (m := _MAIN.match(detail or "")) is not None:
            owner[f"process:{m[1]}"] = server
        if (m := _ROLE.match(detail or "")) is not None:
            roles[f"process:{m[1]}"] = m[2]
            if server is not None:
                owner[f"process:{m[1]}"] = server
    by_server: dict[str, list[str]] = {s.name: [] for s in servers}
    for process in seen:
        name = owner.get(process) or (servers[0].name if len(servers) == 1 else None)
        if name is not None:
            by_server.setdefault(name, []).append(process)
    return {name: found for name, found in by_server.items() if found}, roles
