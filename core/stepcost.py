"""What one step of an engine costs, given what is in it: fitted to recorded steps, from a roofline, or fixed by hand.

All costs are integers: coefficients in whole picoseconds per unit, results in whole nanoseconds, so that a replay gives the
same rows on every machine. :mod:`hoptrace.stepcost_kernel` has the same arithmetic for numba.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from hoptrace.errors import InputError
from hoptrace.manifest import Manifest, Server
from hoptrace.stepcost_table import MILLION, STALL, Composition, Piece

__all__ = [
    "FEATURES", "RESIDUALS", "UNITS", "StepCost", "composition_of", "features_array", "fit", "fixed", "interference",
    "known_cost", "outside", "roofline",
]  # fmt: skip

FEATURES = (
    "step",
    "any_prefill",
    "any_decode",
    "prefill_tokens",
    "prefill_context_tokens",
    "prefill_attention",
    "decode_requests",
    "decode_context_tokens",
    "batched",
)
UNITS: dict[str, str] = {
    "step": "ps per step",
    "any_prefill": "ps per step with prefill",
    "any_decode": "ps per step with decode",
    "prefill_tokens": "ps per prompt token computed",
    "prefill_context_tokens": "ps per token of context before a chunk",
    # Attention costs less than a picosecond per token² on a large GPU, hence the thousand.
    "prefill_attention": "ps per 1000 token² of Σ tokens × (context + tokens ÷ 2)",
    "decode_requests": "ps per decoding request",
    "decode_context_tokens": "ps per token of the decoders' context",
    # One token goes through matrix × vector kernels, more through matrix × matrix: llama.cpp's step of SmolLM2-135M on one core
    # takes 14 ms with one decoder, 32, 43 and 50 ms with two, three and four. No straight line says that.
    "batched": "ps per step of more than one token",
}
_N = len(FEATURES)
_ATTENTION = FEATURES.index("prefill_attention")
RESIDUALS = ("decode", "prefill", "mixed")
"""Kinds of steps that have residuals of their own, in the kernel's order."""
_COMPOSITION = ("prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens")


