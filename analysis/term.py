"""A figure that `hoptrace explain` explains. Each part of the analysis lists its own in ``TERMS``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

__all__ = ["Term", "sql_of"]


@dataclass(frozen=True, slots=True)
class Term:
    """``kind``: metric, part of latency, class of latency, ledger, coordination. ``sql``: for `hoptrace sql`, or empty."""

    name: str
    kind: str
    title: str
    unit: str
    formula: str
    doc: str
    sql: str = ""

    def as_dict(self) -> dict[str, str]:
        return {f: getattr(self, f) for f in ("name", "kind", "title", "unit", "formula", "doc", "sql")}


def sql_of(name: str) -> str:
    """The query ``analysis/sql/NAME.sql``."""
    return files("hoptrace.analysis.sql").joinpath(f"{name}.sql").read_text(encoding="utf-8").strip()
