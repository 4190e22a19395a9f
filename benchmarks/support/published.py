"""What a comparison with a published result says."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Check", "Row"]


@dataclass(frozen=True)
class Row:
    """One figure: what, as published, as ours."""

    what: str
    published: str
    ours: str


@dataclass(frozen=True)
class Check:
    """``met``: whether direction, and ratio where the setting is complete, agree. ``why``: what differs and from where."""

    id: str
    setting: str
    rows: list[Row] = field(default_factory=list)
    met: bool = False
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"met": bool(self.met)}  # numpy's bool is none of JSON's
