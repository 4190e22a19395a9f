"""One figure of one trace."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Figure", "per_token"]


@dataclass(frozen=True, slots=True)
class Figure:
    """``value`` null is unknown. ``unit``: ns, bytes, share (0 to 1), 1, tokens/s, requests/s, ns·bytes. ``basis``: counted,
    derived, assumed; null for what has none."""

    value: float | None
    unit: str
    section: str
    lower_is_better: bool | None = None
    basis: str | None = None


def per_token(value: float | None, tokens: float | None) -> float | None:
    """value ÷ tokens; null if either is unknown or there are no tokens."""
    return None if value is None or not tokens else value / tokens
