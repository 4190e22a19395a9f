"""What a series is, whoever prints it: the one question that all tables answer together."""

from __future__ import annotations

from hoptrace.collectors.hardware.scraped.dcgm import DCGM
from hoptrace.collectors.hardware.scraped.hosts import node_meaning
from hoptrace.collectors.hardware.scraped.libraries import library_meaning
from hoptrace.collectors.hardware.scraped.meaning import Labels, Meaning
from hoptrace.collectors.hardware.scraped.pcm_page import pcm_meaning

__all__ = ["meaning_of"]


def meaning_of(name: str, labels: Labels | None = None) -> Meaning | None:
    """The meaning of a series of this name (and of these labels, where they are part of what it counts); null for one that
    nobody here knows."""
    return DCGM.get(name) or node_meaning(name, labels) or library_meaning(name) or pcm_meaning(name)
