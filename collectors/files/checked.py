"""One batch of records on its way into `requests`: what cannot be used is rejected with its reason, the rest is written."""

from __future__ import annotations

import polars as pl

from hoptrace.collectors.files.base import Sink
from hoptrace.collectors.files.blocks import BAD, ROW
from hoptrace.collectors.files.values import Read, is_missing, whole

__all__ = ["Batch", "Requests"]

# Nobody counts more of anything in one request; sums of these fit 64 bits.
_MOST_COUNT = (1 << 31) - 1
_LONGER = "Requests longer than the context of {most:,} tokens, kept as they are: {{n}}."


class Batch:
    """Records as text (columns of the file, ROW, BAD). The first thing found wrong with a record is its reason."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self.frame = frame
        self._reason = frame[BAD].alias("reason")
        self._value = pl.Series("value", [None], dtype=pl.String).new_from_index(0, frame.height)

    @property
    def good(self) -> pl.Series:
        """Where nothing was found wrong so far."""
        return self._reason.is_null()

    @property
    def rows(self) -> pl.Series:
        """The records' lines in the file."""
        return self.frame[ROW]

    def bad(self, where: pl.Series, reason: str | pl.Series, value: pl.Series | None = None) -> None:
        """Reject the records where the mask says so (null is no)."""
        where = where.fill_null(False) & self._reason.is_null()
        if not where.any():
            return
        said = pl.lit(reason) if isinstance(reason, str) else reason
        self._reason = pl.select(pl.when(where).then(said).otherwise(self._reason)).to_series()
        if value is not None:
            text = value.cast(pl.String)
            self._value = pl.select(pl.when(where).then(text).otherwise(self._value)).to_series()

    def take(self, column: str, read: Read, what: str) -> pl.Series:
        """The values of a column that was read; a record where something else stands is rejected: "COLUMN is not WHAT"."""
        if read.bad is not None:
            self.bad(read.bad, f"{column} is not {what}", self.frame[column])
        return read.value

    def count(self, column: str, what: str, *, least: int = 0, needed: bool = True) -> pl.Series:
        """A column of whole numbers; records whose number is missing (if it is needed), no number or too small are rejected."""
        text = self.frame[column]
        value = self.take(column, whole(text), f"a number of {what}")
        if needed and value.null_count():
            self.bad(value.is_null() & is_missing(text), f"it has no {column}")
        large = value > _MOST_COUNT
        if large.any():
            self.bad(large, f"{column} is too large", text)
        low = value < least
        if low.any():
            self.bad(low, f"{column} is {'negative' if least == 0 else f'less than {least}'}", text)
        return value

    def done(self, sink: Sink, columns: dict[str, pl.Series]) -> pl.DataFrame:
        """Count the records, reject the bad ones, and return ``columns`` of the good ones, with ROW."""
        sink.count(self.frame.height)
        rows = pl.DataFrame({**columns, ROW: self.frame[ROW]})
        if self._reason.null_count() == self.frame.height:
            return rows
        good = self._reason.is_null()
        lost = pl.DataFrame({"row": self.frame[ROW], "reason": self._reason, "value": self._value}).filter(~good)
        sink.reject_many(lost)
        return rows.filter(good)


class Requests:
    """Gives requests of one file their numbers and writes them."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.next = 0

    def number(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The frame with the column `request`, counted on from what was written."""
        return frame.with_columns(pl.int_range(self.next, self.next + frame.height, dtype=pl.Int64, eager=True).alias("request"))

    def write(self, frame: pl.DataFrame) -> None:
        """Write rows that :meth:`number` numbered (columns of `requests`; ROW is left out)."""
        most = self.sink.options.context_tokens
        if most is not None and frame.height:
            known = [c for c in ("prompt_tokens", "output_tokens") if c in frame.columns]
            longer = frame.select((pl.sum_horizontal(known) > most).sum()).item() if known else 0
            self.sink.tally(_LONGER.format(most=most), int(longer))
        self.next += frame.height
        self.sink.write("requests", frame.drop(ROW, strict=False))
