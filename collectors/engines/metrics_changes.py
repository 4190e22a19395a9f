"""What changes from page to page besides the values: restarts, metrics that vanish, counters that are none, histograms that tell
nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from hoptrace.collectors.engines.prometheus import Kind, Page, Sample

__all__ = ["Changes", "Found"]

_ENOUGH = 50
_LISTED = 12
_FALLS = 3
_OF_PAGES = 10
_OFTEN = 16


@dataclass(slots=True)
class Found:
    """What a page showed: whether the totals began anew, series that are gone, and what is to be said (kind, detail)."""

    restarted: bool = False
    vanished: list[Sample] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)


class Changes:
    """Looks at one page after the other.

    ``gauges``: metrics that their page declares counters, that no table knows, and that fell: they are read as gauges.
    ``doubted``: totals that fall again and again, since several processes answer behind one port: no increase can be told.
    """

    def __init__(self, renamed: Mapping[str, str]) -> None:
        self._renamed = renamed
        self._series: dict[str, Sample] = {}
        self._names: set[str] = set()
        self._created: dict[str, float] = {}
        self._fresh = False
        self._falls: deque[bool] = deque(maxlen=_OF_PAGES)
        self._flat: set[str] = set()
        self._gone: set[str] = set()
        self._pages = 0
        self.gauges: set[str] = set()
        self.doubted: set[str] = set()

    def renew(self) -> None:
        """The server was restarted, as is known from elsewhere: falls say nothing at the next page."""
        self._fresh = True

    def look(self, page: Page) -> Found:
        """Compare ``page`` with the one before."""
        found = Found()
        now = {s.name: s for s in page.samples}
        if self._series:
            if not self._fresh:
                self._restart(page, now, found)
            self._vanish(page, now, found)
        self._pages += 1
        if self._pages < _OFTEN or self._pages % _OFTEN == 0:
            self._flatness(page, found)
        self._fresh = False
        self._series, self._names, self._created = now, page.names, page.created
        return found

    # -- inside -------------------------------------------------------------------------------------------------------

    def _restart(self, page: Page, now: Mapping[str, Sample], found: Found) -> None:
        fell = [s for name, s in now.items() if (was := self._series.get(name)) and _fell(was, s) and s.base not in self.gauges]
        sure = [s for s in fell if s.known]
        reason = f"the cumulative metric {sure[0].name} fell" if sure else None
        start, began = now.get("process_start_time_seconds"), self._series.get("process_start_time_seconds")
        if reason is None and start and began and start.value != began.value:
            reason = "the process's start is another"
        if reason is None and any(self._created.get(k, v) != v for k, v in page.created.items()):
            reason = "the metrics were created anew"
        if reason is None and len(fell) > 1 and 2 * len(fell) > sum(1 for s in now.values() if _total(s.kind) and s.value):
            reason = f"most totals fell, {fell[0].name} for one"
        self._falls.append(reason is not None)
        if reason is None:
            if others := sorted({s.base for s in fell}):
                self.gauges |= set(others)
                found.events.append(("note", f"declared counters, but they fall: read as gauges: {_listed(others)}"))
            return
        if self.doubted or sum(self._falls) >= _FALLS:
            if not self.doubted:
                why = f"totals fall again and again ({reason}): several processes answer behind one port"
                found.events.append(("gap", f"{why}, no increase can be told"))
            self.doubted |= {s.name for s in now.values() if _total(s.kind)}
            return
        found.restarted = True
        found.events.append(("restart", reason))

    def _vanish(self, page: Page, now: Mapping[str, Sample], found: Found) -> None:
        found.vanished = [s for name, s in self._series.items() if name not in now]
        gone = sorted(n for n in self._names - page.names if n not in self._gone)
        self._gone = (self._gone | set(gone)) - page.names
        if gone:
            now_called = [
                f"{n} is {new} now" for n in gone if (new := self._renamed.get(n)) and {new, f"{new}_total"} & page.names
            ]
            also = f" ({'; '.join(now_called)})" if now_called else ""
            found.events.append(("metrics vanished", f"{len(gone)}: {_listed(gone)}{also}"))

    def _flatness(self, page: Page, found: Found) -> None:
        """Histograms of time with everything in the first bucket: sampled as zero, or faster than it can tell (no percentile)."""
        first: dict[tuple[str, str], tuple[float, float]] = {}
        total: dict[tuple[str, str], float] = {}
        seconds = set()
        for s in page.samples:
            if s.name.startswith(f"{s.base}_sum") and s.kind and s.kind.unit in ("s", "ms", "us"):
                seconds.add(s.base)
            edge = s.labels.get("le")
            if edge is None or s.value is None:
                continue
            key = s.base, ",".join(f"{k}={v}" for k, v in sorted(s.labels.items()) if k != "le")
            try:
                at = float(edge)
            except ValueError:
                continue
            if at == float("inf"):
                total[key] = s.value
            elif at > 0 and (key not in first or at < first[key][0]):
                first[key] = at, s.value
        for (base, labels), n in total.items():
            low = first.get((base, labels))
            if base in seconds and base not in self._flat and low and n >= _ENOUGH and low[1] == n:
                self._flat.add(base)
                what = f"{base}: all of {n:.0f} are in the first bucket (le={low[0]:g})"
                found.events.append(
                    ("note", f"{what}: sampled as zero, or faster than it can tell; it has no percentile to read")
                )


def _total(kind: Kind | None) -> bool:
    return kind is not None and kind.semantics == "cumulative"


def _fell(was: Sample, now: Sample) -> bool:
    return _total(now.kind) and was.value is not None and now.value is not None and now.value < was.value


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
