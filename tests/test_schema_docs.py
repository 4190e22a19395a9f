"""docs/schema.md says what core/schema.py says."""

from __future__ import annotations

from pathlib import Path

from hoptrace.schema import TABLES
from hoptrace.schema_docs import markdown

DOCUMENT = Path(__file__).parents[1] / "docs" / "schema.md"


def test_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == markdown(), "run: python -m hoptrace.schema_docs > docs/schema.md"


def test_every_column_is_in_it() -> None:
    sections = markdown().split("\n## ")
    assert [s.split("\n")[0] for s in sections[1:]] == list(TABLES)
    for section, table in zip(sections[1:], TABLES.values(), strict=True):
        for name in table.names:
            assert f"`{name}`" in section


def test_cells_do_not_break_the_tables() -> None:
    """A bar inside a text would open a new cell."""
    for table in TABLES.values():
        for column in table.columns:
            assert "|" not in column.doc + column.unit
