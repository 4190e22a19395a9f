"""Sources of this family."""

from __future__ import annotations

from collections.abc import Iterator

from hoptrace.collectors.hardware.source import Asked, Source

__all__ = ["sources"]


def sources(asked: Asked) -> Iterator[Source]:
    """The sources of this family."""
    yield from ()
