"""What an importer is: it knows its files by their first bytes, and turns one into rows of `requests`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import polars as pl

__all__ = ["Imported", "Importer"]


@dataclass(frozen=True, slots=True)
class Imported:
    """What one file held.

    ``requests`` has columns of the table of that name, without `request` (numbers are given when files are put together).
    ``dropped`` counts rows that could not be used, by reason; ``notes`` says what was assumed.
    """

    requests: pl.DataFrame
    notes: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)


class Importer(Protocol):
    """One kind of file."""

    kind: str
    summary: str

    def matches(self, path: Path, head: bytes) -> bool:
        """Whether a file that begins with ``head`` is of this kind."""
        ...

    def read(self, path: Path) -> Imported:
        """Read one file. InputError names the file, the line or column, and the remedy."""
        ...
