"""`hoptrace attach` as a user runs it: one sentence and an exit code for each mistake, and a clean end on a signal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
import pytest

import hoptrace
from hoptrace.cli.attach import Address, Duration, Pid

TOY = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from aiohttp import web
from pathlib import Path
from support.toy_server import Toy, serve, token
DATA = Path({tests!r}) / "data" / "llamacpp"
FILES = {{"/v1/models": "models.json", "/props": "props.json", "/slots": "slots_off.json", "/metrics": "metrics.prom"}}
def get(request):
    name = FILES.get(request.path)
    return web.Response(status=501 if "off" in name else 200, body=(DATA / name).read_bytes()) if name else None
async def main():
    async with serve(Toy([token("a", "length"), b"data: [DONE]\\n\\n"], get=get)) as toy:
        print(toy.url, flush=True)
        await asyncio.sleep(300)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    code = TOY.format(tests=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as toy:
        assert toy.stdout is not None
        yield toy.stdout.readline().strip()
        toy.kill()


def run(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hoptrace", "attach", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | (env or {}))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_counters_only(url: str, tmp_path: Path) -> None:
    out = tmp_path / "t.trace"
    done = run(url, "--duration", "500ms", "--json", "-o", str(out))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["trace"] == str(out) and told["requests"] == 0 and told["samples"]["llamacpp-metrics"] > 0
    assert "llamacpp-slots: /slots is turned off: start llama-server with --slots" in told["not_seen"]
    assert any("no --proxy was given" in what for what in told["not_seen"])
    assert hoptrace.open(out).manifest.closed


def test_the_end_is_told_in_words(url: str, tmp_path: Path) -> None:
    done = run(url, "--proxy", ":0", "--duration", "300ms", "-o", str(tmp_path / "t.trace"))
    assert done.returncode == 0
    assert "no request came through the proxy" in done.stdout and "Next:" in done.stdout
    assert "Send requests to http://127.0.0.1:" in done.stderr
    assert run(url, "-q", "--duration", "100ms", "-o", str(tmp_path / "q.trace")).stderr == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_closes_the_trace(url: str, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "t.trace"
    command = [sys.executable, "-m", "hoptrace", "attach", url, "-o", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        assert running.stderr.readline().startswith("Recording")
        time.sleep(0.3)
        running.send_signal(number)
        assert running.wait(30) == 0
    assert hoptrace.open(out).manifest.closed


def test_kill_int_reaches_what_a_script_started_in_the_background(url: str, tmp_path: Path) -> None:
    """A shell without job control has SIGINT ignored for `command &`."""
    out = tmp_path / "t.trace"
    command = [sys.executable, "-m", "hoptrace", "attach", url, "-o", str(out)]
    ignoring = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=ignoring) as running:
        assert running.stderr is not None
        assert running.stderr.readline().startswith("Recording")
        time.sleep(0.3)
        running.send_signal(signal.SIGINT)
        try:
            assert running.wait(20) == 0
        finally:
            running.kill()
    assert hoptrace.open(out).manifest.closed


def test_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    code = TOY.format(tests=str(Path(__file__).parent)).replace('token("a", "length")', 'token("a"), "hang"')
    out = tmp_path / "t.trace"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as toy:
        assert toy.stdout is not None
        url = toy.stdout.readline().strip()
        port = free_port()
        command = [sys.executable, "-m", "hoptrace", "attach", url, "--proxy", f":{port}", "-o", str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            assert running.stderr is not None
            assert running.stderr.readline().startswith("Recording")
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
                assert b"200 OK" in client.recv(1 << 16)
                running.send_signal(signal.SIGINT)
                time.sleep(0.3)
                running.send_signal(signal.SIGINT)
                assert running.wait(30) == 130
            told = running.stderr.read()
        toy.kill()
    assert "Traceback" not in told and "Unclosed" not in told and "it reads all the same" in told
    assert not hoptrace.open(out).manifest.closed


LOADING = """
import asyncio
async def answer(reader, writer):
    while await reader.readline() not in (b"\\r\\n", b""):
        pass
    writer.write(b"HTTP/1.1 503 Service Unavailable\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\n{}")
    writer.close()
