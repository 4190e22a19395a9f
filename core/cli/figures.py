"""How the verbs print a figure of a comparison and its error."""

from __future__ import annotations

__all__ = ["amount", "figure", "percent_off", "span", "three_digits"]

_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"))


def figure(value: float | None, unit: str) -> str:
    """A latency (``unit`` ns) in ms, a rate per second; null is unknown."""
    if value is None:
        return "unknown"
    return f"{value / 1e6:,.1f} ms" if unit == "ns" else f"{value:,.2f} /s"


def percent_off(pct: float | None) -> str:
    """A signed percentage; nothing where it is null."""
    return "" if pct is None else f"{pct:+.1f} %"


def three_digits(value: float) -> str:
    """At least three digits: 0.97, 16.2, 1242."""
    size = abs(value)
    if size == 0:
        return "0"
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def amount(value: float | None, unit: str) -> str:
    """A figure in three digits: a latency (``unit`` ns) in s, ms or µs, a rate without unit; null is unknown."""
    if value is None:
        return "unknown"
    if unit != "ns":
        return three_digits(value)
    scale, name = _unit(value)
    return f"{three_digits(value / scale)} {name}"


def span(low: float, high: float, value: float, unit: str) -> str:
    """Bounds in the unit that :func:`amount` gives ``value``."""
    scale = _unit(value)[0] if unit == "ns" else 1.0
    return f"{three_digits(low / scale)}–{three_digits(high / scale)}"


def _unit(value: float) -> tuple[float, str]:
    return next((u for u in _UNITS if abs(value) >= 0.9995 * u[0]), _UNITS[-1])
