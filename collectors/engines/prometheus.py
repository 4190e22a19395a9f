"""A Prometheus text page as counter samples: names kept, semantics and units by a table, by the TYPE line where it is silent.

The TYPE line is not to be trusted for a name that is known: exporters have declared the same field a counter in one release and
a gauge in the next.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (text 0.0.4; OpenMetrics' exemplars and stamps are skipped).
A line that is not in it costs that line, not the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Kind", "Page", "Reading", "Sample", "read"]

Semantics = Literal["cumulative", "gauge"]
_BY_TYPE: dict[str, Semantics] = {"counter": "cumulative", "histogram": "cumulative", "summary": "cumulative", "gauge": "gauge"}
_PARTS = ("_bucket", "_count", "_sum", "_total", "_created", "_info")
_LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+(\S+)(?:[ \t].*)?$')
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|$)')
_LONGEST = 4096


@dataclass(frozen=True, slots=True)
class Kind:
    """How a metric reads; ``whole`` if its values are integers."""

    unit: str
    semantics: Semantics
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of the series ``name`` (labels sorted, part of the name) of the metric ``base``.

    ``kind`` is null where neither the table nor the TYPE line tells, ``known`` says whether the table did; ``value`` is null for
    NaN.
    """

    name: str
    base: str
    labels: Mapping[str, str]
    value: float | None
    kind: Kind | None
    known: bool = False


@dataclass(slots=True)
class Page:
    """What a page holds. ``names``: of metrics, also those without a series; ``created``: their ``_created`` stamps; ``bad``:
    lines that are not in the format."""

    samples: list[Sample] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    created: dict[str, float] = field(default_factory=dict)
    bad: int = 0


@dataclass(slots=True)
class _Series:
    name: str
    base: str
    labels: dict[str, str]
    kind: Kind | None
    known: bool
    created: bool
    page: int = 0


class Reading:
    """Reads one server's pages, one after the other: a series is parsed once. At most ``limit`` series are kept, the first seen;
    a page's others are counted in ``cut``."""

    def __init__(self, known: Mapping[str, Kind], limit: int = 5000) -> None:
        self._known = known
        self._limit = limit
        self._seen: dict[str, _Series] = {}
        self._types: dict[str, str] = {}
        self._number = 0
        self.cut = 0

    def page(self, text: str) -> Page:
        """All samples of a page."""
        page = self._page(text)
        if self.cut and (gone := [k for k, s in self._seen.items() if s.page != self._number]):
            # Series that are no longer told hold places of those that are.
            for key in gone:
                del self._seen[key]
            page = self._page(text)
        return page

    def _page(self, text: str) -> Page:
        page = Page()
        self._number += 1
        self.cut = 0
        for line in text.split("\n"):
            if not line or line == "\r":
                continue
            if line[0] == "#":
                self._comment(line, page)
                continue
            at = line.rfind(" ")
            series = self._seen.get(line[:at]) if at > 0 else None
            value: float | None
            if series is None:
                match = _LINE.match(line) if len(line) <= _LONGEST else None
                if match is None:
                    page.bad += 1
                    continue
                # With a stamp or an exemplar behind the value, or the first time.
                key = line[: match.end(2) + 1] if match[2] is not None else match[1]
                series = self._seen.get(key) or self._series(key, match[1], match[2])
                if series is None:
                    continue
                text_value = match[3]
            else:
                text_value = line[at + 1 :]
            try:
                value = float(text_value)
            except ValueError:
                page.bad += 1
                continue
            series.page = self._number
            if series.created:
                page.created[series.name] = value
                continue
            page.names.add(series.base)
            kept = None if math.isnan(value) else value
            page.samples.append(Sample(series.name, series.base, series.labels, kept, series.kind, series.known))
        return page

    def forget(self) -> None:
        """The server was restarted: its series, and what it declares them to be, may be others."""
        self._seen.clear()
        self._types.clear()

    def _comment(self, line: str, page: Page) -> None:
        word = line.split(None, 3)
        if len(word) >= 3 and word[1] in ("TYPE", "HELP"):
            if not word[2].endswith("_created"):
                page.names.add(word[2])
            if word[1] == "TYPE" and len(word) == 4 and len(self._types) < self._limit:
                self._types[word[2]] = word[3].strip()

    def _series(self, key: str, name: str, labels: str | None) -> _Series | None:
        """A series that is new; null if there is no place for it."""
        if len(self._seen) >= self._limit:
            self.cut += 1
            return None
        pairs = dict(_LABEL.findall(labels)) if labels else {}
        base, type_ = name, self._types.get(name)
        if type_ is None:
            for part in _PARTS:
                short = name.removesuffix(part)
                if short != name and short in self._types:
                    base, type_ = short, self._types[short]
                    break
        kind = self._known.get(name)
        known = kind is not None
        if kind is None and type_ is not None and (semantics := _BY_TYPE.get(type_)):
            kind = Kind("1", "gauge" if type_ == "summary" and "quantile" in pairs else semantics)
        told = ",".join(f'{k}="{v}"' for k, v in sorted(pairs.items()))
        # Clients write the stamp of a metric's creation either as a series of its family or as a family of its own.
        series = _Series(f"{name}{{{told}}}" if told else name, base, pairs, kind, known, name.endswith("_created"))
        self._seen[key] = series
        return series


def read(text: str, known: Mapping[str, Kind]) -> Page:
    """One page, by itself."""
    return Reading(known).page(text)
