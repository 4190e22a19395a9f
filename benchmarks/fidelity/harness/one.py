"""One run: caches cold, server warm, recorder and load before it, gauges beside it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from harness.children import end, grant, last_words, spawn, wait_until
from harness.fleet import Up, answers, free_ports
from harness.gauges import Gauge
from harness.recipe import Cell, Policy, Recipe

import hoptrace
from hoptrace.errors import EnvironmentProblem

__all__ = ["run_once"]

_HERE = Path(__file__).resolve().parent
_START_S, _CLOSE_S = 60.0, 120.0
_EXACT = {"return_token_ids": True}  # each chunk then says how many tokens it has


def run_once(recipe: Recipe, cell: Cell, up: Up, work: Path, out: Path) -> dict[str, Any]:
    """Drive ``work`` at the servers ``up`` and record it at ``out``; gives the gauges of the run.

    Raises:
        EnvironmentProblem: a server died, or the recorder or the load did not do its part.
    """
    policy = recipe.policies[up.policy]
    log = out.with_name("log.txt")
    salt = secrets.token_hex(6)
    _warm(up, policy, recipe.warm_up, salt)
    before = _probe(up.cpus[0], recipe.machine.server_nice)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with ExitStack() as stack:
        target = _recorder(stack, recipe, cell, policy, up, out, log)
        gauge = Gauge(up.cpus, up.roots, client_too=bool(set(up.cpus) & set(recipe.machine.client_cpus)))
        begun = time.monotonic()
        told = _drive(recipe, policy, recipe.workloads[cell.workload].prompts, work, target, log, salt)
        gauges = gauge.read()
        duration = time.monotonic() - begun
        if not up.alive():
            raise EnvironmentProblem(f"A server of {up.policy} died: {last_words(up.logs[0])}", hint=f"Its log is {up.logs[0]}.")
    after = _probe(up.cpus[0], recipe.machine.server_nice)
    steps = hoptrace.open(out).rows("steps")
    return {
        "policy": up.policy, "started": started, "duration_s": round(duration, 2), **gauges,
        "probe_before_ns": before[0], "probe_after_ns": after[0], "probe_before_wall_ns": before[1],
        "probe_after_wall_ns": after[1],
        "requests": told["sent"], "failed": told["failed"], "failures": told["failures"], "steps": steps,
        "server_cpu_per_step_ms": round(1e3 * gauges["server_cpu_s"] / steps, 3) if steps else None,
        "load": {k: told[k] for k in ("ttft_ns", "e2e_ns", "lateness_ns")}, "server_cpus": up.cpus, "priority": up.granted,
    }  # fmt: skip


def _recorder(stack: ExitStack, recipe: Recipe, cell: Cell, policy: Policy, up: Up, out: Path, log: Path) -> str:
    """Start `hoptrace attach` and, for several servers, a router before it; gives the address for the load."""
    machine = recipe.machine
    ports = free_ports(len(up.places) + 1)
    env = dict(os.environ)
    # Where the servers' plug-ins write; with the proxy alone, where nobody does.
    env["HOPTRACE_CHANNELS"] = str(up.places[0].folder.parent / ("channels" if cell.record == "all" else "nowhere"))
    words = [sys.executable, "-m", "hoptrace", "attach", *(p.url for p in up.places), "--proxy", f"127.0.0.1:{ports[0]}"]
    words += ["-q", "-o", str(out), *([] if cell.record == "all" else ["--pid", "none"])]
    attach = spawn(words, log, env=env, cpus=machine.client_cpus, nice=machine.client_nice)
    stack.callback(end, attach, with_signal=signal.SIGINT, patience_s=_CLOSE_S)
    proxies = [f"http://127.0.0.1:{ports[k]}" for k in range(len(up.places))]
    for url in proxies:
        wait_until(partial(answers, f"{url}/health"), attach, log, "hoptrace attach", _START_S)
    if len(proxies) == 1:
        return proxies[0]
    words = [
        sys.executable,
        str(_HERE / "router.py"),
        str(ports[-1]),
        *proxies,
        *(["--split"] if policy.layout == "split" else []),
    ]
    router = spawn(words, log, cpus=machine.client_cpus, nice=machine.client_nice)
    stack.callback(end, router)
    url = f"http://127.0.0.1:{ports[-1]}"
    wait_until(partial(answers, f"{url}/health"), router, log, "The router", _START_S)
    return url


def _drive(recipe: Recipe, policy: Policy, prompts: str, work: Path, url: str, log: Path, salt: str) -> dict[str, Any]:
    """Send the work; gives what `hoptrace drive --json` says."""
    body = {"cache_salt": salt, **_EXACT, **policy.body} if policy.engine != "llamacpp" else policy.body
    words = [sys.executable, "-m", "hoptrace", "drive", str(work), "--against", url, "--json", "--name", "fidelity"]
    words += ["--token-ids"] if prompts == "ids" else []
    words += ["--timeout", str(recipe.timeout_s), "--body", json.dumps(body)]
    said = log.with_name("drive.json")
    drive = spawn(words, said, cpus=recipe.machine.client_cpus, nice=recipe.machine.client_nice)
    last_ns = hoptrace.open(work).table("requests").select("arrival_ns").collect()["arrival_ns"].max()
    assert isinstance(last_ns, int)
    try:
        drive.wait(last_ns / 1e9 + recipe.timeout_s + _START_S)
    except subprocess.TimeoutExpired:
        raise EnvironmentProblem(f"The load did not end in {recipe.timeout_s:.0f} s after its last request.") from None
    finally:
        end(drive, with_signal=signal.SIGINT)
    try:
        found: dict[str, Any] = json.loads(said.read_text().strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise EnvironmentProblem(f"The load failed: {last_words(said)}") from None
    return found


def _warm(up: Up, policy: Policy, requests: int, salt: str) -> None:
    """So many short requests to each server, side by side; then llama.cpp's slots are cleared (vLLM has the salt)."""
    for place in up.places if policy.layout != "split" else ():
        body = {"model": "smol", "prompt": [100 + i for i in range(64)], "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        if policy.engine != "llamacpp":
            body["cache_salt"] = f"warm-{salt}"
        threads = [threading.Thread(target=_post, args=(f"{place.url}/v1/completions", body)) for _ in range(requests)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if policy.engine == "llamacpp":
            with urllib.request.urlopen(f"{place.url}/slots", timeout=10) as reply:
                slots = json.loads(reply.read())
            for slot in slots:
                _post(f"{place.url}/slots/{slot['id']}?action=erase", {})


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", "Connection": "close"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        reply.read()


def _probe(cpu: int, nice: int | str) -> tuple[int, int]:
    """(CPU, wall) ns of the fixed work, on the first server's core at the servers' priority."""
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(_HERE.parent)}

    def there() -> None:
        os.sched_setaffinity(0, [cpu])
        grant(0, nice)

    done = subprocess.run(
        [sys.executable, "-m", "harness.gauges"],
        env=os.environ | env,
        preexec_fn=there,
        capture_output=True,
        text=True,
        check=True,
    )
    cpu_ns, wall_ns = map(int, done.stdout.split())
    return cpu_ns, wall_ns