@dataclass(frozen=True)
class StepCost:
    """A step cost: ``max(Σ coefficients × features, Σ compute × features)``, the second sum empty unless it is a roofline; to
    either side pieces may add what they look up; a residual then makes it longer or shorter.

    Attributes:
        coefficients_ps: whole picoseconds by feature (:data:`UNITS`); missing is 0; never negative.
        origin: fitted, roofline, fixed or table.
        compute_ps: the roofline's compute side, likewise; empty for the others.
        pieces: looked-up parts (:mod:`hoptrace.stepcost_table`).
        residuals: by kind of step (:data:`RESIDUALS`), in the order in which the steps were recorded: millionths of the cost,
            or a stall (:data:`hoptrace.stepcost_table.STALL`). Only a replay draws them; :meth:`cost_ns` is the cost without.
        domain: smallest and largest value seen of each feature while fitting.
        error: what cross-validation measured (see :func:`fit`); empty where there was nothing to measure against.
        covariance_ps2: covariance of the coefficients, in the order of FEATURES; null where unknown.
        notes: what a reader has to know, in sentences (features dropped, steps left out).
    """

    coefficients_ps: dict[str, int]
    origin: str
    compute_ps: dict[str, int] = field(default_factory=dict)
    pieces: tuple[Piece, ...] = ()
    residuals: dict[str, tuple[int, ...]] = field(default_factory=dict)
    domain: dict[str, tuple[int, int]] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    covariance_ps2: tuple[tuple[float, ...], ...] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (*self.coefficients_ps.items(), *self.compute_ps.items()):
            if name not in FEATURES:
                raise InputError(f"A step cost has no feature {name!r}.", hint=f"Features: {', '.join(FEATURES)}.")
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(f"The step cost's {name} is {value!r}: a coefficient is whole picoseconds, 0 or more.")
        for kind, table in self.residuals.items():
            if kind not in RESIDUALS or not all(-MILLION <= v < 2 * STALL for v in table):
                raise InputError(f"The step cost's residuals of {kind!r} steps are none: kinds are {', '.join(RESIDUALS)}, "
                                 "values are millionths, at least -1,000,000.")  # fmt: skip

    @property
    def kind(self) -> int:
        """0 linear, 1 roofline: the ``kind`` of ``stepcost_kernel``."""
        return 1 if self.compute_ps or any(p.side for p in self.pieces) else 0

    def as_vector(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64[18] for the kernel: the coefficients in the order of FEATURES, then the compute side."""
        values = [self.coefficients_ps.get(f, 0) for f in FEATURES] + [self.compute_ps.get(f, 0) for f in FEATURES]
        return np.array(values, dtype=np.int64)

    def cost_ns(
        self,
        *,
        prefill_tokens: int = 0,
        prefill_context_tokens: int = 0,
        prefill_requests: int | None = None,
        decode_requests: int = 0,
        decode_context_tokens: int = 0,
    ) -> int:
        """Cost of one step in ns. ``prefill_requests`` is taken as 1 where it is not given; a step without work costs 0."""
        if prefill_requests is None:
            prefill_requests = 1 if prefill_tokens else 0
        r, t, c, d, e, none = (np.array([v], dtype=np.int64) for v in (
            prefill_requests, prefill_tokens, prefill_context_tokens, decode_requests, decode_context_tokens, 0,
        ))  # fmt: skip
        return int(self._cost(_features(r, t, c, d, e), Composition(r, t, c, d, e, none))[0])

    def cost_ns_array(self, steps: pl.DataFrame) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Cost of each row of ``steps`` in ns (int64[n]). InputError if the composition of a step is unknown."""
        return self._cost(features_array(steps), composition_of(steps) if self.pieces else None)

    def _cost(
        self, features: np.ndarray[Any, np.dtype[np.int64]], held: Composition | None = None
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        v = self.as_vector()
        c = _composition(features) if self.pieces and held is None else held
        best = np.zeros(len(features), dtype=np.int64)
        for side in range(1 + self.kind):
            ps = _side(v[side * _N : side * _N + _N], features)
            for piece in self.pieces:
                if piece.side == side and c is not None:
                    ps = ps + piece.ps(c)
            best = np.maximum(best, ps)
        return (best + 500) // 1000

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the manifest and for TOML; :meth:`from_dict` gives the equal cost back."""
        d: dict[str, Any] = {"origin": self.origin, "coefficients_ps": dict(self.coefficients_ps)}
        if self.compute_ps:
            d["compute_ps"] = dict(self.compute_ps)
        if self.pieces:
            d["pieces"] = [p.to_dict() for p in self.pieces]
        if self.residuals:
            d["residuals"] = {k: list(v) for k, v in self.residuals.items()}
        if self.domain:
            d["domain"] = {k: list(v) for k, v in self.domain.items()}
        if self.error:
            d["error"] = self.error
        if self.covariance_ps2 is not None:
            d["covariance_ps2"] = [list(r) for r in self.covariance_ps2]
        if self.notes:
            d["notes"] = list(self.notes)
        return d

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> StepCost:
        """The reverse of :meth:`to_dict`. InputError names what is missing or wrong."""
        try:
            cov = d.get("covariance_ps2")
            return cls(
                coefficients_ps=dict(d["coefficients_ps"]),
                origin=str(d["origin"]),
                compute_ps=dict(d.get("compute_ps", {})),
                pieces=tuple(Piece.from_dict(p) for p in d.get("pieces", ())),
                residuals={str(k): tuple(int(x) for x in v) for k, v in d.get("residuals", {}).items()},
                domain={str(k): (int(v[0]), int(v[1])) for k, v in d.get("domain", {}).items()},
                error=dict(d.get("error", {})),
                covariance_ps2=None if cov is None else tuple(tuple(float(x) for x in r) for r in cov),
                notes=tuple(str(n) for n in d.get("notes", ())),
            )
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise InputError(f"The step cost cannot be read: {type(e).__name__} {e}.") from None


def features_array(steps: pl.DataFrame) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64[n, 9]: the features of each step in the order of FEATURES, from its composition.

    InputError if a composition column holds nulls; ``prefill_requests`` alone may be null (then one prefill is taken).
    """
    return _features(*_held(steps))


def composition_of(steps: pl.DataFrame) -> Composition:
    """What each step holds. InputError as :func:`features_array`."""
    r, t, c, d, e = _held(steps)
    return Composition(r, t, c, d, e, np.zeros_like(t))


def _held(steps: pl.DataFrame) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    unknown = [c for c in _COMPOSITION if c not in steps.columns or steps[c].null_count()]
    if unknown:
        raise InputError(f"Some steps do not say their {', '.join(unknown)}.", hint="Leave out the rows where these are null.")
    tokens = steps["prefill_tokens"]
    one = (tokens > 0).cast(pl.Int64)
    requests = steps["prefill_requests"].fill_null(one) if "prefill_requests" in steps.columns else one
    return [s.cast(pl.Int64).to_numpy() for s in (
        requests, tokens, steps["prefill_context_tokens"], steps["decode_requests"], steps["decode_context_tokens"],
    )]  # fmt: skip


def fit(steps: pl.DataFrame) -> StepCost:
    """Fit a step cost to recorded steps: non-negative, robust, and right in the mean.

    Least squares of the relative error finds outliers (stalls of the machine), which are left out; what is kept is fitted again
    and scaled so that predicted and observed time are equal in sum. Features that the data cannot tell apart, or that do not
    lessen the cross-validated error, are dropped, with a note.

    ``error`` holds what five-fold cross-validation over contiguous blocks of steps measured on all usable steps: ``n``;
    ``p50``, ``p90``, ``p95``, ``p99`` of |predicted − observed| ÷ observed; ``left_out`` (steps) and ``left_out_time`` (share):
    the outliers; and over the steps kept ``bias`` = Σ predicted ÷ Σ observed − 1, ``sd`` of the relative residual, and
    ``by_kind``: n, p50, p95 and bias for decode, prefill and mixed steps.

    Args:
        steps: rows of the table `steps` with known start, end and composition; others are left out.

    Raises:
        InputError: fewer than 20 usable steps.
    """
    from hoptrace.stepcost_fit import fit_steps

    return fit_steps(steps)


def fixed(
    *,
    step_ns: float = 0,
    any_prefill_ns: float = 0,
    any_decode_ns: float = 0,
    prefill_token_ns: float = 0,
    prefill_context_token_ns: float = 0,
    prefill_attention_ns: float = 0,
    decode_request_ns: float = 0,
    decode_context_token_ns: float = 0,
    batched_ns: float = 0,
) -> StepCost:
    """A cost set by hand, in ns per unit (``prefill_attention_ns`` per 1000 token²), rounded to whole picoseconds."""
    values = (
        step_ns, any_prefill_ns, any_decode_ns, prefill_token_ns, prefill_context_token_ns, prefill_attention_ns,
        decode_request_ns, decode_context_token_ns, batched_ns,
    )  # fmt: skip
    return StepCost({f: round(v * 1000) for f, v in zip(FEATURES, values, strict=True) if v}, "fixed")


def roofline(server: Server, platform: Mapping[str, Any]) -> StepCost:
    """The least time that the platform's arithmetic and memory allow a step; see :mod:`hoptrace.stepcost_roofline`."""
    from hoptrace.stepcost_roofline import roofline as made

    return made(server, platform)


def known_cost(manifest: Manifest) -> StepCost | None:
    """The step cost that a replay was made with, from its manifest: exact, where fitting its steps again would only guess. None
    if the manifest names none (a recorded or imported trace). InputError if what it names cannot be read."""
    step = manifest.replay.cost_model.get("step") if manifest.replay is not None else None
    if step is None:
        return None
    if not isinstance(step, Mapping):
        raise InputError(f"The step cost in the replay's manifest is a {type(step).__name__}, not a table.")
    return StepCost.from_dict(step)


def outside(domain: Mapping[str, tuple[int, int]], features: Mapping[str, int | tuple[int, int]]) -> list[str]:
    """Where a what-if leaves what was seen: one sentence per feature of ``features`` (a value or a range) beyond ``domain``."""
    warnings = []
    for name in FEATURES:
        if name not in domain or name not in features:
            continue
        value = features[name]
        low, high = value if isinstance(value, tuple) else (value, value)
        seen_low, seen_high = domain[name]
        if low < seen_low or high > seen_high:
            asked = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            warnings.append(f"{name} of {asked} was asked for, {seen_low:,} to {seen_high:,} was seen: extrapolated.")
    return warnings


def interference(cost: StepCost, steps: pl.DataFrame) -> pl.DataFrame:
    """What the phases of mixed steps cost each other, one row per row of ``steps``, in order.

    ``on_decode_ns`` = cost of the step − its cost without the prefill: what a decoder would not have paid. ``on_prefill_ns``
    likewise, without the decoders. Both lie in [0, duration of the step] and are 0 where the step is not mixed. ``…_se_ns`` is
    the standard error from the cost's covariance, null where it has none. The split is modelled, not observed.
    """
    full = features_array(steps)
    mixed = (full[:, 3] > 0) & (full[:, 6] > 0)
    duration = (steps["end_ns"] - steps["start_ns"]).to_numpy()
    columns: dict[str, pl.Series] = {}
    for name, gone in (("on_decode", (1, 3, 4, 5)), ("on_prefill", (2, 6, 7))):
        alone = full.copy()
        alone[:, gone] = 0
        alone[:, 8] = alone[:, 3] + alone[:, 6] > 1
        saved = np.where(mixed, np.clip(cost._cost(full) - cost._cost(alone), 0, np.maximum(duration, 0)), 0)
        columns[f"{name}_ns"] = pl.Series(saved, dtype=pl.Int64)
        if cost.covariance_ps2 is None:
            columns[f"{name}_se_ns"] = pl.Series([None] * steps.height, dtype=pl.Float64)
        else:
            d = (full - alone).astype(np.float64)
            d[:, _ATTENTION] /= 1000
            variance = np.einsum("ij,jk,ik->i", d, np.array(cost.covariance_ps2), d)
            columns[f"{name}_se_ns"] = pl.Series(np.where(mixed, np.sqrt(np.maximum(variance, 0)) / 1000, 0.0))
    return pl.DataFrame(columns)


def _side(v: np.ndarray[Any, Any], features: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    plain = v.copy()
    plain[_ATTENTION] = 0
    return features @ plain + v[_ATTENTION] * features[:, _ATTENTION] // 1000  # type: ignore[no-any-return]


def _composition(x: np.ndarray[Any, Any]) -> Composition:
    """What steps hold, from their features: the number of prompts from the pairs of positions, which is exact for one prompt and
    may be one off where several are computed in few tokens."""
    tokens, context, pairs = x[:, 3], x[:, 4], x[:, 5]
    prompts = np.maximum((tokens * (2 * context + tokens) + pairs) // np.maximum(2 * pairs, 1), 1) * (tokens > 0)
    return Composition(prompts, tokens, context, x[:, 6], x[:, 7], np.zeros_like(tokens))


def _features(
    prefill_requests: np.ndarray[Any, Any],
    prefill_tokens: np.ndarray[Any, Any],
    prefill_context: np.ndarray[Any, Any],
    decode_requests: np.ndarray[Any, Any],
    decode_context: np.ndarray[Any, Any],
) -> np.ndarray[Any, np.dtype[np.int64]]:
    x = np.zeros((len(prefill_tokens), _N), dtype=np.int64)
    prefill, decode = prefill_tokens > 0, decode_requests > 0
    x[:, 0] = prefill | decode
    x[:, 1] = prefill
    x[:, 2] = decode
    x[:, 3] = prefill_tokens
    x[:, 4] = np.where(prefill, prefill_context, 0)
    shared = np.maximum(prefill_requests, 1)
    x[:, 5] = np.where(prefill, prefill_tokens * (2 * prefill_context + prefill_tokens) // (2 * shared), 0)
    x[:, 6] = decode_requests
    x[:, 7] = np.where(decode, decode_context, 0)
    x[:, 8] = prefill_tokens + decode_requests > 1
    return x
