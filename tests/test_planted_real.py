"""Law 1 with real delays: sleeps of real code come out in their own parts, within 5 %, measured by the clock of who slept.

In a client (`drive`'s intended against sent), in the hand-over and the transfer of a prefill/decode pair behind two proxies, in
the loop around vLLM's recording scheduler, and (marker `vllm`) in the scheduler of a real vLLM server.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import polars as pl
import pytest
from aiohttp import web
from support import rings, vllm_fakes, vllm_server
from support.memory import MemoryTrace
from support.toy_server import Toy, event, serve, token

import hoptrace
from hoptrace.analysis.latency.accounting import Accounting, account
from hoptrace.analysis.latency.parts import PARTS
from hoptrace.collectors.engines.streams.proxy import Proxy, listen
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.collectors.engines.vllm_channel import SCHEDULER
from hoptrace.collectors.engines.vllm_moves import transfers
from hoptrace.collectors.engines.vllm_watched import Watched
from hoptrace.collectors.hardware.listener import find_listener
from hoptrace.collectors.inside import ring
from hoptrace.collectors.inside.channel import decoder
from hoptrace.collectors.links import Links
from hoptrace.manifest import Manifest, Server
from hoptrace.replay.drive import drive
from hoptrace.replay.workload import workload
from hoptrace.writer import TraceWriter

MS = 1_000_000


def told(prompt_ms: int, decode_ms: int, tokens: int) -> str:
    """What llama.cpp says of a request at its end."""
    timings = {"cache_n": 0, "prompt_n": 7, "prompt_ms": prompt_ms, "predicted_n": tokens, "predicted_ms": decode_ms}
    return ',"timings":' + json.dumps(timings)


def row_of(a: Accounting, **which: Any) -> dict[str, int]:
    row = a.parts.filter(**which).row(0, named=True) if which else a.parts.row(0, named=True)
    assert sum(row[p.column] or 0 for p in PARTS) == row["e2e_ns"]
    return row


def close(found: int | None, planted_ns: int, share: float = 0.05) -> bool:
    return abs((found or 0) / planted_ns - 1) <= share


# -- the client -------------------------------------------------------------------------------------------------------


def _models(request: web.BaseRequest) -> web.StreamResponse | None:
    return web.json_response({"data": [{"id": "m"}]}) if request.path == "/v1/models" else None


async def test_a_client_that_sends_late_is_the_client(tmp_path: Path) -> None:
    """`drive` may have one request under way: the second, meant for the same moment, waits in the client as long as the first
    takes, and the server is not to blame."""
    script = [0.3, token("a"), 0.3, token("b"), 0.2, token("", "length", told(300, 600, 2)), event("[DONE]")]
    rows = {"requests": [{"request": n, "arrival_ns": n, "prompt_tokens": 8, "output_tokens": 2} for n in range(2)]}
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded", servers=[Server(name="toy", max_sequences=4)])) as writer:
        recorder = Recorder(writer, "toy", None)
        async with serve(Toy(script, get=_models)) as toy:
            proxy = Proxy(toy.url, recorder, writer.clock.now_ns)
            await proxy.start(listen("127.0.0.1", 0))
            result = await drive(workload(MemoryTrace(rows)), proxy.url, max_concurrency=1)
            await proxy.close()
    assert result.sent == 2 and not result.failed
    a = account(hoptrace.open(tmp_path / "t.trace"))
    driven = a.parts.filter(pl.col("client_ns").is_not_null()).sort("client_ns")
    assert driven.height == 2
    first, second = driven.iter_rows(named=True)
    lateness = sorted((s.sent_ns or 0) - s.intended_ns for s in result.records)
    assert lateness[1] >= 800 * MS and close(second["client_ns"], lateness[1]) and close(first["client_ns"], lateness[0], 0.5)
    others = sum((second[p.column] or 0) - (first[p.column] or 0) for p in PARTS if p.name != "client")
    assert abs(others) <= 0.05 * lateness[1]


# -- a prefill/decode pair --------------------------------------------------------------------------------------------


class Pulls(Toy):
    """A decode server that fetches the KV before it begins, and keeps the time of that."""

    fetched: tuple[int, int] = (0, 0)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        begin = time.monotonic_ns()
        await asyncio.sleep(0.6)
        self.fetched = begin, time.monotonic_ns()
        return await super().handle(request)


async def test_a_slow_router_is_the_hand_over_and_a_slow_wire_the_transfer(tmp_path: Path) -> None:
    """Rows of the capture itself: two proxies under one x-request-id, the transfer as vLLM's connector tells it."""
    prefill = Toy([0.4, token("a"), token("", "length", told(400, 0, 1)), event("[DONE]")])
    decode = Pulls([0.1, token("a"), 0.3, token("b"), token("", "length", told(100, 300, 2)), event("[DONE]")])
    servers = [Server(name="p", max_sequences=4), Server(name="d", max_sequences=4)]
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded", servers=servers)) as writer:
        links = Links(writer)
        async with serve(prefill), serve(decode), aiohttp.ClientSession() as client:
            proxies = [
                Proxy(t.url, Recorder(writer, n, None, links), writer.clock.now_ns) for t, n in ((prefill, "p"), (decode, "d"))
            ]
            for proxy in proxies:
                await proxy.start(listen("127.0.0.1", 0))

            async def ask(proxy: Proxy, params: dict[str, Any]) -> None:
                body = {"model": "m", "prompt": "x" * 28, "max_tokens": 2, "stream": True, "kv_transfer_params": params}
                async with client.post(proxy.url + "/v1/completions", json=body, headers={"x-request-id": "one"}) as answer:
                    await answer.read()

            await ask(proxies[0], {"do_remote_decode": True})
            begin = time.monotonic_ns()
            await asyncio.sleep(0.5)
            slept = time.monotonic_ns() - begin
            await ask(proxies[1], {"do_remote_prefill": True})
            for proxy in proxies:
                await proxy.close()
        t0, t1 = (writer.clock.from_monotonic_ns(t) for t in decode.fetched)
        found = transfers(
            {"transfer_duration": [(t1 - t0) / 1e9], "bytes_transferred": [4096], "num_descriptors": [4]}, t1, "server:d"
        )
        for table, rows in (("moves", found.moves), ("waits", found.waits)):
            writer.append(table, [r | {"request": 0, "server": "d", "source": "vllm-plugin"} for r in rows])
    a = account(hoptrace.open(tmp_path / "t.trace"))
    row = row_of(a)
    assert close(row["transfer_ns"], t1 - t0), row
    assert close(row["handover_ns"], slept), row
    assert row["queue_room_ns"] <= 0.05 * slept and row["proxy_ns"] <= 0.05 * slept and row["unexplained_ns"] == 0


