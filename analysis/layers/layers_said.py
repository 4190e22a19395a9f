"""What the layers come to, in sentences: the bound, what contradicts the roofline, and what would have to be recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hoptrace.analysis.layers.layers_steps import HOST_COLUMNS, ServerSteps
from hoptrace.analysis.layers.layers_summary import StepLayers
from hoptrace.analysis.text import counted, duration_text, percent
from hoptrace.roofline import Roofline

__all__ = ["Said", "bound_of", "said"]

_FAR = 10.0  # times the roofline: more than any host or collective time that serving engines are known for
_MUCH = 0.5
_NOTABLE = 0.2
_SMALL = 0.01
_WORDS = {"compute": "Arithmetic", "state": "State", "scheduling": "Scheduling"}


@dataclass
class Said:
    warnings: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def bound_of(ns: Mapping[str, float | None], e2e_ns: float, *, no_platform: bool = False) -> tuple[str | None, str]:
    """The layer that takes the most of latency, and the sentence; null where what nobody can tell takes more. ``no_platform``:
    that no platform is known is why."""
    if not ns or not e2e_ns > 0:
        return None, "No request is known to have finished, so there is no latency to divide."
    share = {k: v / e2e_ns for k, v in ns.items() if v is not None}
    told = {k: share[k] for k in ("compute", "state", "scheduling") if k in share}
    leader = max(told, key=lambda k: told[k])
    dark = share.get("unexplained", 0.0) + share.get("undivided", 0.0)
    named = {"compute": "arithmetic", "state": "state", "scheduling": "scheduling"}
    others = [f"{named[k]} {percent(told[k])}" for k in told if k != leader]
    away = share.get("outside", 0.0)
    others += [f"client and network {percent(away)}"] if away >= _SMALL else []
    if told[leader] > dark and told[leader] >= away:
        rest = ", ".join([*others, *([f"not told {percent(dark)}"] if dark > 0 else [])])
        return leader, f"{_WORDS[leader]} takes most of the latency: {percent(told[leader])}{f' ({rest})' if rest else ''}."
    if away > max(told[leader], dark):
        return None, f"Client and network take most of the latency: {percent(away)}; no layer of the server does."
    if no_platform and share.get("undivided", 0.0) > share.get("unexplained", 0.0):
        first = f"Without --platform the layer of {percent(dark)} of latency is not told"
    else:
        first = f"What bounds the latency is not told: of {percent(dark)} nobody can say the layer"
    if told[leader] == 0:
        return None, f"{first}."
    rest = ", ".join(others)
    return None, f"{first}; of what is told {named[leader]} leads with {percent(told[leader])}{f' ({rest})' if rest else ''}."


def said(
    steps: StepLayers | None,
    split: Sequence[ServerSteps],
    rooflines: Sequence[Roofline],
    why_not: Mapping[str, str],
    origin: str,
) -> Said:
    """All sentences about the steps."""
    out = Said()
    if steps is None:
        out.unseen.append("Layers: the trace tells no steps, so what bounds the time in them is unknown.")
        return out
    by_server = {r.server: r for r in rooflines}
    for s in split:
        roofline = by_server.get(s.server)
        who = s.server if s.dp_rank == 0 else f"{s.server}, rank {s.dp_rank}"
        if roofline is not None:
            _contradicted(out, s, roofline, who)
            _far(out, s, roofline, who)
        elif s.server not in why_not:
            out.unseen.append(f"Layers of {who}'s steps: the manifest does not describe this server, so it has no roofline.")
        if s.hidden_host:
            out.unseen.append(
                f"{who} schedules asynchronously: its host time may run beside the device, so it shows nothing of a step. Record "
                "device_ns to tell how long the device waited."
            )
        if roofline is None and s.recorded:
            host = ", ".join(c for c in HOST_COLUMNS if c in s.recorded)
            out.notes.append(
                f"Scheduling in {who}'s steps is derived from the trace itself ({host}); of the rest, compute and state are not "
                "told apart."
            )
    for server, why in why_not.items():
        out.unseen.append(
            f"Compute and state in {server}'s steps: {why.rstrip('.')}. What lies outside steps is given; state is only that."
        )
    for r in rooflines:
        out.notes.append(
            f"Roofline of {r.server} on {r.platform}: {r.flops_per_s / 1e12:,.4g} TFLOP/s and "
            f"{r.memory_bytes_per_s / 1e9:,.4g} GB/s; compute and state are at most what these rates bound a step by."
        )
        out.notes += r.notes
    if origin == "reconstructed":
        out.notes.append("The steps were reconstructed from token times: they touch, so host time between them lies in them.")
    return out


def _contradicted(out: Said, s: ServerSteps, r: Roofline, who: str) -> None:
    if not s.faster:
        return
    total = int(s.by_kind["took_ns"].sum())
    part = percent(s.faster_ns / total if total else None)
    share = f"{counted(s.faster, 'step')} of {s.by_kind['steps'].sum():,} ({part} of their time)"
    least = f", down to {percent(s.fastest)} of it" if s.fastest is not None else ""
    if s.withheld:
        out.warnings.append(
            f"{who} is faster than its roofline on {r.platform} in {share}{least}. That cannot be: the platform or the model's "
            "sizes in the manifest are wrong, or it computes in a narrower number format than the rate is for. Its steps are not "
            "divided into compute and state."
        )
    else:
        out.warnings.append(
            f"{who} is faster than its roofline on {r.platform} in {share}{least}: these steps are not divided. Is the platform "
            "right?"
        )


def _far(out: Said, s: ServerSteps, r: Roofline, who: str) -> None:
    k = s.by_kind
    divided, least, unexplained = int(k["divided_ns"].sum()), float(k["roofline_ns"].sum()), int(k["unexplained_ns"].sum())
    if not divided or least <= 0:
        return
    times, dark = divided / least, unexplained / divided
    n = int(k["divided_steps"].sum())
    if times >= _FAR and dark >= _MUCH:
        out.warnings.append(
            f"{who}'s steps take {times:,.0f} × their roofline on {r.platform} ({duration_text(divided / n)} where "
            f"{duration_text(least / n)} bounds them), and recorded host and collective time explains only "
            f"{percent(1 - dark - least / divided)} of it. By its roofline no such device is that slow: which kernel path runs "
            f"(a fallback of attention or of the number format, eager mode), or is {r.platform} not this machine?"
        )
    if dark < _NOTABLE:
        return
    missing = [c for c in HOST_COLUMNS if c not in s.recorded and (c != "collective_ns" or r.ranks > 1)]
    if "device_ns" in s.recorded:
        remedy = (
            "the device was at work: look at its kernels"
            if "collective_ns" in s.recorded or r.ranks == 1
            else ("the device was at work: record collective_ns to tell collectives from kernels")
        )
    else:
        remedy = f"record {', '.join(missing)} of its steps to tell the host from slow kernels"
    out.unseen.append(
        f"{percent(dark)} of the time of {who}'s steps ({times:.1f} × their roofline) is neither roofline nor recorded host or "
        f"collective time: {remedy}."
    )
