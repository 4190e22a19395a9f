"""Which request of the trace an engine's identifier means, so that proxy, sniffer, plug-in and spans write to the same row.

Whoever sees requests begin (proxy, sniffer: a *primary*) gives them numbers, and claims their identifiers as soon as the server
tells them. A source inside the engine often knows an identifier before that: its rows are parked until the identifier is claimed,
or until it is certain that nobody will. Memory is bounded: at the limit the oldest parked rows get a number of their own.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from hoptrace.writer import TraceWriter

__all__ = ["GRACE_NS", "Links", "canonical"]

GRACE_NS = 5_000_000_000
"""How long after the engine's last word on a request a primary may still claim it."""

_FORGET_NS = 600_000_000_000
_PARKED_ROWS = 200_000
_KNOWN = 500_000

# vLLM: the server's id, then `-<prompt>` for completions, then eight random hex digits inside the engine; `<n>_` before it for
# each sequence of n > 1 (vllm/v1/engine/parallel_sampling.py, vllm/v1/engine/input_processor.py of 0.32).
_SEQUENCE = re.compile(r"^(\d{1,4})_(.+)$")
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_PROMPT = re.compile(r"^(cmpl-.+)-(\d{1,4})$")


def canonical(engine_id: str) -> tuple[str, int]:
    """The identifier as the client sees it, and which of the request's sequences is meant."""
    sequence = 0
    if m := _SEQUENCE.match(engine_id):
        sequence, engine_id = int(m[1]), m[2]
    engine_id = _SUFFIX.sub("", engine_id)
    if m := _PROMPT.match(engine_id):
        engine_id, sequence = m[1], sequence or int(m[2])
    return engine_id, sequence


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
        self._parked: OrderedDict[str, _Parked] = OrderedDict()
        self._parked_rows = 0
        self._stays: OrderedDict[int, dict[str | None, int]] = OrderedDict()
        self._headers: OrderedDict[str, tuple[int, set[str | None]]] = OrderedDict()
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

    def stage(self, number: int, server: str | None) -> int:
        """Order of the request's stay on ``server`` among its stays; a new stay is the next one."""
        stays = self._stays.setdefault(number, {})
        while len(self._stays) > _KNOWN:
            self._stays.popitem(last=False)
        return stays.setdefault(server, len(stays))

    def find(self, engine_id: str) -> int | None:
        """The request that an identifier means; null if nobody has claimed it."""
        return self._known.get(canonical(engine_id)[0])

    def claim(self, number: int, engine_id: str) -> None:
        """A primary says: this identifier is request ``number``. Rows that waited for it are handed over."""
        key = canonical(engine_id)[0]
        before = self._known.get(key)
        if before is not None and before != number:
            self.late += 1  # its rows already stand under a number of their own
        self._remember(key, number)
        self._release(key, number)

    def add(self, engine_id: str, table: str, row: dict[str, Any], now_ns: int, *, done: bool = False) -> None:
        """Write a row of the request that ``engine_id`` means. ``request`` and, where the row has ``server`` and the table is
        `stages`, ``stage`` are filled in; `sequence` too where the row has none. ``done``: the engine has no more to say."""
        key, sequence = canonical(engine_id)
        if table in ("stages", "tokens", "residency"):
            row.setdefault("sequence", sequence)
        number = self._known.get(key)
        if number is None and not self.primary:
            number = self.new()
            self._remember(key, number)
        if number is not None:
            self._write(number, table, row)
            return
        parked = self._parked.setdefault(key, _Parked())
        parked.rows.append((table, row))
        parked.touched_ns = now_ns
        self._parked_rows += 1
        if done:
            parked.done_ns = now_ns
        while self._parked_rows > _PARKED_ROWS:
            self._own(next(iter(self._parked)))

    def settle(self, now_ns: int | None = None) -> None:
        """Give numbers to those whom no primary can claim any more; to all that wait if ``now_ns`` is null (the end)."""
        for key, parked in list(self._parked.items()):
            over = parked.done_ns is not None and now_ns is not None and now_ns - parked.done_ns > GRACE_NS
            if now_ns is None or over or now_ns - parked.touched_ns > _FORGET_NS:
                self._own(key)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _own(self, key: str) -> None:
        number = self.new()
        self._remember(key, number)
        self._release(key, number)

    def _remember(self, key: str, number: int) -> None:
        self._known[key] = number
        self._known.move_to_end(key)
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)

    def _release(self, key: str, number: int) -> None:
        parked = self._parked.pop(key, None)
        if parked is None:
            return
        self._parked_rows -= len(parked.rows)
        for table, row in parked.rows:
            self._write(number, table, row)

    def _write(self, number: int, table: str, row: dict[str, Any]) -> None:
        row["request"] = number
        if table == "stages":
            row.setdefault("attempt", 0)
            row.setdefault("stage", self.stage(number, row.get("server")))
        self._writer.append(table, [row])
