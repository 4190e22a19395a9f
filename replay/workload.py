"""What a trace asks of a server: arrivals, lengths, prefix blocks; the int64 arrays that kernel and load generator read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl

from hoptrace.errors import InputError, UsageError
from hoptrace.metrics import arrivals_known
from hoptrace.reader import Trace
from hoptrace.replay.common_text import common_tokens

__all__ = ["Workload", "from_frame", "parse_rate", "sooner", "workload"]

_AT_ONCE = (
    "When the requests arrived is not known (the trace has durations only): here all come at once, and nothing is comparable."
)
_Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Workload:
    """The requests of a trace that can be replayed, sorted by arrival (ties by number). Arrays are int64.

    Attributes:
        request: [n] numbers of the requests in the trace.
        arrival_ns: [n] on the trace's clock.
        prompt_tokens, output_tokens: [n], at least 1. Prompt tokens that the recorded server found in its cache are prompt tokens
            all the same: a replay's cache decides anew.
        block_ptr: [n+1], block_id, block_end: [b] the prompts' leading blocks in CSR form. Equal ids mean equal text from the
            start of the prompt (the hashes are chained); ``block_end`` is the prompt tokens through the block's end. Blocks in
            characters are scaled by the request's own prompt_tokens ÷ prompt_chars and rounded down.
        block_tokens: [distinct] the least number of tokens that the block covers in any request.
        left_out: requests of the trace that are not here, by reason.
        notes: what a reader has to know, in sentences.
        session: [n] the conversation that each request belongs to; null where it is unknown.
        after: [n] position of the request that this one comes after, -1 if none; null: none has one.
        think_ns: [n] from that one's end until this one's arrival; floor: [n] whether it also does not come before
            ``arrival_ns``.
        session_id: [n] number of the session (in the order of their first requests), -1 without one; null: none has one.
        priority: [n] of the request, lower is sooner, 0 where it has none; null: none has one.
        in_characters: [n] whether the request's blocks are of characters; null: nobody's are.
        common: [distinct] tokens that prompts were seen to share that share this block and no further one, 0 where not seen
            (:mod:`hoptrace.replay.common_text`); null: not looked at.
    """

    request: _Ints
    arrival_ns: _Ints
    prompt_tokens: _Ints
    output_tokens: _Ints
    block_ptr: _Ints
    block_id: _Ints
    block_end: _Ints
    block_tokens: _Ints
    left_out: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    session: tuple[str | None, ...] = ()
    after: _Ints | None = None
    think_ns: _Ints | None = None
    floor: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    session_id: _Ints | None = None
    priority: _Ints | None = None
    in_characters: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    common: _Ints | None = None

    @property
    def n(self) -> int:
        """Number of requests."""
        return len(self.request)

    def at_rate(self, rate: Fraction | float) -> Workload:
        """The same work with the arrivals ``rate`` times as close together; the first arrival stays where it is.

        Raises:
            UsageError: the rate is not a positive number.
        """
        if rate <= 0:
            raise UsageError(f"A rate of {rate} is not possible.", hint="Give a positive number: 1.5 is half as much again.")
        if rate == 1 or not self.n:
            return self
        start = int(self.arrival_ns[0])
        return replace(self, arrival_ns=start + sooner(self.arrival_ns - start, rate))

    def take(self, keep: np.ndarray[Any, Any]) -> Workload:
        """Only the requests at the positions (or where the mask) ``keep`` says, in that order."""
        index = np.flatnonzero(keep) if keep.dtype == np.bool_ else keep
        counts = np.diff(self.block_ptr)[index]
        ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        at = np.repeat(self.block_ptr[index] - ptr[:-1], counts) + np.arange(ptr[-1])
        after = self.after
        if after is not None:
            # Who waited for one that is not here waits for nobody.
            place = np.full(self.n + 1, -1, dtype=np.int64)
            place[index] = np.arange(len(index))
            after = place[after[index]]
        return replace(
            self,
            request=self.request[index],
            arrival_ns=self.arrival_ns[index],
            prompt_tokens=self.prompt_tokens[index],
            output_tokens=self.output_tokens[index],
            block_ptr=ptr,
            block_id=self.block_id[at],
            block_end=self.block_end[at],
            session=tuple(self.session[i] for i in index) if self.session else (),
            after=after,
            think_ns=None if self.think_ns is None else self.think_ns[index],
            floor=None if self.floor is None else self.floor[index],
            session_id=None if self.session_id is None else self.session_id[index],
            priority=None if self.priority is None else self.priority[index],
            in_characters=None if self.in_characters is None else self.in_characters[index],
        )


def sooner(spans_ns: _Ints, rate: Fraction | float) -> _Ints:
    """Spans of time ÷ rate, rounded down; exact for rates of a denominator of 10,000 at most."""
    exact = Fraction(rate).limit_denominator(10_000)
    up, down = exact.denominator, max(1, exact.numerator)
    if not len(spans_ns) or max(abs(int(spans_ns.min())), int(spans_ns.max())) < np.iinfo(np.int64).max // up:
        return spans_ns * up // down
    return np.array([int(a) * up // down for a in spans_ns], dtype=np.int64)


def workload(trace: Trace) -> Workload:
    """The workload of a trace.

    Requests that failed, or do not say how long they are, are left out and counted by reason.

    Raises:
        InputError: no request is left; says why.
    """
    columns = (
        "request", "arrival_ns", "prompt_tokens", "output_tokens", "prefix_blocks", "hash_space", "block_size", "block_unit",
        "prompt_chars", "session", "priority", "error",
    )  # fmt: skip
    found = from_frame(trace.table("requests").select(columns).collect(), str(trace.path))
    if found.in_characters is not None:
        found = replace(found, common=common_tokens(found.block_ptr, found.block_id, _cached(trace, found.request)))
    at_once = () if arrivals_known(trace) else (_AT_ONCE,)
    return replace(found, notes=(*at_once, *found.notes, *_several(trace, found.request)))


def _cached(trace: Trace, request: _Ints) -> _Ints:
    """[n] prompt tokens that each request's first server found in its cache, -1 where it did not say."""
    told = (
        trace.table("stages")
        .sort("request", "attempt", "stage", nulls_last=False)
        .group_by("request")
        .agg(pl.col("cached_tokens").first())
        .collect()
    )
    rows = pl.DataFrame({"request": request}).join(told, on="request", how="left", maintain_order="left")
    return rows["cached_tokens"].fill_null(-1).cast(pl.Int64).to_numpy()


