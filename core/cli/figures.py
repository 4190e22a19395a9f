"""How the verbs print a figure of a comparison and its error."""

from __future__ import annotations

__all__ = ["figure", "percent_off"]


def figure(value: float | None, unit: str) -> str:
    """A latency (``unit`` ns) in ms, a rate per second; null is unknown."""
    if value is None:
        return "unknown"
    return f"{value / 1e6:,.1f} ms" if unit == "ns" else f"{value:,.2f} /s"


def percent_off(pct: float | None) -> str:
    """A signed percentage; nothing where it is null."""
    return "" if pct is None else f"{pct:+.1f} %"
