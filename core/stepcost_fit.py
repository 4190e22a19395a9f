"""The fit behind :func:`hoptrace.stepcost.fit`: weighted, non-negative, robust least squares with cross-validation and block
bootstrap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from hoptrace.errors import InputError
from hoptrace.nnls import nnls
from hoptrace.stepcost import FEATURES, StepCost, features_array
from hoptrace.stepcost_residuals import residuals

__all__ = ["fit_steps", "solve"]

MIN_STEPS = 20
_FOLDS = 5
# Contiguous blocks of steps are left out, or drawn, together: neighbours are alike (load of a shared machine comes and goes over
# seconds), and small blocks would let such a phase pass for a feature.
_BLOCKS = 30
_DRAWS = 200
_SEED = 20260101
_OUTLIER = 8.0  # robust standard deviations
_MOST_OUTLIERS = 0.1  # share of the steps that may be left out
_DOUBT = 2.5  # a feature is taken in if it lessens the cross-validated error by this many standard errors of the gain
_BASE = ("step", "prefill_tokens", "decode_requests")
# Which of several features that the data cannot tell apart is kept: the first.
_PREFERENCE = (
    "step", "prefill_tokens", "decode_requests", "any_prefill", "batched", "decode_context_tokens", "prefill_attention",
    "prefill_context_tokens", "any_decode",
)  # fmt: skip

_Array = np.ndarray[Any, np.dtype[np.float64]]
_Mask = np.ndarray[Any, np.dtype[np.bool_]]


def fit_steps(steps: pl.DataFrame) -> StepCost:
    """See :func:`hoptrace.stepcost.fit`."""
    frame = _usable(steps)
    if frame.height < MIN_STEPS:
        raise InputError(
            f"A step cost needs at least {MIN_STEPS} steps with known times and composition; the trace has {frame.height}.",
            hint="Capture longer, or use a cost model that is not fitted (roofline).",
        )
    whole = features_array(frame)
    x = whole.astype(np.float64)
    x[:, FEATURES.index("prefill_attention")] /= 1000
    y = (frame["end_ns"] - frame["start_ns"]).to_numpy().astype(np.float64)
    block = np.arange(len(y)) * min(_BLOCKS, len(y)) // len(y)

    columns, merged = _identifiable(x)
    columns, useless = _helpful(x, y, columns, block)
    beta, keep = _robust(x[:, columns], y)
    some = _sample(len(y), 20_000)
    predicted = _cross_validate(x[some][:, columns], y[some], block[some])
    covariance = _bootstrap(x[keep][:, columns], y[keep], block[keep], beta)

    ps = {FEATURES[c]: round(b * 1000) for c, b in zip(columns, beta, strict=True) if round(b * 1000) > 0}
    full = np.zeros((len(FEATURES), len(FEATURES)))
    full[np.ix_(columns, columns)] = covariance * 1e6
    cost = StepCost(
        coefficients_ps={f: ps[f] for f in FEATURES if f in ps},
        origin="fitted",
        domain={f: (int(whole[:, i].min()), int(whole[:, i].max())) for i, f in enumerate(FEATURES)},
        error=_error(x[some], y[some], predicted, keep[some]) | _left_out(y, keep),
        covariance_ps2=tuple(tuple(float(f"{v:.6g}") for v in row) for row in full),
        notes=_notes(merged, useless, y, keep),
    )
    left = residuals(y.astype(np.int64), cost.cost_ns_array(frame), whole[:, 1] > 0, whole[:, 2] > 0, keep)
    return replace(cost, residuals=left)


def _usable(steps: pl.DataFrame) -> pl.DataFrame:
    known = ["start_ns", "end_ns", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens"]
    frame = steps.drop_nulls(known).filter(
        (pl.col("end_ns") > pl.col("start_ns")) & (pl.col("prefill_tokens") + pl.col("decode_requests") > 0)
    )
    if "pp_rank" in frame.columns:
        frame = frame.filter(pl.col("pp_rank").fill_null(0) == 0)
    return frame.sort("start_ns")


def solve(x: _Array, y: _Array, weight: _Array) -> _Array:
    """argmin Σ weight² (y − xβ)², β ≥ 0, by QR, so that the cost of the active-set search does not grow with the steps."""
    a, b = x * weight[:, None], y * weight
    scale = np.sqrt((a * a).sum(axis=0))
    scale[scale == 0] = 1
    # With y as a last column, R holds Qᵀy too, and Q itself need not be made.
    k = x.shape[1]
    r: _Array = np.linalg.qr(np.column_stack([a / scale, b]), mode="r")  # type: ignore[assignment]
    return nnls(r[:k, :k], r[:k, k]) / scale  # type: ignore[no-any-return]


def _robust(x: _Array, y: _Array) -> tuple[_Array, _Mask]:
    """Coefficients (ns per unit) and which steps were kept."""
    floor = float(np.median(y)) * 0.02
    beta = solve(x, y, 1 / np.maximum(y, floor))
    keep = np.ones(len(y), dtype=bool)
    for _ in range(12):
        expected = np.maximum(x @ beta, floor)
        residual = (y - expected) / expected
        sigma = _sigma(residual)
        huber = np.minimum(1, 1.345 * sigma / np.maximum(np.abs(residual), 1e-12))
        new = solve(x, y, np.sqrt(huber) / expected)
        if np.allclose(new, beta, rtol=1e-6):
            break
        beta = new
    expected = np.maximum(x @ beta, floor)
    residual = np.abs(y - expected) / expected
    keep = residual <= max(_OUTLIER * _sigma((y - expected) / expected), float(np.quantile(residual, 1 - _MOST_OUTLIERS)))
    for _ in range(4):
        beta = solve(x[keep], y[keep], 1 / np.maximum(x[keep] @ beta, floor))
    total = float((x[keep] @ beta).sum())
    return (beta * (float(y[keep].sum()) / total) if total > 0 else beta), keep


def _sigma(residual: _Array) -> float:
    """Robust standard deviation: 1.4826 × median absolute deviation; at least one in ten thousand, for data without noise."""
    return max(1.4826 * float(np.median(np.abs(residual - np.median(residual)))), 1e-4)


def _identifiable(x: _Array) -> tuple[list[int], list[str]]:
    """Columns that are linearly independent (to 1 in 1000 of their length), by preference; and the names of the others."""
    kept: list[int] = []
    basis: list[_Array] = []
    dropped: list[str] = []
    for name in _PREFERENCE:
        i = FEATURES.index(name)
        v = x[:, i].copy()
        length = float(np.linalg.norm(v))
        if length == 0:
            continue
        if name == "prefill_context_tokens" and v.max() < 0.5 * x[:, FEATURES.index("prefill_tokens")].max():
            # Next to none was seen (a few tokens of a shared prefix): its cost would be noise, and dear in a what-if.
            dropped.append(name)
            continue
        for b in basis:
            v -= (b @ v) * b
        rest = float(np.linalg.norm(v))
        if rest < 1e-3 * length:
            dropped.append(name)
            continue
        kept.append(i)
        basis.append(v / rest)
    return sorted(kept), dropped


def _cross_validate(x: _Array, y: _Array, block: np.ndarray[Any, Any]) -> _Array:
    """Prediction of each step by a fit that has not seen its block."""
    predicted = np.zeros(len(y))
    for fold in range(_FOLDS):
        test = block % _FOLDS == fold
        if test.any():
            beta, _ = _robust(x[~test], y[~test])
            predicted[test] = x[test] @ beta
    return predicted


def _loss(x: _Array, y: _Array, columns: list[int], block: np.ndarray[Any, Any]) -> _Array:
    """By block, the cross-validated squared relative error, half of the weight by steps and half by time: decode steps are
    many, prefills are long."""
    predicted = _cross_validate(x[:, columns], y, block)
    error = np.abs(predicted - y) / np.maximum(predicted, 0.02 * float(np.median(y)))
    return np.bincount(block, weights=error**2 * (1 / len(y) + y / y.sum()) / 2).astype(np.float64)


def _helpful(x: _Array, y: _Array, columns: list[int], block: np.ndarray[Any, Any]) -> tuple[list[int], list[str]]:
    """Forward selection: from a constant, prompt tokens and decoders, add the feature that lessens the error most, while the
    gain is well beyond its own standard error over the blocks.

    Adding and not leaving out, since a feature that explains noise may still cost a what-if dearly far from what was seen.
    """
    some = _sample(len(y), 5_000)
    x, y, block = x[some], y[some], block[some]
    _, keep = _robust(x[:, columns], y)  # an outlier says nothing of a feature
    x, y, block = x[keep], y[keep], block[keep]
    chosen = [c for c in columns if FEATURES[c] in _BASE]
    rest = [c for c in columns if c not in chosen]
    if not chosen:
        chosen, rest = rest[:1], rest[1:]
    best = _loss(x, y, chosen, block)
    while rest:
        tried = {c: _loss(x, y, sorted([*chosen, c]), block) for c in rest}
        gains = []
        for c, loss in tried.items():
            gain = best - loss
            doubt = float(gain.std() * np.sqrt(len(gain)))
            if gain.sum() > max(_DOUBT * doubt, 1e-3 * best.sum(), 1e-12):
                gains.append((float(gain.sum()), -_PREFERENCE.index(FEATURES[c]), c))
        if not gains:
            break
        new = max(gains)[2]
        chosen, rest, best = sorted([*chosen, new]), [c for c in rest if c != new], tried[new]
    return chosen, [FEATURES[c] for c in rest]


def _bootstrap(x: _Array, y: _Array, block: np.ndarray[Any, Any], beta: _Array) -> _Array:
    """Covariance of the coefficients (ns²) from redrawing blocks of steps, with the kept steps' final weights."""
    weight = 1 / np.maximum(x @ beta, float(np.median(y)) * 0.02)
    blocks = np.unique(block)
    scale = np.sqrt(((x * weight[:, None]) ** 2).sum(axis=0))
    scale[scale == 0] = 1
    k = x.shape[1]
    n = len(blocks)
    gram, right, x_sum, y_sum = np.zeros((n, k, k)), np.zeros((n, k)), np.zeros((n, k)), np.zeros(n)
    for i, b in enumerate(blocks):
        rows = block == b
        a = x[rows] * weight[rows, None] / scale
        gram[i], right[i] = a.T @ a, a.T @ (y[rows] * weight[rows])
        x_sum[i], y_sum[i] = x[rows].sum(axis=0), y[rows].sum()
    rng = np.random.default_rng(_SEED)
    draws = []
    for _ in range(_DRAWS):
        times = np.bincount(rng.integers(0, len(blocks), len(blocks)), minlength=len(blocks)).astype(np.float64)
        g = np.tensordot(times, gram, 1) + 1e-10 * np.eye(k)
        low = np.linalg.cholesky(g)
        drawn = nnls(low.T, np.linalg.solve(low, times @ right)) / scale
        total = float(times @ x_sum @ drawn)
        if total > 0:
            draws.append(drawn * float(times @ y_sum) / total)
    return np.atleast_2d(np.cov(np.array(draws).T))


