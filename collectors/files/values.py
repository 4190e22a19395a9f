"""Text to numbers and times, exactly: what cannot be read is null and marked, never bent."""

from __future__ import annotations

import re
from dataclasses import dataclass

import polars as pl

from hoptrace.errors import InputError, UsageError

__all__ = ["FORMATS", "NS_PER", "Read", "Times", "duration_ns", "is_missing", "whole"]

# What stands for "no value" in files of this world: pandas' and databases' words, and the dash of access logs.
_MISSING = ("", "nan", "null", "none", "na", "n/a", "-")
_EXACT = 1 << 53
# Years outside of which int64 ns since 1970 wrap around (1677-09-21 to 2262-04-11).
_FIRST_YEAR, _LAST_YEAR = "1678", "2262"
_MOST_US = ((1 << 63) - 1) // 1_000
_LARGEST = (1 << 63) - 1
NS_PER = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_ISO = "%Y-%m-%d %H:%M:%S%.f"
# The forms of ISO 8601 that programs write, tried before the rarer ones are put in order.
_ISOS = (_ISO, _ISO + "%#z", "%Y-%m-%dT%H:%M:%S%.fZ", "%Y-%m-%dT%H:%M:%S%.f%#z", "%Y-%m-%dT%H:%M:%S%.f")
_TRIED = 50
_NGINX = "%d/%b/%Y:%H:%M:%S %z"
# Names of time formats that a user may give; anything with a % is a strptime pattern.
FORMATS = (*NS_PER, "iso8601", "nginx")
_PLAIN_NUMBER = r"^[+-]?\d+(\.\d*)?$"
# Epochs by their size, from 2001 on: 1e9 s is 2001-09-09, 1e12 s the year 33658.
_EPOCHS = ((10**18, "ns"), (10**15, "us"), (10**12, "ms"), (10**9, "s"))
_GUESSED_FROM_NS = 10**18


@dataclass(frozen=True, slots=True)
class Read:
    """Values of a column (int64, null where there is none) and where something stands that cannot be read."""

    value: pl.Series
    bad: pl.Series | None = None


def is_missing(text: pl.Series) -> pl.Series:
    """Where a column of text has no value."""
    return text.is_null() | text.str.strip_chars().str.to_lowercase().is_in(_MISSING).fill_null(True)


def whole(text: pl.Series) -> Read:
    """Whole numbers; 12.0 and 1.2e1 are 12, 12.5 cannot be read."""
    value = text.cast(pl.Int64, strict=False)
    if value.null_count() == text.null_count():
        return Read(value)
    plain = text.str.strip_chars()
    number = plain.cast(pl.Float64, strict=False)
    exact = number.is_finite() & (number == number.floor()) & (number.abs() < _EXACT)
    more = pl.select(pl.when(exact).then(number).cast(pl.Int64)).to_series()
    value = pl.select(pl.coalesce(value, plain.cast(pl.Int64, strict=False), more)).to_series().alias(text.name)
    return _read(text, value)


def duration_ns(text: pl.Series, unit: str) -> Read:
    """Lengths of time (or times since some start) in ns, rounded to the nearest. Exact to 19 digits."""
    per = NS_PER[unit]
    value = _decimal_ns(text, per)
    if value.null_count() == text.null_count():
        return Read(value)
    plain = text.str.strip_chars()
    value = pl.select(pl.coalesce(value, _decimal_ns(plain, per))).to_series().alias(text.name)
    return _read(text, value)


def _decimal_ns(text: pl.Series, per: int) -> pl.Series:
    """Decimal text × ``per``, rounded. Decimals of 38 digits, for a float holds no epoch in ns."""
    # Whole numbers are the usual case, and much faster read.
    direct = text.cast(pl.Int64, strict=False)
    if direct.null_count() == text.null_count():
        low, high = int(direct.min() or 0), int(direct.max() or 0)  # type: ignore[arg-type]
        if max(-low, high) <= _LARGEST // per:
            return direct * per
    digits = len(str(per)) - 1
    # Rounding to the scale is done by the cast; the product is a whole number.
    number = text.cast(pl.Decimal(28, digits), strict=False)
    return (number * per).cast(pl.Int64, strict=False) if digits else number.cast(pl.Int64, strict=False)


def _read(text: pl.Series, value: pl.Series) -> Read:
    if value.null_count() == text.null_count():
        return Read(value)
    bad = value.is_null() & ~is_missing(text)
    return Read(value, bad if bad.any() else None)


