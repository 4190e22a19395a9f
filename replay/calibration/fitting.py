"""One step cost, and the times outside steps, out of one or several captures of one server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import polars as pl

from hoptrace.comparison import speed
from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Server
from hoptrace.reader import Trace
from hoptrace.reconstruct import steps_of
from hoptrace.replay.calibration.held import FEWEST, Held, held, usable
from hoptrace.replay.calibration.speeds import Speed, speeds
from hoptrace.replay.overheads import Overheads, overheads
from hoptrace.replay.parent import one_rank
from hoptrace.roofline import platform_of
from hoptrace.stepcost import StepCost, fit

__all__ = ["Calibrated", "Capture", "calibrate", "capture_of", "fitted"]

_APART_NS = 10**9  # between captures that are put one after another


@dataclass(frozen=True)
class Capture:
    """What calibration takes from a trace.

    Attributes:
        name: of the trace. created_utc: when it was recorded. server: as its manifest has it. platform: name of the machine, null
            where it is not told.
        steps: usable ones. origin: observed, reconstructed. note: what was said of them, or null.
        outside: the times outside its steps. requests: finished ones. duration_ns: from the first step to the last one's end.
    """

    name: str
    created_utc: str
    server: Server
    platform: str | None
    steps: pl.DataFrame
    origin: str
    note: str | None
    outside: Overheads
    requests: int

    @property
    def duration_ns(self) -> int:
        """From the first step's start to the last one's end."""
        if not self.steps.height:
            return 0
        return int(self.steps["end_ns"].max()) - int(self.steps["start_ns"].min())  # type: ignore[arg-type]


@dataclass(frozen=True)
class Calibrated:
    """``cost`` at the mean speed of the captures; ``stalls``: what their steps took ÷ what the cost gives them, stalls included,
    which the cost is without; ``speeds`` and ``quarters`` (how long equal steps took in each quarter of a capture against its
    mean) by capture; ``held``: by all steps; ``notes``: what cannot be told."""

    captures: tuple[Capture, ...]
    cost: StepCost
    outside: Overheads
    speeds: tuple[Speed, ...]
    quarters: tuple[tuple[float, ...], ...]
    held: Held
    notes: tuple[str, ...]
    stalls: float = 1.0

    @property
    def server(self) -> Server:
        """The first capture's."""
        return self.captures[0].server


def capture_of(trace: Trace, server: str | None = None) -> Capture:
    """What a trace tells.

    Args:
        server: the name of one of its servers; null: all of them, which must then be alike.

    Raises:
        UsageError: it has no such server. InputError: its servers are not alike, or have several data-parallel ranks.
    """
    one_rank(trace)
    known = trace.manifest.servers
    names = ", ".join(s.name for s in known)
    if server is not None and trace.manifest.server(server) is None:
        raise UsageError(f"{trace.name} has no server {server!r}.", hint=f"It has {names or 'none'}.")
    kinds = {(s.engine, s.model) for s in known}
    if server is None and len(kinds) > 1:
        raise InputError(f"The servers of {trace.name} are not alike ({names}).", hint="Name one: --server NAME.")
    seen = steps_of(trace)
    steps, residency = seen.steps, seen.residency
    if server is not None:
        steps, residency = (f.filter(pl.col("server") == server) for f in (steps, residency))
    one = trace.manifest.server(server) or (known[0] if known else Server(name="engine"))
    done = trace.table("requests").filter(pl.col("finish_ns").is_not_null() & pl.col("error").is_null())
    on = platform_of(trace.manifest, one)
    return Capture(
        trace.name, trace.manifest.created_utc, one, None if on is None else str(on.get("name") or "") or None, usable(steps),
        seen.origin, seen.note, overheads(trace, steps, residency), int(done.select(pl.len()).collect().item()),
    )  # fmt: skip


def calibrate(traces: Sequence[Trace], *, server: str | None = None) -> Calibrated:
    """Fit one step cost to the steps of all traces, each one's machine speed taken out. Raises as :func:`capture_of` and
    :func:`fitted`."""
    return fitted([capture_of(t, server) for t in traces])


