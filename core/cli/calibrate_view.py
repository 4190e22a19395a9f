"""What `hoptrace calibrate` prints of what it found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hoptrace.replay.calibration.fitting import Calibrated
    from hoptrace.stepcost import StepCost

__all__ = ["as_dict", "coefficients", "curves", "show"]

# What each coefficient is per, and by how many of that unit the stored number counts.
_PER = {
    "step": ("a step", 1),
    "any_prefill": ("a step with prompts", 1),
    "any_decode": ("a step with decoders", 1),
    "prefill_tokens": ("a prompt token computed", 1),
    "prefill_context_tokens": ("a token of context before a chunk", 1),
    "prefill_attention": ("1,000 pairs of positions in a prompt's attention", 1),
    "decode_requests": ("a decoder", 1),
    "decode_context_tokens": ("1,000 tokens of the decoders' context", 1000),
    "batched": ("a step of several tokens", 1),
}
_PS = (("s", 10**12), ("ms", 10**9), ("µs", 10**6), ("ns", 10**3))


def coefficients(cost: StepCost) -> list[dict[str, Any]]:
    """One row a coefficient: ``feature``, ``ps`` and its standard error ``ps_error`` (null: unknown) as they are kept
    (:data:`hoptrace.stepcost.UNITS`), and ``text``: value and error in units that people read."""
    from hoptrace.stepcost import FEATURES

    spread = None if cost.covariance_ps2 is None else np.sqrt(np.maximum(np.diag(np.array(cost.covariance_ps2)), 0))
    rows = []
    for i, name in enumerate(FEATURES):
        ps = cost.coefficients_ps.get(name)
        if ps is None:
            continue
        per, times = _PER.get(name, (name, 1))
        # 0 is none: of a coefficient that belongs to a curve no error is told.
        error = float(spread[i]) or None if spread is not None and i < len(spread) else None
        rows.append(
            {"feature": name, "ps": ps, "ps_error": error, "text": _text(ps * times, error and error * times), "per": per}
        )
    return rows


def curves(cost: StepCost) -> list[str]:
    """What is looked up and is no straight line, one line each: its points as they were measured."""
    said = []
    for piece in cost.pieces:
        if len(piece.grid.rows) > 1:
            said.append(f"{piece.name or 'more'}: by {piece.inner} and {piece.outer}, {len(piece.grid.rows)} rows of times")
            continue
        points = piece.grid.rows[0][:-1] if len(piece.grid.rows[0]) > 1 else piece.grid.rows[0]
        some = points if len(points) <= 12 else [*points[:8], *points[8 :: max(1, len(points) // 5)]]
        said.append(f"{piece.name or 'more'} alone: " + ", ".join(f"{n:,} take {_text(ps, None)}" for n, ps in some))
    return said


def _text(ps: float, error: float | None) -> str:
    """``3.68 ± 0.21 ms``, in the largest unit in which the value is 1 or more."""
    unit, size = next(((u, s) for u, s in _PS if ps >= s), _PS[-1])
    value = ps / size
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error / size:.{digits}f}") + f" {unit}"


def as_dict(made: Calibrated, out: Path | None) -> dict[str, Any]:
    """For ``--json``: the cost file's content but for the scatter, and the coefficients as people read them."""
    from hoptrace.replay.calibration.cost_file import cost_file

    d = cost_file(made).to_dict()
    d.pop("checksum")
    d["cost"].pop("residuals", None)
    return {"file": None if out is None else str(out), "coefficients": coefficients(made.cost), **d}


