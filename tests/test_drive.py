"""The load generator: what it sends, when, and what it says of answers that go wrong."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from aiohttp import web
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.workloads import MS, make, store

import hoptrace
from hoptrace.cli.drive import command
from hoptrace.errors import EnvironmentProblem, UsageError
from hoptrace.replay.drive import drive
from hoptrace.replay.prompts import TOKEN_IDS, WORDS, Calibration, id_prompts, prompts, sizes

Answer = Callable[[dict[str, Any], web.StreamResponse], Awaitable[None]]


async def plain(body: dict[str, Any], out: web.StreamResponse) -> None:
    """As many chunks as were asked for, usage, the end."""
    for _ in range(body["max_tokens"]):
        await out.write(b'data: {"choices": [{"index": 0, "text": " x"}]}\n\n')
    usage = {"prompt_tokens": 1 + 2 * len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
    await out.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())


class Server:
    """An OpenAI-compatible server whose tokenizer makes two tokens of a word, after one start token."""

    def __init__(self, answer: Answer = plain, *, tokenizer: bool = True, status: int = 200) -> None:
        self.answer, self.tokenizer, self.status = answer, tokenizer, status
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self.now = self.most = 0

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "toy"}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": [0] * (1 + 2 * len(body["content"].split()))})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"usage": {"prompt_tokens": 1 + 2 * len(body["prompt"].split())}})
        self.bodies.append(body)
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        if self.status != 200:
            return web.json_response({"error": {"message": "too long"}}, status=self.status)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.answer(body, out)
        finally:
            self.now -= 1
        return out

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        if self.tokenizer:
            app.router.add_post("/tokenize", self.tokenize)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


WORK = make((0, 21, 3), (20 * MS, 41, 2), (40 * MS, 9, 4))


@pytest.mark.parametrize("tokenizer", [True, False])
async def test_lengths_are_what_the_trace_says(tokenizer: bool) -> None:
    async with Server(tokenizer=tokenizer).running() as s:
        done: list[int] = []
        r = await drive(WORK, s.url, progress=done.append)
    assert (r.sent, r.failed, r.errors, r.planned) == (3, 0, [], 3)
    assert (r.calibration.base, r.calibration.per_word) == (1.0, 2.0)
    assert [x.prompt_tokens for x in r.records] == [21, 41, 9]
    assert [x.output_tokens for x in r.records] == [3, 2, 4]
    assert done == [1, 2, 3]
    by_length = sorted(s.bodies, key=lambda b: b["max_tokens"])
    assert [b["max_tokens"] for b in by_length] == [2, 3, 4]
    for body in s.bodies:
        assert body["ignore_eos"] is True and body["temperature"] == 0 and body["model"] == "toy"
        assert "cache_prompt" not in body
        assert set(body["prompt"].split()) <= set(WORDS)


async def test_headers_say_when_it_was_meant_and_when_it_was_sent() -> None:
    async with Server().running() as s:
        before = time.time_ns()
        r = await drive(WORK, s.url, rate=2)
        after = time.time_ns()
    ids = [h["x-request-id"].rsplit("-", 1) for h in s.headers]
    (run,) = {i[0] for i in ids}  # one drive, unlike any other's
    assert re.fullmatch(r"hoptrace-[0-9a-f]{8}", run) and {i[1] for i in ids} == {"0", "1", "2"}
    told = {h["x-request-id"]: (int(h["x-hoptrace-intended-ns"]), int(h["x-hoptrace-sent-ns"])) for h in s.headers}
    intended = [told[f"{run}-{i}"][0] for i in range(3)]
    assert [t - intended[0] for t in intended] == [0, 10 * MS, 20 * MS]
    for x in r.records:
        assert told[f"{run}-{x.request}"] == (x.intended_ns, x.sent_ns)

        assert before <= x.intended_ns <= x.sent_ns <= x.first_token_ns <= x.finish_ns <= after  # type: ignore[operator]


async def test_an_open_loop_does_not_wait_for_answers_and_a_bound_holds() -> None:
    gate = asyncio.Event()

    async def slow(body: dict[str, Any], out: web.StreamResponse) -> None:
        await gate.wait()
        await plain(body, out)

    work = make(*((0, 5, 1) for _ in range(6)))
    server = Server(slow)
    async with server.running() as s:
        going = asyncio.create_task(drive(work, s.url))
        while s.now < 6:
            await asyncio.sleep(0.01)
        gate.set()
        assert (await going).failed == 0
        assert s.most == 6
        s.most = 0
        await drive(work, s.url, max_concurrency=2)
        assert s.most <= 2


async def test_turns_of_a_session_say_so() -> None:
    work = replace(WORK, session=("chat one", None, "chat one"))
    async with Server().running() as s:
        await drive(work, s.url)
        await drive(work.take(np.array([2])), s.url)
    assert len({h["x-request-id"].rsplit("-", 1)[0] for h in s.headers}) == 2
    told = sorted((h["x-request-id"].rsplit("-", 1)[1], h.get("x-session-id")) for h in s.headers)
    assert told == [("0", "chat%20one"), ("1", None), ("2", "chat%20one"), ("2", "chat%20one")]


async def test_drive_records_what_it_drives(tmp_path: Path) -> None:
    """-o: a session in a process of its own; its trace has the intended and sent times of the very requests."""
    asked = [{"request": i, "arrival_ns": int(WORK.arrival_ns[i]), "prompt_tokens": int(WORK.prompt_tokens[i]),
              "output_tokens": int(WORK.output_tokens[i]), "source": "x"} for i in range(3)]  # fmt: skip
    trace, out = store(tmp_path / "w.trace", {"requests": pl.DataFrame(asked)}).path, tmp_path / "out.trace"
    args = [sys.executable, "-m", "hoptrace", "drive", str(trace), "-o", str(out), "--json", "--against"]
    async with Server().running() as s:
        p = await asyncio.create_subprocess_exec(*args, s.url, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        told, errors = await p.communicate()
        assert p.returncode == 0, errors
        again = await asyncio.create_subprocess_exec(*args, s.url, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        _, refused = await again.communicate()
    assert json.loads(told)["trace"] == str(out)
    seen = hoptrace.open(out)
    assert seen.manifest.closed and seen.manifest.origin == "recorded"
    rows = seen.table("requests").collect().sort("request_id")
    assert rows["output_tokens"].to_list() == [3, 2, 4] and rows["arrival_of"].to_list() == ["intended"] * 3
    assert rows["intended_ns"].diff().to_list()[1:] == [20 * MS, 20 * MS]
    assert (rows["received_ns"] >= rows["sent_ns"]).all() and (rows["sent_ns"] >= rows["intended_ns"]).all()
    assert again.returncode == 2 and b"is already there" in refused


async def test_scales_caps_and_limit() -> None:
    async with Server().running() as s:
        r = await drive(WORK, s.url, limit=2, prompt_scale=2, max_prompt_tokens=51, output_scale=0.4, max_output_tokens=1)
    assert [x.prompt_tokens for x in r.records] == [41, 51]
    assert [b["max_tokens"] for b in s.bodies] == [1, 1]


async def test_failures_are_reported_by_reason() -> None:
    async def broken(body: dict[str, Any], out: web.StreamResponse) -> None:
        await out.write(b'data: {"choices": [{"index": 0, "text": " x"}]}\n\n')

    async def failing(body: dict[str, Any], out: web.StreamResponse) -> None:
        await out.write(b'data: {"error": {"message": "out of memory"}}\n\n')

    async def hanging(body: dict[str, Any], out: web.StreamResponse) -> None:
        await out.write(b'data: {"choices": [{"index": 0, "text": " x"}]}\n\n')
        await asyncio.sleep(60)

    one = WORK.take(pl.Series([0]).to_numpy())
    for answer, options, reason in (
        (broken, {}, "the stream broke off"),
        (failing, {}, "the stream says: out of memory"),
        (hanging, {"timeout_s": 0.3}, "no answer within 0.3 s"),
    ):
        async with Server(answer).running() as s:
            r = await drive(one, s.url, **options)  # type: ignore[arg-type]
        assert r.failures == {reason: 1}
        assert r.as_dict()["finished"] == 0
    async with Server(status=400).running() as s:
        r = await drive(WORK, s.url)
    assert r.failures == {"HTTP 400: too long": 3}


async def test_nobody_there_and_somebody_else_there() -> None:
    with pytest.raises(EnvironmentProblem, match="Nobody answers"):
        await drive(WORK, "http://127.0.0.1:9")

    async def hello(_: web.BaseRequest) -> web.Response:
        return web.Response(text="hello")

    runner = web.ServerRunner(web.Server(hello))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        with pytest.raises(EnvironmentProblem, match=r"not.*OpenAI"):
            await drive(WORK, f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


def test_prompts_begin_alike_where_the_blocks_are_equal() -> None:
    work = make((0, 12, 1, [0, 1, 2]), (1, 14, 1, [0, 1, 3]), (2, 12, 1, [7, 8, 9]), (3, 12, 1))
    a, b, c, d = (p.split() for p in prompts(work, sizes(work), Calibration()))
    assert [len(x) for x in (a, b, c, d)] == [12, 14, 12, 12]
    assert a[:8] == b[:8] and a[8:12] != b[8:12]
    assert a[:4] != c[:4] and a[:4] != d[:4] and c[:4] != d[:4]
    assert prompts(work, sizes(work), Calibration())[0].split() == a


def test_token_ids_begin_alike_where_the_blocks_are_equal_and_are_as_many_as_wanted() -> None:
    work = make((0, 12, 1, [0, 1, 2]), (1, 15, 1, [0, 1, 3]), (2, 12, 1, [7, 8, 9]), (3, 5, 1), (4, 6, 1, [0, 1]))
    a, b, c, d, e = id_prompts(work, sizes(work))
    assert [len(x) for x in (a, b, c, d, e)] == [12, 15, 12, 5, 6]
    assert a[:8] == b[:8] and a[8:] != b[8:12] and e == a[:6]
    assert a[0] != c[0] and a[:4] != d[:4]
    assert {t for x in (a, b, c, d) for t in x} <= set(TOKEN_IDS)
    halved = id_prompts(work, sizes(work, prompt_scale=0.5))
    assert [len(x) for x in halved] == [6, 8, 6, 2, 3] and halved[0][:4] == halved[1][:4]


async def test_token_ids_more_fields_priorities_and_a_name() -> None:
    async def count(body: dict[str, Any], out: web.StreamResponse) -> None:
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        await out.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())

    work = replace(WORK, priority=np.array([2, 0, 1]))
    async with Server(count, tokenizer=False).running() as s:
        r = await drive(work, s.url, token_ids=True, body={"cache_salt": "x", "temperature": 1}, name="pair-1")
    assert [x.prompt_tokens for x in r.records] == [21, 41, 9] and r.failed == 0
    by_length = sorted(s.bodies, key=lambda b: len(b["prompt"]))
    assert [(b["cache_salt"], b["temperature"], b["priority"]) for b in by_length] == [("x", 1, 1), ("x", 1, 2), ("x", 1, 0)]
    assert sorted(h["x-request-id"] for h in s.headers) == ["hoptrace-pair-1-0", "hoptrace-pair-1-1", "hoptrace-pair-1-2"]


async def test_a_body_cannot_set_what_the_trace_sets_nor_a_name_break_a_header() -> None:
    with pytest.raises(UsageError, match="'prompt' of a request's body comes from the trace"):
        await drive(WORK, "http://127.0.0.1:9", body={"prompt": "mine"})
    for name in ("", "a\r\nx: y", "a b", "é"):
        with pytest.raises(UsageError, match="cannot be part of a request's id"):
            await drive(WORK, "http://127.0.0.1:9", name=name)


@pytest.mark.parametrize("text", ["", "x", "[1]", '"x"', "{", "null"])
def test_the_command_takes_a_json_object_as_body(text: str) -> None:
    ran = CliRunner().invoke(command, ["t.trace", "--against", "http://127.0.0.1:9", "--body", text])
    assert ran.exit_code == 2
    assert "is not a JSON object" in ran.output


@given(st.integers(1, 3000), st.integers(1, 3000), st.floats(0.01, 3))
def test_sizes_are_whole_and_at_least_one(prompt: int, output: int, scale: float) -> None:
    s = sizes(make((0, prompt, output)), prompt_scale=scale, output_scale=scale, max_prompt_tokens=500)
    assert 1 <= s.prompt_tokens[0] <= 500
    assert s.output_tokens[0] == max(1, round(output * scale))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"prompt_scale": 1e9},
            "A prompt of 12,000,000,000 tokens is longer than any server takes. Choose a smaller --prompt-scale",
        ),
        ({"output_scale": 1e9}, "An output of 1,000,000,000 tokens"),
        ({"prompt_scale": math.nan}, "A scale of nan"),
        ({"output_scale": math.inf}, "A scale of inf"),
        ({"prompt_scale": 0.0}, "A scale of 0.0"),
    ],
)
def test_lengths_that_nobody_can_send_are_refused_at_once(options: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError) as e:
        sizes(make((0, 12, 1)), **options)  # type: ignore[arg-type]
    assert words in str(e.value)


def test_all_prompts_together_have_a_bound_and_a_cap_helps() -> None:
    work = make(*((i, 9_000_000, 1) for i in range(23)))
    with pytest.raises(UsageError, match=r"Prompts of 207,000,000 tokens in all"):
        sizes(work)
    assert sizes(work, prompt_scale=1e9, max_prompt_tokens=50).prompt_tokens == [50] * 23


@pytest.mark.parametrize("url", ["foo", "127.0.0.1:9000", "ftp://host", "http://", "http://host:99999", "http://host:x", ""])
async def test_what_is_no_url_is_wrong_use(url: str) -> None:
    with pytest.raises(UsageError, match="not a URL") as e:
        await drive(WORK, url)
    assert e.value.exit_code == 2


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, 0.0])
async def test_a_timeout_is_a_positive_number(timeout_s: float) -> None:
    with pytest.raises(UsageError, match="timeout"):
        await drive(WORK, "http://127.0.0.1:9", timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("option", "value"),
    [(o, v) for o in ("--prompt-scale", "--output-scale", "--timeout") for v in ("nan", "inf", "1e9", "0", "-1", "x")],
)
def test_the_command_takes_plain_numbers_only(option: str, value: str) -> None:
    ran = CliRunner().invoke(command, ["t.trace", "--against", "http://127.0.0.1:9", option, value])
    assert ran.exit_code == 2
    assert option in ran.output


async def test_the_command_and_ctrl_c(tmp_path: Path) -> None:
    row = {"arrival_of": "received", "prompt_tokens": 5, "output_tokens": 2, "source": "t"}
    rows = [{"request": i, "arrival_ns": i * 60_000 * MS} | row for i in range(2)]
    path = store(tmp_path / "t.trace", {"requests": pl.DataFrame(rows)}).path
    async with Server().running() as s:
        base = [sys.executable, "-m", "hoptrace", "drive", str(path), "--against", s.url, "--json"]
        whole = await asyncio.to_thread(subprocess.run, [*base, "--limit", "1"], capture_output=True, text=True)
        assert whole.returncode == 0, whole.stderr
        assert json.loads(whole.stdout)["finished"] == 1
        # The second request is a minute away: stop before it.
        process = subprocess.Popen(base, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        while len(s.bodies) < 2:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.to_thread(process.communicate)
    said = json.loads(out)
    assert (said["stopped"], said["finished"], said["planned"]) == (True, 1, 2), err
