"""The probe: what its design covers, as a pure function; that it keeps its time, its limits and its word; a real server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import hoptrace
from hoptrace.cli.calibrate import command
from hoptrace.collectors.engines.running import running
from hoptrace.errors import EnvironmentProblem, UsageError
from hoptrace.manifest import Server
from hoptrace.replay.calibration import probing as module
from hoptrace.replay.calibration.design import FEWEST, Limits, Pace, Phase, design, paced
from hoptrace.replay.calibration.probing import limits_of, probing, work_of
from hoptrace.replay.drive import DriveResult

KINDS = ["decoders alone", "prompts beside decoders", "prompts alone", "long contexts"]
VLLM = Limits(8, 512, 2048, 87_000)
CPU = Pace(0.0007, 0.03)

limits_ = st.builds(
    Limits, st.integers(1, 512), st.integers(64, 32_768), st.integers(128, 131_072), st.none() | st.integers(2_048, 2_000_000)
)
paces = st.builds(Pace, st.floats(1e-6, 0.05), st.floats(1e-4, 0.5))


def of(phases: list[Phase], kind: str) -> list[Phase]:
    return [p for p in phases if p.kind == kind]


# The design


@given(limits_, paces, st.integers(FEWEST, 400))
def test_a_design_keeps_within_its_number_and_the_servers_limits(limits: Limits, pace: Pace, requests: int) -> None:
    phases = design(limits, pace, requests=requests)
    assert sum(len(p.probes) for p in phases) + 2 <= requests
    assert {p.kind for p in phases} <= set(KINDS)
    for phase in (*phases, paced(limits), paced(limits, token_s=pace.prompt_token_s)):
        for p in phase.probes:
            assert p.prompt_tokens >= 1 and p.output_tokens >= 1 and p.at_s >= 0
            assert p.prompt_tokens + p.output_tokens <= limits.context
        together = sum(p.prompt_tokens + p.output_tokens for p in phase.probes)
        if limits.kv_tokens is not None and phase.kind in ("decoders alone", "long contexts"):
            assert together <= limits.kv_tokens
        if phase.kind != "prompts alone":
            at_once = [p for p in phase.probes if p.at_s == 0]
            assert len(at_once) <= limits.sequences or phase.kind == "pace"


@given(limits_, paces, st.integers(FEWEST, 200))
def test_all_kinds_are_there_and_decoders_go_down_one_by_one(limits: Limits, pace: Pace, requests: int) -> None:
    phases = design(limits, pace, requests=requests)
    kinds = {p.kind for p in phases}
    assert {"prompts alone", "decoders alone", "long contexts"} <= kinds
    assert ("prompts beside decoders" in kinds) == (limits.sequences > 1 and requests >= FEWEST + 2) or limits.sequences > 1
    for p in of(phases, "decoders alone"):
        outputs = [q.output_tokens for q in p.probes]
        # Each outlasts the one before by as many tokens: every batch from all of them to one is seen for as long.
        assert outputs == [outputs[0] * (i + 1) for i in range(len(outputs))]
        assert {q.at_s for q in p.probes} == {0.0}
    for p in of(phases, "prompts alone"):
        assert all(q.output_tokens == 1 for q in p.probes)
        assert [q.at_s for q in p.probes] == sorted(q.at_s for q in p.probes)


@given(limits_, st.integers(FEWEST, 200), st.floats(10, 600))
def test_lengths_give_way_to_the_time(limits: Limits, requests: int, at_most_s: float) -> None:
    """On a slow server it takes no longer than asked, but for what cannot be shorter: 16-token prompts, 2 steps a stair."""
    pace = Pace(0.01, 0.05)
    phases = design(limits, pace, requests=requests, at_most_s=at_most_s)
    n = sum(len(p.probes) for p in phases)
    flight = sum(2 * pace.step(d) for p in of(phases, "decoders alone") for d in range(1, len(p.probes) + 1))
    beside = sum(
        max(q.output_tokens for q in p.probes) * pace.step(limits.sequences) for p in of(phases, "prompts beside decoders")
    )
    least = n * 16 * pace.prompt_token_s * 1.2 + n * pace.step_s * 1.2 + flight + beside + 12 * pace.step(limits.sequences)
    assert sum(p.expected_s for p in phases) <= 0.8 * at_most_s + least


def test_sixty_requests_of_a_small_vllm_cover_what_is_promised() -> None:
    phases = design(VLLM, CPU)
    prompts = sorted(q.prompt_tokens for p in of(phases, "prompts alone") for q in p.probes)
    assert prompts[0] == 16 and 0.95 * 2048 < prompts[-1] < 2048
    assert all(b / a < 1.6 for a, b in pairwise(prompts))
    assert any(0.95 * 512 < p <= 512 for p in prompts)  # one step, filled to the brim
    assert [len(p.probes) for p in of(phases, "decoders alone")] == [8, 8]
    beside = [sum(q.output_tokens > 1 for q in p.probes) for p in of(phases, "prompts beside decoders")]
    assert beside[:2] == [1, 7]
    longest = max(q.prompt_tokens for p in of(phases, "long contexts") for q in p.probes)
    assert longest > 0.95 * 2048 - 20
    assert 50 <= sum(len(p.probes) for p in phases) <= 58
    assert sum(p.expected_s for p in phases) < 60
    # In two rounds: no kind has all of its requests in one half.
    half = len(phases) // 2
    assert {p.kind for p in phases[: half + 1]} == set(KINDS) and set(KINDS) - {"prompts beside decoders"} <= {
        p.kind for p in phases[half:]
    }


def test_many_sequences_get_one_wide_flight_of_stairs() -> None:
    phases = design(Limits(256, 8192, 131_072, 500_000), Pace(3e-5, 0.012))
    assert [len(p.probes) for p in of(phases, "decoders alone")] == [23]
    wide = design(Limits(256, 8192, 131_072, 500_000), Pace(3e-5, 0.012), requests=700)
    assert max(len(p.probes) for p in of(wide, "decoders alone")) == 256


def test_one_slot_has_no_decoders_beside_anything() -> None:
    phases = design(Limits(1, 2048, 2048), Pace(0.006, 0.014), requests=20)
    assert not of(phases, "prompts beside decoders") and [len(p.probes) for p in of(phases, "decoders alone")] == [1]


def test_limits_of_a_server_and_what_is_assumed() -> None:
    told = Server(name="s", max_sequences=4, max_batched_tokens=512, context_tokens=2048, block_count=10, block_size_tokens=16)
    assert limits_of(told) == (Limits(4, 512, 2048, 160), [])
    limits, said = limits_of(Server(name="s", max_sequences=4))
    assert limits == Limits(4, 2048, 2048, None)
    assert said == [
        "The server does not tell its token budget: 2,048 is taken.",
        "The server does not tell its context: 2,048 is taken.",
    ]


def test_no_two_prompts_are_alike_and_none_is_cached() -> None:
    stairs = of(design(VLLM, CPU), "decoders alone")[0]
    a, b = work_of(stairs, 100), work_of(stairs, 108)
    assert not set(a.request) & set(b.request) and not len(a.block_id)
    assert a.arrival_ns.tolist() == [0] * 8 and a.prompt_tokens.tolist() == [16] * 8


def test_the_pace_is_told_by_what_the_server_can_do_in_little_time() -> None:
    assert [p.prompt_tokens for p in paced(VLLM).probes] == [16]
    assert paced(VLLM, token_s=0.0007).probes[0].prompt_tokens == 256
    assert paced(VLLM, token_s=0.04, at_most_s=100).probes[0].prompt_tokens == 125  # 5 s of the 100
    assert paced(VLLM, token_s=5.0).probes[0].prompt_tokens == 32
    assert paced(Limits(1, 64, 40), token_s=5.0).probes[0].prompt_tokens == 30


# Sending it


class Toy:
    """An OpenAI-compatible server: a prompt token takes 10 µs, a token 1 ms, whoever else is there. ``metrics``: its page."""

    def __init__(self, metrics: str | None = "vllm:num_requests_running 0\n", status: int = 200, token_s: float = 0.001) -> None:
        self.metrics, self.status, self.token_s = metrics, status, token_s
        self.prompts: list[str] = []
        self.url = ""
        self.now = self.most = 0

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "toy"}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": [0] * len(body["content"].split())})

    async def page(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics or "", status=200 if self.metrics is not None else 404)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.prompts.append(body["prompt"])
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            n = len(body["prompt"].split())
            await asyncio.sleep(1e-5 * n)
            for _ in range(body["max_tokens"]):
                await out.write(b'data: {"choices": [{"index": 0, "text": " x"}]}\n\n')
                await asyncio.sleep(self.token_s)
            usage = {"prompt_tokens": n, "completion_tokens": body["max_tokens"]}
            await out.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        finally:
            self.now -= 1
        return out

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.page)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()

    @contextmanager
    def served(self) -> Iterator[Toy]:
        """In a thread of its own, since the probe has an event loop of its own."""
        ready, stop = threading.Event(), asyncio.Event()
        loop = asyncio.new_event_loop()

        async def main() -> None:
            async with self._serving():
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
        thread.start()
        assert ready.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(10)


def test_a_probe_sends_what_was_designed_and_each_prompt_once() -> None:
    told: list[str] = []
    with Toy().served() as toy:
        got = probing(toy.url, Limits(4, 512, 400), requests=16, progress=lambda kind, sent, planned: told.append(kind))
    assert (got.sent, got.failed, got.skipped, got.stopped) == (got.planned, 0, [], False)
    assert list(dict.fromkeys(told)) == ["pace", *KINDS]
    assert got.sent == len(toy.prompts) == len({" ".join(p.split()[:8]) for p in toy.prompts})
    assert toy.most <= 4 and toy.most == 4
    assert got.pace is not None and 0.0005 < got.pace.step_s < 0.05
    assert max(len(p.split()) for p in toy.prompts) <= 400


def test_a_phase_that_time_does_not_allow_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick pace, then each phase takes half a minute, or is cut off: by a clock of the test's own, nothing waits."""
    now = [0.0]

    def drive(work: Any, url: str, *, timeout_s: float, **_: Any) -> DriveResult:
        from hoptrace.replay.drive import Sent

        now[0] += min(0.1 if work.n == 1 else 30.0, timeout_s)
        records = [Sent(int(r), 0, 0, 10**7, 8 * 10**7, int(p), 8) for r, p in zip(work.request, work.prompt_tokens, strict=True)]
        return DriveResult(records, work.n)

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

    monkeypatch.setattr(module, "drive_until_stopped", drive)
    monkeypatch.setattr(module, "time", Clock)
    got = probing("http://x", VLLM, at_most_s=120.0)
    assert now[0] <= 121 and got.skipped and got.phases[2]["kind"] == KINDS[0]
    assert got.sent < got.planned and len(got.phases) - 2 + len(got.skipped) == len(design(VLLM, got.pace))  # type: ignore[arg-type]