# -- the loop around vLLM's recording scheduler -----------------------------------------------------------------------


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The recording scheduler over a stand-in for vLLM's, whose channel lies in ``tmp_path``."""
    monkeypatch.setenv("HOPTRACE_CHANNELS", str(tmp_path))
    for name, made in {
        "scheduler": {"Scheduler": vllm_fakes.Scheduler},
        "async_scheduler": {"AsyncScheduler": vllm_fakes.Scheduler},
    }.items():
        module = types.ModuleType(f"vllm.v1.core.sched.{name}")
        vars(module).update(made)
        monkeypatch.setitem(sys.modules, f"vllm.v1.core.sched.{name}", module)
    for package in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.delitem(sys.modules, "hoptrace.collectors.inside.vllm_scheduler", raising=False)
    from hoptrace.collectors.inside.vllm_scheduler import recording

    class Scheduler(vllm_fakes.Scheduler):
        def update_from_output(self, output: Any, results: Any) -> dict[int, Any]:
            self.clock = time.monotonic() - 1000.001  # results bear the engine's time
            return super().update_from_output(output, results)

    return recording(Scheduler)


def test_a_host_that_sleeps_between_steps_is_time_between_steps(recording: Any, tmp_path: Path) -> None:
    engine = recording(budget=16, seats=2)
    slept = {"model": 0, "host": 0, "queue": 0}

    def sleep(seconds: float, what: str) -> None:
        begin = time.monotonic_ns()
        time.sleep(seconds)
        slept[what] += time.monotonic_ns() - begin

    engine.add_request(vllm_fakes.Request("cmpl-a", 40, max_tokens=8))
    sleep(0.1, "queue")
    steps = 0
    while engine.requests:
        output = engine.schedule()
        sleep(0.02, "model")
        engine.update_from_output(output, None)
        steps += 1
        if engine.requests:
            sleep(0.06, "host")
    assert steps == 10
    rows: dict[str, list[dict[str, Any]]] = {"requests": [], "stages": [], "tokens": [], "residency": [], "steps": []}

    def emit(who: str, table: str, row: dict[str, Any], done: bool) -> None:
        rows[table].append({"request": 0, **({"sequence": 0, "stage": 0} if table == "stages" else {})} | row)

    watched = Watched("s", 0, {}, lambda t: t, emit)
    reader = ring.Reader(next(tmp_path.glob("vllm-engine-*.ring")))
    for record in map(decoder(reader.header.encoding), reader.read()):
        if record["k"] == "a":
            watched.told(record)
        elif record["k"] == "x":
            watched.gone(record)
        elif record["k"] == "c":
            rows["steps"].append(watched.step(record) | {"server": "s", "origin": "observed"})
    watched.close()
    manifest = Manifest(origin="recorded", servers=[Server(name="s", max_sequences=2)], closed=True)
    row = row_of(account(MemoryTrace(rows, manifest)))
    assert close(row["host_gap_ns"], slept["host"]), (row, slept)
    assert close(row["prefill_ns"] + row["decode_ns"], slept["model"]) and close(row["queue_room_ns"], slept["queue"])


