"""Step costs that the recorded steps could have given as well: features chosen and coefficients fitted anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from hoptrace.comparison import COMPOSITION
from hoptrace.errors import InputError
from hoptrace.stepcost import FEATURES, StepCost, features_array, fit
from hoptrace.stepcost_curve import curve
from hoptrace.stepcost_robust import robust

__all__ = ["FORMS", "applied", "from_covariance", "refitted", "slower"]

FORMS = 4
"""Fits that choose their features anew; the other draws are fitted in these forms, and in the cost's own, in turns."""
_BLOCKS = 30
_ATTENTION = FEATURES.index("prefill_attention")
_Floats = np.ndarray[Any, np.dtype[np.float64]]


def refitted(steps: pl.DataFrame, n: int, rng: np.random.Generator) -> list[StepCost]:
    """``n`` step costs, each fitted to the steps redrawn in thirty contiguous blocks, as the fit's own bootstrap draws them.

    Some choose their features anew, and whether decoders follow a curve, and the others are fitted in the forms that these found:
    so what the data hardly tells (a feature that was just left out) is doubted too, most where a what-if leaves the domain.
    Fewer than ``n``, or none, where the redrawn steps cannot be fitted.
    """
    frame = steps.drop_nulls(COMPOSITION).filter(pl.col("end_ns") > pl.col("start_ns")).sort("start_ns")
    parts = np.array_split(np.arange(frame.height), min(_BLOCKS, max(frame.height, 1)))
    forms: list[StepCost] = []
    found = []
    for i in range(n if frame.height else 0):
        drawn = frame[np.concatenate([parts[j] for j in rng.integers(0, len(parts), len(parts))])]
        took = (drawn["end_ns"] - drawn["start_ns"]).to_numpy()
        begin = np.concatenate([[0], np.cumsum(took[:-1])])
        drawn = drawn.with_columns(pl.Series("start_ns", begin), pl.Series("end_ns", begin + took))
        try:
            if i < FORMS:
                forms.append(fit(drawn))
                found.append(forms[-1])
            elif forms and (again := _in_form(drawn, forms[i % len(forms)])) is not None:
                found.append(again)
        except InputError:  # too few usable steps among those drawn
            continue
    return found


def _in_form(steps: pl.DataFrame, form: StepCost) -> StepCost | None:
    """A step cost with the features of ``form``, and a curve of decoders where it has one."""
    known = steps.filter(pl.col("prefill_tokens") + pl.col("decode_requests") > 0)
    x = features_array(known).astype(np.float64)
    x[:, _ATTENTION] /= 1000
    y = (known["end_ns"] - known["start_ns"]).to_numpy().astype(np.float64)
    columns = [i for i, f in enumerate(FEATURES) if f in form.coefficients_ps]
    beta, pieces = np.zeros(len(FEATURES)), form.pieces
    if pieces:
        bent = curve(x, y, columns)
        if bent is None:
            return None
        beta, pieces = bent.beta, (bent.piece(),)
    else:
        beta[columns], _ = robust(x[:, columns], y)
    ps = {f: round(b * 1000) for f, b in zip(FEATURES, beta, strict=True) if round(b * 1000) > 0}
    return replace(form, coefficients_ps=ps, pieces=pieces)


def from_covariance(cost: StepCost, steps: pl.DataFrame, n: int, rng: np.random.Generator) -> list[StepCost]:
    """``n`` draws of a normal distribution of the cost's covariance, where the steps it was fitted to are not at hand: never
    negative, and the time of ``steps`` kept when that cuts something off. Empty without a covariance (one of zeros is none)."""
    if cost.covariance_ps2 is None or not np.any(cost.covariance_ps2):
        return []
    mean = np.array([cost.coefficients_ps.get(f, 0) for f in FEATURES], dtype=np.float64)
    values, vectors = np.linalg.eigh(np.array(cost.covariance_ps2))
    root = vectors * np.sqrt(np.maximum(values, 0))
    raw = mean + rng.standard_normal((n, len(mean))) @ root.T
    cut = np.maximum(raw, 0)
    weight = _weight(steps)
    before, after = raw @ weight, cut @ weight
    scale = np.where((before > 0) & (after > 0), before / np.where(after > 0, after, 1), 1.0)
    drawn = ({f: round(v) for f, v in zip(FEATURES, row, strict=True) if v >= 0.5} for row in cut * scale[:, None])
    return [replace(cost, coefficients_ps=d) for d in drawn]


def _weight(steps: pl.DataFrame) -> _Floats:
    """Σ of each feature over the steps of known composition; one step's constant where there are none."""
    known = steps.drop_nulls(COMPOSITION[2:]) if set(COMPOSITION) <= set(steps.columns) else steps.clear()
    if not known.height:
        constant: _Floats = np.zeros(len(FEATURES))
        constant[0] = 1
        return constant
    total: _Floats = features_array(known).astype(np.float64).sum(axis=0)
    total[_ATTENTION] /= 1000
    return total


def applied(cost: StepCost, base: StepCost, drawn: StepCost, speed: float) -> StepCost:
    """``cost`` with ``drawn`` in place of ``base``, so much slower, and its own residuals.

    Where ``cost`` is ``base`` itself, that is ``drawn``. Where it was made from it (another platform, a ceiling), each
    coefficient changes in the proportion in which base's does, what was taken away stays away, looked-up parts stay as they are.
    """
    if cost.coefficients_ps == base.coefficients_ps and cost.pieces == base.pieces:
        return replace(slower(drawn, speed), residuals=cost.residuals)
    new = {}
    for f, v in cost.coefficients_ps.items():
        had = 0 if base.pieces else base.coefficients_ps.get(f, 0)
        new[f] = round(v * drawn.coefficients_ps.get(f, 0) / had) if had else v
    return slower(replace(cost, coefficients_ps=new), speed)


def slower(cost: StepCost, factor: float) -> StepCost:
    """A cost whose steps take ``factor`` times as long; stalls stay as long as they are."""
    coefficients = {f: round(v * factor) for f, v in cost.coefficients_ps.items()}
    compute = {f: round(v * factor) for f, v in cost.compute_ps.items()}
    pieces = []
    for p in cost.pieces:
        prompts, decoders, both = (round(f * factor) for f in p.factors)
        pieces.append(replace(p, factors=(prompts, decoders, both)))
    return replace(cost, coefficients_ps=coefficients, compute_ps=compute, pieces=tuple(pieces))
