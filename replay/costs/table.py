"""Step costs from files of measured phase times: hoptrace's own form, Splitwise's ``perf_model.csv``, Vidur's profiles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Server
from hoptrace.replay.costs.table_own import is_own, own
from hoptrace.replay.costs.table_splitwise import is_splitwise, splitwise
from hoptrace.replay.costs.table_vidur import is_vidur, vidur
from hoptrace.stepcost import StepCost

__all__ = ["Asked", "read_table"]

_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True)
class Asked:
    """What follows ``table:``: files, and which of their rows (``key=value``)."""

    files: tuple[Path, ...]
    rows: dict[str, str]


def parse(text: str) -> Asked:
    """``FILE[,FILE …][,key=value …]``. UsageError if no file is named, or one is not there."""
    files, rows = [], {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        path = Path(part)
        if "=" in part and not path.exists():
            key, _, value = part.partition("=")
            rows[key.strip()] = value.strip()
            continue
        if not path.exists():
            raise UsageError(f"There is no table {part!r}.", hint="Write table:FILE.csv, several files apart by commas.")
        files += sorted(f for f in path.iterdir() if f.suffix in (".csv", ".parquet")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"table:{text} names no file of step times.", hint="Write table:FILE.csv, .parquet, or their folder.")
    return Asked(tuple(files), rows)


def read_table(text: str, server: Server | None) -> StepCost:
    """The step cost in the files that ``text`` names (docs/costs.md has the forms).

    Args:
        server: its layers, heads and ranks choose the rows of a Vidur profile, and multiply them.

    Raises:
        UsageError: no such file or key, or the rows of several models or devices and none chosen. InputError: a file is of no
            known form, or holds no times that can be used; names the file and the column.
    """
    asked = parse(text)
    frames = [(f, _read(f)) for f in asked.files]
    name = asked.files[0].name
    if any(is_vidur(frame) for _, frame in frames):
        return vidur([(f.name, frame) for f, frame in frames], asked.rows, server)
    if len(frames) > 1:
        raise InputError(f"{name} and {len(frames) - 1} more are no profiles of Vidur; a table of step times is one file.")
    frame = frames[0][1]
    if is_splitwise(frame):
        return splitwise(name, frame, asked.rows)
    if is_own(frame):
        return own(name, frame, asked.rows)
    raise InputError(
        f"{asked.files[0]} is no table of step times: it has the columns {', '.join(frame.columns[:12]) or 'of no table'}.",
        hint="It needs prefill_tokens, decode_requests and time_ms; see docs/costs.md.",
    )


def _read(path: Path) -> pl.DataFrame:
    try:
        if path.stat().st_size > _LIMIT_BYTES:
            raise InputError(f"{path} is larger than 1 GiB: no table of step times.")
        frame = pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_csv(path, infer_schema_length=None)
    except (pl.exceptions.PolarsError, OSError, UnicodeDecodeError) as e:
        raise InputError(f"{path} can't be read as a table: {str(e).splitlines()[0]}.") from None
    for column, kind in frame.schema.items():
        if kind.is_nested() or kind in (pl.Binary, pl.Object):
            raise InputError(f"{path}: the column {column} holds {kind}; a table of step times holds numbers and text.")
    return frame
