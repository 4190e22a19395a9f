"""What the accounting of some requests needs of a trace's steps and stays: those of their time, whether or not all are in memory.

Everything that is evaluated over steps is a difference of running sums, and whether a server is full at a moment depends on the
stays and steps about that moment; so the steps and stays of a window of time give the same figures within it as all of them do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.latency.axis import Ints
from hoptrace.analysis.latency.fullness import Fullness, fullness
from hoptrace.analysis.latency.interference import COMPOSITION, Model
from hoptrace.analysis.latency.runs import read_runs
from hoptrace.analysis.latency.serverstate import FAR, Samples, ServerState, server_state
from hoptrace.analysis.latency.stepline import StepLine, lines
from hoptrace.reader import Trace
from hoptrace.step_source import StepSource
from hoptrace.step_windows import StepWindows, step_windows

__all__ = ["Key", "Scope", "Stays", "StepAccess", "runs_of", "server_keys", "step_access"]

Key = tuple[str, int]
Span = tuple[int, int]
_QUEUED = ("preempted", "queued_decode_requests", "queued_decode_context_tokens")
_FULLNESS = ("prefill_tokens", "decode_tokens", "decode_requests", "kv_used_tokens", "kv_capacity_tokens", *_QUEUED)
_COLUMNS = ("start_ns", "end_ns", *dict.fromkeys((*COMPOSITION, "prefill_requests", *_FULLNESS)))
_ORDER = ("server", "dp_rank", "pp_rank", "step")
_SAMPLE = 50_000  # steps that a cost is fitted to


@dataclass(frozen=True)
class StepAccess:
    """A trace's steps: ``held`` in memory, or read by ``windows``. ``sample``: at most some 50,000 of them, evenly spread;
    ``told``: by (server, rank) one row that is null only where all of its steps are."""

    source: StepSource
    coverage: pl.DataFrame
    held: pl.DataFrame | None
    windows: StepWindows | None
    rows: int
    sample: pl.DataFrame
    told: Mapping[Key, pl.DataFrame]

    def read(self, span: Span | None, numbers: Mapping[Key, Span]) -> pl.DataFrame:
        """See :meth:`hoptrace.step_windows.StepWindows.read`; all steps where they are in memory."""
        if self.windows is None:
            assert self.held is not None
            return self.held
        return self.windows.read(_COLUMNS, span, dict(numbers))


def step_access(trace: Trace, source: StepSource, *, windows: bool) -> StepAccess:
    """``windows``: rather read windows than hold all steps, if the trace allows it."""
    found = step_windows(trace) if windows and source.stored else None
    coverage = trace.table("coverage").collect()
    need = [*dict.fromkeys((*_ORDER, *_COLUMNS))]
    if found is None:
        held = source.steps.select(need).with_columns(pl.col("dp_rank").fill_null(0)).sort(_ORDER, maintain_order=True)
        frame = held.collect()
        told = _told([_tops(frame)])
        return StepAccess(source, coverage, frame, None, frame.height, _sampled([frame], frame.height), told)
    tops: list[pl.DataFrame] = []

    def seen() -> Iterator[pl.DataFrame]:  # both in one reading
        for f in found.batches(need):
            tops.append(_tops(f))
            yield f

    sample = _sampled(seen(), found.rows)
    return StepAccess(source, coverage, None, found, found.rows, sample, _told(tops))


def _sampled(frames: Iterable[pl.DataFrame], rows: int) -> pl.DataFrame:
    every, at = max(1, -(-rows // _SAMPLE)), 0
    picked = []
    for f in frames:
        picked.append(f.slice(-at % every).gather_every(every))
        at += f.height
    whole = pl.concat(picked) if picked else pl.DataFrame()
    return whole.sort(_ORDER, maintain_order=True) if whole.height else whole


def _tops(f: pl.DataFrame) -> pl.DataFrame:
    """Of some steps, by (server, rank): the greatest of each column, and the first KV use that is told with its capacity."""
    both = pl.col("kv_used_tokens").is_not_null() & pl.col("kv_capacity_tokens").is_not_null()
    return f.group_by("server", pl.col("dp_rank").fill_null(0)).agg(
        pl.col("start_ns", "end_ns").max(),
        pl.col("prefill_tokens", "decode_tokens", "decode_requests").max(),
        pl.coalesce(pl.col("kv_used_tokens").filter(both).first(), pl.col("kv_used_tokens").max()).alias("kv_used_tokens"),
        pl.col("kv_capacity_tokens").filter(both).first().alias("kv_capacity_tokens"),
    )


def _told(rows: list[pl.DataFrame]) -> dict[Key, pl.DataFrame]:
    found = {}
    for (server, rank), own in pl.concat(rows).partition_by("server", "dp_rank", as_dict=True).items() if rows else ():
        pairs = own.filter(pl.col("kv_capacity_tokens").is_not_null())
        first = (pairs if pairs.height else own).select("kv_used_tokens", "kv_capacity_tokens").head(1)
        top = own.select(pl.col("server").first(), pl.col("dp_rank").first(), pl.col("start_ns", "end_ns", *_FULLNESS[:3]).max())
        used = (
            first["kv_used_tokens"]
            if pairs.height
            else own["kv_used_tokens"].drop_nulls().head(1).extend_constant(None, 1).head(1)
        )
        nothing = (pl.lit(None, dtype=pl.Int64).alias(c) for c in _QUEUED)
        found[(str(server), int(rank))] = top.with_columns(used.alias("kv_used_tokens"), first["kv_capacity_tokens"], *nothing)
    return found


class Stays:
    """All stays of a trace (:func:`hoptrace.analysis.latency.marks.read_stays`), ascending by request."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self.frame = frame
        self._request = frame["request"].to_numpy()
        times = ("enqueued_ns", "scheduled_ns", "end_ns")
        open_ = pl.any_horizontal(pl.col("scheduled_ns", "end_ns").is_null())
        bounds = frame.select(
            pl.min_horizontal(*times, "waits_from_ns").fill_null(FAR).alias("low"),
            pl.when(open_).then(FAR).otherwise(pl.max_horizontal(*times, "finish_ns")).fill_null(FAR).alias("high"),
        )
        self._low, self._high = bounds["low"].to_numpy(), bounds["high"].to_numpy()

    def of(self, low: int, high: int) -> pl.DataFrame:
        """Those of the requests ``low ≤ request < high``."""
        a, b = np.searchsorted(self._request, [low, high], side="left").tolist()
        return self.frame.slice(a, b - a)

    def within(self, span: Span) -> pl.DataFrame:
        """Those that may lie in ``span``, at least partly, waiting or served."""
        return self.frame.filter(pl.Series((self._low <= span[1]) & (self._high >= span[0])))


