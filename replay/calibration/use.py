"""A cost file in a replay: is it this server's, at what speed of the machine, and which of its times outside steps count."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from hoptrace.comparison import speed
from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Server
from hoptrace.replay.calibration.cost_file import CostFile, read_cost_file
from hoptrace.replay.calibration.held import FEWEST, usable
from hoptrace.replay.overheads import Overheads
from hoptrace.stepcost import FEATURES, StepCost, features_array

__all__ = ["Used", "merged", "scaled", "use"]

_CLIENTS = ("arrival_to_sent_ns", "sent_to_received_ns")
"""Times outside steps that are the load generator's and the network's: the trace's own count, if it tells them."""
_SIZES = (
    "model", "parameters", "weight_bytes", "layers", "kv_heads", "heads", "head_size", "hidden_size", "kv_dtype",
    "block_size_tokens", "block_count", "kv_capacity_tokens",
)  # fmt: skip
# Settings that change how long equal steps take: said by name where they differ.
_SETTINGS = ("engine_version", "weight_bytes", "kv_dtype")
_CONFIG = ("dtype", "quantization", "tensor_parallel_size", "pipeline_parallel_size", "enforce_eager", "n_gpu_layers", "threads")
_ANOTHER = 1.5
"""A shared machine was seen to differ by 10 to 40 % from run to run."""
_HINT = "Write --cost file:cost.json, or file:cost.json,speed=1.1 (trace, measured, or a number)."


@dataclass(frozen=True)
class Used:
    """What a replay takes from a cost file: as :class:`hoptrace.replay.cost.Chosen`, and ``outside``."""

    cost: StepCost
    how: dict[str, Any]
    server: Server
    outside: Overheads
    notes: tuple[str, ...]


def use(
    text: str,
    server: Server,
    steps: pl.DataFrame | None,
    *,
    model: str | None = None,
    platform: str | None = None,
    recorded_on: str | None = None,
) -> Used:
    """The cost file that ``text`` names: ``PATH[,speed=trace|measured|NUMBER]``.

    By ``trace``, the default, the costs are scaled so that the trace's own steps take as long in sum as they did, where 20 or
    more of them lie within what the cost was measured on: the machine was faster or slower when the trace was recorded.
    ``measured`` leaves them; a number is how many times as long steps take.

    Args:
        server: the trace's. steps: the trace's, or null. model, platform: what was asked for. recorded_on: platform of the trace.

    Raises:
        UsageError: the text is no cost file's, or a model was asked for that is not the file's.
        InputError: the file cannot be read, or the trace's server has another model or engine than it was measured on.
    """
    path, factor = _parsed(text)
    content = read_cost_file(path)
    notes = [*_refused_or_said(path, content, server, model), *_machine(content, platform, recorded_on)]
    cost, applied, told = content.cost, 1.0, "as measured"
    if isinstance(factor, float):
        applied, told = factor, f"{factor:g} times as long, as asked for"
    elif factor == "trace":
        known = _comparable(steps, cost)
        found = speed(known, cost) if known.height >= FEWEST else None
        if found is not None:
            # Both sides with their stalls, which the cost is without: a replay draws the cost's.
            found /= content.stalls
            applied, told = found, "by the trace's own steps"
            if abs(found - 1) > 0.02:
                slower = f"{100 * (found - 1):.0f} % longer" if found > 1 else f"{100 * (1 - found):.0f} % shorter"
                notes.append(
                    f"The trace's steps took {slower} than {path.name} says of such steps; its costs are scaled by {found:.3f} "
                    "(speed=measured leaves them as they are)."
                )
            if not 1 / _ANOTHER <= found <= _ANOTHER:
                notes.append("That is more than one machine's speed drifts by: is it the machine that the cost was measured on?")
    sized = {
        k: getattr(content.server, k) for k in _SIZES if getattr(server, k) is None and getattr(content.server, k) is not None
    }
    # Either of the two says how much KV space there is. That of a server set otherwise (other slots, another context) is not the
    # trace's: it would be a limit that its server never had.
    pairs = [(getattr(server, k), getattr(content.server, k)) for k in ("max_sequences", "context_tokens")]
    set_otherwise = any(None not in pair and pair[0] != pair[1] for pair in pairs)
    if server.kv_capacity_tokens or server.block_count or set_otherwise:
        sized = {k: v for k, v in sized.items() if k not in ("kv_capacity_tokens", "block_count")}
    blocks, tokens = sized.get("block_count"), sized.get("kv_capacity_tokens")
    if size := f"{tokens:,} tokens" if tokens else f"{blocks:,} blocks" if blocks else "":
        notes.append(f"The trace tells no KV space: {size}, as the server had that {path.name} was measured on.")
    cost = replace(scaled(cost, applied), notes=(*notes, *_from(path, content), *cost.notes))
    how = {"kind": "file", "file": path.name, "made_utc": content.made_utc, "measured_on": _where(content),
           "captures": [c.get("trace") for c in content.captures], "speed": round(applied, 6), "speed_from": told}  # fmt: skip
    return Used(cost, how, server.model_copy(update=sized), content.outside, tuple(notes))


