"""A Prometheus page that the user names, asked for again and again: known series under the names and entities of hoptrace's own
sources, others under their own (:mod:`hoptrace.collectors.hardware.scraped.taken`).

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

from hoptrace.collectors.engines.prometheus import Reading
from hoptrace.collectors.hardware.scraped.known import meaning_of
from hoptrace.collectors.hardware.scraped.libraries import UNITS
from hoptrace.collectors.hardware.scraped.pcm_page import is_of_pcm
from hoptrace.collectors.hardware.scraped.taken import MAX_SERIES, Taken, is_page
from hoptrace.collectors.hardware.sink import Sink, Status
from hoptrace.collectors.hardware.source import Found, Pace
from hoptrace.errors import UsageError

__all__ = ["PAGE_BYTES", "PageSource"]

PAGE_BYTES = 8 << 20
"""A longer page is not read."""

_TIMEOUT_S = 5.0
_BYTES_PER_S = 50_000
_SLOWEST_S = 10.0


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
        self._taken = Taken(self.place)
        self._connection: http.client.HTTPConnection | None = None
        self._hash = b""
        self._pages = 0
        self._due_s = 0.0
        self._gone: str | None = None

    def probe(self) -> Found:
        try:
            text = self._fetch().decode("utf-8", "replace")
        except _Unreadable as e:
            return Found(e.status, e.why, e.remedy)
        page = Reading(UNITS, MAX_SERIES).page(text)
        if not is_page(page):
            return Found("error", f"{self.place}{self._path} is not in the Prometheus text format", "name the page of metrics")
        if "persecond" in self._path and any(is_of_pcm(s.base) for s in page.samples):
            return Found("unsupported", "PCM's page of differences bears the names of its totals", "name its page /metrics")
        known = sum(meaning_of(s.name.split("{", 1)[0], s.labels) is not None for s in page.samples)
        units = sum(s.known for s in page.samples)
        more = f", {units} more with a unit" if units else ""
        return Found("ok", sees=f"{len(page.samples)} series, {known} of them known{more}")

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
            self._taken.forget()
        page_series = out.series(f"scrape:{self.place}", "page", "pages", "cumulative")
        mark = hashlib.blake2b(data, digest_size=16).digest()
        if mark == self._hash:
            out.put(page_series, None, "stale")
            return
        if not self._taken.take(data.decode("utf-8", "replace"), out):
            self._lose(_Unreadable("error", f"{self.place} answers with something that is no page of metrics"), out)
            return
        self._hash, self._pages = mark, self._pages + 1
        out.put(page_series, self._pages)

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
        self._taken.lose(e.status, out)
        if self._gone != e.why:
            self._gone = e.why
            out.event("metrics vanished", e.why)