def show(made: Calibrated, out: Path | None) -> None:
    """Coefficients, error, captures, domain, what is covered, what cannot be told."""
    from rich.table import Table

    from hoptrace.cli.console import PlainConsole

    console = PlainConsole(highlight=False)

    def line(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    s = made.server
    engine = " ".join(x for x in (s.engine, s.engine_version) if x) or "unknown engine"
    line(f"{s.model or 'unknown model'} on {engine}: step cost from {_captures(made)}.")
    table = Table(box=None, pad_edge=False, show_header=False, title="One step takes", title_justify="left")
    table.add_column("", justify="right")
    table.add_column("")
    for row in coefficients(made.cost):
        table.add_row(row["text"], f"for {row['per']}")
    console.print(table)
    for text in curves(made.cost):
        line(text)
    line(_error(made.cost))
    for c, speed, quarters in zip(made.captures, made.speeds, made.quarters, strict=True):
        line(_speed(c.name, speed.factor, speed.error, speed.told, quarters, len(made.captures)))
    console.print(_outside(made))
    console.print(_domain(made))
    line("Covered what-ifs:")
    for row in made.held.covers(s):
        line(f"  {row['sentence']}")
    for note in dict.fromkeys((*made.notes, *made.cost.notes)):
        console.print("[yellow]note[/yellow] ", end="")
        line(note)
    if out is not None:
        line(f"Written: {out}. Next: hoptrace replay T.trace --cost file:{out} --policy P -o OUT.trace")


def _captures(made: Calibrated) -> str:
    steps = sum(c.steps.height for c in made.captures)
    seconds = sum(c.duration_ns for c in made.captures) / 1e9
    origins = " and ".join(sorted({o.strip() for c in made.captures for o in c.origin.split(",") if o.strip()}))
    where = made.captures[0].name if len(made.captures) == 1 else f"{len(made.captures)} captures"
    return f"{steps:,} {origins or 'known'} steps over {seconds:,.0f} s of {where}"


def _error(cost: StepCost) -> str:
    kinds = {"decode": "decoders", "prefill": "prompts", "mixed": "both"}
    e = cost.error
    parts = [
        f"{kinds[k]} {_pct(v['p50'])} (p95 {_pct(v['p95'])}, bias {100 * v['bias']:+.1f} %)"
        for k, v in e.get("by_kind", {}).items()
        if k in kinds
    ]
    return f"A step that the fit has not seen is predicted to {_pct(e['p50'])} in the median; by kind: {'; '.join(parts)}."


def _pct(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def _speed(name: str, factor: float, error: float | None, told: bool, quarters: tuple[float, ...], n: int) -> str:
    steady = "too short to tell whether the machine was steady"
    if quarters:
        steady = f"its slowest quarter {100 * (max(quarters) / min(quarters) - 1):.0f} % slower than its fastest"
    if n == 1:
        return f"{name}: {steady}."
    if not told:
        return f"{name}: its speed against the others cannot be told; {steady}."
    return f"{name}: equal steps took {factor:.3f} ± {error or 0:.3f} of the captures' mean; {steady}."


def _outside(made: Calibrated) -> Any:
    from rich.table import Table

    names = {
        "arrival_to_sent_ns": "the client sends late by",
        "sent_to_received_ns": "on the way in",
        "received_to_enqueued_ns": "the server's front",
        "enqueued_to_ready_ns": "until the engine begins",
        "between_steps_ns": "between steps",
        "step_to_token_ns": "from a step's end to its token",
        "last_token_to_finish_ns": "from the last token to the end",
    }
    table = Table(box=None, pad_edge=False, title="Outside steps", title_justify="left")
    for column, side in (("", "left"), ("", "right"), ("from", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for name, figure in made.outside.as_dict().items():
        if not isinstance(figure, dict) or "ns" not in figure:
            continue
        value = "unknown" if figure["ns"] is None else f"{figure['ns'] / 1e6:,.2f} ms"
        table.add_row(names.get(name, name.replace("_", " ").removesuffix(" ns")), value, f"{figure.get('n', 0):,}")
    return table


def _domain(made: Calibrated) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title="Measured on", title_justify="left")
    table.add_column("")
    for name in ("steps", "least", "p50", "p95", "most"):
        table.add_column(name, justify="right")
    for name, span in made.held.spans.items():
        values = ("0", "", "", "", "") if span is None else tuple(f"{v:,}" for v in span.as_dict().values())
        table.add_row(name, *values)
    return table
