"""A vLLM server's log: `Iteration(…)` lines (`--enable-logging-iteration-details`) into `steps`, summaries into `counters`.

A step's length and composition are exact; its place is known to a second, as the log's stamps are whole seconds: each step is put
as early as its stamp and the step before it allow. So its origin is "reconstructed", lest tokens be held against such places.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polars as pl

from hoptrace.collectors.engines.vllm_log import FLAG, stamp_ns, step_of, summary_of, transfers_of
from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.text_lines import text_lines
from hoptrace.errors import InputError
from hoptrace.manifest import Server

__all__ = ["IMPORTER", "VllmLogFile"]

_SERVER = "vllm"
_PLACES = (
    "Steps' lengths and compositions are the log's; their places are known to one second only: each is as early as its stamp and "
    "the step ahead of it allow."
)
_STAMPS = "The log's stamps have neither year nor zone: the year nearest to the file's date and this machine's zone are taken."
_NO_STEPS = f"The log has no Iteration lines, so there are no steps: start vLLM with {FLAG} to have them."
_RESTARTS = "{n} times the iterations begin anew (the server was restarted): step numbers go on where they had ended."
_MISSING = "{n} iterations are missing between those that the log has."
_LATE = "{n} steps end later than their line was written, if all before them ran one after another: they overlap in truth."
_CAPACITY = re.compile(r"KV cache size: ([\d,]+) tokens")
_VERSION = re.compile(r"(?:Initializing a V1 LLM engine \(v|vLLM API server version |version )(\d+\.\d+[\w.+-]*)")
_CONTEXT = re.compile(r"Using max model len (\d+)")
_SETTING = {
    "model": re.compile(r"non-default args: .*?'model(?:_tag)?': '([^']*)'"),
    "max_sequences": re.compile(r"non-default args: .*?'max_num_seqs': (\d+)"),
    "max_batched_tokens": re.compile(r"max_num_batched_tokens=(\d+)"),
    "block_size_tokens": re.compile(r"non-default args: .*?'block_size': (\d+)"),
}  # fmt: skip
_FLUSH = 50_000


class VllmLogFile(Importer):
    """A vLLM server's log."""

    kind = "vllm-log"
    summary = "vLLM server logs: steps from Iteration(...) lines, figures from the ten-second summaries"

    def matches(self, path: Path, head: bytes) -> bool:
        if head.lstrip().startswith((b"{", b"[{")):
            return False
        return any(
            w in head for w in (b"iteration elapsed time:", b"Avg prompt throughput:", b"(EngineCore pid=", b"(APIServer pid=")
        )

    def read(self, path: Path, sink: Sink) -> None:
        sink.epoch = "utc"
        sink.main = "steps"
        reader = _Reader(sink, int(path.stat().st_mtime * 1e9))
        for number, line in text_lines(sink):
            reader.line(number, line)
        reader.close()


class _Reader:
    def __init__(self, sink: Sink, near_ns: int) -> None:
        self._sink, self._near_ns = sink, near_ns
        self._steps: list[dict[str, Any]] = []
        self._counters: list[dict[str, Any]] = []
        self._end: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._base: dict[int, int] = {}
        self._capacity: int | None = None
        self._stamp: tuple[int, int] | None = None
        self._server = Server(name=_SERVER, engine="vllm")

    def line(self, number: int, line: str) -> None:
        """Take one line of the log."""
        if "Iteration(" in line and "context requests" in line:
            self._sink.count()
            self._step(number, line)
        elif "Avg prompt throughput" in line:
            found = summary_of(line)
            if found is not None:
                self._figures(found[1], line, found[0])
        elif "KV Transfer metrics" in line:
            self._figures(transfers_of(line), line, "")
        else:
            self._about(line)

    def close(self) -> None:
        """Write what is left and describe the server."""
        sink = self._sink
        if sink.manifest.server(_SERVER) is None:
            sink.manifest.servers.append(self._server)
        if sink.read:
            sink.note(_PLACES)
        else:
            if not self._counters:
                raise InputError(
                    f"{sink.path} has neither Iteration lines nor summaries of vLLM.", hint=f"Start vLLM with {FLAG}."
                )
            sink.main = "counters"
            sink.count(len(self._counters))
            sink.note(_NO_STEPS)
        sink.note(_STAMPS)
        self._flush()
        self._flush_counters()

    def _step(self, number: int, line: str) -> None:
        found = step_of(line)
        if found is None:
            self._sink.reject(number, "its figures cannot be read (the line is cut?)")
            return
        stamp = stamp_ns(line, self._near_ns) or self._stamp
        if stamp is None:
            self._sink.reject(number, "it has no time, nor has any line before it")
            return
        self._stamp = stamp
        rank, index, length, columns = found
        expected = self._next.get(rank)
        if expected is not None and index < expected:
            self._base[rank] = self._base.get(rank, 0) + expected
            self._sink.tally(_RESTARTS)
        elif expected is not None and index > expected:
            self._sink.tally(_MISSING, index - expected)
        self._next[rank] = index + 1
        before = self._end.get(rank)
        end = stamp[0] if before is None else max(stamp[0], before + length)
        if end >= stamp[1]:
            self._sink.tally(_LATE)
        self._end[rank] = end
        self._steps.append(
            {"server": _SERVER, "dp_rank": rank, "pp_rank": 0, "step": self._base.get(rank, 0) + index, "start_ns": end - length,
             "end_ns": end, **columns, "kv_capacity_tokens": self._capacity, "origin": "reconstructed"}
        )  # fmt: skip
        if len(self._steps) >= _FLUSH:
            self._flush()

    def _figures(self, figures: list[tuple[str, float, str]], line: str, part: str) -> None:
        stamp = stamp_ns(line, self._near_ns) or self._stamp
        if stamp is None:
            self._sink.tally("{n} summaries have no time and are left out.")
            return
        self._stamp = stamp
        for name, value, unit in figures:
            self._counters.append(
                {"time_ns": (stamp[0] + stamp[1]) // 2, "uncertainty_ns": (stamp[1] - stamp[0]) // 2, "name": name, "unit": unit,
                 "entity": f"server:{_SERVER}{part}", "value_float": value, "semantics": "gauge", "status": "ok"}
            )  # fmt: skip
        if len(self._counters) >= _FLUSH and self._sink.read:
            self._flush_counters()

    def _about(self, line: str) -> None:
        if self._capacity is None and (found := _CAPACITY.search(line)):
            self._capacity = self._server.kv_capacity_tokens = int(found[1].replace(",", ""))
        if self._server.engine_version is None and (found := _VERSION.search(line)):
            self._server.engine_version = found[1]
        if self._server.context_tokens is None and (found := _CONTEXT.search(line)):
            self._server.context_tokens = int(found[1])
        for name, pattern in _SETTING.items():
            if getattr(self._server, name) is None and (found := pattern.search(line)):
                setattr(self._server, name, found[1] if name == "model" else int(found[1]))

    def _flush(self) -> None:
        if self._steps:
            whole = {c: pl.Int64 for c in self._steps[0] if c not in ("server", "origin")}
            self._sink.write("steps", pl.DataFrame(self._steps, schema_overrides=whole))
            self._steps.clear()

    def _flush_counters(self) -> None:
        if self._counters:
            self._sink.write("counters", pl.DataFrame(self._counters, schema_overrides={"value_float": pl.Float64}))
            self._counters.clear()


IMPORTER = VllmLogFile()
