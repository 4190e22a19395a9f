"""AMD GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from hoptrace.collectors.hardware.amd.gpus import AmdSource
from hoptrace.collectors.hardware.source import Asked, Source

__all__ = ["sources"]


def sources(asked: Asked) -> Iterator[Source]:
    """One for all of them."""
    yield AmdSource(asked.roots)
