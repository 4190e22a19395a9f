"""Is another process stealing my step? Run-queue delay of the server's threads against steps that took longer than what they
held.

The threads that compute are looked at, where threads were recorded one by one: those with a tenth or more of the CPU time of the
busiest; else all threads of the server's processes together. Delay and steps are taken per bin of the clock and as shares, so
that a busy bin is not a slow one: the delay as share of the time in which the threads wanted a CPU, the steps as time taken ÷
time predicted. The delay of the threads together bounds what a step can have lost; whether it was lost, the bins tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from hoptrace.analysis.hardware.rank import Rank, drawn, rank
from hoptrace.analysis.hardware.stealing_says import Answer, unknown, verdict
from hoptrace.analysis.hardware.stepbins import StepBins, cost_of, grid_of, own_steps, step_bins
from hoptrace.analysis.hardware.threads import UNREAD
from hoptrace.analysis.query import query_with
from hoptrace.analysis.text import percent
from hoptrace.reader import Trace
from hoptrace.stepcost import StepCost

__all__ = ["NAMES", "Contrast", "Stealing", "stealing"]

NAMES = {
    "delay": ("run_delay_ns",),
    "cpu": ("on_cpu_ns",),
    "involuntary": ("involuntary_switches",),
    "busy": ("user_ns", "nice_ns", "system_ns", "irq_ns", "softirq_ns", "steal_ns"),
    "steal": ("steal_ns",),
    "idle": ("idle_ns", "iowait_ns"),
}
"""Counters by what they are added up as: the first two and the third of the server's processes and threads, the rest of the
machine."""

_SPREAD = 0.01  # by which the delay's share must vary for bins to be compared
_STEPS = 3  # that a bin needs
_THREAD = r"^thread:(\d+)/"
_COMPUTES = 0.1  # of the busiest thread's CPU time
_ENOUGH = 0.8  # of the processes' CPU time that the threads must make up
_ENOUGH_LOST = 0.1  # of the CPU time: more of it by threads whose waiting is not known, and the delay tells too little
_COVER = 0.9  # of a bin that samples must cover
_LEAST = {"run_delay_share": _SPREAD, "involuntary_per_s": 0.0, "foreign_share": _SPREAD, "steal_share": 0.0}


@dataclass(frozen=True, slots=True)
class Contrast:
    """The third of the bins with most delay against the third with least, per step of the former. ``slower_ns``: how much longer
    its steps took than their composition says, compared with the calm third's, 95 % between ``low_ns`` and ``high_ns``;
    ``more_delay_ns``: how much more its threads waited; ``explained_at_most_ns``: the smaller of the two. ``foreign``: share of
    the machine's busy CPU time that others took in the two thirds (waiting, calm)."""

    bins: int
    slower_ns: float
    low_ns: float
    high_ns: float
    more_delay_ns: float
    foreign: tuple[float | None, float | None]

    @property
    def explained_at_most_ns(self) -> float:
        return max(0.0, min(self.slower_ns, self.more_delay_ns))

    def as_dict(self) -> dict[str, Any]:
        names = ("slower_ns", "low_ns", "high_ns", "more_delay_ns", "explained_at_most_ns")
        numbers = {k: round(getattr(self, k)) for k in names}
        waiting, calm = (None if f is None else round(f, 6) for f in self.foreign)
        return {"bins": self.bins, **numbers, "foreign_share_waiting": waiting, "foreign_share_calm": calm}


