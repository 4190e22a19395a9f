"""Step costs that no straight line tells: grids of times, linear between their points.

A piece is one grid with what it is looked up by, and in which steps it counts. :mod:`hoptrace.stepcost_kernel` looks up the same
integers; a property test holds the two equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from hoptrace.errors import InputError

__all__ = ["DECODE", "EVER", "MILLION", "PROMPT", "STALL", "TIMES", "VARIABLES", "Composition", "Grid", "Piece", "grid"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]

MILLION = 1_000_000
EVER, PROMPT, DECODE = (MILLION, MILLION, MILLION), (MILLION, 0, MILLION), (0, MILLION, MILLION)
"""Factors of a piece that counts in every step, in those with prompt tokens, in those with decoders."""
STALL = 1 << 40
"""A residual of that much and more is a stall: so many ns above it, whatever the step holds."""

VARIABLES = (
    "none",
    "tokens",  # prompt tokens, decoders and verified proposals
    "prefill_tokens",
    "prefill_context_tokens",
    "decode_batch",  # decoders and verified proposals
    "decode_context",  # tokens of context for each of those
    "decoder_context",  # tokens of context for each decoder
    "prompt_tokens",  # tokens computed for each prompt
    "prompt_context",  # tokens of context before them
    "prompt_tokens_rms",  # root of Σ tokens²: one prompt whose attention is as dear
    "sequences",  # prompts and decoders
)
"""What a grid is looked up by, in whole numbers; means are rounded down. Positions are the kernel's codes."""

TIMES = ("once", "prefill_requests", "decode_requests")
"""How often the looked-up time counts."""

_MOST_PS = 10**15  # 1000 s: sums of a few stay far from the end of int64
_MOST = 1 << 40


@dataclass(frozen=True)
class Grid:
    """Times in ps by an outer and an inner variable.

    Attributes:
        outer: ascending values; (0,) where there is no outer variable.
        rows: for each of them its points (inner value, ps), ascending. Rows need not have the same inner values.

    Between points and rows it is linear; beyond the ends it goes on in the line of the last two; a single point is constant.
    """

    outer: tuple[int, ...]
    rows: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        if not self.outer or len(self.outer) != len(self.rows) or not all(self.rows):
            raise InputError("A grid of step times needs a row of points for each outer value.")
        for values in (self.outer, *([x for x, _ in row] for row in self.rows)):
            if any(b <= a for a, b in pairwise(values)):
                raise InputError("The values of a grid of step times must ascend.")
            if not all(0 <= v < _MOST for v in values):
                raise InputError("A value of a grid of step times is below 0 or absurdly large.")
        if not all(0 <= ps <= _MOST_PS for row in self.rows for _, ps in row):
            raise InputError("A time in a grid of step times is below 0 or above 1000 s.")

    def packed(self) -> list[int]:
        """As the kernel reads it (:data:`hoptrace.stepcost_kernel.PIECE`)."""
        head: list[int] = list(self.outer)
        body: list[int] = []
        for row in self.rows:
            head.append(2 * len(self.outer) + len(body))
            body += [len(row), *(x for x, _ in row), *(ps for _, ps in row)]
        return head + body

    def at(self, outer: _Ints, inner: _Ints) -> _Ints:
        """Times in ps, int64[n]; never below 0."""
        rows = np.stack([_line(np.array(row, dtype=np.int64), inner) for row in self.rows])
        if len(self.outer) == 1:
            only: _Ints = np.maximum(rows[0], 0)
            return only
        knots = np.array(self.outer, dtype=np.int64)
        i = _place(knots, outer)
        each = np.arange(len(outer))
        found: _Ints = np.maximum(_between(outer, knots[i], knots[i + 1], rows[i, each], rows[i + 1, each]), 0)
        return found


def grid(points: Mapping[tuple[int, int], int]) -> Grid:
    """A grid from ps by (outer, inner)."""
    outer = sorted({o for o, _ in points})
    return Grid(tuple(outer), tuple(tuple(sorted((i, ps) for (o, i), ps in points.items() if o == each)) for each in outer))


@dataclass(frozen=True)
class Composition:
    """What steps hold, int64[n] each."""

    prefill_requests: _Ints
    prefill_tokens: _Ints
    prefill_context_tokens: _Ints
    decode_requests: _Ints
    decode_context_tokens: _Ints
    extra_tokens: _Ints

    def variable(self, name: str) -> _Ints:
        """One of :data:`VARIABLES`."""
        batch = self.decode_requests + self.extra_tokens
        if name == "tokens":
            return self.prefill_tokens + batch
        if name in ("prefill_tokens", "prefill_context_tokens"):
            return self.prefill_tokens if name == "prefill_tokens" else self.prefill_context_tokens
        if name == "decode_batch":
            return batch
        if name == "decode_context":
            return _each(self.decode_context_tokens, batch)
        if name == "decoder_context":
            return _each(self.decode_context_tokens, self.decode_requests)
        if name == "prompt_tokens":
            return _each(self.prefill_tokens, self.prefill_requests)
        if name == "prompt_context":
            return _each(self.prefill_context_tokens, self.prefill_requests)
        if name == "prompt_tokens_rms":
            squares = _each(self.prefill_tokens * self.prefill_tokens, self.prefill_requests)
            return np.sqrt(squares).astype(np.int64)
        if name == "sequences":
            return self.prefill_requests + self.decode_requests
        return np.zeros_like(batch)


