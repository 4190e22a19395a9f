"""Which request of the trace an engine's identifier means, so that proxy, sniffer, plug-in and spans write to the same row.

Whoever sees requests begin (proxy, sniffer: a *primary*) gives them numbers, and claims their identifiers as soon as the server
tells them. A source inside the engine often knows an identifier before that: its rows are parked until the identifier is claimed,
or until it is certain that nobody will. Memory is bounded: at the limit the oldest parked rows get a number of their own.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from hoptrace.collectors.left import Aborted, Left, pairs
from hoptrace.writer import TraceWriter

__all__ = ["GRACE_NS", "OUTSIDE", "Links", "readings"]

GRACE_NS = 5_000_000_000
"""How long after the engine's last word on a request a primary may still claim it."""

OUTSIDE = (
    "request_id",
    "received_ns",
    "arrival_ns",
    "arrival_of",
    "first_token_ns",
    "first_visible_ns",
    "last_token_ns",
    "finish_ns",
)
"""Columns of `requests` that say what is seen from outside: the engine's opinion of them never overwrites what a primary saw."""

_FORGET_NS = 600_000_000_000
_PARKED_ROWS = 200_000
_KNOWN = 500_000
_LEFT = 10_000

# vLLM: the server's id, then `-<prompt>` for completions, then eight random hex digits inside the engine; `<n>_` before it for
# each sequence of n > 1 (vllm/v1/engine/parallel_sampling.py, vllm/v1/engine/input_processor.py of 0.32).
_SEQUENCE = re.compile(r"^(\d{1,4})_(.+)$")
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_PROMPT = re.compile(r"^(cmpl-.+)-(\d{1,4})$")


def readings(engine_id: str) -> list[tuple[str, int, int]]:
    """What an engine's identifier may be to the client, and which of its prompts and which of that prompt's sequences it is then;
    likeliest first.

    A client's own identifier may end like something that the engine adds: which reading is right is told by what is claimed.
    """
    choice = 0
    if m := _SEQUENCE.match(engine_id):
        choice, engine_id = int(m[1]), m[2]
    bare = _SUFFIX.sub("", engine_id)
    found = []
    for name in dict.fromkeys((bare, engine_id)):
        if m := _PROMPT.match(name):
            found.append((m[1], int(m[2]), choice))
        found.append((name, 0, choice))
    return found


@dataclass(slots=True)
class _Parked:
    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    touched_ns: int = 0
    done_ns: int | None = None


