"""Lines of a log as text, with their numbers; terminal colours are taken out."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hoptrace.collectors.files.base import Sink
from hoptrace.collectors.files.blocks import NOT_TEXT, blocks

__all__ = ["text_lines"]

_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def text_lines(sink: Sink) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of each line of the sink's file."""
    with sink.open() as file:
        for block in blocks(file):
            if block.damaged:
                sink.note(NOT_TEXT)
            for i, raw in enumerate(block.data.decode("utf-8", "replace").split("\n")):
                yield block.line + i, _COLOUR.sub("", raw) if "\x1b" in raw else raw