class Scope:
    """Steps and fullness by (server, rank) for some requests at a time."""

    def __init__(self, trace: Trace, access: StepAccess, model: Model | None, keys: list[Key], stays: Stays) -> None:
        self._trace, self._access, self._model, self._keys, self._stays = trace, access, model, keys, stays
        ranks = {name: sum(s == name for s, _ in keys) for name, _ in keys}
        self._states = {k: server_state(trace, k[0], alone=ranks[k[0]] == 1) for k in keys}
        self._whole: tuple[dict[Key, StepLine], dict[Key, Fullness]] | None = None
        # Who has lost his place holds no slot, whoever he is.
        self._lost = access.source.residency.filter(pl.col("phase") == "preempted").collect(engine="streaming")

    def told(self) -> dict[Key, tuple[bool, frozenset[str]]]:
        """Of each (server, rank): whether there is any time with room known, and the causes of being full that could be told."""
        nothing = self._stays.frame.clear()
        out = {}
        for k in self._keys:
            one = self._access.told.get(k)
            steps = one if one is not None else pl.DataFrame(schema=dict.fromkeys(("start_ns", "end_ns", *_FULLNESS), pl.Int64))
            found = fullness(nothing, steps, self._trace.manifest.server(k[0]), self._states[k])
            out[k] = found.certain, found.told
        return out

    def look(self, span: Span | None, residency: pl.DataFrame) -> tuple[dict[Key, StepLine], pl.DataFrame, dict[Key, Fullness]]:
        """(lines, runs, fullness), right for the requests of ``residency`` within ``span`` (ns, both ends included)."""
        if self._access.windows is None:
            if self._whole is None:
                assert self._access.held is not None
                by_server = lines(self._access.held, self._model, self._access.coverage)
                lost = read_runs(self._lost, by_server)
                full = {k: self._fullness(k, self._stays.frame, self._access.held, self._states[k], lost) for k in self._keys}
                self._whole = by_server, full
            return self._whole[0], read_runs(residency, self._whole[0], self._own(residency)), self._whole[1]
        states = {k: _state_within(s, span) for k, s in self._states.items()} if span is not None else self._states
        wide = _widened(span, states)
        steps = self._access.read(wide, numbers_of(residency))
        by_server = lines(steps, self._model, self._access.coverage)
        runs, lost = read_runs(residency, by_server, self._own(residency)), read_runs(self._lost, by_server)
        if wide is None:
            nobody = self._stays.frame.clear()
            return by_server, runs, {k: self._fullness(k, nobody, steps.clear(), s, lost) for k, s in states.items()}
        earliest = steps["start_ns"].min()
        # A step speaks for the time until the next one: the stays since the first of them count.
        begin = min(wide[0], int(earliest)) if isinstance(earliest, int) else wide[0]
        stays = self._stays.within((begin, wide[1]))
        cut = {k: _cut_at(s, begin, stays) for k, s in states.items()}
        return by_server, runs, {k: self._fullness(k, stays, steps, s, lost) for k, s in cut.items()}

    def _own(self, residency: pl.DataFrame) -> pl.DataFrame:
        """The stays of those whose rows these are."""
        low, high = residency["request"].min(), residency["request"].max()
        return self._stays.of(low, high + 1) if isinstance(low, int) and isinstance(high, int) else self._stays.frame.clear()

    def _fullness(self, key: Key, stays: pl.DataFrame, steps: pl.DataFrame, state: ServerState, lost: pl.DataFrame) -> Fullness:
        alone = len(self._trace.manifest.servers) <= 1
        here = ((pl.col("server") == key[0]) & (pl.col("dp_rank") == key[1])) | (pl.col("server").is_null() & alone)
        own = steps.filter((pl.col("server") == key[0]) & (pl.col("dp_rank") == key[1])).sort("start_ns", "step")
        away = lost.filter((pl.col("server") == key[0]) & (pl.col("dp_rank") == key[1]))
        return fullness(stays.filter(here), own, self._trace.manifest.server(key[0]), state, away)


