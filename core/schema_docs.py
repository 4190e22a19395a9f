"""``docs/schema.md`` from :mod:`hoptrace.schema`: ``python -m hoptrace.schema_docs > docs/schema.md``."""

from __future__ import annotations

import pyarrow as pa

from hoptrace.schema import TABLES, VERSION, Column, Table

__all__ = ["markdown"]

_INTRO = f"""# The trace schema, version {VERSION}

Generated from `core/schema.py` by `python -m hoptrace.schema_docs > docs/schema.md`; a test holds the two equal.

A trace is a folder `NAME.trace/` with `manifest.json` and one folder per table. Each table is one or more Parquet parts, sorted
as given below; while a trace is written its newest rows are in a journal (checksummed Arrow frames), which becomes a part. The
manifest names the files: read those, never glob.

Times are int64 nanoseconds since 1970 on one trace clock (the lead host's CLOCK_MONOTONIC plus an offset fixed at the start).
Sizes are bytes. Unknown is null, never 0. A newer minor version may add tables and columns; a newer major version is refused.

Where a table is *merged*, several rows may be written per key, each with what its writer knew; a reader gives one row per key, in
each column the last value that is not null. Of `tokens` a reader gives the rows of one vantage per request.
"""


def markdown() -> str:
    """The whole document."""
    parts = [_INTRO, _contents(), *(_table(t) for t in TABLES.values())]
    return "\n".join(parts)


def _contents() -> str:
    rows = "".join(f"| [`{t.name}`](#{t.name}) | {t.row} |\n" for t in TABLES.values())
    return f"| table | a row is |\n| --- | --- |\n{rows}"


def _table(table: Table) -> str:
    lines = [f"## {table.name}", "", f"A row is {table.row}.", ""]
    if table.key:
        merged = " (merged)" if table.merge else ""
        lines.append(f"Key: {_names(table.key)}{merged}.\n")
    lines.append(f"Sorted by {_names(table.sort)}.")
    lines += ["", "| column | type | unit | meaning |", "| --- | --- | --- | --- |"]
    lines += [_column(c) for c in table.columns]
    return "\n".join(lines) + "\n"


def _column(column: Column) -> str:
    meaning = column.doc
    if column.values:
        meaning += f" One of {', '.join(f'`{v}`' for v in column.values)}."
    name = f"**`{column.name}`**" if column.required else f"`{column.name}`"
    return f"| {name} | {_kind(column.type)} | {column.unit} | {meaning}{' Never null.' if column.required else ''} |"


def _kind(kind: pa.DataType) -> str:
    return f"list of {kind.value_type}" if pa.types.is_list(kind) else str(kind)


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{n}`" for n in names)


if __name__ == "__main__":
    print(markdown(), end="")
