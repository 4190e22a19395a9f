"""Records that an import could not use: all counted by reason, all in a CSV if it is asked for, the first ones in `events`."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import polars as pl

from hoptrace.errors import EnvironmentProblem, InputError, UsageError

__all__ = ["KEPT", "Rejects"]

KEPT = 10_000
_REASONS = 1_000
_OTHERS = "other reasons"
_SCHEMA: dict[str, type[pl.DataType]] = {"file": pl.String, "row": pl.Int64, "reason": pl.String, "value": pl.String}


class Rejects:
    """Of all files of one import.

    Attributes:
        reasons: how many by reason.
        kept: the first 10,000 (columns file, row, reason, value).
    """

    def __init__(self, csv: Path | None = None, *, strict: bool = False) -> None:
        """``csv`` gets every reject, and stays if the import fails; ``strict``: the first one raises InputError.

        Raises:
            UsageError: ``csv`` is already there.
            EnvironmentProblem: it cannot be written.
        """
        self.reasons: dict[str, int] = {}
        self.kept = pl.DataFrame(schema=_SCHEMA)
        self.total = 0
        self._first: dict[Path, str] = {}
        self._strict = strict
        self._path = csv
        self._csv: BinaryIO | None = None
        if csv is not None:
            try:
                self._csv = csv.open("xb")
            except FileExistsError:
                raise UsageError(f"{csv} is already there.", hint="Choose another name after --rejects.") from None
            except OSError as e:
                raise EnvironmentProblem(f"{csv} cannot be written: {e.strerror}.") from None
            self._put(self.kept, header=True)

    def add(self, file: Path, frame: pl.DataFrame) -> None:
        """Rejects of one file: columns `row`, `reason`, and perhaps `value`."""
        value = pl.col("value").cast(pl.String) if "value" in frame.columns else pl.lit(None, dtype=pl.String).alias("value")
        rows = frame.select(
            pl.lit(str(file)).alias("file"), pl.col("row").cast(pl.Int64), pl.col("reason"), value.str.slice(0, 200)
        )
        self.total += rows.height
        for reason, n in rows.group_by("reason", maintain_order=True).len().iter_rows():
            key = reason if reason in self.reasons or len(self.reasons) < _REASONS else _OTHERS
            self.reasons[key] = self.reasons.get(key, 0) + n
        if file not in self._first:
            self._first[file] = sentence(rows.row(0, named=True))
        if self.kept.height < KEPT:
            self.kept = pl.concat([self.kept, rows.head(KEPT - self.kept.height)])
        if self._csv is not None:
            self._put(rows, header=False)
        elif self._strict:
            self.raise_if_strict()

    def first(self, file: Path) -> str:
        """The first reject of a file, in words."""
        return self._first.get(file, "unknown")

    def raise_if_strict(self) -> None:
        """Raises InputError if there are any and none is allowed. With a CSV that is asked at the end, so that it has all."""
        if self._strict and self.total:
            file, first = next(iter(self._first.items()))
            n = f"{self.total:,} records were rejected. The first: " if self._csv is not None else ""
            raise InputError(f"{file}: {n}{first}.", hint="Without --strict it is left out and counted.")

    def events(self, time_ns: int) -> list[dict[str, object]]:
        """Rows of `events` for those kept. A record that cannot be used has no time, so all have ``time_ns``."""
        return [
            {"time_ns": time_ns, "kind": "rejected", "detail": f"{Path(r['file']).name}, {sentence(r)}", "source": "import"}
            for r in self.kept.iter_rows(named=True)
        ]

    def close(self) -> None:
        """Close the CSV."""
        if self._csv is not None:
            self._csv.close()

    def _put(self, rows: pl.DataFrame, *, header: bool) -> None:
        assert self._csv is not None
        try:
            self._csv.write(rows.write_csv(include_header=header).encode())
        except OSError as e:
            raise EnvironmentProblem(f"{self._path} cannot be written: {e.strerror}.") from None


def sentence(reject: dict[str, object]) -> str:
    """A reject in words: "row 3: it has no prompt length ('')"."""
    value = reject["value"]
    return f"row {reject['row']}: {reject['reason']}" + (f" ({value!r})" if value is not None else "")
