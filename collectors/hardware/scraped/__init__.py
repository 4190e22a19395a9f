"""Counters that others have collected: Prometheus pages, files of Intel PCM and of UCX, which are told apart by their content."""

from __future__ import annotations

from collections.abc import Iterator

from hoptrace.collectors.hardware.network.ucx import UcxSource, looks_like_ucx
from hoptrace.collectors.hardware.scraped.followed import PcmSource
from hoptrace.collectors.hardware.scraped.page import PageSource
from hoptrace.collectors.hardware.source import Asked, Source

__all__ = ["sources"]


def sources(asked: Asked) -> Iterator[Source]:
    """One for each page and each file that was asked for. UsageError: an address that is none."""
    for url in asked.scrape:
        yield PageSource(url)
    for path in asked.files:
        yield UcxSource(path) if looks_like_ucx(path) else PcmSource(path)
