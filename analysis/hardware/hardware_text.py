"""Hardware and operating system on the terminal. Nothing is computed here: every figure is a field of :class:`Hardware`."""

from __future__ import annotations

from collections.abc import Collection

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.hardware.collecting import Cost
from hoptrace.analysis.hardware.devices import Devices, Gpu
from hoptrace.analysis.hardware.hardware import Hardware
from hoptrace.analysis.hardware.threads import CALLS, COUNTS, CYCLES, Threads
from hoptrace.analysis.text import bytes_text, count_text, counted, duration_text, percent

__all__ = ["blocks"]

_ROWS = 10
_PRESSED = 0.001
_LINKS = ("gpu", "pcie", "nvlink", "c2c", "xgmi", "rdma")
_HEADS = {
    "on_cpu_ns": "on CPU", "run_delay_ns": "waited", "voluntary_switches": "voluntary", "involuntary_switches": "involuntary",
    "migrations": "moved", "minor_faults": "faults", "major_faults": "major", "futex_calls": "futex", "poll_calls": "poll",
    "ioctl_calls": "ioctl", "yield_calls": "yield", "timeslices": "slices",
    "cpu_cycles": "cycles", "instructions": "instructions", "llc_misses": "LLC misses", "stalled_cycles": "stalled",
}  # fmt: skip
_OTHER = {"run_delay_share": "run-queue delay", "involuntary_per_s": "involuntary switches", "foreign_share": "what others took",
          "steal_share": "what the hypervisor took"}  # fmt: skip


def blocks(h: Hardware, *, full: bool = False) -> list[RenderableType]:
    """Whether others steal steps, and what is out of order; ``full``: threads, devices, what collecting cost."""
    if not full:
        known = [s for s in h.stealing if s.step_ns is not None]
        lines = [s.short for s in sorted(known, key=lambda s: s.verdict != "yes")[:1]]
        if h.collecting.over:
            lines.append(_cost(h.collecting)[0])
        lines += _trouble(h.devices, _LINKS)[:1]
        return [Text(line) for line in lines]
    out: list[RenderableType] = [Text(c.says, style="yellow") for c in h.contradictions]
    for s in h.stealing:
        out.append(Text(s.says))
        others = [f"{_OTHER[k]} {r.rho:+.2f} ({r.low:+.2f} to {r.high:+.2f})" for k, r in s.together.items() if r.rho is not None]
        if others:
            out.append(Text(f"Rank correlation with the slowness of the steps of {s.server}: {'; '.join(others)}.", style="dim"))
    if h.threads is not None:
        out += _threads(h.threads)
    out += [Text(line) for line in _devices(h.devices)]
    out += [Text(line) for line in _cost(h.collecting)]
    if h.absent:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("not there", "why", "what would change it"):
            table.add_column(name)
        for c in h.absent:
            table.add_row(Text(c.name), Text(c.reason or "no reason given"), Text(c.remedy or "–"))
        out.append(table)
    return out + [Text(note, style="dim") for note in h.notes]


def _threads(t: Threads) -> list[RenderableType]:
    out: list[RenderableType] = []
    figures = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    figures.add_column("the server's threads")
    for name in ("in all", "per step", "per output token"):
        figures.add_column(name, justify="right")
    for name in COUNTS:
        total = t.sums[name]
        if total is None:
            continue
        text = duration_text if name.endswith("_ns") else count_text
        least = {"threads": "≥ ", "machine": "≤ "}.get(t.sums_of[name], "")
        each = (t.per(name, n) for n in (t.steps, t.output_tokens))
        figures.add_row(_words(name), f"{least}{text(total)}", *("–" if v is None else f"{least}{text(v)}" for v in each))
    if figures.row_count:
        out.append(figures)
    for why in dict.fromkeys(t.missing.values()):
        names = [_words(n) for n, w in t.missing.items() if w == why]
        out.append(Text(f"Unknown, not 0: {', '.join(names)} ({why}).", style="dim"))
    if (cycles := t.sums["cpu_cycles"]) and (done := t.sums["instructions"]) is not None:
        out.append(Text(f"{count_text(done / cycles)} instructions a cycle."))
    if t.threads:
        shown = [n for n in COUNTS if n not in ("timeslices", *CYCLES) and any(d.figures[n] is not None for d in t.threads)]
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        table.add_column("thread")
        for name in shown:
            table.add_column(_HEADS[name], justify="right")
        for d in t.threads[:_ROWS]:
            cells = ((duration_text if n.endswith("_ns") else count_text)(d.figures[n]) for n in shown)
            table.add_row(d.entity.removeprefix("thread:"), *cells)
        out.append(table)
        if (more := len(t.threads) - _ROWS + t.left_out) > 0:
            out.append(Text(f"{counted(more, 'more thread')}, each with less: --json", style="dim"))
    return out


