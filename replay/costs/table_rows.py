"""What the forms of tables share: choosing rows, numbers that can be used, times in ps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import polars as pl

from hoptrace.errors import InputError, UsageError
from hoptrace.stepcost_table import Grid

__all__ = ["Measured", "chosen", "grid_of", "numbers", "refuse_other_keys", "with_ps"]

_MOST_POINTS = 200_000
_FAR = 1 << 39


class Measured(NamedTuple):
    """A grid, and (least, greatest) inner and outer value that was measured, for a :class:`hoptrace.stepcost_table.Piece`."""

    grid: Grid
    seen: tuple[int, int, int, int]


def refuse_other_keys(name: str, rows: Mapping[str, str], allowed: Sequence[str]) -> None:
    """UsageError for a ``key=value`` that this form does not know."""
    for key in rows:
        if key not in allowed:
            raise UsageError(
                f"{name}: there is no {key!r} to choose rows by.",
                hint=f"Keys: {', '.join(allowed)}." if allowed else "This form has none.",
            )


def chosen(name: str, frame: pl.DataFrame, rows: Mapping[str, str], keys: Sequence[str]) -> tuple[pl.DataFrame, dict[str, str]]:
    """The rows of one value of each key, as ``rows`` says; where it does not say, there must be only one. And those values."""
    refuse_other_keys(name, rows, keys)
    said: dict[str, str] = {}
    for key in keys:
        if key not in frame.columns:
            continue
        values = [str(v) for v in frame[key].unique().sort().to_list()]
        if key in rows and rows[key] not in values:
            raise UsageError(f"{name} has no {key}={rows[key]}.", hint=f"It has {', '.join(values)}.")
        if key not in rows and len(values) > 1:
            raise UsageError(
                f"{name} has several of {key}: {', '.join(values[:20])}.", hint=f"Choose: table:{name},{key}={values[0]}"
            )
        said[key] = rows.get(key, values[0] if values else "")
        frame = frame.filter(pl.col(key).cast(pl.String) == said[key])
    return frame, said


def numbers(name: str, frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """``columns`` as Int64. InputError for what is no whole number of 0 or more."""
    for column in columns:
        values = frame[column].cast(pl.Float64, strict=False)
        bad = values.is_null() | ~values.is_finite() | (values < 0) | (values != values.floor()) | (values > 1 << 40)
        if bad.any():
            row = int(bad.arg_true()[0])
            raise InputError(f"{name}, row {row + 1}: {column} must be a whole number, 0 or more, not {frame[column][row]!r}.")
    return frame.with_columns(pl.col(c).cast(pl.Float64).cast(pl.Int64) for c in columns)


def with_ps(name: str, frame: pl.DataFrame, column: str, ps_per_unit: float) -> pl.DataFrame:
    """``frame`` with the column ``ps``. InputError for a time that is not positive and below 1000 s."""
    values = frame[column].cast(pl.Float64, strict=False)
    bad = values.is_null() | ~values.is_finite() | (values <= 0) | (values * ps_per_unit > 1e15)
    if bad.any():
        row = int(bad.arg_true()[0])
        raise InputError(f"{name}, row {row + 1}: {column} must be a time above 0 and up to 1000 s, not {frame[column][row]!r}.")
    return frame.with_columns((values * ps_per_unit).round().cast(pl.Int64).alias("ps"))


def grid_of(name: str, frame: pl.DataFrame, outer: str | None, inner: str, *, line: bool = False) -> Measured:
    """The grid of ``ps`` by two columns, the median of repeats, with the range of each that was measured.

    A row goes on beyond its ends in the line of its last two points, but less work is never dearer there, nor for nothing, and
    more work never cheaper: noise at an end would rule all that lies beyond it. ``line``: the bare line.
    """
    keys = [c for c in (outer, inner) if c is not None]
    points = frame.group_by(keys).agg(pl.col("ps").median()).sort(keys)
    if points.height > _MOST_POINTS:
        raise InputError(f"{name} has {points.height:,} different steps; a table holds {_MOST_POINTS:,} at most.",
                         hint="Recorded steps are no table: fit them (--cost fitted).")  # fmt: skip
    found: dict[int, list[tuple[int, int]]] = {}
    for r in points.iter_rows(named=True):
        found.setdefault(0 if outer is None else r[outer], []).append((r[inner], round(r["ps"])))
    values = [x for row in found.values() for x, _ in row]
    rows = tuple(tuple(row if line else _ends(row)) for row in found.values())
    return Measured(Grid(tuple(found), rows), (min(values), max(values), min(found), max(found)))


def _ends(row: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if len(row) == 1:
        return row
    (x0, y0), (x1, y1), (x2, y2) = row[0], row[1], row[-1]
    at_zero = min(max(y0 - (y1 - y0) * x0 // (x1 - x0), 0), y0)
    head = [(0, at_zero)] if x0 > 0 else []
    return head + row + ([(_FAR, y2)] if y2 < row[-2][1] and x2 < _FAR else [])
