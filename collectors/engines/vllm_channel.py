"""vLLM from inside: what its plug-in (:mod:`hoptrace.collectors.inside`) writes, as rows. See docs/vllm.md."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hoptrace.collectors.base import Finding
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.vllm_rings import Open, Search, search
from hoptrace.collectors.engines.vllm_told import Told
from hoptrace.collectors.engines.vllm_watched import Families, Watched
from hoptrace.collectors.links import readings
from hoptrace.manifest import Manifest

__all__ = ["DETAILS", "SCHEDULER", "VllmChannel", "config_of"]

DETAILS = "--enable-logging-iteration-details"
SCHEDULER = "--scheduler-cls hoptrace.collectors.inside.vllm_scheduler.RecordingScheduler"
_LOOK_S = 1.0
_BUSY_S = 0.001


def config_of(ctx: Context) -> dict[str, Any] | None:
    """The server's configuration as its plug-in wrote it down; null without one. Takes some milliseconds: call it in a thread.

    Keys are the manifest's (:class:`hoptrace.manifest.Server`) where it has one: model, model_path, layers, heads, kv_heads,
    head_size, hidden_size, kv_dtype, max_sequences, max_batched_tokens, context_tokens, block_size_tokens, block_count,
    kv_capacity_tokens, prefix_caching. Others: version, dtype, quantization, chunked_prefill, async_scheduling, speculation,
    speculative_tokens, tensor_parallel_size, pipeline_parallel_size, data_parallel_size, expert_parallel, kv_connector, kv_role,
    iteration_details, device … A key that this vLLM does not have is missing.
    """
    found = _search(ctx)
    return _config(found.headers) if found.paths else None


def _config(headers: Any) -> dict[str, Any]:
    # An engine knows its own number of blocks, an API server only the sum.
    config: dict[str, Any] = {}
    for header in sorted(headers, key=lambda h: h.role == "engine"):
        told = header.about.get("config")
        config |= told if isinstance(told, dict) else {}
    return config


def _search(ctx: Context) -> Search:
    if ctx.find is None:
        return Search(reason="the server's process is not looked for (--pid none)")
    found = ctx.find()
    if found.pid is None:
        return Search(reason=found.reason)
    return search(ctx.options.channels, found.pid)


def _time_of(item: tuple[int, dict[str, Any]]) -> int:
    t = item[1]["t"]
    return t if isinstance(t, int) else max((x for x in t if isinstance(x, int)), default=0)


class VllmChannel:
    """Reads the channels of the server's processes."""

    name = "vllm-plugin"

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._open: dict[str, Open] = {}
        self._gone: set[str] = set()
        self._watched: dict[int, Watched] = {}
        self._past: list[Watched] = []
        self._families: Families = OrderedDict()
        self._lives: dict[tuple[str, int], tuple[int, int]] = {}
        self._told: Told | None = None
        self._config: dict[str, Any] = {}
        self._details = False
        self._look_at = 0.0
        self._rows = 0
        self._incarnation = ""
        self._watch_todo: deque[tuple[int, dict[str, Any]]] = deque()
        self._told_todo: deque[dict[str, Any]] = deque()
        self._busy_since = 0.0

    @property
    def tables(self) -> tuple[str, ...]:
        """What the server's flags let it fill."""
        tables = ["requests", "stages", "counters"]
        if self._details or self._watched:
            tables.append("steps")
        if self._watched:
            tables += ["tokens", "residency", "events"]
        if self._config.get("kv_connector") or self._config.get("ec_connector"):
            tables += ["moves", "waits"]
        return tuple(tables)

    async def probe(self) -> Finding:
        found = await asyncio.to_thread(_search, self._ctx)
        if not found.paths:
            return Finding(False, found.reason)
        self._take(found)
        engines = any(h.role == "engine" for h in found.headers)
        if not any(h.role == "api" for h in found.headers):
            return Finding(True, "only the scheduler is watched: the stat logger is off (does VLLM_PLUGINS leave hoptrace out?)")
        if engines:
            return Finding(True)
        if not self._details:
            return Finding(True, f"no steps: restart vLLM with {DETAILS} (each step) or {SCHEDULER} (each request's share too)")
        return Finding(True, f"each step, but not which request had what share of it: for that restart vLLM with {SCHEDULER}")

    async def start(self) -> None:
        await self._look(from_start=False)
        config = self._config

        def note(manifest: Manifest) -> None:
            server = manifest.server(self._ctx.server.name)
            if server is None:
                return
            server.config["step_source"] = self.steps_from
            if config.get("async_scheduling"):
                manifest.notes.append(
                    f"{server.name}: asynchronous scheduling is on: a step's end − start is not device time"
                    + (", but the wait for its result." if not self._watched else "; schedule_ns may lie in the step before.")
                )

        if self._ctx.writer is not None:
            self._ctx.writer.update(note)

    @property
    def steps_from(self) -> str | None:
        """Which of the two sources the steps come from; null where there are none."""
        return "scheduler" if self._watched else "stat logger" if self._details else None

    async def sample(self) -> int:
        before = self._rows
        # API servers first: what the schedulers said before it is then there too.
        for channel in sorted(self._open.values(), key=lambda o: o.role == "engine"):
            end = channel.reader.head
            while channel.reader.position < end:
                for record in channel.some():
                    if channel.role == "engine":
                        self._watch_todo.append((channel.engine, record))
                    elif record["k"] == "s":
                        self._told_todo.append(record)
                await self._breathe()
        await self._process()
        # Only now: what a server said before it ended belongs before what the next one says.
        if time.monotonic() >= self._look_at:
            await self._look(from_start=True)
        return self._rows - before

    def restarted(self) -> None:
        self._look_at = 0.0

    async def close(self) -> None:
        if self._ctx.writer is not None and self._open:
            with suppress(Exception):
                await self.sample()
        for watched in self._watched.values():
            watched.close()
        if self._told is not None:
            self._told.take(None)
            self._flush()
            self._last_words()
        for channel in self._open.values():
            channel.reader.close()
        self._open.clear()

    # -- channels -----------------------------------------------------------------------------------------------------

    def _take(self, found: Search) -> None:
        self._config = _config(found.headers)
        self._details = bool(self._config.get("iteration_details"))

    async def _look(self, *, from_start: bool) -> None:
        """Open channels that are new. A process that has ended is read to its end first."""
        self._look_at = time.monotonic() + _LOOK_S
        for key, channel in list(self._open.items()):
            if channel.ended:
                self._count(channel)
                channel.reader.close()
                del self._open[key]
                self._gone.add(key)
        found = await asyncio.to_thread(_search, self._ctx)
        new = [p for p in found.paths if str(p) not in self._open and str(p) not in self._gone]
        new.sort(key=lambda p: "-engine-" not in p.name)
        if not new:
            return
        self._take(found)
        for path in new:
            try:
                channel = Open(path, from_start=from_start)
            except (OSError, ValueError, RuntimeError, ImportError) as e:
                self._ctx.writer.drop(f"{self.name}: {type(e).__name__}", 1) if self._ctx.writer else None
                continue
            self._open[str(path)] = channel
            self._begin(channel)

    def _begin(self, channel: Open) -> None:
        writer = self._ctx.writer
        assert writer is not None
        convert = writer.clock.from_monotonic_ns
        server = self._ctx.server.name
        if self._told is None:
            self._told = Told(server, self._config, convert, self._emit, self._write)
        life = (channel.role, channel.engine)
        if channel.role == "engine":
            watched = self._watched.get(channel.engine)
            if watched is None:
                watched = self._watched[channel.engine] = Watched(
                    server, channel.engine, self._config, convert, self._emit, self._families
                )
                self._told.take(None)
                watched.base = self._told.last.get(channel.engine, -1) + 1
                self._told.joins[channel.engine] = watched.join
            elif self._lives.get(life) != channel.identity:
                watched.restart(self._config)
        elif life in self._lives and not any(o.role == "api" and o is not channel for o in self._open.values()):
            # Further API servers of one server share its engines; after a restart all are new.
            self._unwatch()
            self._told.restart(self._config)
        self._lives[life] = channel.identity
        self._incarnation = f"vllm:{channel.identity[0]}:{channel.identity[1]}"

    def _unwatch(self) -> None:
        """Engines whose scheduler is no longer watched: from here on the stat logger says what their steps are."""
        assert self._told is not None
        there = {o.engine for o in self._open.values() if o.role == "engine" and not o.ended}
        for engine in [e for e in self._watched if e not in there]:
            watched = self._watched.pop(engine)
            watched.close()
            self._told.last[engine] = max(watched.last_step, self._told.last.get(engine, -1))
            del self._told.joins[engine]
            self._past.append(watched)

    # -- records ------------------------------------------------------------------------------------------------------

    async def _process(self) -> None:
        """Work through what was read. A sample may be cancelled at any await: what is left is for the next, or for the end."""
        told = self._told
        if told is None or self._ctx.writer is None:
            return
        if len(self._watched) > 1:
            # By time: a request's sequences may run on several ranks.
            self._watch_todo = deque(sorted(self._watch_todo, key=_time_of))
        while self._watch_todo:
            engine, record = self._watch_todo.popleft()
            self._guarded(self._watch, self._watched[engine], record)
            await self._breathe()
        self._told_todo = deque(sorted(self._told_todo, key=lambda r: r["t"]))
        while self._told_todo:
            self._guarded(told.record, self._told_todo.popleft())
            await self._breathe()
        told.take(self._ctx.writer.clock.now_ns())
        for there in told.arrived.values():
            del there[:-1024]
        self._flush()

    async def _breathe(self) -> None:
        """Let others run: a large batch is hundreds of rows a step, and a proxy's stamps must not wait for them."""
        if time.perf_counter() - self._busy_since > _BUSY_S:
            await asyncio.sleep(0)
            self._busy_since = time.perf_counter()

    def _guarded(self, call: Any, *args: Any) -> None:
        try:
            call(*args)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            assert self._ctx.writer is not None
            self._ctx.writer.drop(f"{self.name}: record that is not understood", 1)

    def _watch(self, watched: Watched, record: Mapping[str, Any]) -> None:
        kind = record["k"]
        if kind == "a":
            watched.told(record)
        elif kind == "x":
            watched.gone(record)
        elif kind == "v":
            self._arrived(watched, record["t"], [watched.identifier(n) for n in record["l"]])
        elif kind == "c":
            arrived = [watched.identifier(n) for n in record.get("kr", ())]
            preempted = [watched.identifier(n) for n in record.get("pre", ())]
            row = watched.step(record)
            self._write("steps", row)
            self._arrived(watched, record.get("g") or record["t"][3], arrived)
            for who in preempted:
                what = f"{readings(who)[0][0]} is preempted in step {row['step']}" if who else f"preemption in step {row['step']}"
                event = {"time_ns": row["start_ns"], "host": self._ctx.host, "server": row["server"], "kind": "preemption"}
                self._write("events", event | {"detail": what})

    def _arrived(self, watched: Watched, monotonic_ns: int, who: list[str | None]) -> None:
        if self._told is not None and who:
            there = self._told.arrived.setdefault(watched.engine, [])
            # One whose name is not known counts too: its transfer must not be taken for another's.
            there += [(watched.convert(monotonic_ns), name or "") for name in who]

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _write(self, table: str, row: dict[str, Any]) -> None:
        assert self._ctx.writer is not None
        self._ctx.writer.append(table, [row | {"source": self.name}])
        self._rows += 1

    def _emit(self, engine_id: str, table: str, row: dict[str, Any], done: bool) -> None:
        assert self._ctx.links is not None and self._ctx.writer is not None
        row["source"] = self.name
        self._ctx.links.add(engine_id, table, row, self._ctx.writer.clock.now_ns(), done=done)
        self._rows += 1

    def _flush(self) -> None:
        assert self._told is not None and self._ctx.writer is not None
        rows = self._told.sums.rows()
        common = {"host": self._ctx.host, "incarnation": self._incarnation, "source": self.name}
        self._ctx.writer.append("counters", [row | common for row in rows])
        self._rows += len(rows)
        for channel in self._open.values():
            self._count(channel)

    def _count(self, channel: Open) -> None:
        """Losses, once each."""
        assert self._ctx.writer is not None
        reader = channel.reader
        for what, value in (("missed", reader.missed), ("damaged", reader.damaged), ("malformed", channel.malformed)):
            if value:
                self._ctx.writer.drop(f"{self.name}: records {what} in the channel", value)
        reader.missed = reader.damaged = channel.malformed = 0
        lost = reader.lost - channel.lost_before
        if lost > 0:
            self._ctx.writer.drop(f"{self.name}: records that the plug-in could not write", lost)
            channel.lost_before += lost

    def _last_words(self) -> None:
        told, name = self._told, self._ctx.server.name
        assert told is not None and self._ctx.writer is not None
        notes = []
        watched = [*self._past, *self._watched.values()]
        for w in watched:
            join = w.join
            if join.joined or join.alone:
                rank = f" (rank {w.engine})" if w.engine else ""
                notes.append(
                    f"{name}{rank}: {join.joined} steps are told alike by scheduler and stat logger"
                    + (f", {join.alone} by the stat logger alone." if join.alone else ".")
                )
        partial = sum(w.partial for w in watched)
        if partial:
            text = "requests were under way when recording began: steps count them, they have no rows of their own."
            notes.append(f"{name}: {partial} {text}")
        for count, what in (
            (told.unplaced, "steps have no place in time and are left out"),
            (told.cut, "steps are cut at their start: they overlap the one ahead"),
            (told.late, "steps came out of order and are left out"),
        ):
            if count:
                notes.append(f"{name}: {count} {what}.")
        if notes:
            self._ctx.writer.update(lambda m: m.notes.extend(notes))
