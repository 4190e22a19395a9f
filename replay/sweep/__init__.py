"""Many what-ifs of one trace on all cores: a row for each, finished ones kept across a kill, one Parquet table at the end.

While it runs, each finished point is a small file in ``OUT.points/`` beside the table, put there whole or not at all, named by
what its figures depend on (:meth:`hoptrace.replay.sweep.grid.Point.identity`). The next run takes those as done. The table
replaces the folder when all points are there. The same grid, trace and version give the same bytes, on one core or many.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import polars as pl

import hoptrace
from hoptrace.errors import EnvironmentProblem, UsageError
from hoptrace.reader import open_trace
from hoptrace.replay.sweep.grid import Grid, Point
from hoptrace.replay.sweep.point import BOUNDS, FIGURES, begin, run_point

__all__ = ["Swept", "sweep"]

Told = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Swept:
    """``table``: one row a point. ``kept``: points that an earlier run had done."""

    table: pl.DataFrame
    kept: int
    failed: int


def sweep(
    trace: Path,
    grid: Grid,
    out: Path,
    *,
    jobs: int | None = None,
    slo: dict[str, int] | None = None,
    tokens: bool = True,
    retry_failed: bool = False,
    draws: int = 0,
    told: Told | None = None,
) -> Swept:
    """Replay every point of ``grid``.

    Args:
        trace: its folder. out: the table to write; a sweep's table that is there already is completed, anything else refused.
        jobs: processes at once; null: as many as this process may use cores.
        tokens: whether to make token rows (without them ITL is null, and a point is faster).
        retry_failed: do points again that failed in an earlier run.
        draws: replays of each side of a point for its intervals (:mod:`hoptrace.replay.uncertainty`); 0: none.
        told: called with (done, of, what) as points end.

    Raises:
        UsageError: ``out`` is something else. InputError: the trace cannot be read. EnvironmentProblem: the disk refuses.
    """
    opened = open_trace(trace)
    identity = hashlib.sha256((opened.path / "manifest.json").read_bytes()).hexdigest()
    shape = json.dumps([slo, tokens, *([draws] if draws else [])], sort_keys=True)
    known = {p.number: p.identity(identity + shape, hoptrace.__version__) for p in grid.points()}
    folder = out.with_name(out.name + ".points")
    done = _earlier(out, folder, set(known.values()), retry_failed)
    kept = sum(key in done for key in known.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        todo = [p for p in grid.points() if known[p.number] not in done]
        if told and kept:
            told(kept, grid.size, "done before")
        for point, row in _run(str(opened.path.resolve()), todo, jobs or _cores(), slo, tokens, draws):
            key = known[point.number]
            done[key] = {"point_id": key, **row}
            _put(folder / f"{key}.json", json.dumps(done[key]).encode())
            if told:
                told(len([k for k in known.values() if k in done]), grid.size, row["status"])
        table = _table(grid, known, done, FIGURES + BOUNDS if draws else FIGURES)
        temporary = out.with_name(out.name + ".part")
        table.write_parquet(temporary, metadata={"hoptrace.sweep": json.dumps({"trace": opened.name, "grid": grid.name})})
        _name(temporary, out)
        for file in folder.glob("*.json"):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: another run is at the same table
            folder.rmdir()
    except OSError as e:
        raise EnvironmentProblem(
            f"{e.filename or out} cannot be written: {e.strerror}.", hint="Finished points are kept: run it again to go on."
        ) from None
    return Swept(table, kept, int((table["status"] != "ok").sum()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _earlier(out: Path, folder: Path, wanted: set[str], retry_failed: bool) -> dict[str, dict[str, Any]]:
    """Rows of points that are done, by identity: from the folder of a run that was broken off, and the table of a whole one."""
    found: dict[str, dict[str, Any]] = {}
    columns = ("point_id", "status", "error", *(name for name, _ in FIGURES + BOUNDS))
    if out.exists():
        try:
            if not out.is_file() or "hoptrace.sweep" not in pl.read_parquet_metadata(out):
                raise ValueError
            for row in pl.read_parquet(out).iter_rows(named=True):
                found[row["point_id"]] = {k: row[k] for k in columns if k in row}
        except (ValueError, pl.exceptions.PolarsError):
            raise UsageError(f"{out} is already there, and no sweep's table.", hint="Choose another name after -o.") from None
    if folder.is_dir():
        for file in sorted(folder.glob("*.json")):
            try:
                row = json.loads(file.read_bytes())
                found[row["point_id"]] = row
            except (ValueError, KeyError, TypeError):
                continue  # not ours, or damaged: the point is done again
    return {k: r for k, r in found.items() if k in wanted and not (retry_failed and r["status"] != "ok")}


def _put(path: Path, content: bytes) -> None:
    # Another run at the same table takes the folder away at its end.
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_bytes(content)
    _name(temporary, path)


def _name(temporary: Path, path: Path) -> None:
    """Give the file its name; where it is gone, another run at the same table has named it: the same rows."""
    with suppress(FileNotFoundError):
        os.replace(temporary, path)


def _run(
    path: str, todo: list[Point], jobs: int, slo: dict[str, int] | None, tokens: bool, draws: int
) -> Iterator[tuple[Point, dict[str, Any]]]:
    """The rows as they come. A point whose process dies (out of memory, say) is tried once more alone, then it has failed."""
    alone: list[Point] = []
    waiting = list(reversed(todo))
    while waiting:
        pool = ProcessPoolExecutor(min(jobs, len(waiting)), mp_context=get_context("spawn"), initializer=begin)
        going: dict[Future[dict[str, Any]], Point] = {}
        try:
            while waiting or going:
                while waiting and len(going) < jobs:
                    point = waiting.pop()
                    going[pool.submit(run_point, path, point, slo, tokens, draws)] = point
                for future in wait(going, return_when=FIRST_COMPLETED).done:
                    row = future.result()
                    yield going.pop(future), row
        except BrokenProcessPool:
            alone += going.values()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    for point in sorted(alone, key=lambda p: p.number):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=begin) as single:
            try:
                row = single.submit(run_point, path, point, slo, tokens, draws).result()
            except BrokenProcessPool:
                row = {"status": "failed", "error": "its process was killed, perhaps for want of memory"}
        yield point, row


def _table(
    grid: Grid, known: dict[int, str], done: dict[str, dict[str, Any]], figures: tuple[tuple[str, type], ...]
) -> pl.DataFrame:
    """One row a point, in the order of the product: point, point_id, the axes, status, error, figures."""
    columns: dict[str, pl.Series] = {
        "point": pl.Series(sorted(known), dtype=pl.Int64),
        "point_id": pl.Series([known[n] for n in sorted(known)], dtype=pl.String),
    }
    points = sorted(grid.points(), key=lambda p: p.number)
    for axis, values in grid.axes.items():
        kinds = {type(v) for v in values}
        cells = [p.values[axis] for p in points]
        if kinds <= {int, float} and kinds != {int}:
            columns[axis] = pl.Series(cells, dtype=pl.Float64, strict=False)
        elif len(kinds) == 1 and kinds <= {int, bool, str}:
            columns[axis] = pl.Series(cells)
        else:
            columns[axis] = pl.Series([c if isinstance(c, str) else json.dumps(c, default=str) for c in cells], dtype=pl.String)
    rows = [done[known[n]] for n in sorted(known)]
    columns["status"] = pl.Series([r["status"] for r in rows], dtype=pl.String)
    columns["error"] = pl.Series([r.get("error") for r in rows], dtype=pl.String)
    kinds_of = {int: pl.Int64, float: pl.Float64, str: pl.String}
    for name, kind in figures:
        columns[name] = pl.Series([r.get(name) for r in rows], dtype=kinds_of[kind], strict=False)
    return pl.DataFrame(columns)
