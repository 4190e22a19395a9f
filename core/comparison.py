"""Two traces of the same work, one predicted and one observed: how far apart, per metric and per request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.metrics import Stat, arrivals_known, itl_ns, request_metrics, stat
from hoptrace.reader import Trace
from hoptrace.stepcost import StepCost

__all__ = [
    "COMPOSITION", "METRICS", "STATISTICS", "Comparison", "Difference", "Matched", "compare", "matched", "speed", "values",
]  # fmt: skip

METRICS = ("ttft", "itl", "tpot", "e2e", "queue")
STATISTICS = ("mean", "p50", "p95", "p99")
# What a step must tell so that its cost can be held against its time.
COMPOSITION = ["start_ns", "end_ns", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens"]
_SAME_WORK = 0.9
_NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "End to end", "queue": "Queue"}


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure. Errors are predicted − observed; the percentage is of the observed, null where that is 0.

    ``n``: over how many requests, where the metric is known on both sides for fewer than all that are compared; else null.
    """

    metric: str
    statistic: str
    observed: float | None
    predicted: float | None
    unit: str = "ns"
    n: int | None = None

    @property
    def error(self) -> float | None:
        """Predicted − observed, in ``unit``."""
        return None if self.observed is None or self.predicted is None else self.predicted - self.observed

    @property
    def error_pct(self) -> float | None:
        """Error in % of the observed."""
        return None if self.error is None or not self.observed else 100 * self.error / self.observed

    def as_dict(self) -> dict[str, Any]:
        pct = self.error_pct
        return {
            "metric": self.metric, "statistic": self.statistic, "unit": self.unit, "observed": self.observed,
            "predicted": self.predicted, "error": self.error, "error_pct": None if pct is None else round(pct, 3), "n": self.n,
        }  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """All figures of two traces.

    Attributes:
        differences: one per metric and statistic, then throughput.
        paired: whether the same requests were compared (equal id or number, prompt and output length), each metric over those
            for which both sides know it; else whole distributions.
        requests: compared on either side (observed, predicted).
        per_request: median and p95 of |predicted − observed| ÷ observed over the requests, by metric, in %; if paired.
        notes: what a reader has to know.
    """

    differences: tuple[Difference, ...]
    paired: bool
    requests: tuple[int, int]
    per_request: dict[str, dict[str, float]]
    notes: tuple[str, ...] = ()

    def get(self, metric: str, statistic: str) -> Difference:
        """The figure of that name; KeyError if there is none."""
        for d in self.differences:
            if d.metric == metric and d.statistic == statistic:
                return d
        raise KeyError(f"{metric} {statistic}")

    def errors(self) -> dict[str, dict[str, float]]:
        """Relative errors (predicted ÷ observed − 1) by metric and statistic, for the manifest; what is unknown is missing."""
        found: dict[str, dict[str, float]] = {}
        for d in self.differences:
            if d.error_pct is not None:
                found.setdefault(d.metric, {})[d.statistic] = round(d.error_pct / 100, 6)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and the manifest."""
        return {
            "paired": self.paired,
            "requests": {"observed": self.requests[0], "predicted": self.requests[1]},
            "figures": [d.as_dict() for d in self.differences],
            "per_request_pct": self.per_request,
            "notes": list(self.notes),
        }


def speed(steps: pl.DataFrame, cost: StepCost) -> float | None:
    """Time that steps took ÷ time that a step cost gives them; null without steps that it can price.

    With the cost fitted to one capture and the steps of another of the same server, 1.1 says that equal steps took a tenth longer
    in the other: the machine's drift, or the fit's error on that mix of steps.
    """
    known = steps.drop_nulls(COMPOSITION)
    priced = int(cost.cost_ns_array(known).sum()) if known.height else 0
    return int((known["end_ns"] - known["start_ns"]).sum()) / priced if priced > 0 else None


@dataclass(frozen=True)
class Matched:
    """The finished requests of two traces: :func:`hoptrace.metrics.request_metrics` with a ``name``.

    ``paired``: row i of one is the twin of row i of the other, in the order of ``name``; else all of both. ``by``: the column of
    `requests` that is the name. ``notes``: see :attr:`Comparison.notes`.
    """

    observed: pl.DataFrame
    predicted: pl.DataFrame
    paired: bool
    by: str
    notes: tuple[str, ...] = ()


def matched(observed: Trace, predicted: Trace) -> Matched:
    """Which request of one trace is which of the other, by the rule of :func:`compare`."""
    a, b, by = _named(observed, predicted)
    key = ["name", "prompt_tokens", "output_tokens"]
    twins = a.select(key).join(b.select(key), on=key)
    paired = twins.height > 0 and twins.height >= _SAME_WORK * max(a.height, b.height)
    notes = []
    if paired:
        a_all, b_all = a.height, b.height
        a, b = (x.join(twins, on=key, how="semi").sort("name") for x in (a, b))
        if a.height < max(a_all, b_all):
            notes.append(f"{a.height} requests are on both sides (observed {a_all}, predicted {b_all}); only they are compared.")
    elif a.height and b.height:
        notes.append("The two traces do not hold the same requests: their distributions are compared.")
        x, y = int(a["output_tokens"].sum()), int(b["output_tokens"].sum())
        if x and abs(y - x) > 0.01 * x:
            notes.append(f"They do unequal work: {x:,} output tokens observed, {y:,} predicted.")
    return Matched(a, b, paired, by, tuple(notes))


def compare(observed: Trace, predicted: Trace, *, known: Trace | None = None) -> Comparison:
    """Compare two traces over their finished requests.

    If at least nine tenths of the requests on either side have a twin of the same name and lengths on the other, only twins
    are compared, and their own errors too; else the distributions of all. The name is ``request_id`` if both sides give each
    request one of its own and share any, else the number: a load generator sends its ids again, while two requests that arrive
    together may swap their numbers.

    Of twins, each metric is taken over those for which both sides know it, so that it never holds some requests against others.

    Args:
        known: of twins only those for which this trace, too, knows the metric (if it knows it of any): so the difference of two
            replays is over the requests that both were held against a recording for.
    """
    twins = matched(observed, predicted)
    a, b, paired = twins.observed, twins.predicted, twins.paired
    notes = list(twins.notes)
    found: list[Difference] = []
    fewer: dict[str, list[str]] = {}
    for m in METRICS:
        one, other, n, why = _metric(m, (observed, a), (predicted, b), paired, known)
        found += [Difference(m, s, getattr(one, f"{s}_ns"), getattr(other, f"{s}_ns"), n=n) for s in STATISTICS]
        if why:
            fewer.setdefault(why, []).append(_NAMES[m])
    notes += [f"{', '.join(names)}: {why}" for why, names in fewer.items()]
    for name, amount in (("output tokens", "output_tokens"), ("requests", None)):
        one_rate = _per_s(a, amount) if arrivals_known(observed) else None
        other_rate = _per_s(b, amount) if arrivals_known(predicted) else None
        found.append(Difference("throughput", name, one_rate, other_rate, f"{name}/s"))
    return Comparison(tuple(found), paired, (a.height, b.height), _per_request(a, b) if paired else {}, tuple(notes))


def _named(observed: Trace, predicted: Trace) -> tuple[pl.DataFrame, pl.DataFrame, str]:
    """The metrics of both, each request with the ``name`` that tells which one it is, and the column that this is."""
    sides = []
    for trace in (observed, predicted):
        ids = trace.table("requests").select("request", "request_id").collect()
        sides.append(request_metrics(trace).join(ids, on="request", how="left", maintain_order="left"))
    a, b = sides
    own = all(x["request_id"].null_count() == 0 and x["request_id"].n_unique() == x.height for x in sides)
    by = "request_id" if own and bool(a["request_id"].is_in(b["request_id"].implode()).any()) else "request"
    return a.with_columns(pl.col(by).alias("name")), b.with_columns(pl.col(by).alias("name")), by


def _metric(
    m: str, one: tuple[Trace, pl.DataFrame], other: tuple[Trace, pl.DataFrame], paired: bool, third: Trace | None = None
) -> tuple[Stat, Stat, int | None, str | None]:
    """A metric of both sides: over how many requests, if not over all to which it applies; and a sentence on that."""
    sides = [x.select("name", "request").join(values(m, t, x), on="request") for t, x in (one, other)]
    known = [v.select("name").unique() for v in sides]
    # A single token has no token after it: neither ITL nor TPOT applies.
    several = (pl.col("output_tokens") > 1).fill_null(True)
    alone = m in ("itl", "tpot")
    total = [x.filter(several).height if alone else x.height for _, x in (one, other)]
    counts = [k.height for k in known]
    if not all(counts):
        # Nothing to hold one against the other: no error can come of it, and a known side stays known.
        return stat(sides[0]["value"]), stat(sides[1]["value"]), None, None
    if not paired:
        partly = [f"{counts[i]} of {total[i]} requests {('observed', 'predicted')[i]}" for i in (0, 1) if counts[i] < total[i]]
        note = f"known only for {' and '.join(partly)}; the sides may differ by that alone." if partly else None
        return stat(sides[0]["value"]), stat(sides[1]["value"]), None, note
    both = known[0].join(known[1], on="name")
    if third is not None:
        told = values(m, third, request_metrics(third)).select("request").unique()
        of_both = one[1].select("name", "request").join(both, on="name", how="semi").join(told, on="request", how="semi")
        both = of_both.select("name") if of_both.height else both
    first, second = (stat(v.join(both, on="name", how="semi")["value"]) for v in sides)
    if both.height >= total[0]:
        return first, second, None, None
    why = f"compared over {both.height} of {total[0]} requests; for the others it is not known on both sides."
    return first, second, both.height, why


def values(m: str, trace: Trace, requests: pl.DataFrame) -> pl.DataFrame:
    """request, value (ns): the metric where it is known; of ITL one row per interval. ``requests``: the trace's
    :func:`hoptrace.metrics.request_metrics`."""
    if m == "itl":
        found = itl_ns(trace).select("request", pl.col("itl_ns").alias("value"))
    else:
        found = requests.select("request", pl.col(f"{m}_ns").alias("value"))
    return found.drop_nulls("value")


def _per_s(requests: pl.DataFrame, amount: str | None) -> float | None:
    """Per second from the first arrival to the last finish."""
    first, last = requests["arrival_ns"].min(), requests["finish_ns"].max()
    if not isinstance(first, int) or not isinstance(last, int) or last <= first:
        return None
    if amount is not None and requests[amount].null_count():
        return None
    total = requests.height if amount is None else int(requests[amount].sum())
    return total * 1e9 / (last - first)


def _per_request(a: pl.DataFrame, b: pl.DataFrame) -> dict[str, dict[str, float]]:
    result = {}
    for m in METRICS:
        if m == "itl":
            continue
        o, p = a[f"{m}_ns"], b[f"{m}_ns"]
        known = o.is_not_null() & p.is_not_null() & (o > 0)
        error = (100 * (p - o).abs() / o).filter(known)
        if error.len():
            p50, p95 = error.quantile(0.5, "linear"), error.quantile(0.95, "linear")
            assert p50 is not None and p95 is not None
            result[m] = {"n": error.len(), "p50": round(p50, 3), "p95": round(p95, 3)}
    return result
