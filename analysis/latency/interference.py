"""What the other phase took of each mixed step, and how sure that is.

A mixed step lasted y; the step cost puts it at c, and at a without the other phase. Then y·(1 − a/c) of it is interference: the
cost says in what proportion, the clock how much. A step that took far longer than its cost (the host stalled) is no doing of the
other phase: y counts up to c·(1 + 3σ), σ being the spread of mixed steps about their cost.

Standard error of a sum over steps, the terms added as squares:

* of the coefficients: √(gᵀΣg), g = Σ (y/c)·((a/c)·x − x_a), x and x_a the features of the step with and without the other phase,
  Σ the covariance of the fit (redrawn blocks of steps);
* of the form: |b|·Σa, b = Σy ÷ Σc − 1 over all mixed steps: where the phases overlap, the cost of both is no sum of two;
* of the steps: √Σ a²(σ² + σ_a²): what this very step would have taken alone nobody saw; σ_a is the spread of the steps that hold
  the phase alone. It is what a request's own figure can be off by though the cost were known exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.latency.axis import Ints
from hoptrace.errors import InputError
from hoptrace.stepcost import FEATURES, StepCost, features_array, fit

__all__ = ["Interference", "Model", "interference_of", "model_of", "told_apart", "without_composition"]

Floats = npt.NDArray[np.float64]
COMPOSITION = ("prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens")
PHASES = ("prefill", "decode")
_ALONE = 5  # fewest steps of a phase by itself
_GONE = {"prefill": (2, 6, 7), "decode": (1, 3, 4, 5)}  # features that leave when the phase is alone in the step
_PREFILL, _DECODE, _BATCHED, _ATTENTION = (
    FEATURES.index(f) for f in ("prefill_tokens", "decode_requests", "batched", "prefill_attention")
)
_FEWEST = 20  # steps that tell how fast a server is
_UNLIKE = 1.25  # how much slower than another it is to be said
_CAP = 3.0  # standard deviations above its cost that a mixed step is taken to last
_MOST_STEPS = 200_000  # of which spreads are taken
_OUTLIER = 8.0  # robust standard deviations


@dataclass(frozen=True)
class Model:
    """A step cost and how well it holds.

    Attributes:
        cost: the step cost.
        phases: those ("prefill", "decode") whose interference the steps can tell.
        spread: relative standard deviation of mixed steps about their cost; 0 where there are none to see.
        alone: the same of steps that hold one phase alone, by phase.
        bias: Σ observed ÷ Σ cost − 1 over mixed steps.
        fitted: whether there is a standard error to give: the cost has a covariance.
        used: features that the coefficients' part of the error needs.
    """

    cost: StepCost
    phases: frozenset[str]
    spread: float
    alone: dict[str, float]
    bias: float
    fitted: bool
    used: tuple[int, ...]

    @property
    def width(self) -> int:
        """Columns of :attr:`Interference.sums`."""
        return len(self.used) + 2

    def standard_error_ns(self, sums: Floats) -> Floats:
        """From rows of differences of :attr:`Interference.sums`; of several phases, their sum."""
        k = len(self.used)
        covariance = np.array(self.cost.covariance_ps2)[np.ix_(self.used, self.used)] / 1e6
        variance = np.einsum("ij,jk,ik->i", sums[:, :k], covariance, sums[:, :k])
        return np.sqrt(np.maximum(variance, 0) + sums[:, k] ** 2 + np.maximum(sums[:, k + 1], 0))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Interference:
    """Of one phase, along the steps of one server: ``ns`` of each step and ``total`` before it. ``sums`` is the running sum of
    what the error is made of (gradient by used coefficient, bias, variance), a row per mixed step; ``mixed`` counts those before
    each step."""

    ns: Ints
    total: Ints
    mixed: Ints
    sums: Floats

    def before(self, step: Ints, fraction: Floats) -> tuple[Ints, Floats]:
        """(ns, sums) of all steps before each ``step`` and of that ``fraction`` of it."""
        ns = self.total[step] + np.floor(self.ns[step] * fraction).astype(np.int64)
        low, high = self.sums[self.mixed[step]], self.sums[self.mixed[step + 1]]
        return ns, low + (high - low) * fraction[:, None]


def model_of(
    steps: pl.DataFrame, cost: StepCost | None, every: pl.LazyFrame | None = None
) -> tuple[Model | None, list[str], list[str], str | None]:
    """(the model, notes, what it cannot tell, why there is none), from the steps of a trace.

    ``cost``: where it is not given, it is fitted to the steps, and phases that no step shows alone are left out. ``every``: all
    steps, where ``steps`` is a sample of them.
    """
    phases, notes, unseen = frozenset(PHASES), list[str](), list[str]()
    if cost is None:
        try:
            cost = fit(steps)
        except InputError as e:
            return None, [], [], e.message
        p50 = cost.error.get("p50")
        error = f", median error {p50:.1%}" if isinstance(p50, float) else ""
        notes.append(f"Split of mixed steps by a step cost fitted to {cost.error.get('n')} steps{error}.")
        phases, unseen = told_apart(steps if every is None else every)
        unseen += _unlike_servers(steps, cost)
    x, y = _sampled(steps)
    c = cost._cost(x).astype(np.float64)
    whole = (c > 0) & (y > 0)
    x, y, c = x[whole], y[whole], c[whole]
    prefill, decode = x[:, _PREFILL] > 0, x[:, _DECODE] > 0
    covariance = cost.covariance_ps2
    used = tuple(np.flatnonzero(np.any(np.array(covariance) != 0, axis=0)).tolist()) if covariance is not None else ()
    notes += _extrapolated(x, prefill, decode)
    spread, bias = _spread(y, c, prefill & decode)
    alone = {"prefill": _spread(y, c, prefill & ~decode)[0], "decode": _spread(y, c, decode & ~prefill)[0]}
    return Model(cost, phases, spread, alone, bias, covariance is not None, used), notes, unseen, None


def _extrapolated(x: Ints, prefill: npt.NDArray[np.bool_], decode: npt.NDArray[np.bool_]) -> list[str]:
    """Where mixed steps hold more decoders than were ever seen alone."""
    mixed, alone = x[prefill & decode, _DECODE], x[decode & ~prefill, _DECODE]
    most = int(alone.max()) if len(alone) else 0
    beyond = int((mixed > most).sum())
    if not beyond or not most:
        return []
    return [
        f"{beyond:,} of {len(mixed):,} mixed steps hold more decoders than any step without prompts ({most:,}): what they would "
        "have taken alone is extrapolated."
    ]


def _unlike_servers(steps: pl.DataFrame, cost: StepCost) -> list[str]:
    """Whether one cost holds for the steps of all servers: another device or model beside them has one of its own."""
    took = {}
    for (server,), own in sorted(steps.partition_by("server", as_dict=True).items()):
        x, y = _sampled(own)
        c = cost._cost(x).astype(np.float64)
        whole = (c > 0) & (y > 0)
        if whole.sum() >= _FEWEST:
            took[str(server)] = float(np.median(y[whole] / c[whole]))
    if len(took) < 2 or max(took.values()) <= _UNLIKE * min(took.values()):
        return []
    slow, fast = max(took, key=took.__getitem__), min(took, key=took.__getitem__)
    return [
        f"Interference: one step cost is fitted to the steps of {len(took)} servers, but it is not one: against it, steps of "
        f"{slow} take {took[slow] / took[fast]:.1f} times as long as those of {fast}. What their mixed steps are split into may "
        "be off by as much."
    ]


def _sampled(steps: pl.DataFrame) -> tuple[Ints, Floats]:
    known = steps.drop_nulls([*COMPOSITION, "start_ns", "end_ns"])
    known = known.gather_every(max(1, -(-known.height // _MOST_STEPS))) if known.height else known
    return features_array(known), (known["end_ns"] - known["start_ns"]).to_numpy().astype(np.float64)


def _spread(y: Floats, c: Floats, which: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """(relative standard deviation about the cost, bias), stalls left out as the fit leaves them out."""
    if not which.any():
        return 0.0, 0.0
    relative = y[which] / c[which] - 1
    middle = float(np.median(relative))
    sigma = max(1.4826 * float(np.median(np.abs(relative - middle))), 1e-4)
    kept = np.abs(relative - middle) <= _OUTLIER * sigma
    bias = float(y[which][kept].sum() / c[which][kept].sum() - 1)
    return float(np.sqrt(np.mean((relative[kept] - bias) ** 2))), bias


def told_apart(steps: pl.DataFrame | pl.LazyFrame) -> tuple[frozenset[str], list[str]]:
    """Phases ("prefill", "decode") whose interference a fit to the steps can tell, and a sentence for each other one.

    What a mixed step would have cost without the decoders shows only in steps without them, and likewise for prompts: with
    next to none of those, a fit puts the cost of the other phase into its constant, and the split would come out as 0.
    """
    prefill, decode = pl.col("prefill_tokens") > 0, pl.col("decode_requests") > 0
    counts = (
        steps.lazy()
        .select(COMPOSITION)
        .drop_nulls()
        .select(pl.len(), (prefill & decode).sum().alias("m"), (prefill & ~decode).sum().alias("p"), (decode & ~prefill).sum())
    )
    height, mixed, *rest = counts.collect(engine="streaming").row(0)
    alone = dict(zip(("prefill", "decode"), rest, strict=True))
    enough = max(_ALONE, mixed // 1000)
    phases = frozenset(p for p, n in alone.items() if not mixed or n >= enough)
    told = {"prefill": ("prompts", "decoders", "prefill"), "decode": ("decoders", "prompts", "decode")}
    said = []
    for phase in sorted(told.keys() - phases):
        only, other, name = told[phase]
        said.append(
            f"Interference on {name}: {alone[phase]:,} of {height:,} steps hold {only} alone, too few to tell what {other} "
            f"add in the {mixed:,} mixed steps, so that time counts as {name}."
        )
    return phases, said


def without_composition(steps: pl.DataFrame | pl.LazyFrame) -> int:
    """How many steps do not say what was in them."""
    blank = pl.any_horizontal(pl.col(c).is_null() for c in COMPOSITION)
    return int(steps.lazy().select(blank.sum()).collect(engine="streaming").item())


def interference_of(g: pl.DataFrame, length: Ints, model: Model) -> dict[str, Interference]:
    """By phase, along steps in ascending order: their composition and ``prefill_requests`` (nulls: of unknown composition, no
    interference), ``length`` in ns."""
    known = g.select(pl.all_horizontal(pl.col(c).is_not_null() for c in COMPOSITION)).to_series()
    both = (known & (g["prefill_tokens"] > 0) & (g["decode_requests"] > 0)).fill_null(False).to_numpy()
    mixed = np.flatnonzero(both)
    x = features_array(g[mixed])
    y = length[mixed].astype(np.float64)
    c = model.cost._cost(x).astype(np.float64)
    count = np.zeros(g.height + 1, dtype=np.int64)
    np.cumsum(both, out=count[1:])
    out = {}
    for phase in PHASES:
        own = x.copy()
        own[:, list(_GONE[phase])] = 0
        own[:, _BATCHED] = own[:, _PREFILL] + own[:, _DECODE] > 1
        a = np.minimum(model.cost._cost(own).astype(np.float64), c)
        ns = np.zeros(g.height, dtype=np.int64)
        sums = np.zeros((len(mixed) + 1, model.width))
        if phase in model.phases and len(mixed):
            # How often the step's cost it lasted, as far as the other phase can be behind it.
            times = np.minimum(np.divide(y, c, out=np.zeros_like(y), where=c > 0), 1 + _CAP * model.spread)
            ns[mixed] = np.floor(times * (c - a)).astype(np.int64)
            _sum_up(sums, x, own, a, c, times, model, phase)
        total = np.zeros(g.height, dtype=np.int64)
        if g.height:
            np.cumsum(ns[:-1], out=total[1:])
        out[phase] = Interference(ns, total, count, sums)
    return out


def _sum_up(sums: Floats, x: Ints, own: Ints, a: Floats, c: Floats, times: Floats, model: Model, phase: str) -> None:
    k = len(model.used)
    if k:
        share = np.divide(a, c, out=np.zeros_like(a), where=c > 0)
        gradient = times[:, None] * (share[:, None] * x[:, model.used] - own[:, model.used])
        if _ATTENTION in model.used:
            gradient[:, model.used.index(_ATTENTION)] /= 1000  # the unit of its coefficient
        sums[1:, :k] = np.cumsum(gradient, axis=0)
    sums[1:, k] = np.cumsum(abs(model.bias) * a)
    sums[1:, k + 1] = np.cumsum(a**2) * (model.spread**2 + model.alone[phase] ** 2)