async def main():
    server = await asyncio.start_server(answer if MODE == "loading" else lambda r, w: asyncio.sleep(300), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.sleep(300)
asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["loading", "silent"])
@pytest.mark.parametrize("more", [["-o", "OUT"], ["--explain"]])
def test_a_server_that_is_waited_for_is_named_and_ctrl_c_ends_it(tmp_path: Path, mode: str, more: list[str]) -> None:
    out = tmp_path / "t.trace"
    code = LOADING.replace("MODE", repr(mode))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as toy:
        assert toy.stdout is not None
        url = f"http://127.0.0.1:{toy.stdout.readline().strip()}"
        command = [sys.executable, "-m", "hoptrace", "attach", url, *(str(out) if a == "OUT" else a for a in more)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            assert running.stderr is not None
            told = running.stderr.readline()
            assert told.startswith(f"Waiting for {url} to say what is there")
            running.send_signal(signal.SIGINT)
            rest = running.communicate(timeout=30)[1]
            assert running.returncode == 130 and rest.strip() == "Stopped."
        toy.kill()
    assert not out.exists()


def test_a_kill_leaves_a_trace_that_reads(url: str, tmp_path: Path) -> None:
    out = tmp_path / "t.trace"
    command = [sys.executable, "-m", "hoptrace", "attach", url, "-o", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        running.stderr.readline()
        time.sleep(2.5)
        running.kill()
    trace = hoptrace.open(out)
    assert not trace.manifest.closed
    assert trace.rows("counters") > 0 and trace.rows("coverage") > 0


def test_a_process_that_does_not_hold_the_port(url: str, tmp_path: Path) -> None:
    done = run(url, "--pid", str(os.getpid()), "--duration", "200ms", "-o", str(tmp_path / "t.trace"))
    assert done.returncode == 0
    assert f"process: process {os.getpid()} does not hold the server's port" in done.stderr


def test_explain(url: str) -> None:
    done = run(url, "--explain", "--pid", "none")
    assert done.returncode == 0
    assert "Not here:" in done.stdout and "start llama-server with --slots" in done.stdout
    assert json.loads(run(url, "--explain", "--json").stdout)["server"]["engine"] == "llama.cpp"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["http://127.0.0.1:1", "-o", "OUT"], 4, "Nothing listens at http://127.0.0.1:1. Start the server"),
        (["http://no.invalid:80", "-o", "OUT"], 4, "is not known"),
        (["ftp://x", "-o", "OUT"], 2, "is not the URL of a server"),
        (["notaurl", "-o", "OUT"], 2, "is not the URL of a server"),
        (["URL"], 2, "Where shall the trace go?"),
        (["URL", "-o", "HERE"], 2, "is already there"),
        (["URL", "--proxy", "URLPORT", "-o", "OUT"], 4, "Address already in use"),
        (["URL", "--proxy", "nine", "-o", "OUT"], 2, "is not [HOST]:PORT"),
        (["URL", "--every", "fast", "-o", "OUT"], 2, "is not a duration"),
        (["URL", "--pid", "me", "-o", "OUT"], 2, "is not auto, none or the number of a process"),
        (["URL", "--pid", "99999999", "-o", "OUT"], 2, "There is no process 99999999."),
        (["URL", "--key-env", "NO_SUCH_VAR", "-o", "OUT"], 2, "is not set"),
        (["URL", "--group", "a/b", "-o", "OUT"], 2, "can't be a group's name"),
    ],
)
def test_mistakes(url: str, tmp_path: Path, args: list[str], code: int, words: str) -> None:
    names = {"URL": url, "URLPORT": ":" + url.rsplit(":", 1)[1], "OUT": str(tmp_path / "out.trace"), "HERE": str(tmp_path)}
    done = run(*(names.get(a, a) for a in args))
    assert done.returncode == code
    assert words in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("60s", 60.0), ("1.5m", 90.0), ("2h", 7200.0)])
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "0s", "5", "-1s", "1d", "s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Duration().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "address"),
    [(":9000", ("127.0.0.1", 9000)), ("0.0.0.0:1", ("0.0.0.0", 1)), ("[::1]:5", ("::1", 5)), ("9", ("127.0.0.1", 9))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert Address().convert(text, None, None) == address


def test_pids() -> None:
    assert [Pid().convert(v, None, None) for v in ("auto", "none", "12")] == ["auto", "none", 12]
    for bad in ("0", "-1", "x", "1.5"):
        with pytest.raises(click.BadParameter):
            Pid().convert(bad, None, None)