def runs_of(access: StepAccess, residency: pl.DataFrame) -> pl.DataFrame:
    """The runs of steps of some requests, from the numbers of their steps alone."""
    if not residency.height:
        return read_runs(residency, {})
    return read_runs(residency, lines(access.read(None, numbers_of(residency)), None))


def numbers_of(residency: pl.DataFrame) -> dict[Key, Span]:
    """First and last step of the rows, by (server, rank)."""
    found = residency.group_by("server", pl.col("dp_rank").fill_null(0)).agg(
        pl.col("first_step").min(), pl.col("last_step").max()
    )
    return {(str(s), int(r)): (int(a), int(b)) for s, r, a, b in found.rows()}


def server_keys(trace: Trace, stays: pl.DataFrame, access: StepAccess) -> list[Key]:
    """Every (server, rank) that the trace names, ascending."""
    named = {(str(s), int(r)) for s, r in stays.select("server", "dp_rank").drop_nulls().unique().rows()}
    return sorted(named | set(access.told) | {(s.name, 0) for s in trace.manifest.servers})


def _state_within(state: ServerState, span: Span) -> ServerState:
    """Only the samples that speak for ``span``, and those that saw the server idle (:func:`_cut_at` drops the idle ones that do
    not matter)."""
    return replace(
        state,
        processing=_some(state.processing, _speaks(state.processing, span) | (state.processing.value == 0)),
        deferred=_some(state.deferred, _speaks(state.deferred, span)),
    )


def _speaks(x: Samples, span: Span) -> npt.NDArray[np.bool_]:
    return (x.end >= span[0]) & (x.start <= span[1])


def _some(x: Samples, which: npt.NDArray[np.bool_]) -> Samples:
    return Samples(x.time[which], x.uncertainty[which], x.start[which], x.end[which], x.value[which])


def _widened(span: Span | None, states: Mapping[Key, ServerState]) -> Span | None:
    """``span`` with the moments of the samples that speak for it."""
    if span is None:
        return None
    low, high = span
    for s in states.values():
        for x in (s.processing, s.deferred):
            near = _speaks(x, span)
            if near.any():
                low = min(low, int((x.time - x.uncertainty)[near].min()))
                high = max(high, int((x.time + x.uncertainty)[near].max()))
    return low, high


def _cut_at(state: ServerState, begin: int, stays: pl.DataFrame) -> ServerState:
    """``state`` with a mark at ``begin``, before which not all stays are known, and of the idle samples before it only the first
    after each stay whose client had gone."""
    x = state.processing
    old = (x.end < begin) & (x.value == 0)
    if old.any():
        idle = np.flatnonzero(x.value == 0)
        left = stays.select(pl.coalesce("end_ns", "scheduled_ns", "enqueued_ns")).to_series().drop_nulls().to_numpy()
        seen = (x.time - x.uncertainty)[idle]
        first = np.unique(np.searchsorted(seen, left, side="right"))
        keep = ~old
        keep[idle[first[first < len(idle)]]] = True
        state = replace(state, processing=_some(x, keep))
    at = max(int(np.searchsorted(state.slots_from, begin, side="right")) - 1, 0)
    marks: Ints = np.insert(state.slots_from, at + 1, begin)
    return replace(state, slots_from=marks, slots=np.insert(state.slots, at + 1, state.slots[at]))