def _several(trace: Trace, request: _Ints) -> list[str]:
    """Says how many of the requests had several sequences (n > 1): their output_tokens are those of all of them."""
    beyond = pl.col("sequence") > 0
    asked = [trace.table(name).filter(beyond).select("request").unique() for name in ("stages", "tokens")]
    n = int(np.isin(pl.concat(pl.collect_all(asked, engine="streaming"))["request"].unique().to_numpy(), request).sum())
    if not n:
        return []
    return [
        f"{n} request{'' if n == 1 else 's'} had several sequences side by side (n > 1). A replay computes all their "
        "tokens one after another, as one sequence: these take longer here, and fewer decode at once."
    ]


def from_frame(requests: pl.DataFrame, name: str = "the trace") -> Workload:
    """The workload in rows of `requests`; see :func:`workload`."""
    reason = (
        pl.when(pl.col("error").is_not_null()).then(pl.lit("failed"))
        .when(pl.col("arrival_ns").is_null()).then(pl.lit("no arrival_ns"))
        .when(pl.col("prompt_tokens").is_null()).then(pl.lit("no prompt_tokens"))
        .when(pl.col("output_tokens").is_null()).then(pl.lit("no output_tokens"))
        .when(pl.col("prompt_tokens") < 1).then(pl.lit("empty prompt"))
        .when(pl.col("output_tokens") < 1).then(pl.lit("no output"))
    )  # fmt: skip
    frame = requests.with_columns(reason.alias("why"))
    left_out = {str(w): int(n) for w, n in sorted(frame.drop_nulls("why").group_by("why").len().iter_rows())}
    frame = frame.filter(pl.col("why").is_null()).sort("arrival_ns", "request")
    if not frame.height:
        why = "; ".join(f"{n} {w}" for w, n in left_out.items()) or "it has no requests"
        raise InputError(f"Nothing in {name} can be replayed: {why}.", hint="A replay needs arrival, prompt and output length.")
    notes = []
    for why, n in left_out.items():
        notes.append(f"{n} of {requests.height} requests are left out of the replay: {why}.")
    ptr, block_id, block_end, least, unusable = _blocks(frame)
    if unusable:
        whose = f"{unusable} request{'' if unusable == 1 else 's'}"
        notes.append(f"The prefix blocks of {whose} are not used: their size in tokens is unknown.")
    request, arrival, prompt, output = (
        frame[c].cast(pl.Int64).to_numpy().copy() for c in ("request", "arrival_ns", "prompt_tokens", "output_tokens")
    )
    return Workload(
        request,
        arrival,
        prompt,
        output,
        block_ptr=ptr,
        block_id=block_id,
        block_end=block_end,
        block_tokens=least,
        left_out=left_out,
        notes=tuple(notes),
        session=tuple(frame["session"].to_list()) if _has(frame, "session") else (),
        session_id=_numbered(frame["session"]) if _has(frame, "session") else None,
        priority=frame["priority"].fill_null(0).cast(pl.Int64).to_numpy().copy() if _has(frame, "priority") else None,
        in_characters=_characters(frame),
    )