class Times:
    """Reads one column of times, all in one format.

    Attributes:
        format: as given, or as found in the first times.
        zoned: whether they name their zone.
    """

    def __init__(self, column: str, form: str | None = None) -> None:
        """``form``: s, ms, us, ns (since 1970, or since the log's start), iso8601, nginx (`$time_local`), a strptime pattern, or
        null to find out.

        Raises:
            UsageError: there is no such format.
        """
        if form is not None and form not in FORMATS and "%" not in form:
            raise UsageError(
                f"There is no time format {form!r} (column {column}).",
                hint=f"Choose one of {', '.join(FORMATS)}, or give a strptime pattern.",
            )
        if form is not None and re.search("%Z", form):
            raise UsageError(
                f"A zone's name (%Z, column {column}) does not tell how far it is from UTC.",
                hint="Write offsets (%z) into the log, or times in UTC.",
            )
        self.column = column
        self.format = form
        self.zoned = False
        self.guessed = False
        self._usual = _ISO

    def read(self, text: pl.Series) -> Read:
        """Times in ns: since 1970 UTC, or since the log's own start.

        Raises:
            InputError: the format is not known and cannot be found out.
        """
        if self.format is None:
            known = text.filter(~is_missing(text))
            if not known.len():
                return Read(pl.Series(text.name, [None] * text.len(), dtype=pl.Int64))
            self.format = self._found(known.head(100))
        if self.format in NS_PER:
            read = duration_ns(text, self.format)
            # Of a unit that was told by size, a time of another size is none.
            return _read(text, read.value.set((read.value < _GUESSED_FROM_NS).fill_null(False), None)) if self.guessed else read
        if self.format == "iso8601":
            return self._iso(text)
        return _read(text, _stamp(text.str.strip_chars(), _NGINX if self.format == "nginx" else self.format))

    @property
    def relative(self) -> bool | None:
        """Whether the times can be counts from the log's start; null if the format is not known yet."""
        return None if self.format is None else self.format in NS_PER

    def _found(self, known: pl.Series) -> str:
        self.guessed = True
        plain = known.str.strip_chars()
        if plain.str.contains(_PLAIN_NUMBER).all():
            numbers = plain.cast(pl.Float64).abs()
            units = {next((u for least, u in _EPOCHS if n >= least), None) for n in numbers.to_list() if n}
            unit = units.pop() if len(units) == 1 else None
            if unit is None:
                raise InputError(
                    f"Column {self.column}: the unit of {known[0]!r} cannot be told.", hint="Say it: …=COLUMN:s, :ms, :us or :ns."
                )
            return unit
        for form in ("iso8601", "nginx"):
            trial = Times(self.column, form).read(known)
            if trial.value.null_count() < known.len():
                return form
        raise InputError(
            f"Column {self.column}: {known[0]!r} is no time that hoptrace knows.",
            hint="Say its format, such as …=COLUMN:%d.%m.%Y %H:%M:%S.",
        )

    def _iso(self, text: pl.Series) -> Read:
        value = _stamp(text, self._usual)
        if value.null_count() > text.null_count():
            # Not all are of the form of those before: try the others on a few, then the best of them and the rarer on the rest.
            left = value.is_null() & text.is_not_null()
            rest = text.filter(left)
            best = min(_ISOS, key=lambda f: _stamp(rest.head(_TRIED), f).null_count())
            more = _stamp(rest, best)
            if value.null_count() == value.len():
                self._usual = best
            if more.null_count():
                rare, zoned = _any_iso(rest)
                self.zoned = self.zoned or zoned
                more = pl.select(pl.coalesce(more, rare)).to_series()
            self.zoned = self.zoned or best.endswith(("Z", "z"))
            value = value.scatter(left.arg_true(), more)
        return _read(text, value)


def _any_iso(text: pl.Series) -> tuple[pl.Series, bool]:
    """Times in any of ISO 8601's usual forms, and whether some name their zone; without one they are UTC."""
    plain = text.str.strip_chars()
    zoned = _stamp(plain, _ISO + "%#z")
    if zoned.null_count() == plain.null_count():
        return zoned, True
    # A T between date and time, Z or an offset behind, a comma before the fraction, no seconds.
    plain = plain.str.replace(r"^(\d{4}-\d\d-\d\d)[Tt_]", "$1 ").str.replace(r" ?([Zz]|UTC|GMT)$", "+00:00")
    plain = plain.str.replace(r",(\d)", ".$1").str.replace(r" ([+-]\d\d)", "$1")
    plain = plain.str.replace(r"(:\d\d(?:\.\d+)?[+-]\d\d)$", "$1:00")
    plain = plain.str.replace(r"^(\d{4}-\d\d-\d\d \d\d:\d\d)([+-]|$)", "$1:00$2")
    zoned = _stamp(plain, _ISO + "%#z")
    local = _stamp(plain, _ISO)
    return pl.select(pl.coalesce(zoned, local)).to_series(), zoned.null_count() < zoned.len()


def _stamp(text: pl.Series, pattern: str) -> pl.Series:
    zone = "UTC" if re.search(r"%#?:*z|%\+", pattern) else None
    try:
        found = text.str.to_datetime(pattern, time_unit="ns", time_zone=zone, strict=False).dt.epoch("ns")
        if _may_wrap(text, pattern):
            us = text.str.to_datetime(pattern, time_unit="us", time_zone=zone, strict=False).dt.epoch("us")
            found = found.set((us.abs() >= _MOST_US).fill_null(False), None)
    except pl.exceptions.PolarsError as e:
        why = (str(e).splitlines() or [""])[0]
        raise UsageError(f"The time format {pattern!r} cannot be used ({why}).") from None
    return found


def _may_wrap(text: pl.Series, pattern: str) -> bool:
    """Whether a time of the text can lie where int64 ns do not reach: if the year stands first, the texts' order tells."""
    if not pattern.startswith("%Y"):
        return True
    low, high = text.min(), text.max()
    return low is not None and not (str(low) >= _FIRST_YEAR and str(high) < _LAST_YEAR)