@dataclass(frozen=True)
class Piece:
    """A grid's part in a step cost.

    Attributes:
        outer, inner: of :data:`VARIABLES`.
        factors: its factor in steps of prompts only, of decoders only, and of both, in millionths; 0: no part in those.
        times: of :data:`TIMES`.
        side: 0, or 1 for the arithmetic of a roofline.
        seen: least and greatest inner, then outer value that was measured; beyond them is extrapolation. Null: not measured.
        name: for sentences.
    """

    grid: Grid
    inner: str
    outer: str = "none"
    factors: tuple[int, int, int] = EVER
    times: str = "once"
    side: int = 0
    seen: tuple[int, int, int, int] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for value, allowed in ((self.outer, VARIABLES), (self.inner, VARIABLES), (self.times, TIMES)):
            if value not in allowed:
                raise InputError(f"A grid of step times knows no {value!r}.", hint=f"It knows {', '.join(allowed)}.")
        if len(self.factors) != 3 or not all(0 <= f <= 1000 * MILLION for f in self.factors):
            raise InputError("A factor of a grid of step times must lie between 0 and 1000.")

    def factor(self, c: Composition) -> _Ints:
        """The factor that counts in each step, in millionths."""
        decode, prefill = c.decode_requests + c.extra_tokens > 0, c.prefill_tokens > 0
        alone, decoding, mixed = self.factors
        found: _Ints = np.where(decode, np.where(prefill, mixed, decoding), alone * prefill)
        return found

    def ps(self, c: Composition) -> _Ints:
        """Its part of each step in ps, int64[n]."""
        value = self.grid.at(c.variable(self.outer), c.variable(self.inner))
        if self.times != "once":
            value = value * getattr(c, self.times)
        factor = self.factor(c)
        found: _Ints = np.where(factor > 0, value // MILLION * factor + value % MILLION * factor // MILLION, 0)
        return found

    def scaled(self, factor: float) -> Piece:
        """So many times as long."""
        rows = tuple(tuple((x, round(ps * factor)) for x, ps in row) for row in self.grid.rows)
        return replace(self, grid=Grid(self.grid.outer, rows))

    def head(self, at: int) -> list[int]:
        """The kernel's numbers of it, its grid at ``at``."""
        return [
            self.side, *self.factors, TIMES.index(self.times),
            VARIABLES.index(self.outer), VARIABLES.index(self.inner), len(self.grid.outer), at,
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain values; :meth:`from_dict` gives the equal piece back."""
        d = {name: getattr(self, name) for name in _PLAIN}
        d |= {"factors": list(self.factors), "seen": None if self.seen is None else list(self.seen)}
        return {**d, "grid": {"outer": list(self.grid.outer), "rows": [[list(p) for p in row] for row in self.grid.rows]}}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Piece:
        """The reverse of :meth:`to_dict`; raises what a wrong value raises."""
        rows = tuple(tuple((int(x), int(ps)) for x, ps in row) for row in d["grid"]["rows"])
        seen = None
        if d.get("seen") is not None:
            least, greatest, outer_least, outer_greatest = (int(v) for v in d["seen"])
            seen = (least, greatest, outer_least, outer_greatest)
        alone, decoding, mixed = (int(v) for v in d["factors"])
        plain = {n: d[n] for n in _PLAIN if n in d}
        return cls(Grid(tuple(int(o) for o in d["grid"]["outer"]), rows), factors=(alone, decoding, mixed), seen=seen, **plain)


_PLAIN = ("inner", "outer", "times", "side", "name")


def _each(total: _Ints, n: _Ints) -> _Ints:
    found: _Ints = np.where(n > 0, total // np.maximum(n, 1), 0)
    return found


def _place(knots: _Ints, x: _Ints) -> _Ints:
    return np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2)


def _between(x: _Ints, x0: _Ints, x1: _Ints, y0: _Ints, y1: _Ints) -> _Ints:
    m, n, d = x1 - x0, x - x0, y1 - y0
    found: _Ints = y0 + d // m * n + d % m * n // m
    return found


def _line(row: _Ints, x: _Ints) -> _Ints:
    if len(row) == 1:
        return np.full(len(x), row[0, 1])
    i = _place(row[:, 0], x)
    found: _Ints = _between(x, row[i, 0], row[i + 1, 0], row[i, 1], row[i + 1, 1])
    return found
