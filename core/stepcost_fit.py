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
from hoptrace.stepcost_curve import Curve, curve
from hoptrace.stepcost_residuals import residuals
from hoptrace.stepcost_robust import keep_usual, robust, solve
from hoptrace.stepcost_table import Piece

__all__ = ["fit_steps", "solve"]

MIN_STEPS = 20
_FOLDS = 5
# Contiguous blocks of steps are left out, or drawn, together: neighbours are alike (load of a shared machine comes and goes over
# seconds), and small blocks would let such a phase pass for a feature.
_BLOCKS = 30
_DRAWS = 200
_SEED = 20260101
_DOUBT = 1.5  # a feature is taken in if it lessens the cross-validated error by this many standard errors of the gain
# Where few steps hold prompts and decoders, a constant of each is hardly told from one of all.
_SAME_DOUBT = 2.5
_CURVE_DOUBT = 1.0  # likewise a curve of decoders instead of a line: it costs no what-if dearly, since it has what was seen only
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
    some = _sample(len(y), 20_000)
    predicted = _cross_validate(x[some][:, columns], y[some], block[some])
    bent = _curve(x, y, columns, block, predicted, some)
    if bent is None:
        beta = np.zeros(len(FEATURES))
        beta[columns], keep = robust(x[:, columns], y)
        covariance = _bootstrap(x[keep][:, columns], y[keep], block[keep], beta[columns])
        pieces: tuple[Piece, ...] = ()
    else:
        found, predicted = bent
        beta, pieces, useless = found.beta, (found.piece(),), []
        keep = keep_usual(y, np.maximum(found.predict(x), 0.02 * float(np.median(y))))
        # Of the curve itself no covariance is told: a refit of redrawn steps tells it (replay/uncertainty).
        columns = [c for c in found.columns if beta[c] > 0]
        rows = keep & (x[:, FEATURES.index("prefill_tokens")] > 0)
        drawn = np.column_stack([x[:, columns], found.decoders(x[:, FEATURES.index("decode_requests")])])[rows]
        k = len(columns)
        covariance = np.zeros((k, k))
        if k and rows.any():
            covariance = _bootstrap(drawn, y[rows], block[rows], np.append(beta[columns], found.share))[:k, :k]

    ps = {FEATURES[c]: round(b * 1000) for c, b in enumerate(beta) if round(b * 1000) > 0}
    full = np.zeros((len(FEATURES), len(FEATURES)))
    full[np.ix_(columns, columns)] = covariance * 1e6
    cost = StepCost(
        coefficients_ps=ps,
        origin="fitted",
        pieces=pieces,
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
            beta, _ = robust(x[~test], y[~test])
            predicted[test] = x[test] @ beta
    return predicted


def _loss(x: _Array, y: _Array, columns: list[int], block: np.ndarray[Any, Any]) -> _Array:
    """By block, the cross-validated squared relative error, half of the weight by steps and half by time: decode steps are
    many, prefills are long."""
    return _of_blocks(_cross_validate(x[:, columns], y, block), y, block)


def _of_blocks(predicted: _Array, y: _Array, block: np.ndarray[Any, Any]) -> _Array:
    """See :func:`_loss`."""
    error = np.abs(predicted - y) / np.maximum(predicted, 0.02 * float(np.median(y)))
    return np.bincount(block, weights=error**2 * (1 / len(y) + y / y.sum()) / 2).astype(np.float64)


def _helpful(x: _Array, y: _Array, columns: list[int], block: np.ndarray[Any, Any]) -> tuple[list[int], list[str]]:
    """Forward selection: from a constant, prompt tokens and decoders, add the feature that lessens the error most, while the
    gain is well beyond its own standard error over the blocks.

    Adding and not leaving out, since a feature that explains noise may still cost a what-if dearly far from what was seen.
    """
    some = _sample(len(y), 5_000)
    x, y, block = x[some], y[some], block[some]
    _, keep = robust(x[:, columns], y)  # an outlier says nothing of a feature
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
            if gain.sum() > max((_DOUBT if FEATURES[c] != "any_decode" else _SAME_DOUBT) * doubt, 1e-3 * best.sum(), 1e-12):
                gains.append((float(gain.sum()), -_PREFERENCE.index(FEATURES[c]), c))
        if not gains:
            break
        new = max(gains)[2]
        chosen, rest, best = sorted([*chosen, new]), [c for c in rest if c != new], tried[new]
    return chosen, [FEATURES[c] for c in rest]


def _curve(
    x: _Array, y: _Array, columns: list[int], block: np.ndarray[Any, Any], straight: _Array, some: np.ndarray[Any, Any]
) -> tuple[Curve, _Array] | None:
    """A fit with a curve of decoders, and its cross-validated prediction of ``some`` steps; null where it does not lessen the
    error of the ``straight`` one."""
    every = sorted({*columns, *(FEATURES.index(f) for f in ("any_prefill", "prefill_tokens"))})
    xs, ys, bs = x[some], y[some], block[some]
    bent = np.zeros(len(ys))
    for fold in range(_FOLDS):
        test = bs % _FOLDS == fold
        if not test.any():
            continue
        c = curve(xs[~test], ys[~test], every)
        if c is None:
            return None
        bent[test] = c.predict(xs[test])
    before = _of_blocks(straight, ys, bs)
    gain = before - _of_blocks(bent, ys, bs)
    if gain.sum() <= max(_CURVE_DOUBT * float(gain.std() * np.sqrt(len(gain))), 1e-2 * before.sum(), 1e-12):
        return None
    found = curve(x, y, every)
    return None if found is None else (found, bent)


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