# -- a real vLLM ------------------------------------------------------------------------------------------------------

SLEEPY = '''
import os, time
from hoptrace.collectors.inside.vllm_scheduler import RecordingSyncScheduler

class Sleepy(RecordingSyncScheduler):
    """Sleeps before it looks at the queue, as long as the file says; writes down when it did."""

    def schedule(self, *args, **kwargs):
        try:
            seconds = float(open(os.environ["SLEEPY"]).read() or 0)
        except (OSError, ValueError):
            seconds = 0.0
        if seconds and (self.running or self.waiting):
            begin = time.monotonic_ns()
            time.sleep(seconds)
            with open(os.environ["SLEEPY"] + ".log", "a") as out:
                out.write(f"{begin} {time.monotonic_ns()}\\n")
        return super().schedule(*args, **kwargs)
'''


@pytest.mark.vllm
@pytest.mark.skipif(vllm_server.python() is None, reason="needs HOPTRACE_VLLM_PYTHON: a Python that has vLLM")
def test_a_real_vllm_whose_scheduler_sleeps(tmp_path: Path) -> None:
    """A subclass of the recording scheduler sleeps before each step: between a request's steps that is `host_gap`, before its
    first one queueing; without the sleeps there is next to none."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "sleepy.py").write_text(SLEEPY)
    amount = tmp_path / "amount"
    env = {"HOPTRACE_CHANNELS": str(tmp_path / "channels"), "PYTHONPATH": str(code), "SLEEPY": str(amount)}
    flags = [
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "256",
        "--no-async-scheduling",
        "--enable-logging-iteration-details",
    ]
    assert SCHEDULER.startswith("--scheduler-cls")
    port = vllm_server.free_port()
    server = vllm_server.start(tmp_path, *flags, "--scheduler-cls", "sleepy.Sleepy", env=env, port=port)
    try:
        with rings.capture(tmp_path, find=lambda: find_listener(f"http://127.0.0.1:{port}")) as capture:
            server.wait()
            with rings.sampling(capture):
                for seconds in (0.0, 0.08):
                    amount.write_text(str(seconds))
                    with ThreadPoolExecutor(3) as pool:
                        for i in range(3):
                            pool.submit(server.complete, [5 + i] * 60, 20, request_id=f"s{seconds}-{i}")
                    time.sleep(1.0)
                time.sleep(1.0)
            clock = capture.writer.clock
    finally:
        server.kill()
    assert capture.trace is not None
    a = account(capture.trace)
    slept = [
        tuple(clock.from_monotonic_ns(int(t)) for t in line.split()) for line in Path(f"{amount}.log").read_text().splitlines()
    ]
    named = capture.trace.table("requests").select("request", "request_id").collect()
    stays = {r["request"]: r for r in capture.trace.table("stages").collect().iter_rows(named=True)}
    last = dict(
        capture.trace.table("residency")
        .group_by("request")
        .agg(pl.col("last_step").max())
        .join(capture.trace.table("steps").select(pl.col("step").alias("last_step"), "end_ns"), on="last_step")
        .select("request", "end_ns")
        .collect()
        .rows()
    )
    quiet, sleepy = (named.filter(pl.col("request_id").str.contains(f"s{s}-", literal=True))["request"] for s in ("0.0", "0.08"))
    assert len(quiet) == len(sleepy) == 3
    for number in sleepy:
        row, stay = row_of(a, request=number), stays[number]

        def planted(begin: int, end: int) -> int:
            return sum(max(0, min(t1, end) - max(t0, begin)) for t0, t1 in slept)

        between = planted(stay["scheduled_ns"], last[number])
        assert between >= 1.4e9 and close(row["host_gap_ns"], between), (row["host_gap_ns"], between)
        # Nobody told this capture how many slots there are, so the queue has no cause.
        before = planted(stay["enqueued_ns"], stay["scheduled_ns"])
        assert before >= 0.07e9 and close(row["queue_unknown_ns"], before), (row["queue_unknown_ns"], before)
    for number in quiet:
        assert (row_of(a, request=number)["host_gap_ns"] or 0) < 0.2e9