def _has(frame: pl.DataFrame, column: str) -> bool:
    return column in frame.columns and frame[column].null_count() < frame.height


def _characters(frame: pl.DataFrame) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Whose prefix blocks are of characters; null: nobody's."""
    found = (frame["block_unit"] == "characters").fill_null(False).to_numpy().copy()
    return found if found.any() else None


def _numbered(names: pl.Series) -> _Ints:
    """Numbers of names in the order in which they come; -1 for null."""
    known = names.drop_nulls().unique(maintain_order=True)
    numbers = names.replace_strict(known, np.arange(known.len()), default=-1, return_dtype=pl.Int64)
    return numbers.to_numpy().copy()


def _blocks(frame: pl.DataFrame) -> tuple[_Ints, _Ints, _Ints, _Ints, int]:
    """Of the (sorted) requests: block_ptr, block_id, block_end, block_tokens, and of how many the blocks cannot be used.
    Ids are numbers in the order in which the blocks first come."""
    has = (pl.col("prefix_blocks").list.len() > 0).fill_null(False)
    known = (pl.col("block_size") > 0) & (
        (pl.col("block_unit") == "tokens") | ((pl.col("block_unit") == "characters") & (pl.col("prompt_chars") > 0))
    )
    told = frame.select(has.alias("has"), (has & known.fill_null(False)).alias("usable"))
    rows = np.flatnonzero(told["usable"].to_numpy())
    unusable = int(told["has"].sum()) - len(rows)
    used = frame[rows] if len(rows) < frame.height else frame
    counts = np.zeros(frame.height, dtype=np.int64)
    counts[rows] = used["prefix_blocks"].list.len().fill_null(0).to_numpy()
    ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    if not len(rows):
        none = np.zeros(0, dtype=np.int64)
        return ptr, none, none, none, unusable
    each = counts[rows]
    values = used["prefix_blocks"].explode()
    space = used["hash_space"].cast(pl.Categorical).to_physical().cast(pl.Int64).fill_null(-1).to_numpy()
    unlike = np.repeat(2 * space, each) + values.is_null().to_numpy()
    ids = _first_come(values.fill_null(0).to_numpy(), unlike)
    tokens = used["prompt_tokens"].cast(pl.Int64).to_numpy()
    chars = np.where((used["block_unit"] == "characters").to_numpy(), used["prompt_chars"].fill_null(1).to_numpy(), 0)
    # A block longer than its prompt ends with it.
    size = np.minimum(used["block_size"].to_numpy(), np.where(chars > 0, chars, tokens))
    nth = np.arange(1, ptr[-1] + 1) - np.repeat(ptr[rows], each)
    end = nth * np.repeat(size, each)
    if (chars > 0).any():
        of = np.repeat(np.maximum(chars, 1), each)
        end = np.where(np.repeat(chars > 0, each), end * np.repeat(tokens, each) // of, end)
    end = np.minimum(end, np.repeat(tokens, each))
    length = end - np.where(nth == 1, 0, np.concatenate([[0], end[:-1]]))
    least = np.full(int(ids.max()) + 1, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(least, ids, length)
    return ptr, ids, end, least, unusable


def _first_come(values: _Ints, unlike: _Ints) -> _Ints:
    """Numbers of the (value, kind) pairs in the order in which they first come."""
    found = np.unique(values, return_inverse=True)[1].astype(np.int64)
    if unlike.min() != unlike.max():
        kinds, kind = np.unique(unlike, return_inverse=True)
        found = np.unique(found * len(kinds) + kind, return_inverse=True)[1].astype(np.int64)
    first = np.full(int(found.max()) + 1, len(found), dtype=np.int64)
    np.minimum.at(first, found, np.arange(len(found)))
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbered: _Ints = rank[found]
    return numbered


def parse_rate(text: str) -> Fraction:
    """``1.5x`` or ``1.5`` as an exact number. UsageError if it is none, or beyond 0.0001 to 10000."""
    try:
        number = text.strip().lower().removesuffix("x")
        # A fraction of 1e-99999999 is so many digits: look at its size before.
        rate = Fraction(number) if "e" not in number or 1e-9 < float(number) < 1e9 else Fraction(0)
    except (ValueError, ZeroDivisionError):
        rate = Fraction(0)
    # Beyond these the times leave 64 bits, or lie closer together than the clock's ns.
    if not Fraction(1, 10_000) <= rate <= 10_000:
        raise UsageError(f"{text[:40]!r} is not a rate from 0.0001x to 10000x.", hint="1.5x is half as much load again.")
    return rate