def _words(name: str) -> str:
    if name in CALLS:
        return f"{name.removesuffix('_calls')} calls"
    return {"on_cpu_ns": "on a CPU", "run_delay_ns": "waiting for a CPU", "timeslices": "time slices"}.get(
        name, name.replace("_", " ")
    )


def _devices(d: Devices) -> list[str]:
    out = [_gpu(g) for g in d.gpus[:_ROWS]]
    if len(d.gpus) > _ROWS:
        out.append(f"{counted(len(d.gpus) - _ROWS, 'more GPU')}: --json")
    out += [f"{kind}: {detail}" for _, kind, detail in d.events[:5]]
    if len(d.events) > 5:
        out.append(f"{counted(len(d.events) - 5, 'more event')} of devices: --json")
    out += _trouble(d)
    if d.quiet_counters:
        out.append(f"{counted(d.quiet_counters, 'error counter')} of devices and links stayed as they were.")
    if d.vectors:
        named = (f"{v.entity}{f' ({v.owner})' if v.owner else ''} {v.total:,}" for v in d.vectors[:5])
        said = ", ".join(
            text + (f" ({count_text(v.per_s)} a second)" if v.per_s else "") for text, v in zip(named, d.vectors, strict=False)
        )
        out.append(f"Busiest interrupts: {said}.")
    pressed = [f"{k} {percent(v)}" for k, v in sorted(d.pressure.items(), key=lambda x: -x[1]) if v >= _PRESSED][:6]
    if d.pressure:
        out.append(f"Pressure, share of the time: {', '.join(pressed) or 'none'}.")
    return out + d.lacking()


def _trouble(d: Devices, kinds: Collection[str] = ()) -> list[str]:
    """``kinds``: of these entities alone. An Ethernet port drops what nobody wants, which is no news."""
    shown = [t for t in d.trouble if not kinds or t.entity.partition(":")[0] in kinds]
    if not shown:
        return []
    said = ", ".join(f"{t.entity} {t.name}{f' {t.direction}' if t.direction else ''} +{t.total:,}" for t in shown[:6])
    return [f"Errors and retries: {said}{' …' if len(shown) > 6 else ''}."]


def _gpu(g: Gpu) -> str:
    parts = []
    if g.memory_mean_bytes is not None:
        of = "" if g.memory_bytes is None else f" of {bytes_text(g.memory_bytes)}"
        parts.append(f"memory {bytes_text(g.memory_mean_bytes)} at the mean, {bytes_text(g.memory_most_bytes)} at most{of}")
    if g.clocks_mhz:
        parts.append("clocks " + ", ".join(f"{k} {count_text(round(v))} MHz" for k, v in g.clocks_mhz.items()))
    if g.throttled_ns:
        worst = sorted(g.throttled_ns.items(), key=lambda x: -x[1])
        parts.append("slowed down by " + ", ".join(f"{k.replace('_', ' ')} for {duration_text(v)}" for k, v in worst))
    elif g.window_ns:
        parts.append("never slowed down")
    if g.energy_mj is not None:
        parts.append(f"{count_text(g.energy_mj / 1000)} J")
    return f"{g.entity}: {'; '.join(parts) or 'counters without memory, clocks or energy'}."


def _cost(c: Cost) -> list[str]:
    if c.share is None:
        return []
    dear = ", ".join(
        f"{x.name} {percent(x.share)}" + (f" ({duration_text(x.each_ns)} a sample)" if x.each_ns else "")
        for x in c.collectors[:4]
    )
    whole = "" if c.whole_share is None else f" All of hoptrace took {percent(c.whole_share)} (proxy, servers' pages, writing)."
    limit = f"{'over' if c.over else 'within'} the {100 * c.allowed:g}% that may"
    said = f"Collecting from the machine took {c.share:.2%} of a core ({limit}): {dear}.{whole}"
    missed = sum(x.missed or 0 for x in c.collectors)
    return [said] + ([f"{counted(missed, 'beat')} of its sources {'was' if missed == 1 else 'were'} missed."] if missed else [])
