"""Forward-pass metrics of SGLang and of Dynamo's vLLM into `steps`: one message an iteration, over ZeroMQ.

A message says how long its iteration took, not when it was; :class:`StepTimes` places it by when it came. What "how long" means
is the publisher's: Dynamo's vLLM measures from one result to the next, SGLang (since its device timer) the device's time alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence as Seq
from typing import Any
from urllib.parse import urlsplit

from hoptrace.collectors.base import Finding
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.published.fpm_messages import VERSION, Metrics, UnknownVersion, decode_metrics
from hoptrace.collectors.engines.published.step_times import StepTimes
from hoptrace.collectors.engines.published.zmq_stream import Endpoint, Stream, look, sequence_number

__all__ = ["DYNAMO_PORT", "ForwardPass", "endpoints_at"]

DYNAMO_PORT = 20380
"""dynamo/vllm/instrumented_scheduler.py: DEFAULT_FPM_PORT; rank r is at the port plus r."""

_REMEDY = (
    "start SGLang with --enable-forward-pass-metrics --forward-pass-metrics-ipc-name ipc:///tmp/sglang-fpm, or Dynamo's vLLM "
    "with its instrumented scheduler (DYN_FORWARDPASS_METRIC_PORT)"
)
_STEPS = (1 << 62) - 1


def endpoints_at(address: str, host: str = "127.0.0.1", ranks: int = 1) -> list[Endpoint]:
    """The ranks' endpoints of an address. SGLang puts `.RANK` behind an ipc name, Dynamo adds the rank to the port."""
    found = []
    for rank in range(max(1, ranks)):
        if address.startswith("tcp://"):
            base, _, port = address.rpartition(":")
            base = f"tcp://{host}" if base in ("tcp://*", "tcp://0.0.0.0") else base
            found.append(Endpoint(f"{base}:{int(port) + rank}" if port.isdecimal() else address, rank=rank))
        elif address.startswith("ipc://") and not address.rpartition(".")[2].isdecimal():
            found.append(Endpoint(f"{address}.{rank}", rank=rank))
        else:
            found.append(Endpoint(address, rank=rank))
            break
    return found


class ForwardPass:
    """Reads a server's forward-pass metrics. ``endpoint``: see :func:`endpoints_at`; null where the server publishes none."""

    name = "forward-pass"
    tables: tuple[str, ...] = ("steps",)

    def __init__(self, ctx: Context, endpoint: str | Seq[Endpoint] | None, *, ranks: int = 1) -> None:
        host = urlsplit(ctx.api.url).hostname or "127.0.0.1"
        self._endpoints = endpoints_at(endpoint, host, ranks) if isinstance(endpoint, str) else list(endpoint or ())
        self._ctx = ctx
        self._listeners = [_Rank(self, e) for e in self._endpoints]
        self._stream: Stream | None = None
        self._lock = threading.Lock()
        self.counts: dict[str, int] = {}
        self._noted: set[str] = set()

    async def probe(self) -> Finding:
        if not self._endpoints:
            return Finding(False, f"the server publishes no forward-pass metrics: {_REMEDY}")
        problems = [p for e in self._endpoints if (p := await look(e, _REMEDY)) is not None]
        if len(problems) == len(self._endpoints):
            return Finding(False, problems[0])
        return Finding(True, f"{len(problems)} of {len(self._endpoints)} ranks publish none: {problems[0]}" if problems else None)

    async def start(self) -> None:
        self._stream = Stream(self._endpoints, list(self._listeners), self.name)
        self._stream.start()

    async def sample(self) -> int:
        return sum(self._write(r, time.monotonic_ns()) for r in self._listeners)

    def restarted(self) -> None:
        return None  # seen by the messages' own numbers

    async def close(self) -> None:
        if self._stream is None:
            return
        await asyncio.to_thread(self._stream.close)
        for rank in self._listeners:
            self._write(rank, None)
        writer = self._ctx.writer
        assert writer is not None
        for what, n in [*self.counts.items(), *self._stream.faults.items()]:
            writer.drop(f"{self.name}: {what}", n)
        if notes := self.notes():
            writer.update(lambda m: m.notes.extend(notes))

    def notes(self) -> list[str]:
        """What the reader of the trace should know."""
        server = self._ctx.server.name
        notes = [f"{server}: steps are the server's forward-pass metrics; each is placed in time by when its message came."]
        if cut := sum(r.cut for r in self._listeners):
            notes.append(f"{server}: {cut:,} steps overlapped the one ahead (asynchronous scheduling): they start at its end.")
        if lost := sum(r.lost for r in self._listeners):
            notes.append(f"{server}: {lost:,} forward-pass messages were missed: `steps` has gaps (see `events`).")
        if not self._one_token_each():
            notes.append(f"{server}: forward-pass metrics do not tell the tokens that decoding requests compute (speculation).")
        return notes

    # -- inside -------------------------------------------------------------------------------------------------------

    def _one_token_each(self) -> bool:
        """Whether it is certain that no request computes more than one token: the server says that it does not speculate."""
        config = self._ctx.server.config
        told = [config[n] for n in ("speculative_config", "speculative_algorithm") if n in config]
        return bool(told) and not any(told)

    def _count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self.counts[what] = self.counts.get(what, 0) + n

    def _event(self, kind: str, detail: str, at_ns: int) -> None:
        ctx = self._ctx
        assert ctx.writer is not None
        row = {"time_ns": ctx.writer.clock.from_monotonic_ns(at_ns), "host": ctx.host, "server": ctx.server.name, "kind": kind}
        ctx.writer.append("events", [row | {"detail": detail, "source": self.name}])

    def _write(self, rank: _Rank, now_ns: int | None) -> int:
        writer = self._ctx.writer
        assert writer is not None
        with rank.lock:
            placed = rank.times.take(now_ns)
            rank.cut += sum(p.cut for p in placed)
            unplaced, rank.times.unplaced = rank.times.unplaced, 0
        if unplaced:
            self._count("steps that overlap the one ahead wholly", unplaced)
        one, clock = self._one_token_each(), writer.clock
        rows: list[dict[str, Any]] = []
        for p in placed:
            (step, m), s, q = p.what, p.what[1].scheduled, p.what[1].queued
            rows.append({
                "server": self._ctx.server.name, "dp_rank": m.rank, "step": step,
                "start_ns": clock.from_monotonic_ns(p.start_ns), "end_ns": clock.from_monotonic_ns(p.end_ns),
                "prefill_requests": s.prefill_requests, "prefill_tokens": s.prefill_tokens,
                "prefill_context_tokens": s.prefill_kv_tokens, "decode_requests": s.decode_requests,
                "decode_tokens": s.decode_requests if one or not s.decode_requests else None,
                "decode_context_tokens": s.decode_kv_tokens,
                "prefill_length_variance": s.prefill_length_variance, "decode_context_variance": s.decode_kv_variance,
                "queued_prefill_requests": q.prefill_requests, "queued_prefill_tokens": q.prefill_tokens,
                "queued_prefill_length_variance": q.prefill_length_variance,
                "queued_decode_requests": q.decode_requests, "queued_decode_context_tokens": q.decode_kv_tokens,
                "queued_decode_context_variance": q.decode_kv_variance,
                "waiting": q.prefill_requests + q.decode_requests, "origin": "observed", "source": self.name,
            })  # fmt: skip
        writer.append("steps", rows)
        return len(rows)


