"""The bottleneck layers for the terminal, by rich. Nothing is computed here: every figure is a field of the layers."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.latency.parts import part
from hoptrace.analysis.layers.ceilings import Ceiling, factor_text
from hoptrace.analysis.layers.layer_of import LAYER_OF_PART, LAYERS
from hoptrace.analysis.layers.layers import Layers, LayerShares
from hoptrace.analysis.layers.layers_summary import StepLayers
from hoptrace.analysis.text import duration_text, percent

__all__ = ["blocks"]

_NAMES = {"all": "mean of all", "p50": "p50", "p95": "p95", "p99": "p99", "slowest": "slowest 1 %"}


def blocks(x: Layers, *, full: bool = False) -> list[RenderableType]:
    """What belongs on one screen; ``full``: all."""
    out: list[RenderableType] = [Text(x.headline, style="bold" if full else "")]
    if not full:
        # Warnings stand above all sections.
        return out + ([Text(line)] if (line := _ceilings_line(x.ceilings)) else [])
    out += [Text(f"! {w}", style="yellow") for w in x.warnings]
    if x.groups:
        out.append(_shares(x))
    if x.steps is not None:
        out.append(_steps(x.steps))
    out += _ceilings(x.ceilings)
    out.append(_parts())
    out += [Text(f"• {n}", style="dim") for n in x.notes]
    out += [Text(f"• {u}") for u in x.unseen]
    return out


def _ceilings_line(ceilings: tuple[Ceiling, ...]) -> str | None:
    asked = sorted((c for c in ceilings if c.e2e is not None), key=lambda c: -(c.e2e or 0))
    if not asked:
        return None
    factors = ", ".join(f"{c.name} {factor_text(c.e2e)}" for c in asked)
    error = (asked[0].error or {}).get("e2e")
    off = "" if error is None else f" (the method is {error:+.1%} off)"
    return f"End to end at most, by replay with one cost taken away: {factors}{off}."


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(names[0])
    for name in names[1:]:
        table.add_column(name, justify="right")
    return table


def _shares(x: Layers) -> Table:
    table = _table("latency", "requests", "e2e", *LAYERS)
    for name, g in x.groups.items():
        table.add_row(_NAMES[name], f"{g.requests:,}", duration_text(g.e2e_ns), *(_share(g, k) for k in LAYERS))
    return table


def _share(g: LayerShares, layer: str) -> str:
    """At least so much, while some of it is not divided."""
    least = layer in ("compute", "state", "scheduling") and (g.ns["undivided"] or 0) > 0
    text = percent(g.shares[layer])
    return f"≥{text}" if least and g.ns[layer] else text


def _steps(steps: StepLayers) -> Table:
    table = _table("steps", "n", "mean", "roofline", "×", "host", "device at work")
    for k in (steps.all, *steps.kinds):
        bound = k.roofline_ns / k.divided_steps if k.divided_steps else None
        table.add_row(
            k.kind, f"{k.steps:,}", duration_text(k.took_ns / k.steps if k.steps else None), duration_text(bound),
            factor_text(k.times_roofline), percent(k.host_share), percent(k.device_share),
        )  # fmt: skip
    return table


def _ceilings(ceilings: tuple[Ceiling, ...]) -> list[RenderableType]:
    asked = [c for c in ceilings if c.left_out is None]
    out: list[RenderableType] = []
    if asked:
        table = _table("at most, by replay", "end to end", "TTFT", "TPOT", "throughput")
        for c in asked:
            table.add_row(c.question, *(factor_text(f) for f in (c.e2e, c.ttft, c.tpot, c.throughput)))
        out.append(table)
        error = asked[0].error
        if error and "e2e" in error:
            off = f"{error['e2e']:+.1%}"
            out.append(
                Text(f"Each against the replay under the trace's own policy, which is {off} off in mean end to end.", "dim")
            )
        if any(c.e2e is not None and c.e2e < 0.995 for c in asked):
            out.append(Text("Below 1 it is slower on the whole: what is no longer held back meets in the same steps.", "dim"))
    said: dict[str, list[str]] = {}
    for c in ceilings:
        for w in c.warnings:
            said.setdefault(w, []).append(c.name)
    out += [Text(f"• {', '.join(names)}: {w}", style="dim") for w, names in said.items()]
    out += [Text(f"• {c.sentence}", style="dim") for c in ceilings if c.left_out is not None]
    return out


def _parts() -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("part", "layer", "why"):
        table.add_column(name)
    for name, (layer, why) in LAYER_OF_PART.items():
        table.add_row(part(name).label, "each step's own" if layer == "steps" else layer, why)
    return table
