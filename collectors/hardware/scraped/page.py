"""A Prometheus page that the user names, as counters: known series under the names and entities of hoptrace's own sources, others
under their own.

The page tells no times: a value is as old as the exporter's interval, and a page that is the same as before holds nothing new
(status `stale` of the series `page`).
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import socket
import ssl
import time
from urllib.parse import urlsplit

from hoptrace.collectors.engines.prometheus import Page, Reading, Sample
from hoptrace.collectors.hardware.scraped.dcgm import DCGM
from hoptrace.collectors.hardware.scraped.hosts import node_meaning
from hoptrace.collectors.hardware.scraped.libraries import library_meaning
from hoptrace.collectors.hardware.scraped.meaning import Meaning, blank
from hoptrace.collectors.hardware.sink import Sink, Status
from hoptrace.collectors.hardware.source import Found, Pace
from hoptrace.errors import UsageError

__all__ = ["MAX_SERIES", "PAGE_BYTES", "PageSource", "meaning_of"]

MAX_SERIES = 5000
"""Series of one page that are kept, the first seen."""

PAGE_BYTES = 8 << 20
"""A longer page is not read."""

_TIMEOUT_S = 5.0
_BYTES_PER_S = 50_000
_SLOWEST_S = 10.0


def meaning_of(name: str) -> Meaning | None:
    """What a series of this name is, whoever prints it; null for one that nobody here knows."""
    return DCGM.get(name) or node_meaning(name) or library_meaning(name)


class _Unreadable(Exception):
    def __init__(self, status: Status, why: str, remedy: str | None = None) -> None:
        super().__init__(why)
        self.status, self.why, self.remedy = status, why, remedy


class PageSource:
    """One page. UsageError: ``url`` is no URL of a page. Credentials in it are sent, and neither shown nor kept."""

    answers = "what an exporter (DCGM, node_exporter, NIXL …) counts"
    pace: Pace = "own"
    every_s = 1.0

    def __init__(self, url: str) -> None:
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--scrape {url} is not the URL of a page.", hint="Write it like http://127.0.0.1:9400/metrics.")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port or (443 if self._secure else 80)
        self._path = (parts.path or "/metrics") + (f"?{parts.query}" if parts.query else "")
        self._headers = {"Accept": "text/plain;version=0.0.4", "Connection": "keep-alive"}
        if parts.username is not None:
            pair = f"{parts.username}:{parts.password or ''}".encode()
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair).decode()
        self.place = f"{self._host}:{self._port}"
        self.name = f"scrape {self.place}"
        self._reading = Reading({}, MAX_SERIES)
        self._connection: http.client.HTTPConnection | None = None
        self._hash = b""
        self._pages = 0
        self._due_s = 0.0
        self._bad = self._cut = 0
        self._numbers: dict[str, int] = {}
        self._totals: dict[str, float] = {}
        self._begun = 1
        self._gone: str | None = None
        self._vague: set[str] = set()

    def probe(self) -> Found:
        try:
            text = self._fetch().decode("utf-8", "replace")
        except _Unreadable as e:
            return Found(e.status, e.why, e.remedy)
        page = Reading({}, MAX_SERIES).page(text)
        if not page.samples and text.strip():
            return Found("error", f"{self.place}{self._path} is not in the Prometheus text format", "name the page of metrics")
        known = sum(meaning_of(s.name.split("{")[0]) is not None for s in page.samples)
        return Found("ok", sees=f"{len(page.samples)} series, {known} of them known")

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        if time.monotonic() < self._due_s:
            return
        before = out.now_ns()
        try:
            data = self._fetch()
        except _Unreadable as e:
            out.at(before, out.now_ns())
            self._lose(e, out)
            return
        out.at(before, out.now_ns())
        # What a page costs its server is bounded by its size.
        self._due_s = time.monotonic() + min(len(data) / _BYTES_PER_S, _SLOWEST_S)
        if self._gone is not None:
            out.event("metrics", f"{self.place} answers again")
            self._gone = None
        page_series = out.series(f"scrape:{self.place}", "page", "pages", "cumulative")
        mark = hashlib.blake2b(data, digest_size=16).digest()
        if mark == self._hash:
            out.put(page_series, None, "stale")
            return
        page = self._reading.page(data.decode("utf-8", "replace"))
        if not page.samples and data.strip():
            self._lose(_Unreadable("error", f"{self.place} answers with something that is no page of metrics"), out)
            return
        self._hash, self._pages = mark, self._pages + 1
        out.put(page_series, self._pages)
        self._take(page, out)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _fetch(self) -> bytes:
        """The page, over a connection that is kept; _Unreadable with its reason."""
        for attempt in (1, 2):
            kept = self._connection is not None
            try:
                return self._ask()
            except (http.client.HTTPException, OSError) as e:
                self.close()
                # A kept connection that the server has closed meanwhile is no failure.
                if attempt == 1 and kept and not isinstance(e, TimeoutError):
                    continue
                raise self._why(e) from None
        raise AssertionError

    def _ask(self) -> bytes:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            self._connection = kind(self._host, self._port, timeout=_TIMEOUT_S)
        self._connection.request("GET", self._path, headers=self._headers)
        reply = self._connection.getresponse()
        until_s = time.monotonic() + _TIMEOUT_S
        data = b""
        while piece := reply.read1(1 << 16):
            data += piece
            if len(data) > PAGE_BYTES:
                self.close()
                raise _Unreadable("error", f"the page of {self.place} is longer than {PAGE_BYTES >> 20} MiB")
            if time.monotonic() > until_s:
                self.close()
                raise _Unreadable("lost", f"the page of {self.place} did not come within {_TIMEOUT_S:g} s")
        if reply.length:
            raise http.client.IncompleteRead(data, reply.length)  # it broke off, which read1 does not tell
        if reply.status != 200:
            status: Status = "denied" if reply.status in (401, 403) else "absent" if reply.status in (404, 410) else "error"
            remedy = {"denied": "http://USER:PASSWORD@HOST:PORT/…", "absent": "name the page: http://HOST:PORT/metrics"}.get(
                status
            )
            raise _Unreadable(status, f"{self.place}{self._path} answers {reply.status} {reply.reason}", remedy)
        return data

    def _why(self, e: Exception) -> _Unreadable:
        if isinstance(e, TimeoutError):
            return _Unreadable("lost", f"{self.place} does not answer within {_TIMEOUT_S:g} s")
        if isinstance(e, ConnectionRefusedError):
            return _Unreadable("absent", f"nothing listens at {self.place}", "start the exporter, or name its address")
        if isinstance(e, socket.gaierror):
            return _Unreadable("absent", f"the host {self._host} is not known")
        if isinstance(e, ssl.SSLError):
            return _Unreadable("error", f"no TLS with {self.place}: {e.reason or e}")
        return _Unreadable("lost", f"{self.place} broke off ({type(e).__name__})")

    def _lose(self, e: _Unreadable, out: Sink) -> None:
        """The page can't be read: each series is unknown from here on. Told once, and again when the reason changes."""
        self._hash = b""
        out.fail(self._numbers.values(), e.status)
        if self._gone != e.why:
            self._gone = e.why
            out.event("metrics vanished", e.why)

    def _take(self, page: Page, out: Sink) -> None:
        if page.bad > self._bad:
            out.drop("lines that are not in the text format", page.bad - self._bad)
        self._bad = page.bad
        if self._reading.cut > self._cut:
            if not self._cut:
                out.event("gap", f"{self.place} has more than {MAX_SERIES} series: those seen first are kept")
            out.drop(f"series beyond the limit of {MAX_SERIES}", self._reading.cut - self._cut)
        self._cut = self._reading.cut
        if self._fell(page.samples):
            self._begun += 1
            out.event("restart", f"totals of {self.place} begin anew")
            self._numbers.clear()
        present = set()
        for s in page.samples:
            present.add(s.name)
            self._one(s, out)
        for name in self._numbers.keys() - present:
            out.put(self._numbers.pop(name), None, "absent")

    def _fell(self, samples: list[Sample]) -> bool:
        """Whether the exporter began anew: most of the totals that moved have fallen. One that falls alone is that counter's own
        matter (a driver that was loaded anew, a counter that was cleared)."""
        was, self._totals = self._totals, {}
        up = down = 0
        for s in samples:
            if s.value is None or self._semantics(s) != "cumulative":
                continue
            self._totals[s.name] = s.value
            before = was.get(s.name)
            up += before is not None and s.value > before
            down += before is not None and s.value < before
        return down > up

    @staticmethod
    def _semantics(s: Sample) -> str | None:
        known = meaning_of(s.name.split("{")[0])
        return known.semantics if known else s.kind.semantics if s.kind else None

    def _one(self, s: Sample, out: Sink) -> None:
        base = s.name.split("{")[0]
        known = meaning_of(base)
        entity = known.entity(s.labels) if known else None
        number = self._numbers.get(s.name)
        if number is None:
            number = self._numbers[s.name] = self._series(s, known, entity, out)
        if s.value is None:
            out.put(number, None, "absent")
            return
        if (none := blank(s.value) if base.startswith("DCGM_") else None) is not None:
            out.drop(f"DCGM's blank values ({none})")
            out.put(number, None, none)
            return
        value: int | float = s.value
        if known is not None and entity is not None:
            value = known.value(s.value)
        elif s.kind is not None and s.kind.semantics == "cumulative" and abs(s.value) < 1 << 53 and s.value == int(s.value):
            value = int(s.value)
        out.put(number, value)

    def _series(self, s: Sample, known: Meaning | None, entity: str | None, out: Sink) -> int:
        life = f"{self.place}#{self._begun}"
        if known is not None and entity is not None:
            counted = known.semantics == "cumulative"
            return out.series(
                entity, known.name, known.unit, known.semantics, direction=known.direction, incarnation=life if counted else None
            )
        semantics = s.kind.semantics if s.kind else "gauge"
        return out.series(
            f"scrape:{self.place}", s.name, None, semantics, incarnation=life if semantics == "cumulative" else None
        )