def test_ctrl_c_ends_it_and_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., DriveResult] = module.drive_until_stopped
    calls = []

    def drive(*args: Any, **more: Any) -> DriveResult:
        calls.append(args)
        result = real(*args, **more)
        result.stopped = len(calls) == 3
        return result

    monkeypatch.setattr(module, "drive_until_stopped", drive)
    with Toy().served() as toy:
        got = probing(toy.url, Limits(2, 512, 300), requests=16)
    assert got.stopped and len(got.phases) == 3 and 2 < got.sent < got.planned


def test_a_server_that_answers_nothing_is_said_at_once() -> None:
    with (
        Toy(status=500).served() as toy,
        pytest.raises(EnvironmentProblem, match=r"answers no request of a probe \(HTTP 500: no\)"),
    ):
        probing(toy.url, VLLM)
    assert len(toy.prompts) == 1


# On whom


@pytest.mark.parametrize(
    ("page", "n"),
    [
        ("vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n", 0),
        (
            'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\nvllm:num_requests_waiting 4\n',
            7,
        ),
        ("llamacpp:requests_processing 3\nllamacpp:requests_deferred 1\n", 4),
        ("vllm:num_requests_running NaN\n", None),
        ("process_cpu_seconds_total 5\n", None),
        ("\x00\n{{{\n", None),
        (None, None),
    ],
)
def test_who_is_running_is_read_off_the_metrics(page: str | None, n: int | None) -> None:
    with Toy(page).served() as toy:
        assert asyncio.run(running(toy.url)) == n