def _comparable(steps: pl.DataFrame | None, cost: StepCost) -> pl.DataFrame:
    """The trace's steps that tell how fast the machine was: those within what the cost was measured on, since of others the
    extrapolation would be taken for the machine; all, where the cost does not say what it was measured on."""
    if steps is None or not steps.height:
        return pl.DataFrame()
    known = usable(steps)
    features = features_array(known)
    within = np.ones(known.height, dtype=bool)
    for i, name in enumerate(FEATURES):
        if name in cost.domain:
            low, high = cost.domain[name]
            within &= (features[:, i] == 0) | ((features[:, i] >= low) & (features[:, i] <= high))
    return known.filter(pl.Series(within))


def scaled(cost: StepCost, factor: float) -> StepCost:
    """A step cost with every step ``factor`` times as long; residuals are relative, stalls stay as long as they were."""
    if factor == 1:
        return cost
    covariance = cost.covariance_ps2
    return replace(
        cost,
        coefficients_ps={k: round(v * factor) for k, v in cost.coefficients_ps.items()},
        compute_ps={k: round(v * factor) for k, v in cost.compute_ps.items()},
        pieces=tuple(
            replace(p, grid=replace(p.grid, rows=tuple(tuple((x, round(ps * factor)) for x, ps in r) for r in p.grid.rows)))
            for p in cost.pieces
        ),
        covariance_ps2=None if covariance is None else tuple(tuple(v * factor**2 for v in row) for row in covariance),
    )


def merged(measured: Overheads, trace: Overheads) -> Overheads:
    """The times outside steps of a replay: the file's, but the trace's where the file tells none, or where they are the client's
    and the network's and the trace tells them."""
    names = [f.name for f in fields(Overheads) if f.name != "n"]
    values, counts = {}, []
    for i, name in enumerate(names):
        own = trace.n[i] > 0 and (name in _CLIENTS or not measured.n[i])
        one = trace if own else measured
        values[name] = getattr(one, name)
        counts.append(one.n[i])
    return replace(trace, **values, n=tuple(counts))


def _parsed(text: str) -> tuple[Path, float | str]:
    path, comma, given = text.rpartition(",speed=")
    if not comma:
        return Path(text), "trace"
    if given in ("trace", "measured"):
        return Path(path), given
    number = float(given) if re.fullmatch(r"\d{1,6}(\.\d{1,9})?", given) else math.nan
    if not 0.01 <= number <= 100:
        raise UsageError(f"{given!r} is no speed of a cost file: trace, measured, or a number from 0.01 to 100.", hint=_HINT)
    return Path(path), number


def _refused_or_said(path: Path, content: CostFile, server: Server, model: str | None) -> list[str]:
    there = content.server
    if model is not None and model not in (there.model, server.model):
        raise UsageError(
            f"{path} was measured on the model {there.model or 'of unknown name'}, and --model {model} is another.",
            hint="Leave out --model, or use --cost roofline.",
        )
    for what, a, b in (("model", there.model, server.model), ("engine", there.engine, server.engine)):
        if a is not None and b is not None and a != b:
            raise InputError(
                f"{path} was measured on the {what} {a}; the trace's server has {b}.",
                hint="Calibrate on a capture of that server, or use --cost roofline.",
            )
    pairs = [(k, getattr(there, k), getattr(server, k)) for k in _SETTINGS]
    pairs += [(k, there.config.get(k), server.config.get(k)) for k in _CONFIG]
    differ = [f"{k.replace('_', ' ')} {a}, here {b}" for k, a, b in pairs if a is not None and b is not None and a != b]
    return [f"{path.name} was measured with {'; '.join(differ)}: its costs may not hold here."] if differ else []


def _machine(content: CostFile, platform: str | None, recorded_on: str | None) -> list[str]:
    measured = content.platform
    asked = platform or recorded_on
    if asked is None or asked == measured:
        return []
    where = measured or "a machine that it does not name"
    return [
        f"The step cost was measured on {where} and is not scaled to {asked}: that is where transfers and memory are taken from."
    ]


def _where(content: CostFile) -> str:
    s = content.server
    on = f" on {content.platform}" if content.platform else ""
    return f"{s.model or 'unknown model'}, {s.engine or 'unknown engine'} {s.engine_version or ''}".rstrip() + on


def _from(path: Path, content: CostFile) -> list[str]:
    names = ", ".join(str(c.get("trace")) for c in content.captures) or "captures that it does not name"
    return [f"Step cost and times outside steps from {path.name}: {_where(content)}; fitted to {names}."]
