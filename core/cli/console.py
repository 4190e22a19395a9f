"""The console of every verb that shows what stands in a trace."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from hoptrace.printable import printable

__all__ = ["PlainConsole"]


class PlainConsole(Console):
    """Prints names and notes of a trace as text only: a terminal gets no commands but the console's own colours."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            plain = segment.control or segment.text.isprintable()
            yield segment if plain else Segment(printable(segment.text), segment.style)