def test_a_busy_server_is_not_probed(tmp_path: Path) -> None:
    with Toy("vllm:num_requests_running 1\n").served() as toy:
        arguments = ["--probe", toy.url, "-o", str(tmp_path / "p.trace"), "--yes"]
        with pytest.raises(EnvironmentProblem, match="1 request is in flight"):
            CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert not toy.prompts and not (tmp_path / "p.trace").exists()


def test_nobody_to_ask_is_no_yes(tmp_path: Path) -> None:
    with Toy().served() as toy:
        with pytest.raises(UsageError, match="there is nobody to ask"):
            CliRunner().invoke(command, ["--probe", toy.url, "-o", str(tmp_path / "p.trace")], catch_exceptions=False)
        assert not toy.prompts


@pytest.mark.server
def test_a_real_llamacpp_is_probed(model: Path, tmp_path: Path) -> None:
    """Sixteen requests: prompts, decoders and both are in its trace, up to all slots, and a what-if is replayed with its cost."""
    from hoptrace.demo_server import DemoServer
    from hoptrace.replay.run import predict
    from hoptrace.samples import sample

    out, cost = tmp_path / "probe.trace", tmp_path / "cost.json"
    with DemoServer(model, slots=4, log=tmp_path / "server.log") as s:
        begin = time.monotonic()
        arguments = [
            "--probe",
            s.url,
            "-o",
            str(out),
            "--cost",
            str(cost),
            "--yes",
            "--requests",
            "16",
            "--at-most",
            "25s",
            "--json",
        ]
        got = CliRunner().invoke(command, arguments, catch_exceptions=False)
        took = time.monotonic() - begin
    assert got.exit_code == 0, got.output
    d = json.loads(got.stdout)
    assert d["held"]["quantities"]["decode_requests"]["most"] == 4
    assert d["held"]["steps_by_kind"]["decode"] > 20 and d["held"]["steps_by_kind"]["prefill"] >= 3
    assert d["server"]["engine"] == "llama.cpp" and d["covers"][0]["covered"] is True
    assert hoptrace.open(out).table("requests").collect()["error"].null_count() >= 12
    again = predict(hoptrace.open(sample("llamacpp-one-slot")), "as-recorded", cost=f"file:{cost}", check=False)
    assert again.requests["done"] == 48
    assert took < 120  # stated: 25 s of requests at most, with starting and closing; a shared machine may stretch those
