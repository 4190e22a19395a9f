"""A llama.cpp server's log, as text or as JSON lines (`--log-jsonl`): what each task took in its slot, into `requests`, `stages`.

A line's time counts from the server's start, in microseconds. The lines of a task: a slot is chosen and launched, at its end the
timings of prompt and decode, then the slot is released. When a request came, and how long it waited for a slot, is not logged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from hoptrace.collectors.engines.llamacpp_log import parsed
from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.bench_rows import Measured, Reject, Rows
from hoptrace.collectors.files.json_walk import one_line
from hoptrace.collectors.files.text_lines import text_lines
from hoptrace.errors import InputError
from hoptrace.manifest import Server

__all__ = ["IMPORTER", "LlamaCppLogFile"]

_SERVER = "llamacpp"
_SLOT = re.compile(r"^slot +\S*: id +(\d+) \| task (-?\d+) \| (.*)$")
_TIMING = re.compile(r"^ *(prompt eval|eval) time = +([\d.]+) ms / +(\d+) tokens")
_RELEASE = re.compile(r"stop processing: n_tokens = (\d+), truncated = (\d)")
_ERROR = re.compile(r"send_error: task id = (\d+), error: (.*)$")
_CANCEL = re.compile(r"cancel task, id_task = (\d+)")
_START = re.compile(r"^srv +init: initializing")
_SLOTS = re.compile(r"n_slots = (\d+), n_ctx_slot = (\d+)")
_MODEL = re.compile(r"loading model '([^']*)'")
_ARRIVAL = (
    "A request's arrival is when it got a slot: when it came, and how long it waited for one, is not in the log, nor the way to "
    "the client. Times count from the server's start."
)
_DERIVED = "Prompt lengths are derived: tokens in the slot at the end − tokens decoded + 1; cached = prompt − tokens evaluated."
_OPEN = "{n} requests were still running when the log ended or the server was restarted."
_RESTARTS = "{n} restarts of the server are in the log: times go on after the last one before."
_ROUNDED_NS = 1_000_000


@dataclass(slots=True)
class _Task:
    line: int
    slot: int
    launched_ns: int
    prompt: tuple[int, int] | None = None
    decode: tuple[int, int] | None = None
    timed_ns: int | None = None
    error: str | None = None


class LlamaCppLogFile(Importer):
    """A llama.cpp server's log."""

    kind = "llamacpp-log"
    summary = "llama.cpp server logs (text or --log-jsonl): slots, prompt and decode times, cached tokens, failures"

    def matches(self, path: Path, head: bytes) -> bool:
        return b"launch_slot_: id" in head or b"slot print_timing: id" in head or b"slot get_availabl: id" in head

    def read(self, path: Path, sink: Sink) -> None:
        sink.epoch = "relative"
        sink.note(_ARRIVAL)
        reader = _Reader(sink)
        for number, line in text_lines(sink):
            told = parsed(line)
            if told is not None:
                reader.message(number, told[0] * 1_000, told[1])
        reader.close()


class _Reader:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._rows = Rows(sink, vantage="engine", server=_SERVER)
        self._tasks: dict[int, _Task] = {}
        self._server = Server(name=_SERVER, engine="llama.cpp")
        self._offset = self._last = 0
        self._events: list[tuple[int, str, str]] = []

    def message(self, number: int, at_ns: int, text: str) -> None:
        """Take one message of the log. ``at_ns``: since the server's start."""
        if _START.search(text) and self._last:
            self._restart()
        now = at_ns + self._offset
        self._last = max(self._last, now)
        if (m := _SLOT.match(text)) is not None:
            self._slot(number, now, int(m[1]), int(m[2]), m[3])
        elif (m := _ERROR.search(text)) is not None:
            if (task := self._tasks.get(int(m[1]))) is not None:
                task.error = one_line(m[2]) or "failed without a message"
        elif (m := _CANCEL.search(text)) is not None:
            if (task := self._tasks.get(int(m[1]))) is not None:
                task.error = task.error or "cancelled: the client went away"
        elif (m := _SLOTS.search(text)) is not None:
            self._server.max_sequences, self._server.context_tokens = int(m[1]), int(m[2])
        elif (m := _MODEL.search(text)) is not None:
            self._server.model = Path(m[1]).name

    def close(self) -> None:
        """Write what is left."""
        self._abandon()
        if not self._sink.read:
            raise InputError(f"{self._sink.path} has no task of llama.cpp.", hint="The server's default verbosity (3) logs them.")
        self._sink.note(_DERIVED)
        if self._sink.manifest.server(_SERVER) is None:
            self._sink.manifest.servers.append(self._server)
        if self._events:
            times, kinds, details = zip(*self._events, strict=True)
            self._sink.write(
                "events", pl.DataFrame({"time_ns": times, "kind": kinds, "detail": details, "server": [_SERVER] * len(times)})
            )
        self._rows.close()

    def _slot(self, number: int, now: int, slot: int, task_id: int, text: str) -> None:
        if text.startswith("processing task"):
            self._tasks[task_id] = _Task(number, slot, now)
            return
        task = self._tasks.get(task_id)
        if task is None:
            return
        if (m := _TIMING.match(text)) is not None:
            part = round(float(m[2]) * 1e6), int(m[3])
            if m[1] == "eval":
                task.decode, task.timed_ns = part, now
            else:
                task.prompt = part
        elif (m := _RELEASE.search(text)) is not None:
            del self._tasks[task_id]
            held, whole = int(m[1]), m[2] == "0"
            self._rows.record(task.line, _measured, task_id, task, now, held if whole else None)

    def _restart(self) -> None:
        self._abandon()
        self._offset = self._last
        self._sink.tally(_RESTARTS)
        self._events.append((self._last, "restart", "the server was started again"))

    def _abandon(self) -> None:
        for task_id, task in self._tasks.items():
            self._sink.tally(_OPEN)
            self._rows.record(task.line, _measured, task_id, task, None, None)
        self._tasks.clear()


def _measured(task_id: int, task: _Task, released: int | None, held: int | None) -> Measured:
    more: dict[str, int | str | None] = {"arrival_ns": task.launched_ns}
    m = Measured(request_id=str(task_id), finish_ns=released, error=task.error, more=more)
    m.stay = {
        "role": "both", "engine_request_id": str(task_id), "enqueued_ns": task.launched_ns, "end_ns": released,
        "end_reason": None if released is None else "failed" if task.error else "done",
    }  # fmt: skip
    if task.error is None and released is not None and (task.prompt is None or task.decode is None):
        m.error = "it ended without timings"
        m.stay["end_reason"] = "cancelled"
    if task.prompt is None or task.decode is None or task.timed_ns is None:
        return m
    last = task.timed_ns
    first = last - task.decode[0]
    began = first - task.prompt[0]
    if began < task.launched_ns - _ROUNDED_NS:
        raise Reject("its timings are longer than its stay in the slot", f"by {(task.launched_ns - began) / 1e9:.6g} s")
    # The timings are rounded to 10 µs.
    began = max(began, task.launched_ns)
    m.first_ns, m.last_ns = max(first, began), last
    m.output_tokens = task.decode[1]
    more |= {"scheduled_ns": began, "engine_first_token_ns": m.first_ns}
    m.stay["scheduled_ns"] = began
    if held is not None and (prompt := held - task.decode[1] + 1) >= task.prompt[1]:
        m.prompt_tokens = prompt
        m.cached_tokens = prompt - task.prompt[1]
    return m


IMPORTER = LlamaCppLogFile()