def fitted(captures: Sequence[Capture]) -> Calibrated:
    """See :func:`calibrate`. InputError: captures of unlike servers, or fewer than 20 usable steps in all."""
    _alike(captures)
    found = speeds([c.steps for c in captures]) if all(c.steps.height for c in captures) else [Speed()] * len(captures)
    steps = _joined([c.steps for c in captures], [s.factor for s in found])
    try:
        cost = fit(steps)
    except InputError as e:
        raise InputError(e.message, hint="Capture longer, or widen it: hoptrace calibrate --probe URL -o probe.trace.") from None
    notes: list[str] = []
    if len(captures) > 1:
        doubted = [c.name for c, s in zip(captures, found, strict=True) if not s.told]
        if doubted:
            notes.append(
                f"How fast the machine was in {', '.join(doubted)} cannot be told from the other captures: too few steps are "
                "alike. It is taken to be the same."
            )
    quarters = tuple(_quarters(c.steps, cost) for c in captures)
    notes += [f"{c.name}: {c.note}" for c in captures if c.note]
    what = held(steps)
    notes += _untold(captures, cost, what)
    stalls = speed(steps, cost) or 1.0
    return Calibrated(
        tuple(captures), cost, _outside(captures), tuple(found), quarters, what, tuple(dict.fromkeys(notes)), stalls
    )  # fmt: skip


def _alike(captures: Sequence[Capture]) -> None:
    first = captures[0]
    for c in captures[1:]:
        for what in ("engine", "model"):
            a, b = getattr(first.server, what), getattr(c.server, what)
            if a is not None and b is not None and a != b:
                raise InputError(
                    f"{first.name} was recorded from {what} {a}, {c.name} from {b}: their steps cannot be fitted as one.",
                    hint="Calibrate each by itself.",
                )


def _joined(frames: Sequence[pl.DataFrame], factors: Sequence[float]) -> pl.DataFrame:
    """All steps at one speed, each capture after the one before, so that its neighbours stay its neighbours."""
    placed, at = [], 0
    columns = [c for c in frames[0].columns if all(c in f.columns for f in frames)]
    for f, factor in zip(frames, factors, strict=True):
        if not f.height:
            continue
        first = int(f["start_ns"].min())  # type: ignore[arg-type]
        took = (f["end_ns"] - f["start_ns"]).to_numpy()
        took = took if factor == 1 else np.maximum(np.rint(took / factor), 1).astype(np.int64)
        start = f["start_ns"].to_numpy() - first + at
        placed.append(f.select(columns).with_columns(pl.Series("start_ns", start), pl.Series("end_ns", start + took)))
        at = int((start + took).max()) + _APART_NS
    return pl.concat(placed) if placed else frames[0].select(columns)


def _quarters(steps: pl.DataFrame, cost: StepCost) -> tuple[float, ...]:
    """How long equal steps took in each quarter of the steps, against their mean; empty for fewer than 40."""
    if steps.height < 40:
        return ()
    took = (steps["end_ns"] - steps["start_ns"]).to_numpy()
    priced = cost.cost_ns_array(steps)
    mean = took.sum() / max(int(priced.sum()), 1)
    parts = np.array_split(np.arange(len(took)), 4)
    return tuple(round(float(took[p].sum() / max(int(priced[p].sum()), 1) / mean), 4) for p in parts)


def _outside(captures: Sequence[Capture]) -> Overheads:
    """Each time as the mean of the captures that tell it, weighted by how many values are behind it."""
    names = [f.name for f in fields(Overheads) if f.name != "n"]
    if len(captures) == 1:
        return captures[0].outside
    counts = [sum(c.outside.n[i] for c in captures) for i in range(len(names))]
    values: dict[str, Any] = {
        name: round(sum(getattr(c.outside, name) * c.outside.n[i] for c in captures) / counts[i]) if counts[i] else 0
        for i, name in enumerate(names)
    }
    return replace(Overheads(**values), n=tuple(counts))


def _untold(captures: Sequence[Capture], cost: StepCost, what: Held) -> list[str]:
    """What captures of this size cannot tell."""
    notes = []
    seconds, requests = sum(c.duration_ns for c in captures) / 1e9, sum(c.requests for c in captures)
    if seconds < 120:
        notes.append(
            f"{seconds:.0f} s of steps: how the machine's speed changes over minutes is not told; capture 2 to 5 minutes."
        )
    if requests < 100:
        notes.append(f"{requests} requests: the error under the own policy is not told beyond p95 or so.")
    names = {"decode": "decoders alone", "prefill": "prompts alone", "mixed": "prompts beside decoders"}
    for kind, name in names.items():
        n = what.kinds[kind]
        if n < FEWEST:
            lacks = "their cost is extrapolated from the others'" if not n else "how they scatter is not told"
            notes.append(f"{n} step{'' if n == 1 else 's'} of {name}: {lacks}.")
    return notes
