"""A real llama.cpp server, captured with the machine beside it, while others take its cores on purpose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import polars as pl
import pytest

import hoptrace
from hoptrace.demo_server import DemoServer, free_port

pytestmark = pytest.mark.server
CALM_S, LOADED_S = 7.0, 7.0


def test_another_process_that_steals_the_steps_is_seen_beside_them(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.trace"
    loops: list[subprocess.Popen[bytes]] = []
    with DemoServer(model, slots=2, log=tmp_path / "server.log") as server:
        port = free_port()
        words = [sys.executable, "-m", "hoptrace", "attach", server.url, "--proxy", f":{port}", "-o", str(out), "--json"]
        attach = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        stop = threading.Event()

        def ask() -> None:
            body = {"prompt": "Once upon a time", "max_tokens": 24, "stream": True, "stream_options": {"include_usage": True}}
            while not stop.is_set():
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
                )
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        answer.read()
                except OSError:
                    time.sleep(0.2)  # it does not listen yet

        clients = [threading.Thread(target=ask) for _ in range(2)]
        for c in clients:
            c.start()
        try:
            until = time.monotonic() + 60
            while not (out / "manifest.json").exists() and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(CALM_S)
            turned_ns = time.time_ns()
            for _ in range(2 * (os.cpu_count() or 1)):
                # In sessions of their own: Linux shares the cores between sessions first.
                loops.append(subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True))
            time.sleep(LOADED_S)
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
            stop.set()
            for c in clients:
                c.join()
            attach.send_signal(signal.SIGTERM)
            told, err = attach.communicate(timeout=60)
    assert attach.returncode == 0, err
    assert json.loads(told)["samples"]["process"] > 100

    trace = hoptrace.open(out)
    counters = trace.table("counters").collect()
    pid = trace.manifest.servers[0].pid
    mine = counters.filter((pl.col("entity") == f"process:{pid}") & (pl.col("status") == "ok")).sort("time_ns")

    def grown(name: str, low_ns: int, high_ns: int) -> int:
        values = mine.filter((pl.col("name") == name) & pl.col("time_ns").is_between(low_ns, high_ns))["value_int"]
        return int(values[-1] - values[0])

    first, last = int(mine["time_ns"][0]), turned_ns + int(LOADED_S * 1e9)
    calm = grown("run_delay_ns", first, turned_ns) / grown("on_cpu_ns", first, turned_ns)
    loaded = grown("run_delay_ns", turned_ns, last) / grown("on_cpu_ns", turned_ns, last)
    assert loaded > 2 * calm and loaded > 0.02, "others took the cores, and its threads waited for them"

    names = set(counters["name"])
    assert {"voluntary_switches", "involuntary_switches", "migrations", "minor_faults", "rss_bytes", "swap_bytes"} <= names
    entities = set(counters["entity"])
    assert {"cpu", "pressure", "memory", "node:0", "collector:process", "collector:station"} <= entities
    assert any(e.startswith("thread:") for e in entities) and any(e.startswith("irq:") for e in entities)
    clocks = trace.table("clock_sync").collect()
    assert set(clocks["clock"]) >= {"utc", "boottime", "monotonic_raw"} and clocks["uncertainty_ns"].max() < 1e9  # type: ignore[operator]
    covered = trace.table("coverage").collect()
    assert {"process", "cpu", "vmstat"} <= set(covered.filter(pl.col("table") == "counters")["source"])
    assert {n["name"] for n in trace.manifest.platform["nodes"]} >= {"client", "proxy", "socket0"}
    found = {c.name: c for c in trace.manifest.collectors}
    assert all(c.available or c.reason for c in found.values())
    assert all(c.rows > 0 for n, c in found.items() if c.available and n in ("cpu", "process", "vmstat", "numa"))

    report = subprocess.run(
        [sys.executable, "-m", "hoptrace", "report", str(out), "--section", "hardware"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert report.returncode == 0, report.stderr
    assert "Collecting from the machine took" in report.stdout and "waiting for a CPU" in report.stdout
