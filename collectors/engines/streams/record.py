"""Where exchanges are numbered, and how their rows reach the writer.

Rows are handed over as things happen (a kill loses at most the last second). What was seen is only noted with its time;
:meth:`Recorder.work`, called some twenty times a second, looks into it, a little at a time: no stream waits for another's JSON.
Nothing in here may disturb a stream: faults are swallowed and counted, and end the recording of one request.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from hoptrace.collectors.engines.streams.exchange import CAPTURE_ENDED, CLIENT_LEFT, Exchange
from hoptrace.collectors.engines.streams.hashing import HashKey
from hoptrace.collectors.engines.streams.place import PROXY, Place
from hoptrace.collectors.engines.streams.sessions import Past, Sessions
from hoptrace.collectors.engines.streams.tokens import TokenRows
from hoptrace.collectors.links import Links
from hoptrace.writer import TraceWriter

__all__ = ["CAPTURE_ENDED", "CLIENT_LEFT", "Exchange", "Recorder", "Stats"]

_JOB_COST = 4
_SPEAKERS = 10_000
_READ_BYTES = 4096
_NOTED_BYTES = 8 << 20
_FLUSH_ROWS = 4096


@dataclass(slots=True)
class Stats:
    """Live figures for a status line. ``counts_differ``: not the server's total; ``counts_untold``: no total told;
    ``totals_of_one``: the total is that of one sequence among several."""

    started: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    rows: int = 0
    faults: int = 0
    counts_differ: int = 0
    counts_untold: int = 0
    totals_of_one: int = 0
    last_fault: str | None = None

    @property
    def in_flight(self) -> int:
        return self.started - self.finished - self.failed - self.cancelled

    def notes(self) -> list[str]:
        """What whoever uses the counts must know, for the manifest."""
        notes = {
            "streams: the tokens counted chunk by chunk are not the server's total, since some chunks hold several; "
            "per-token gaps of these are not known.": self.counts_differ,
            "requests asked for several sequences and the server's total is that of one: output_tokens is what was seen of "
            "them, or unknown where nothing was streamed.": self.totals_of_one,
            "requests: the server told no total, a chunk is taken as one token (ask for it with "
            "stream_options.include_usage).": self.counts_untold,
        }
        return [f"{n} of {self.started} {text}" for text, n in notes.items() if n]


class _Watcher(Protocol):
    def give_up(self) -> None: ...


class _Shared:
    """What the recorders of one session know together: the stays of requests that go from server to server."""

    def __init__(self) -> None:
        self.open: dict[int, Exchange] = {}
        self.sessions = Sessions()
        # One queue for all: what comes to one server after it came to another is looked into after it.
        self.notes: deque[tuple[Recorder, _Watcher, Callable[..., None], tuple[Any, ...], int]] = deque()
        self.notes_bytes = 0
        self._speakers: OrderedDict[int, Exchange] = OrderedDict()
        self._pasts: OrderedDict[int, Past] = OrderedDict()

    def speaker(self, number: int, stay: Exchange) -> Exchange:
        """The stay whose tokens are the request's: the first that asks."""
        if stay.alone:
            return stay
        while len(self._speakers) > _SPEAKERS:
            self._speakers.popitem(last=False)
        return self._speakers.setdefault(number, stay)

    def remember(self, number: int, past: Past) -> None:
        """Keep what the first stay found out about the conversation, for the stay that ends the request."""
        while len(self._pasts) > _SPEAKERS:
            self._pasts.popitem(last=False)
        self._pasts[number] = past

    def past(self, number: int) -> Past | None:
        """What was kept."""
        return self._pasts.get(number)


_SHARED: WeakKeyDictionary[Links, _Shared] = WeakKeyDictionary()


class Recorder:
    """Records what clients and ``server`` say to each other at ``place``. ``key`` hashes prompts; null turns hashes off.

    ``links`` numbers the requests, together with the other recorders of a session; null for numbers of its own.
    """

    def __init__(
        self, writer: TraceWriter, server: str, key: HashKey | None, links: Links | None = None, place: Place = PROXY
    ) -> None:
        self.writer = writer
        self.server = server
        self.key = key
        self.links = links or Links(writer)
        self.links.primary = True
        self.place = place
        self.stats = Stats()
        self.jobs: deque[Iterator[None]] = deque()
        self.tokens = TokenRows(place)
        self.shared = _SHARED.setdefault(self.links, _Shared())

    def begin(self, received_ns: int, headers: Mapping[str, str], path: str = "") -> Exchange | None:
        """A request has come (names of ``headers`` in lower case); null if it can't be recorded (counted)."""
        try:
            exchange = Exchange(self, received_ns, headers, path)
        except Exception as e:
            self.fault(e)
            return None
        self.stats.started += 1
        return exchange

    def note(self, who: _Watcher, what: Callable[..., None], told: tuple[Any, ...], size: int) -> None:
        """Remember to call ``what(*told)``, with ``size`` bytes in it. In order; memory is bounded."""
        self.shared.notes.append((self, who, what, told, size))
        self.shared.notes_bytes += size
        while self.shared.notes_bytes > _NOTED_BYTES:
            self._look()

    @property
    def busy(self) -> bool:
        """Whether there is something to look into."""
        return bool(self.shared.notes or self.jobs)

    def work(self, reads: int = 24) -> bool:
        """Look into what was noted, by this recorder or another of the session; stops soon after that many reads. Gives whether
        there is more to do."""
        notes = self.shared.notes
        touched = {self}
        while notes and reads > 0:
            touched.add(notes[0][0])
            reads -= self._look()
        while self.jobs and reads > 0:
            reads -= _JOB_COST
            try:
                next(self.jobs[0])
            except StopIteration:
                self.jobs.popleft()
            except Exception as e:
                self.jobs.popleft()
                self.fault(e)
        for recorder in touched:
            if not notes or recorder.tokens.rows > _FLUSH_ROWS:
                recorder.flush()
        return self.busy

    def _look(self) -> int:
        recorder, who, what, told, size = self.shared.notes.popleft()
        self.shared.notes_bytes -= size
        try:
            what(*told)
        except Exception as e:
            recorder.fault(e)
            who.give_up()
        return 1 + size // _READ_BYTES

    def flush(self) -> None:
        """Hand the tokens to the writer."""
        if self.tokens.rows:
            try:
                self.stats.rows += self.tokens.rows
                self.writer.append_arrow("tokens", self.tokens.take())
            except Exception as e:
                self.fault(e)

    def append(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Hand rows to the writer."""
        self.writer.append(table, rows)
        self.stats.rows += len(rows)

    def fault(self, error: Exception) -> None:
        """Count a fault of the recorder itself."""
        self.stats.faults += 1
        self.stats.last_fault = f"{type(error).__name__}: {error}"[:200]
        try:
            self.writer.drop(f"{self.place.source} recorder: {type(error).__name__}", 1)
        except Exception:  # the last line of defence: the stream goes on whatever happens here
            return