def _error(x: _Array, y: _Array, predicted: _Array, keep: _Mask) -> dict[str, Any]:
    relative = np.abs(predicted - y) / y
    signed = ((y - predicted) / np.maximum(predicted, 1))[keep]

    out: dict[str, Any] = {}
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        out[name] = _digits(float(np.quantile(relative, q)))
    out["bias"] = _digits(float(predicted[keep].sum() / y[keep].sum() - 1))
    out["sd"] = _digits(float(signed.std()))
    prefill, decode = x[:, 1] > 0, x[:, 2] > 0
    out["by_kind"] = {}
    for name, rows in (("decode", decode & ~prefill), ("prefill", prefill & ~decode), ("mixed", prefill & decode)):
        rows &= keep
        if rows.any():
            out["by_kind"][name] = {
                "n": int(rows.sum()),
                "p50": _digits(float(np.quantile(relative[rows], 0.5))),
                "p95": _digits(float(np.quantile(relative[rows], 0.95))),
                "bias": _digits(float(predicted[rows].sum() / y[rows].sum() - 1)),
            }
    return out


def _left_out(y: _Array, keep: _Mask) -> dict[str, Any]:
    return {"n": len(y), "left_out": int((~keep).sum()), "left_out_time": _digits(float(y[~keep].sum() / y.sum()))}


def _digits(v: float) -> float:
    return float(f"{v:.4g}")


def _sample(n: int, most: int) -> np.ndarray[Any, Any]:
    """Every k-th of n rows, so that at most about ``most`` are left."""
    return np.arange(0, n, max(1, -(-n // most)))


def _notes(merged: list[str], useless: list[str], y: _Array, keep: _Mask) -> tuple[str, ...]:
    notes = []
    if merged:
        notes.append(
            f"The steps cannot tell the cost of {', '.join(merged)} (too little of it, or always along with others); left out."
        )
    if useless:
        notes.append(f"Did not lessen the cross-validated error: {', '.join(useless)}; left out.")
    out = ~keep
    if out.any():
        share = float(y[out].sum() / y.sum())
        notes.append(f"{int(out.sum())} of {len(y)} steps ({share:.1%} of the time) were outliers and are not in the mean cost.")
    return tuple(notes)