@dataclass(frozen=True)
class Stealing:
    """The answer for one server.

    Attributes:
        verdict: yes (waiting and slow steps go together), no (nothing worth a word was waited, or steps are not slower with it),
            unknown (``why`` says the reason). short: in a sentence; says: in several.
        bin_ns, bins: what was compared: bins with three steps or more, and samples. steps: of all bins with samples;
            few_steps: of those the ones in bins of fewer than three, which stand in the means and not in the comparison.
        step_ns: mean length; delay_ns_per_step: what the threads waited for a CPU in all bins, summed, per step: no more can have
            been lost at the mean; delay_share: of the time that they wanted a CPU. who: which threads, in words.
        together: rank correlation with the slowness of the steps, by what: run_delay_share, involuntary_per_s, foreign_share,
            steal_share.
        contrast: null where the bins cannot be compared.
        series: by bin: from_ns, steps, slowness (taken ÷ predicted − 1) and those shares.
    """

    server: str
    verdict: str
    short: str
    says: str
    why: str | None = None
    who: str | None = None
    bin_ns: int | None = None
    bins: int = 0
    steps: int = 0
    few_steps: int = 0
    step_ns: float | None = None
    delay_ns_per_step: float | None = None
    delay_share: float | None = None
    together: dict[str, Rank] = field(default_factory=dict)
    contrast: Contrast | None = None
    series: pl.DataFrame = field(default_factory=pl.DataFrame)

    def as_dict(self) -> dict[str, Any]:
        return {
            **{k: getattr(self, k) for k in ("server", "verdict", "short", "says", "why", "who")},
            **{k: getattr(self, k) for k in ("bin_ns", "bins", "steps", "few_steps")},
            "step_ns": _whole(self.step_ns), "delay_ns_per_step": _whole(self.delay_ns_per_step),
            "delay_share": _digits(self.delay_share),
            "together": {k: v.as_dict() for k, v in self.together.items()},
            "contrast": None if self.contrast is None else self.contrast.as_dict(),
            "series": [{k: _digits(v) if isinstance(v, float) else v for k, v in r.items()} for r in self.series.to_dicts()],
        }  # fmt: skip


