"""Exact latency accounting: each nanosecond of a request, from arrival to finish, in exactly one part (law 1).

How: an outline of the request's time by its stamps; over it the recorded waits (where they overlap, the one that ends later
wins); over both the runs of steps that the request was in. Time inside a run is then split by cumulative functions over the
server's steps. All of it is integer arithmetic on one line on which the requests lie end to end, so the parts add up by
construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import polars as pl

from hoptrace.analysis.latency.composition import Composition, Ranked, Tail
from hoptrace.analysis.latency.interference import Model, model_of, without_composition
from hoptrace.analysis.latency.levels import Levels, levels
from hoptrace.analysis.latency.marks import read_requests, read_stays
from hoptrace.analysis.latency.part_store import PartStore
from hoptrace.analysis.latency.parts import CLASSES, PARTS
from hoptrace.analysis.latency.passes import MOST_NS, account_for, in_passes
from hoptrace.analysis.latency.runs import read_waits
from hoptrace.analysis.latency.scope import Key, Scope, Stays, StepAccess, runs_of, server_keys, step_access
from hoptrace.analysis.latency.unseen import Sight, facts_of, sentences, shown, sight_of, unseen_too
from hoptrace.analysis.text import duration_text
from hoptrace.errors import InputError
from hoptrace.reader import Trace
from hoptrace.reconstruct import Steps
from hoptrace.step_source import StepSource, step_source
from hoptrace.stepcost import StepCost, known_cost
from hoptrace.token_batches import each_range

__all__ = ["Accounting", "account"]

T = TypeVar("T")
_BATCH = 65_536  # requests accounted for at a time
_HELD = 200_000  # requests whose parts are kept in memory
_ERRORS = ["interference_se_ns", "prefill_interference_se_ns", "decode_interference_se_ns"]


@dataclass(frozen=True)
class Accounting:
    """Where the time of the finished requests went.

    Of a long trace the figures by request (``parts``, ``ttft_parts``, ``interference_se``) lie in temporary files until they are
    asked for; ``compositions``, ``shares`` and the tails need no more than a batch of them in memory.

    Attributes:
        unseen: what this trace cannot show, in sentences.
        notes: how what it does show was found.
        finished, failed, unfinished, impossible: requests counted; only the finished ones are accounted. Impossible ones end
            before they arrive.
        steps_origin: observed, reconstructed, replayed, or null where there are no steps.
        cost: the step cost behind the interference, or null.
        level: which tables it rests on, and what those that are missing would have shown.
        interference_se_ns: mean standard error of a request's interference; null without a fitted cost.
    """

    unseen: list[str]
    notes: list[str]
    finished: int
    failed: int
    unfinished: int
    impossible: int
    level: Levels
    steps_origin: str | None = None
    cost: StepCost | None = field(default=None, repr=False)
    interference_se_ns: float | None = None
    _store: PartStore = field(default_factory=lambda: PartStore(False), repr=False, compare=False)
    _first: Callable[[], PartStore] | None = field(default=None, repr=False, compare=False)
    _spans: Callable[[], pl.DataFrame] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def parts(self) -> pl.DataFrame:
        """One row per finished request, by request: request, arrival_ns, finish_ns, e2e_ns and one column per part
        (:data:`PARTS`), int64 ns. A part is null where the recording cannot show it; the others add up to e2e_ns exactly."""
        return self._store.whole("parts", ["request", "arrival_ns", "finish_ns", "e2e_ns", *(p.column for p in PARTS)])

    def part_batches(self) -> Iterator[pl.DataFrame]:
        """``parts``, one batch of requests after the other, for those who need not hold them all."""
        columns = ["request", "arrival_ns", "finish_ns", "e2e_ns", *(p.column for p in PARTS)]
        return (piece().select(columns) for piece in self._store.pieces("parts"))

    @cached_property
    def ttft_parts(self) -> pl.DataFrame:
        """The same up to the first token: request, arrival_ns, first_token_ns, ttft_ns (first token − arrival, as TTFT has it)
        and the parts, which add up to ttft_ns exactly. Once a request's prompt is computed its first token is on its way: that
        is `delivery` here, whatever steps go on meanwhile. Requests that TTFT leaves out, since nobody outside saw their first
        token, have no row."""
        return self._ttft_store.whole("ttft", ["request", "arrival_ns", "first_token_ns", "ttft_ns", *(p.column for p in PARTS)])

    @cached_property
    def interference_se(self) -> pl.DataFrame:
        """request, interference_se_ns, prefill_interference_se_ns, decode_interference_se_ns: standard errors of both
        interference parts together and of each (those of `prefill` and `decode` are the same: what is not the one is the other);
        null without a fitted cost. See :mod:`hoptrace.analysis.latency.interference` for the formula."""
        return self._store.whole("parts", ["request", *_ERRORS])

    @cached_property
    def spans(self) -> pl.DataFrame:
        """request, start_ns, end_ns, label, server: the same time as an ordered sequence, for timelines. Labels are parts; an
        interval of several by the one that takes most of it (split further only in ``parts``). Found when first asked for."""
        assert self._spans is not None
        return self._spans()

    @property
    def classes(self) -> pl.DataFrame:
        """One row per request: request, e2e_ns and one column per class (`work_ns` …), adding up to e2e_ns exactly."""
        sums = []
        for klass in CLASSES:
            columns = [p.column for p in PARTS if p.klass == klass]
            sums.append(pl.sum_horizontal(pl.col(c).fill_null(0) for c in columns).alias(klass.replace(" ", "_") + "_ns"))
        return self.parts.select("request", "e2e_ns", *sums)

    @cached_property
    def _ranked(self) -> Ranked:
        return Ranked(self._store.pieces("parts"), "e2e")

    @cached_property
    def _ttft_ranked(self) -> Ranked:
        return Ranked(self._ttft_store.pieces("ttft"), "ttft")

    @cached_property
    def _ttft_store(self) -> PartStore:
        return self._store if self._first is None else self._first()

    @cached_property
    def compositions(self) -> dict[str, Composition]:
        """Mean composition of all requests (`all`) and of those around the median (`p50`), `p95` and `p99` of e2e."""
        return self._ranked.compositions()

    @property
    def shares(self) -> dict[str, dict[str, float | None]]:
        """Share of each class in e2e: {"all", "p50", "p95", "p99"} → class → 0 … 1, null where no part of it is shown. Empty
        without finished requests."""
        return {name: c.class_shares for name, c in self.compositions.items()}

    @cached_property
    def tail(self) -> Tail | None:
        """What the slowest 1 % (at least one request) wait for that the median does not; null with fewer than two requests."""
        return self._ranked.tail()

    @cached_property
    def ttft_compositions(self) -> dict[str, Composition]:
        """The same of the time to the first token: of all, and around its percentiles."""
        return self._ttft_ranked.compositions()

    @cached_property
    def ttft_tail(self) -> Tail | None:
        """What the slowest 1 % of first tokens wait for that the median does not."""
        return self._ttft_ranked.tail()


def account(
    trace: Trace,
    *,
    cost: StepCost | None = None,
    steps: StepSource | Steps | None = None,
    batch: int = _BATCH,
    held: int = _HELD,
    ttft: bool = True,
) -> Accounting:
    """Account for the time of every finished request without error.

    Args:
        trace: any trace; what it lacks is named in ``unseen``.
        cost: step cost to split mixed steps by; where it is not given, the one that the manifest names, else fitted to the steps.
        steps: what :func:`hoptrace.step_source.step_source` (or ``steps_of``) gave, if the caller has it.
        batch: requests accounted for at a time. held: requests whose parts are kept in memory.
        ttft: account up to the first token as well; otherwise that is done when it is first asked for, in a pass of its own.

    Raises:
        InputError: a table is damaged.
    """
    source = step_source(trace) if steps is None else StepSource.of(steps) if isinstance(steps, Steps) else steps
    ranges, many = _ranges(trace, batch)
    access = step_access(trace, source, windows=len(ranges) > 1)
    model, said, why_no_cost, lost = _model(trace, access, cost)
    notes = ([source.note] if source.note else []) + said

    def residency(low: int, high: int) -> pl.DataFrame:
        if source.stored:
            return trace.of_requests("residency", low, high).collect()
        return source.residency.filter(pl.col("request").is_between(low, high, closed="left")).collect()

    def stays_of(low: int, high: int) -> pl.DataFrame:
        requests = read_requests(trace, (low, high))
        return read_stays(trace, requests, lambda: runs_of(access, residency(low, high)), (low, high))

    stays = Stays(pl.concat(list(each_range(ranges, stays_of)), rechunk=True))
    keys = server_keys(trace, stays.frame, access)
    scope = Scope(trace, access, model, keys, stays)
    sight = sight_of(trace, source, model.phases if model is not None else frozenset(), scope.told())

    def one(low: int, high: int, spans: bool = False, ttft: bool = ttft) -> _Batch:
        requests = read_requests(trace, (low, high))
        return _account(trace, requests, (low, high), residency(low, high), scope, stays, keys, model, sight, spans, ttft)

    def first() -> PartStore:
        store = PartStore(many > held)
        for found in each_range(ranges, lambda low, high: one(low, high, ttft=True)):
            if found.ttft is not None:
                store.add("ttft", found.ttft)
        return store

    def spans() -> pl.DataFrame:
        return pl.concat([s for b in each_range(ranges, lambda low, high: one(low, high, True)) for s in b.spans])

    store = PartStore(many > held)
    facts, totals = [], _Totals()
    for found in each_range(ranges, one):
        store.add("parts", found.parts)
        if found.ttft is not None:
            store.add("ttft", found.ttft)
        facts.append(found.facts)
        totals.add(found)
    whole = pl.concat(facts)
    unseen = sentences(whole, trace, sight, why_no_cost) + lost
    if model is not None and (blank := without_composition(source.steps)):
        unseen.append(
            f"Interference: {blank:,} of {access.rows:,} steps do not say what was in them; they count as work whole, so "
            "interference is a lower bound."
        )
    se = totals.error / totals.errors if totals.errors else None
    if se is not None and totals.interference:
        mean = totals.interference / totals.finished
        notes.append(f"Interference is {duration_text(mean)} a request, standard error at most {duration_text(se)}.")
    if totals.impossible:
        unseen.insert(0, f"{totals.impossible} finished requests end before they arrive or have no arrival; they are left out.")
    origin = source.origin if access.rows else None
    return Accounting(
        unseen=unseen,
        notes=notes,
        finished=totals.finished,
        failed=totals.failed,
        unfinished=totals.unfinished,
        impossible=totals.impossible,
        level=levels(trace, origin=origin),
        steps_origin=origin,
        cost=model.cost if model is not None else None,
        interference_se_ns=se,
        _store=store,
        _first=None if ttft else first,
        _spans=spans,
    )


@dataclass(frozen=True)
class _Batch:
    """What was found of some requests: ``parts`` and ``ttft`` with their standard errors, as in :class:`Accounting`."""

    parts: pl.DataFrame
    ttft: pl.DataFrame | None
    facts: pl.DataFrame
    spans: list[pl.DataFrame]
    failed: int
    unfinished: int
    impossible: int


class _Totals:
    """Sums over the batches."""

    def __init__(self) -> None:
        self.finished = self.failed = self.unfinished = self.impossible = self.interference = self.errors = 0
        self.error = 0.0

    def add(self, b: _Batch) -> None:
        self.finished += b.parts.height
        self.failed += b.failed
        self.unfinished += b.unfinished
        self.impossible += b.impossible
        for phase in ("prefill", "decode"):
            self.interference += int(b.parts[f"{phase}_interference_ns"].cast(pl.Int128).sum())
        known = b.parts["interference_se_ns"].drop_nulls()
        self.errors += known.len()
        self.error += float(known.sum())


def _ranges(trace: Trace, batch: int) -> tuple[list[tuple[int, int]], int]:
    """Ranges of request numbers that hold all requests, ``batch`` in each, ascending; and how many requests there are."""
    numbers = trace.table("requests").select(pl.col("request").unique()).collect(engine="streaming")["request"].sort()
    if numbers.null_count():
        raise InputError(
            f"{trace.name}: rows of `requests` have no `request` number, so nothing says whose they are.",
            hint=f"Run: hoptrace validate {trace.path}",
        )
    if not numbers.len():
        return [(0, 1)], 0
    cuts = [int(x) for x in numbers.gather_every(batch)]
    return list(pairwise([*cuts, int(numbers[-1]) + 1])), numbers.len()


def _model(trace: Trace, access: StepAccess, cost: StepCost | None) -> tuple[Model | None, list[str], str | None, list[str]]:
    """(the model, notes, why there is none, what it cannot tell)."""
    notes: list[str] = []
    if cost is None and (cost := known_cost(trace.manifest)) is not None:
        notes.append("Split of mixed steps by the step cost that the trace's manifest names.")
    if cost is None and not (access.rows and access.source.residency.head(1).collect().height):
        return None, notes, None, []
    every = access.source.steps if access.rows > access.sample.height else None
    model, said, lost, why = model_of(access.sample, cost, every)
    return model, notes + said, why, lost


def _account(
    trace: Trace,
    requests: pl.DataFrame,
    within: tuple[int, int],
    residency: pl.DataFrame,
    scope: Scope,
    stays: Stays,
    keys: list[Key],
    model: Model | None,
    sight: Sight,
    spans: bool,
    ttft: bool,
) -> _Batch:
    failed = requests["error"].is_not_null()
    unfinished = requests["finish_ns"].is_null() & ~failed
    done = requests.filter(~failed & ~unfinished)
    # In floating point first: hostile stamps may differ by more than an int64 holds.
    length = done["finish_ns"].cast(pl.Float64) - done["arrival_ns"].cast(pl.Float64)
    possible = (length >= 0) & (length < MOST_NS) & done["arrival_ns"].is_not_null()
    whole = done.filter(possible)
    begin, end = whole["arrival_ns"].min(), whole["finish_ns"].max()
    span = (begin, end) if isinstance(begin, int) and isinstance(end, int) else None
    by_server, runs, full = scope.look(span, residency)
    own = stays.of(*within)
    waits = read_waits(trace, within)
    passes = [account_for(part, own, runs, waits, keys, by_server, full, model, spans, ttft) for part in in_passes(whole)]
    raw = pl.concat([p.parts for p in passes])
    facts = facts_of(raw, whole, own, runs, sight)
    parts = shown(raw, facts, sight)
    error = pl.concat([p.error for p in passes])
    until_first = [p.ttft for p in passes if p.ttft is not None]
    return _Batch(
        parts=pl.concat([parts, error.drop("request")], how="horizontal"),
        ttft=_until_first(pl.concat(until_first), parts, error) if until_first else None,
        facts=facts.drop("request"),
        spans=[p.spans for p in passes if p.spans is not None],
        failed=int(failed.sum()),
        unfinished=int(unfinished.sum()),
        impossible=done.height - whole.height,
    )


def _until_first(ttft: pl.DataFrame, parts: pl.DataFrame, error: pl.DataFrame) -> pl.DataFrame:
    """With null where ``parts`` has null, and standard errors: before the first token nothing is decoded."""
    before = error.select(
        "request", "prefill_interference_se_ns", pl.col("prefill_interference_se_ns").alias("interference_se_ns")
    )
    return unseen_too(ttft, parts).join(before, on="request", how="left", maintain_order="left")
