"""What a column and a table of the schema are; the tables themselves are in :mod:`hoptrace.schema`."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

__all__ = ["Column", "Table"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: ``type`` as Arrow sees it, ``unit`` ("ns", "bytes", "tokens", "" …) and what a value means."""

    name: str
    type: pa.DataType
    unit: str
    doc: str
    required: bool = False
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """One table. ``key`` names the columns that identify a row; ``sort`` is the order of closed parts.

    A table with ``merge=True`` may be written in several partial rows per key (when a request is received, when it ends,
    by several who saw it); a reader gives one row per key, in each column the last value that is not null.
    """

    name: str
    row: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    sort: tuple[str, ...] = ()
    merge: bool = False
    arrow: pa.Schema = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrow", pa.schema([pa.field(c.name, c.type) for c in self.columns]))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.columns)

    def column(self, name: str) -> Column:
        """The column of that name; KeyError if there is none."""
        for c in self.columns:
            if c.name == name:
                return c
        raise KeyError(name)
