"""Tables of the errors against real servers: tier 1 (modelled steps) and tier 2 (real compute)."""

from __future__ import annotations

from typing import Any

__all__ = ["tier1", "tier2"]


def tier1(rows: Any) -> str:
    """Real scheduler, stated step times."""
    return ""


def tier2(rows: Any) -> str:
    """Real compute."""
    return ""
