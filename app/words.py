"""Figures and foreign text as people read them. Unknown is said, never shown as 0.

Foreign text (request ids, model names, errors, a trace's name) goes through :func:`plain` before it meets Markdown.
"""

from __future__ import annotations

import math
import re
import string

__all__ = ["UNKNOWN", "change", "count", "duration", "kilobytes", "per_second", "plain", "share"]

UNKNOWN = "unknown"
_LONGEST = 300
_PUNCTUATION = re.compile("([" + re.escape(string.punctuation) + "])")


def plain(text: object, longest: int = _LONGEST) -> str:
    """Text that Markdown shows as it is: one line, at most ``longest`` characters, all punctuation escaped."""
    line = " ".join(str(text).split())
    line = "".join(c for c in line if c.isprintable())
    if len(line) > longest:
        line = line[: longest - 1] + "…"
    # Streamlit reads :name: and :name[…] after Markdown has unescaped: a word joiner keeps them from being seen.
    return _PUNCTUATION.sub(r"\\\1", line).replace("\\:", "\\:\u2060")


def duration(ns: float | None) -> str:
    """12 ns, 3.4 µs, 56 ms, 7.89 s, 2 min 3 s, 4 h 5 min."""
    if ns is None:
        return UNKNOWN
    size = abs(ns)
    for limit, unit, name in ((1e3, 1, "ns"), (1e6, 1e3, "µs"), (1e9, 1e6, "ms"), (60e9, 1e9, "s")):
        if size < limit and float(_three(size / unit)) < limit / unit:
            return f"{'-' if ns < 0 else ''}{_three(size / unit)} {name}"
    sign = "-" if ns < 0 else ""
    seconds = round(size / 1e9)
    if seconds < 3600:
        return f"{sign}{seconds // 60} min {seconds % 60} s"
    return f"{sign}{seconds // 3600:,} h {seconds % 3600 // 60} min"


def kilobytes(size: float | None) -> str:
    """123 B, 4.5 KiB, 67 MiB …"""
    if size is None:
        return UNKNOWN
    value = abs(float(size))
    sign = "-" if size < 0 else ""
    for name in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or name == "TiB":
            break
        value /= 1024
    return f"{sign}{_three(value)} {name}"


def count(value: float | None) -> str:
    """1,234 or 1.23."""
    if value is None:
        return UNKNOWN
    return f"{round(value):,}" if abs(value) >= 100 or float(value).is_integer() else _three(value)


def share(value: float | None) -> str:
    """0.123 as 12.3 %; what is there but rounds to nothing is below 0.1 %."""
    if value is None:
        return UNKNOWN
    if 0 < abs(value) < 0.0005:
        return "< 0.1 %"
    return f"{value * 100:.1f} %"


def change(value: float | None) -> str:
    """0.123 as +12.3 %."""
    return UNKNOWN if value is None else f"{value * 100:+.1f} %"


def per_second(value: float | None, what: str) -> str:
    """12.3 tokens/s."""
    return UNKNOWN if value is None else f"{count(value)} {what}/s"


def _three(value: float) -> str:
    """Three significant digits without an exponent; whole numbers without a point."""
    if abs(value) >= 100 or float(value).is_integer():
        return f"{value:.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else min(9, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"
