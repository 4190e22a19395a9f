"""JSON lines as Python objects, one at a time: for records with lists of measurements in them (plain columns: json_rows.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hoptrace.collectors.files.base import Sink
from hoptrace.collectors.files.blocks import NOT_TEXT, blocks

__all__ = ["json_lines"]


def json_lines(sink: Sink) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line that is one; the others are counted and rejected here. Empty lines are none."""
    with sink.open() as file:
        for block in blocks(file):
            if block.damaged:
                sink.note(NOT_TEXT)
            lines = block.data.split(b"\n")
            for i, raw in enumerate(lines):
                if not raw.strip():
                    continue
                try:
                    found = json.loads(raw)
                except (ValueError, RecursionError):
                    # Only the file's last line has no line end behind it.
                    _refuse(sink, block.line + i, "the file ends inside it" if i + 1 == len(lines) else "it is not JSON")
                    continue
                if isinstance(found, dict):
                    yield block.line + i, found
                else:
                    _refuse(sink, block.line + i, "it is not a JSON object")


def _refuse(sink: Sink, line: int, reason: str) -> None:
    sink.count()
    sink.reject(line, reason)