def stealing(
    trace: Trace, server: str, steps: pl.LazyFrame, totals: pl.DataFrame, processes: Sequence[str], known: StepCost | None
) -> Stealing:
    """The answer for one server.

    Args:
        steps: of the trace. totals: :func:`hoptrace.analysis.counters.counter_totals` of at least :data:`NAMES`. processes: the
            server's entities (``process:PID``). known: the cost of its steps, if the caller has it.
    """

    computing = _computing(totals, processes)
    wanted = _wanted(totals, processes, computing)
    delay = wanted.filter(pl.col("what") == "delay")
    if not delay.height:
        return _of(server, unknown(server, "no run-queue delay of its threads was recorded"))
    if not computing and (lost := _unread(totals, processes)) > _ENOUGH_LOST:
        why = f"{percent(lost)} of its CPU time was of threads that ended between two samples, whose waiting nobody saw"
        return _of(server, unknown(server, why))
    mine = own_steps(steps, server)
    every = int((delay["to_ns"] - delay["from_ns"]).sum() // max(1, int(delay["samples"].sum()) - delay.height))
    # A counter that stands still is written ten times less often: what it says is as fine as its source's beat all the same.
    low, high = delay["from_ns"].min(), delay["to_ns"].max()
    assert isinstance(low, int) and isinstance(high, int)
    grid = grid_of(mine, low, high, min(every, 1_000_000_000))
    if grid is None:
        return _of(server, unknown(server, "no steps that say what was in them lie in the time of the counters"))
    cost = cost_of(mine, known)
    if isinstance(cost, str):
        return _of(server, unknown(server, f"what its steps should take is not known ({cost.rstrip('.')})"))
    taken = step_bins(mine, grid, cost)
    listed = wanted.select("what", "host", "entity", "name", "source")
    told = query_with(trace, "hardware_bins", {"grid": grid.frame(), "wanted": listed})
    who = f"all threads of {server}"
    if computing:
        n = len(computing)
        who = f"the thread of {server} that computes" if n == 1 else f"the {n} threads of {server} that compute"
    return _answer(server, who, _series(taken, told), grid.width_ns)


def _computing(totals: pl.DataFrame, processes: Sequence[str]) -> list[str]:
    """The threads that compute; none where the threads that were looked at do not make up the processes' CPU time."""
    told = totals.filter((pl.col("name") == "on_cpu_ns") & (pl.col("total") > 0))
    pids = [p.removeprefix("process:") for p in processes]
    threads = told.filter(pl.col("entity").str.extract(_THREAD).is_in(pids))
    whole = float(told.filter(pl.col("entity").is_in(list(processes)))["total"].sum())
    delays = totals.filter((pl.col("name") == "run_delay_ns") & (pl.col("samples") > 1))["entity"].to_list()
    if not threads.height or float(threads["total"].sum()) < _ENOUGH * whole:
        return []
    most = threads.filter(pl.col("total") >= _COMPUTES * pl.col("total").max())["entity"].to_list()
    return most if set(most) <= set(delays) else []


def _unread(totals: pl.DataFrame, processes: Sequence[str]) -> float:
    """Share of the processes' CPU time that threads had which were not read."""
    own = totals.filter(pl.col("entity").is_in(list(processes)))
    all_of_it, lost = (float(own.filter(pl.col("name") == n)["total"].sum() or 0) for n in ("on_cpu_ns", UNREAD))
    return lost / all_of_it if all_of_it else 0.0


def _wanted(totals: pl.DataFrame, processes: Sequence[str], computing: Sequence[str]) -> pl.DataFrame:
    """The counters that are added up, with what they are added up as."""
    own = pl.col("entity").is_in(list(processes))
    totals = totals.filter(pl.col("host").is_in(totals.filter(own)["host"].unique().to_list()) & (pl.col("samples") > 1))
    threads = pl.col("entity").str.extract(_THREAD).is_in([p.removeprefix("process:") for p in processes])
    mine = pl.col("entity").is_in(list(computing)) if computing else own
    machine = pl.col("entity") == "cpu"
    # A server inside the capturing process has its time already.
    capture = pl.col("entity").str.extract(r"^hoptrace:(\d+)$").is_in([p.removeprefix("process:") for p in processes]).not_()
    others = pl.col("entity").str.starts_with("process:") & ~own

    def some(what: str, where: pl.Expr, names: Sequence[str]) -> pl.DataFrame:
        return totals.filter(where & pl.col("name").is_in(names)).with_columns(pl.lit(what).alias("what"))

    rows = [some(what, mine if what in ("delay", "cpu") else machine, NAMES[what]) for what in NAMES if what != "involuntary"]
    # The switches stand with the process where its collector sums them up, else with its threads.
    switches = some("involuntary", mine, NAMES["involuntary"])
    rows.append(switches if switches.height else some("involuntary", threads, NAMES["involuntary"]))
    rows += [some("known", where, NAMES["cpu"]) for where in (own, capture, others)]
    return pl.concat(rows)


def _series(taken: StepBins, told: pl.DataFrame) -> pl.DataFrame:
    """By bin that has samples: from_ns, steps, took_ns, cost_ns, delay_ns, wanted_ns; run_delay_share,
    involuntary_per_s, foreign_share, steal_share (null where not recorded)."""
    g = taken.grid
    frame = pl.DataFrame({
        "bin": np.arange(g.bins), "from_ns": g.from_ns + np.arange(g.bins) * g.width_ns,
        "steps": taken.steps, "took_ns": taken.took_ns, "cost_ns": taken.cost_ns,
    })  # fmt: skip
    for what in (*NAMES, "known"):
        some = told.filter((pl.col("what") == what) & (pl.col("counted_ns") >= _COVER * g.width_ns))
        frame = frame.join(some.select("bin", pl.col("grown").alias(what)), on="bin", how="left")
    wanted, all_of_it = pl.col("delay") + pl.col("cpu"), pl.col("busy") + pl.col("idle")
    return frame.drop_nulls("delay").select(
        "from_ns", "steps", "took_ns", "cost_ns", pl.col("delay").alias("delay_ns"), wanted.alias("wanted_ns"),
        pl.when(wanted > 0).then(pl.col("delay") / wanted).alias("run_delay_share"),
        (pl.col("involuntary") * 1e9 / g.width_ns).alias("involuntary_per_s"),
        pl.when(pl.col("busy") > 0).then(((pl.col("busy") - pl.col("known")) / pl.col("busy")).clip(0, 1)).alias("foreign_share"),
        pl.when(all_of_it > 0).then(pl.col("steal") / all_of_it).alias("steal_share"),
        pl.when(pl.col("cost_ns") > 0).then(pl.col("took_ns") / pl.col("cost_ns") - 1).alias("slowness"),
    )  # fmt: skip


def _answer(server: str, who: str, every: pl.DataFrame, width: int) -> Stealing:
    """``every``: bin. A long step leaves bins without any: its threads' waiting there counts in the means all the same."""
    series = every.filter((pl.col("steps") >= _STEPS) & pl.col("slowness").is_not_null())
    n = int(every["steps"].sum())
    if not n:
        why = "no bin of the clock has both steps and samples of its threads' run-queue delay"
        return _of(server, unknown(server, why), bin_ns=width)
    step, delay = float(every["took_ns"].sum()) / n, float(every["delay_ns"].sum()) / n
    wanted = float(every["wanted_ns"].sum())
    share = float(every.drop_nulls("wanted_ns")["delay_ns"].sum()) / wanted if wanted else None
    few = n - int(series["steps"].sum())
    together = {what: _rank(series, what, least) for what, least in _LEAST.items()}
    contrast = None if together["run_delay_share"].why is not None else _contrast(series.drop_nulls("run_delay_share"))
    answer = verdict(who, step, delay, share, together["run_delay_share"], contrast, width, few)
    shown = series.select("from_ns", "steps", "slowness", "run_delay_share", "involuntary_per_s", "foreign_share", "steal_share")
    return _of(
        server, answer, who=who, bin_ns=width, bins=series.height, steps=n, few_steps=few, step_ns=step, delay_ns_per_step=delay,
        delay_share=share, together=together, contrast=contrast, series=shown,
    )  # fmt: skip


def _of(server: str, a: Answer, **more: Any) -> Stealing:
    return Stealing(server, a.verdict, a.short, a.says, a.why, **more)


def _rank(series: pl.DataFrame, what: str, least: float) -> Rank:
    rows = series.drop_nulls(what)
    if not rows.height and series.height:
        return Rank(0, None, None, None, "it was not recorded")
    return rank(rows[what].to_numpy(), rows["slowness"].to_numpy(), least)


def _contrast(series: pl.DataFrame) -> Contrast | None:
    """The bins that waited most against those that waited least, drawn again as blocks for the interval."""
    x = series["run_delay_share"].to_numpy()
    third = len(x) // 3
    if third < 3:
        return None
    order = np.argsort(x, kind="stable")
    side = np.zeros(len(x), dtype=np.int64)
    side[order[:third]], side[order[-third:]] = -1, 1
    took, cost, delay, steps = (series[c].to_numpy().astype(np.float64) for c in ("took_ns", "cost_ns", "delay_ns", "steps"))

    def slower(i: Any) -> float:
        waiting, calm = i[side[i] > 0], i[side[i] < 0]
        if not len(waiting) or not len(calm):
            return 0.0
        ratio = took[waiting].sum() / cost[waiting].sum() - took[calm].sum() / cost[calm].sum()
        return float(ratio * cost[waiting].sum() / steps[waiting].sum())

    every = np.arange(len(x))
    low, high = drawn(len(x), slower)
    waiting, calm = side > 0, side < 0
    more = float(delay[waiting].sum() / steps[waiting].sum() - delay[calm].sum() / steps[calm].sum())

    def foreign(of: np.ndarray[Any, np.dtype[np.bool_]]) -> float | None:
        told = series["foreign_share"].filter(pl.Series(of)).drop_nulls()
        return None if not told.len() else float(told.sum()) / told.len()

    return Contrast(third, slower(every), low, high, more, (foreign(waiting), foreign(calm)))


def _digits(v: float | None) -> float | None:
    return None if v is None else round(v, 6)


def _whole(v: float | None) -> int | None:
    return None if v is None else round(v)
