"""What becomes of a page's series: rows under the names and entities of hoptrace's own sources, the others under their own.

A value that is none is no number: NaN, an infinity, all ones, DCGM's blanks, a counter that stands at its end. Each is a status,
and what was left out is counted by its reason.
"""

from __future__ import annotations

import math

from hoptrace.collectors.engines.prometheus import Page, Reading, Sample
from hoptrace.collectors.hardware.scraped.blanks import blank, blanks_of
from hoptrace.collectors.hardware.scraped.known import meaning_of
from hoptrace.collectors.hardware.scraped.libraries import UNITS
from hoptrace.collectors.hardware.scraped.meaning import Meaning
from hoptrace.collectors.hardware.sink import ALL_ONES, Sink, Status

__all__ = ["MAX_EVER", "MAX_SERIES", "Taken", "is_page"]

MAX_SERIES = 5000
"""Series of one page that are kept, the first seen."""

MAX_EVER = 50_000
"""Series that one source declares in all: a page whose labels are others each time must not fill the memory."""

_EXACT = 1 << 53


def is_page(page: Page) -> bool:
    """Whether it is in the format: an empty page is, one of which no line can be read is not."""
    return bool(page.samples) or not page.bad


class _Series:
    """One series of the page: where it goes, and how it reads."""

    __slots__ = ("ended", "known", "number", "total")

    def __init__(self, number: int, known: Meaning | None, total: bool) -> None:
        self.number, self.known, self.total, self.ended = number, known, total, False


class Taken:
    """The series of one address, page after page. ``place``: HOST:PORT."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._reading = Reading(UNITS, MAX_SERIES)
        self._series: dict[str, _Series] = {}
        self._owner: dict[int, str] = {}
        self._totals: dict[str, float] = {}
        self._begun = 1
        self._bad = self._cut = 0
        self._said: set[str] = set()

    def take(self, text: str, out: Sink) -> bool:
        """The rows of a page; false if it is none."""
        page = self._reading.page(text)
        if not is_page(page):
            return False
        if self._fell(page):
            # It may be another release: what it declares its series to be is read again.
            self._begun += 1
            out.event("restart", f"totals of {self._place} begin anew")
            self.forget()
            page = self._reading.page(text)
        self._count(page, out)
        blanks = blanks_of(text)
        present: set[str] = set()
        for s in page.samples:
            if s.name in present:
                out.drop("series that stand on a page twice")
                continue
            present.add(s.name)
            self._one(s, blanks.get(s.name), out)
        for name in self._series.keys() - present:
            gone = self._series.pop(name)
            del self._owner[gone.number]
            out.put(gone.number, None, "absent")
        return True

    def lose(self, status: Status, out: Sink) -> None:
        """There is no page: each series is unknown from here on."""
        out.fail((s.number for s in self._series.values()), status)

    def forget(self) -> None:
        """What answers now may be another exporter."""
        self._reading.forget()
        self._series.clear()
        self._owner.clear()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _count(self, page: Page, out: Sink) -> None:
        if page.bad > self._bad:
            out.drop("lines that are not in the text format", page.bad - self._bad)
        self._bad = page.bad
        if self._reading.cut > self._cut:
            self._say(out, f"{self._place} has more than {MAX_SERIES} series: those seen first are kept")
            out.drop(f"series beyond the limit of {MAX_SERIES}", self._reading.cut - self._cut)
        self._cut = self._reading.cut

    def _say(self, out: Sink, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            out.event("gap", what)

    def _fell(self, page: Page) -> bool:
        """Whether the exporter began anew: most of the totals that moved have fallen. One that falls alone is that counter's own
        matter (a driver that was loaded anew, a counter that was cleared)."""
        was, self._totals = self._totals, {}
        up = down = 0
        for s in page.samples:
            known = self._series.get(s.name)
            total = known.total if known else _is_total(s)
            if s.value is None or not total:
                continue
            self._totals[s.name] = s.value
            before = was.get(s.name)
            up += before is not None and s.value > before
            down += before is not None and s.value < before
        return down > up

    def _one(self, s: Sample, none: Status | None, out: Sink) -> None:
        series = self._series.get(s.name) or self._declare(s, out)
        if series is None:
            return
        value, known = s.value, series.known
        if value is None:
            out.put(series.number, None, "absent")
            return
        if not math.isfinite(value * (known.scale if known else 1)):
            out.drop("values that are not finite")
            out.put(series.number, None, "error")
            return
        if value == float(ALL_ONES):
            out.drop("all ones (no value)")
            out.put(series.number, None, "unsupported")
            return
        none = none or (blank(value) if s.name.startswith("DCGM_") else None)
        if none is not None:
            out.drop(f"DCGM's blank values ({none})")
            out.put(series.number, None, none)
            return
        if known is not None and known.end is not None and value >= known.end:
            out.put(series.number, None, "stale")
            if not series.ended:
                out.event("counter", f"{s.name[:300]} stands at its end ({known.end}) and counts no more until reset")
            series.ended = True
            return
        series.ended = False
        if known is not None:
            out.put(series.number, known.value(value))
        else:
            out.put(series.number, int(value) if series.total and abs(value) < _EXACT and value == int(value) else value)

    def _declare(self, s: Sample, out: Sink) -> _Series | None:
        if out.series_count >= MAX_EVER:
            self._say(out, f"{self._place} has told {MAX_EVER} series by now: new ones are left out")
            out.drop(f"series beyond {MAX_EVER} in all")
            return None
        known = meaning_of(_base(s), s.labels)
        entity = known.entity(s.labels) if known else None
        life = f"{self._place}#{self._begun}"
        if known is not None and entity is not None:
            number = out.series(
                entity, known.name, known.unit, known.semantics, direction=known.direction, window_ns=known.window_ns,
                incarnation=life if known.semantics == "cumulative" else None,
            )  # fmt: skip
            if number not in self._owner:
                return self._keep(s.name, _Series(number, known, known.semantics == "cumulative"))
            # Two series of the page are one counter of ours: labels that nobody here knows tell them apart.
            self._say(out, f"{self._place} tells {known.name} of {entity} more than once: the others keep their own names")
        semantics = s.kind.semantics if s.kind else "gauge"
        number = out.series(
            f"scrape:{self._place}", s.name, s.kind.unit if s.kind and s.known else None, semantics,
            incarnation=life if semantics == "cumulative" else None,
        )  # fmt: skip
        return self._keep(s.name, _Series(number, None, semantics == "cumulative"))

    def _keep(self, name: str, series: _Series) -> _Series:
        self._series[name] = series
        self._owner[series.number] = name
        return series


def _base(s: Sample) -> str:
    """The series' name on the page, without its labels (a sample's own ``base`` is its family)."""
    return s.name.split("{", 1)[0]


def _is_total(s: Sample) -> bool:
    known = meaning_of(_base(s), s.labels)
    return (known.semantics if known else s.kind.semantics if s.kind else None) == "cumulative"