class _Rank:
    """One publisher. ``live`` runs in the stream's thread."""

    def __init__(self, owner: ForwardPass, endpoint: Endpoint) -> None:
        self._owner, self._endpoint = owner, endpoint
        self.lock = threading.Lock()
        self.times: StepTimes[tuple[int, Metrics]] = StepTimes()
        self.cut = self.lost = 0
        self._worker: str | None = None
        self._gone: set[str] = set()
        self._expected: int | None = None
        self._base = 0

    def live(self, frames: list[bytes], received_ns: int) -> None:
        owner = self._owner
        # Straight from the engine: topic, number, metrics; Dynamo's relay may send the metrics alone.
        number = sequence_number(frames[1]) if len(frames) == 3 else None
        metrics = decode_metrics(frames[-1]) if frames else None
        if metrics is None:
            owner._count("message that is no forward-pass metrics")
            return
        if isinstance(metrics, UnknownVersion):
            what = f"forward-pass metrics of version {metrics.version} (known: {VERSION})"
            owner._count(what)
            if what not in owner._noted and len(owner._noted) < 10:
                owner._noted.add(what)
                owner._event("gap", f"{what} are not read", received_ns)
            return
        if not self._same_worker(metrics, received_ns):
            return
        counter = metrics.counter if metrics.counter is not None else number
        step = self._step(counter, received_ns)
        if metrics.scheduled.idle:
            return
        length_ns = round(metrics.wall_s * 1e9)
        if length_ns <= 0:
            # Dynamo measures from result to result: the first iteration after idling has none.
            owner._count("step whose length the server does not tell (the first after idling)")
            return
        if length_ns > 1 << 52:
            owner._count("step of an impossible length")
            return
        with self.lock:
            self.times.add((step, metrics), received_ns, length_ns)

    def replayed(self, frames: list[bytes]) -> None:
        return None

    def wanted(self, now_ns: int) -> int | None:
        return None

    def _same_worker(self, metrics: Metrics, received_ns: int) -> bool:
        if self._worker is None:
            self._worker = metrics.worker
        elif metrics.worker != self._worker:
            if metrics.worker in self._gone:
                self._owner._count("message of a second worker at the same address")
                return False
            if len(self._gone) < 1000:
                self._gone.add(self._worker)
            self._worker = metrics.worker
            self._restart(received_ns, f"another worker publishes: {metrics.worker}")
        return True

    def _restart(self, received_ns: int, detail: str) -> None:
        self._owner._event("restart", f"forward-pass metrics of rank {self._endpoint.rank} began anew: {detail}", received_ns)
        self._base += self._expected or 0
        self._expected = None

    def _step(self, counter: int | None, received_ns: int) -> int:
        """The step's number: the publisher's own, which ascends, and goes on after a restart."""
        if counter is None:
            counter = self._expected or 0  # no number anywhere: in the order of coming, and gaps can't be seen
        if self._expected is not None and counter < self._expected:
            self._restart(received_ns, "its numbers fell")
        elif self._expected is not None and counter > self._expected:
            missed = counter - self._expected
            self.lost += missed
            self._owner._count("forward-pass messages that were missed", missed)
            what = f"{missed:,} forward-pass messages of rank {self._endpoint.rank} were missed"
            self._owner._event("gap", what, received_ns)
        self._expected = counter + 1
        return min(self._base + counter, _STEPS)
