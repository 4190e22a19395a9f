"""Exact latency accounting: each nanosecond of a request, from arrival to finish, in exactly one part (law 1).

How: an outline of the request's time by its stamps; over it the recorded waits (where they overlap, the one that ends later
wins); over both the runs of steps that the request was in. Time inside a run is then split by cumulative functions over the
server's steps. All of it is integer arithmetic on one line on which the requests lie end to end, so the parts add up by
construction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.axis import Axis, Ints
from hoptrace.analysis.composition import Composition, Tail, compositions, tail_of
from hoptrace.analysis.evaluate import Evaluation, evaluate
from hoptrace.analysis.fullness import Fullness, fullness
from hoptrace.analysis.interference import Model, model_of, without_composition
from hoptrace.analysis.levels import Levels, levels
from hoptrace.analysis.marks import outline, read_requests, read_stays
from hoptrace.analysis.parts import CLASSES, PARTS
from hoptrace.analysis.runs import read_runs, read_waits
from hoptrace.analysis.serverstate import server_state
from hoptrace.analysis.stepline import StepLine, lines
from hoptrace.analysis.text import duration_text
from hoptrace.analysis.unseen import seen_parts, unseen_too
from hoptrace.reader import Trace
from hoptrace.reconstruct import Steps, steps_of
from hoptrace.stepcost import StepCost, known_cost

__all__ = ["Accounting", "account"]

_MOST_NS = 1 << 61  # Σ e2e of one pass; more is done in several


@dataclass(frozen=True)
class Accounting:
    """Where the time of the finished requests went.

    Attributes:
        parts: one row per finished request, by request: request, arrival_ns, finish_ns, e2e_ns and one column per part
            (:data:`PARTS`), int64 ns. A part is null where the recording cannot show it; the others add up to e2e_ns exactly.
        ttft_parts: the same up to the first token: request, arrival_ns, first_token_ns, ttft_ns (first token − arrival, the
            client's where it was seen there) and the parts, which add up to ttft_ns exactly. Once a request's prompt is computed
            its first token is on its way: that is `delivery` here, whatever steps go on meanwhile. Requests whose first token is
            unknown have no row.
        spans: request, start_ns, end_ns, label, server: the same time as an ordered sequence, for timelines. Labels are parts;
            an interval of several by the one that takes most of it (split further only in ``parts``).
        interference_se: request, interference_se_ns, prefill_interference_se_ns, decode_interference_se_ns: standard errors of
            both interference parts together and of each (those of `prefill` and `decode` are the same: what is not the one is
            the other); null without a fitted cost. See :mod:`hoptrace.analysis.interference` for the formula.
        unseen: what this trace cannot show, in sentences.
        notes: how what it does show was found.
        finished, failed, unfinished, impossible: requests counted; only the finished ones are accounted. Impossible ones end
            before they arrive.
        steps_origin: observed, reconstructed, replayed, or null where there are no steps.
        cost: the step cost behind the interference, or null.
        level: which tables it rests on, and what those that are missing would have shown.
    """

    parts: pl.DataFrame
    ttft_parts: pl.DataFrame
    spans: pl.DataFrame
    interference_se: pl.DataFrame
    unseen: list[str]
    notes: list[str]
    finished: int
    failed: int
    unfinished: int
    impossible: int
    level: Levels
    steps_origin: str | None = None
    cost: StepCost | None = field(default=None, repr=False)

    @property
    def classes(self) -> pl.DataFrame:
        """One row per request: request, e2e_ns and one column per class (`work_ns` …), adding up to e2e_ns exactly."""
        sums = []
        for klass in CLASSES:
            columns = [p.column for p in PARTS if p.klass == klass]
            sums.append(pl.sum_horizontal(pl.col(c).fill_null(0) for c in columns).alias(klass.replace(" ", "_") + "_ns"))
        return self.parts.select("request", "e2e_ns", *sums)

    @cached_property
    def compositions(self) -> dict[str, Composition]:
        """Mean composition of all requests (`all`) and of those around the median (`p50`), `p95` and `p99` of e2e."""
        return compositions(self.parts, errors=self.interference_se)

    @property
    def shares(self) -> dict[str, dict[str, float | None]]:
        """Share of each class in e2e: {"all", "p50", "p95", "p99"} → class → 0 … 1, null where no part of it is shown. Empty
        without finished requests."""
        return {name: c.class_shares for name, c in self.compositions.items()}

    @cached_property
    def tail(self) -> Tail | None:
        """What the slowest 1 % (at least one request) wait for that the median does not; null with fewer than two requests."""
        return tail_of(self.parts, errors=self.interference_se)

    @cached_property
    def ttft_compositions(self) -> dict[str, Composition]:
        """The same of the time to the first token: of all, and around its percentiles."""
        return compositions(self.ttft_parts, by="ttft", errors=_prefill_only(self.interference_se))

    @cached_property
    def ttft_tail(self) -> Tail | None:
        """What the slowest 1 % of first tokens wait for that the median does not."""
        return tail_of(self.ttft_parts, by="ttft", errors=_prefill_only(self.interference_se))


def account(trace: Trace, *, cost: StepCost | None = None, steps: Steps | None = None) -> Accounting:
    """Account for the time of every finished request without error.

    Args:
        trace: any trace; what it lacks is named in ``unseen``.
        cost: step cost to split mixed steps by; where it is not given, the one that the manifest names, else fitted to the steps.
        steps: what :func:`hoptrace.reconstruct.steps_of` gave, if the caller has it.

    Raises:
        InputError: a table is damaged.
    """
    found = steps if steps is not None else steps_of(trace)
    steps_frame, residency = found.steps, found.residency
    notes = [found.note] if found.note else []
    why_no_cost: str | None = None
    too_few: list[str] = []
    model: Model | None = None
    if cost is None and (cost := known_cost(trace.manifest)) is not None:
        notes.append("Split of mixed steps by the step cost that the trace's manifest names.")
    if cost is not None or (steps_frame.height and residency.height):
        model, said, too_few, why_no_cost = model_of(steps_frame, cost)
        notes += said
        cost = model.cost if model is not None else None
    by_server = lines(steps_frame, model, trace.table("coverage").collect())
    runs = read_runs(residency, by_server, trace.table("stages"))
    requests = read_requests(trace)
    stays = read_stays(trace, requests, runs)

    failed = requests["error"].is_not_null()
    unfinished = requests["finish_ns"].is_null() & ~failed
    done = requests.filter(~failed & ~unfinished)
    # In floating point first: hostile stamps may differ by more than an int64 holds.
    length = done["finish_ns"].cast(pl.Float64) - done["arrival_ns"].cast(pl.Float64)
    possible = (length >= 0) & (length < _MOST_NS) & done["arrival_ns"].is_not_null()
    whole = done.filter(possible)

    keys = _server_keys(trace, stays, by_server)
    full = {k: _fullness(trace, k, stays, runs, steps_frame, sum(s == k[0] for s, _ in keys) == 1) for k in keys}
    waits = read_waits(trace)
    passes = [_pass(part, stays, runs, waits, keys, by_server, full, model) for part in _batches(whole)]
    parts = pl.concat([p.parts for p in passes])
    ttft = pl.concat([p.ttft for p in passes])
    spans = pl.concat([p.spans for p in passes])
    error = pl.concat([p.error for p in passes])
    gaps = found.origin != "reconstructed"
    modelled = model.phases if model is not None else frozenset[str]()
    parts, unseen = seen_parts(parts, trace, whole, stays, runs, full, keys, modelled, why_no_cost, gaps, found)
    ttft = unseen_too(ttft, parts)
    unseen += too_few
    if cost is not None and (blank := without_composition(steps_frame)):
        unseen.append(
            f"Interference: {blank:,} of {steps_frame.height:,} steps do not say what was in them; they count as work whole, so "
            "interference is a lower bound."
        )
    if note := _interference_note(parts, error):
        notes.append(note)
    impossible = done.height - whole.height
    if impossible:
        unseen.insert(0, f"{impossible} finished requests end before they arrive or have no arrival; they are left out.")
    return Accounting(
        parts=parts,
        ttft_parts=ttft,
        spans=spans,
        interference_se=error,
        unseen=unseen,
        notes=notes,
        finished=whole.height,
        failed=int(failed.sum()),
        unfinished=int(unfinished.sum()),
        impossible=impossible,
        level=levels(trace, origin=found.origin if steps_frame.height else None),
        steps_origin=found.origin if steps_frame.height else None,
        cost=cost,
    )


def _prefill_only(errors: pl.DataFrame) -> pl.DataFrame:
    """Before the first token nothing is decoded."""
    return errors.select(
        "request", "prefill_interference_se_ns", pl.col("prefill_interference_se_ns").alias("interference_se_ns")
    )


def _interference_note(parts: pl.DataFrame, error: pl.DataFrame) -> str | None:
    """Mean interference and its standard error (the same coefficients act on all requests, so it does not average out)."""
    both = parts["prefill_interference_ns"].fill_null(0) + parts["decode_interference_ns"].fill_null(0)
    known = error["interference_se_ns"].drop_nulls()
    if not known.len() or not both.sum():
        return None
    mean, se = float(both.sum()) / both.len(), float(known.sum()) / known.len()
    return f"Interference is {duration_text(mean)} a request, standard error at most {duration_text(se)}."


def _pass(
    requests: pl.DataFrame,
    stays: pl.DataFrame,
    runs: pl.DataFrame,
    waits: pl.DataFrame,
    keys: list[tuple[str, int]],
    by_server: dict[tuple[str, int], StepLine],
    full: dict[tuple[str, int], Fullness],
    model: Model | None,
) -> Evaluation:
    axis = Axis.of(
        requests["request"].to_numpy(),
        requests["arrival_ns"].to_numpy(),
        (requests["finish_ns"] - requests["arrival_ns"]).to_numpy(),
    )
    only = requests.select("request")
    own_runs = runs.join(only, on="request", how="semi", maintain_order="left")
    own_stays = stays.join(only, on="request", how="semi", maintain_order="left")
    own_waits = waits.join(only, on="request", how="semi", maintain_order="left")
    index = {k: i for i, k in enumerate(keys)}
    line_of_stay = _line_of(own_stays, index)
    run_end = np.full(len(axis.request), -1, dtype=np.int64)
    at = axis.find(own_runs["request"].to_numpy())
    np.maximum.at(run_end, at, own_runs["end_ns"].to_numpy())
    plan = outline(axis, requests, own_stays, line_of_stay, run_end, _complete(requests, own_runs))
    return evaluate(
        axis,
        plan,
        own_runs,
        _line_of(own_runs, index),
        own_waits,
        [by_server.get(k) for k in keys],
        [full[k] for k in keys],
        keys,
        model,
        requests["first_token_ns"],
    )


def _complete(requests: pl.DataFrame, runs: pl.DataFrame) -> npt.NDArray[np.bool_]:
    """Whether the runs account for all output tokens (the last chunk of a prompt, and of what is computed again after a
    preemption, gives one too): else time after them is unexplained."""
    more = (pl.col("phase") == "chunk").shift(-1).over("request", "sequence").fill_null(False)
    made = runs.sort("request", "sequence", "start_ns").select(
        "request",
        pl.when(pl.col("phase") == "decode").then("tokens").otherwise(0).alias("_made")
        + ((pl.col("phase") == "chunk") & ~more).cast(pl.Int64),
    )
    made = made.group_by("request").agg(pl.col("_made").sum())
    frame = requests.select("request", "output_tokens").join(made, on="request", how="left", maintain_order="left")
    return (
        frame.select(pl.col("output_tokens").is_null() | (pl.col("_made").fill_null(0) >= pl.col("output_tokens")))
        .to_series()
        .to_numpy()
    )


def _server_keys(trace: Trace, stays: pl.DataFrame, by_server: dict[tuple[str, int], StepLine]) -> list[tuple[str, int]]:
    named = {(str(s), int(r)) for s, r in stays.select("server", "dp_rank").drop_nulls().unique().rows()}
    return sorted(named | set(by_server) | {(s.name, 0) for s in trace.manifest.servers})


def _line_of(frame: pl.DataFrame, index: dict[tuple[str, int], int]) -> Ints:
    """Server index of each row; −1 where the row names no server and there are several."""
    only = next(iter(index.values())) if len(index) == 1 else -1
    pairs = zip(frame["server"].to_list(), frame["dp_rank"].to_list(), strict=True)
    return np.array([only if s is None else index.get((s, r or 0), -1) for s, r in pairs], dtype=np.int64)


def _fullness(
    trace: Trace, key: tuple[str, int], stays: pl.DataFrame, runs: pl.DataFrame, steps: pl.DataFrame, one_rank: bool
) -> Fullness:
    alone = len(trace.manifest.servers) <= 1
    here = ((pl.col("server") == key[0]) & (pl.col("dp_rank") == key[1])) | (pl.col("server").is_null() & alone)
    of_steps = steps.filter((pl.col("server") == key[0]) & (pl.col("dp_rank").fill_null(0) == key[1])).sort("start_ns", "step")
    state = server_state(trace, key[0], alone=one_rank)
    lost = runs.filter((pl.col("phase") == "preempted") & (pl.col("server") == key[0]) & (pl.col("dp_rank") == key[1]))
    return fullness(stays.filter(here), of_steps, trace.manifest.server(key[0]), state, lost)


def _batches(requests: pl.DataFrame) -> list[pl.DataFrame]:
    """All in one, or in several such that Σ e2e of each fits in an int64."""
    total = 0
    cuts = [0]
    lengths = (
        (requests["finish_ns"] - requests["arrival_ns"]).to_list()
        if float((requests["finish_ns"] - requests["arrival_ns"]).cast(pl.Float64).sum()) > _MOST_NS
        else []
    )
    for i, n in enumerate(lengths):
        if total + n > _MOST_NS and i > cuts[-1]:
            cuts.append(i)
            total = 0
        total += n
    cuts.append(requests.height)
    return [requests.slice(a, b - a) for a, b in pairwise(cuts)]
