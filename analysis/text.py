"""Figures as text: durations, sizes, shares, counts. One form, so that terminal, app and headline agree."""

from __future__ import annotations

__all__ = ["bytes_text", "count_text", "counted", "duration_text", "percent"]


def duration_text(ns: float | None) -> str:
    """A duration with three digits in the unit that fits; an en dash if unknown."""
    if ns is None:
        return "–"
    if abs(ns) < 0.005:
        return "0"
    sign, n = ("-" if ns < 0 else ""), abs(ns)
    for limit, unit, scale in ((1e3, "ns", 1.0), (1e6, "µs", 1e3), (1e9, "ms", 1e6), (6e11, "s", 1e9), (3.6e13, "min", 6e10)):
        if n < limit:
            return f"{sign}{_digits(n / scale)} {unit}"
    return f"{sign}{_digits(n / 3.6e12)} h"


def bytes_text(n: float | None) -> str:
    """Bytes in binary units with three digits; an en dash if unknown."""
    if n is None:
        return "–"
    if abs(n) < 1024 and float(n).is_integer():
        return f"{n:.0f} B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1024 or unit == "TiB":
            return f"{_digits(n)} {unit}"
        n /= 1024
    raise AssertionError


def percent(share: float | None) -> str:
    """A share: whole per cent from 10 %, else one digit; an en dash if unknown."""
    if share is None:
        return "–"
    if abs(share) >= 0.0995:
        return f"{share:.0%}"
    return f"{share:.1%}" if share == 0 or abs(share) >= 0.0005 else "<0.1%"


def count_text(n: float | None) -> str:
    """A number of things: whole ones with thousands separated, else three digits; an en dash if unknown."""
    if n is None:
        return "–"
    return f"{n:,.0f}" if float(n).is_integer() or abs(n) >= 1000 else _digits(n)


def counted(n: int, one: str, many: str | None = None) -> str:
    """A number with its noun: 1 request, 2 requests."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def _digits(x: float) -> str:
    if abs(x) >= 99.95 or (float(x).is_integer() and abs(x) >= 10):
        return f"{x:,.0f}"
    return f"{x:.1f}" if abs(x) >= 9.995 else f"{x:.2f}"