class Links:
    """Request numbers of one capture. Not thread-safe: for the session's event loop only."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._next = 0
        self._known: OrderedDict[str, int] = OrderedDict()
        self._own: set[int] = set()
        self._parked: OrderedDict[str, _Parked] = OrderedDict()
        self._waiting: dict[str, list[str]] = {}
        self._parked_rows = 0
        self._stays: OrderedDict[int, dict[str | None, int]] = OrderedDict()
        self._headers: OrderedDict[str, tuple[int, set[str | None]]] = OrderedDict()
        self._choices: OrderedDict[int, int] = OrderedDict()
        self._firsts: OrderedDict[tuple[int, str], int] = OrderedDict()
        self._cached: OrderedDict[tuple[int, str | None], None] = OrderedDict()
        self._left: deque[Left] = deque(maxlen=_LEFT)
        self.primary = False
        self.late = 0

    def begin(self, request_id: str | None, server: str | None) -> tuple[int, bool]:
        """For a primary: the number of a request that comes to ``server``, and whether this is its first stay.

        ``request_id`` is the client's own (``x-request-id``): a router that hands it on from server to server makes their stays
        one request. The same identifier again at the same server is another request.
        """
        known = self._headers.get(request_id) if request_id else None
        if known is not None and server not in known[1]:
            known[1].add(server)
            return known[0], False
        number = self.new()
        if request_id:
            self._headers[request_id] = (number, {server})
            self._headers.move_to_end(request_id)
            while len(self._headers) > _KNOWN:
                self._headers.popitem(last=False)
        return number, True

    def new(self) -> int:
        """The number of a request that nobody has seen before."""
        self._next += 1
        return self._next - 1

    def choices(self, number: int, n: int) -> None:
        """Request ``number`` has ``n`` sequences of each prompt. The answer numbers its choices prompt by prompt, and so does the
        trace; as long as nobody tells, ``n`` is taken from the sequences that have come (an engine takes in those of a prompt
        before those of the next)."""
        self._choices[number] = max(n, self._choices.get(number, 1))
        while len(self._choices) > _KNOWN:
            self._choices.popitem(last=False)

    def knows_cached(self, number: int, server: str | None) -> bool:
        """Whether the engine itself has told what of request ``number`` it found in caches: its answer's usage counts less
        (vLLM's says nothing of KV that came from elsewhere)."""
        return (number, server) in self._cached

    def stage(self, number: int, server: str | None) -> int:
        """Order of the request's stay on ``server`` among its stays; a new stay is the next one."""
        stays = self._stays.setdefault(number, {})
        while len(self._stays) > _KNOWN:
            self._stays.popitem(last=False)
        return stays.setdefault(server, len(stays))

    def find(self, engine_id: str) -> int | None:
        """The request that an engine's identifier means; null if nobody has claimed it."""
        key = self._claimed(engine_id)
        return None if key is None else self._known[key[0]]

    def claim(self, number: int, client_id: str) -> None:
        """A primary says: the server calls request ``number`` so. Rows that waited for it are handed over."""
        before = self._known.get(client_id)
        if before is not None and before != number:
            self.late += 1  # its rows already stand under a number of their own
        self._remember(client_id, number)
        self._release_all(client_id, number)

    def left(self, left: Left) -> None:
        """A primary says: the client of this request left before the server had named it."""
        self._left.append(left)

    def add(self, engine_id: str, table: str, row: dict[str, Any], now_ns: int, *, done: bool = False) -> None:
        """Write a row of the request that ``engine_id`` means.

        ``request`` is filled in, `sequence` in `stages`, `tokens` and `residency` where the row has none, and `attempt` and
        `stage` in `stages`. What outsiders see (:data:`OUTSIDE`) counts only if no primary has seen the request. ``done``: the
        engine has no more to say.
        """
        key = self._claimed(engine_id)
        if key is None and not self.primary:
            key = readings(engine_id)[0]
            self._remember(key[0], self.new())
            self._own.add(self._known[key[0]])
        if key is not None:
            self._write(self._known[key[0]], key, table, row)
            return
        parked = self._parked.get(engine_id)
        if parked is None:
            parked = self._parked[engine_id] = _Parked()
            for name, _, _ in readings(engine_id):
                self._waiting.setdefault(name, []).append(engine_id)
        parked.rows.append((table, row))
        parked.touched_ns = now_ns
        self._parked_rows += 1
        if done:
            parked.done_ns = now_ns
        while self._parked_rows > _PARKED_ROWS:
            self._give_up(next(iter(self._parked)))

    def settle(self, now_ns: int | None = None) -> None:
        """Give numbers to those whom no primary can claim any more; to all that wait if ``now_ns`` is null (the end)."""
        unclaimed = []
        for key, parked in self._parked.items():
            over = parked.done_ns is not None and now_ns is not None and now_ns - parked.done_ns > GRACE_NS
            if now_ns is None or over or now_ns - parked.touched_ns > _FORGET_NS:
                unclaimed.append(key)
        if unclaimed and self._left:
            self._match()
        for key in unclaimed:
            if key in self._parked:
                self._give_up(key)
        while self._left and now_ns is not None and now_ns - self._left[0].to_ns > 4 * GRACE_NS:
            self._left.popleft()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _claimed(self, engine_id: str) -> tuple[str, int, int] | None:
        return next((r for r in readings(engine_id) if r[0] in self._known), None)

    def _match(self) -> None:
        aborted: dict[str, Aborted] = {}
        for engine_id, parked in self._parked.items():
            if parked.done_ns is not None:
                aborted.setdefault(readings(engine_id)[0][0], Aborted()).tell(parked.rows)
        for left, name in pairs(self._left, aborted):
            self._left.remove(left)
            self._writer.append("requests", [{"request": left.number, "request_id": name}])
            self.claim(left.number, name)

    def _give_up(self, engine_id: str) -> None:
        """Nobody claimed it: a number of its own, which its other sequences share."""
        name = readings(engine_id)[0][0]
        if name not in self._known:
            self._remember(name, self.new())
            self._own.add(self._known[name])
        self._learn(name, self._known[name])
        self._release(engine_id, self._known[name])

    def _remember(self, name: str, number: int) -> None:
        self._known[name] = number
        self._known.move_to_end(name)
        while len(self._known) > _KNOWN:
            self._own.discard(self._known.popitem(last=False)[1])

    def _release(self, engine_id: str, number: int) -> None:
        parked = self._parked.pop(engine_id, None)
        if parked is None:
            return
        self._parked_rows -= len(parked.rows)
        meant = (engine_id, 0, 0)
        for reading in readings(engine_id):
            theirs = self._waiting.get(reading[0], [])
            if engine_id in theirs:
                theirs.remove(engine_id)
            if not theirs:
                self._waiting.pop(reading[0], None)
            if self._known.get(reading[0]) == number:
                meant = reading
        for table, row in parked.rows:
            self._write(number, meant, table, row)

    def _release_all(self, name: str, number: int) -> None:
        """Hand over the rows of all sequences of request ``number`` that wait under ``name``."""
        self._learn(name, number)
        for engine_id in self._waiting.get(name, ())[:]:
            self._release(engine_id, number)

    def _learn(self, name: str, number: int) -> None:
        """How many sequences of a prompt there are, from all that wait: before any of them gets its place."""
        for engine_id in self._waiting.get(name, ()):
            self._choices_of(number, next(r for r in readings(engine_id) if r[0] == name))

    def _choices_of(self, number: int, reading: tuple[str, int, int]) -> int:
        """Sequences of each prompt, as far as is known with this one."""
        if reading[2]:
            self.choices(number, reading[2] + 1)
        return self._choices.get(number, 1)

    def _write(self, number: int, reading: tuple[str, int, int], table: str, row: dict[str, Any]) -> None:
        row["request"] = number
        sequence = reading[1] * self._choices_of(number, reading) + reading[2]
        if table in ("stages", "tokens", "residency"):
            row.setdefault("sequence", sequence)
        if table == "stages":
            row.setdefault("attempt", 0)
            row.setdefault("stage", self.stage(number, row.get("server")))
            if row.get("cached_tokens") is not None:
                self._cached[number, row.get("server")] = None
                while len(self._cached) > _KNOWN:
                    self._cached.popitem(last=False)
        if table == "requests":
            # Of several stays the first: when an engine had it, and when one began.
            for name in ("queued_ns", "scheduled_ns"):
                if row.get(name) is not None:
                    row[name] = self._firsts[number, name] = min(row[name], self._firsts.get((number, name), row[name]))
            while len(self._firsts) > _KNOWN:
                self._firsts.popitem(last=False)
        if table == "requests" and number not in self._own:
            for name in OUTSIDE:
                row.pop(name, None)
        self._writer.append(table, [row])
