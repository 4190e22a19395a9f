"""How well engine steps are told from token times alone, against what vLLM's own scheduler wrote down, and how fast.

``python benchmarks/reconstruct_truth.py`` scores the recorded runs in tests/data/steps: vLLM 0.32 with its own API server and
scheduler and steps of modelled length (support/modelled_vllm.py), seen through `hoptrace attach --proxy`. A line is a run; the
figures are explained in docs/steps.md.

``HOPTRACE_VLLM_PYTHON=… python benchmarks/reconstruct_truth.py --record`` records the runs anew on this machine (some ten
minutes; they replace the recorded ones), ``--record NAME`` one of them. The ends of steps depend on how quiet the machine is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.step_data import load, names, save, truth_of
from support.step_score import Score, members_right, reliability, score

import hoptrace
from hoptrace.reconstruct import reconstruct, steps_of

_HERE = Path(__file__).parent / "support"
_ROUNDS = 5
# Name: modelled times in ms (per step, per prompt token, per decoder), budget, requests, requests a second, mean output, median
# prompt, longest prompt, arguments of vLLM's.
_RUNS: dict[str, tuple[dict[str, float], int, int, float, int, int, int, tuple[str, ...]]] = {
    "steps_5ms": ({"step_ms": 4.4, "prefill_ms": 0.004, "decode_ms": 0.05}, 512, 400, 19, 50, 200, 1500, ()),
    "steps_10ms": ({"step_ms": 8.6, "prefill_ms": 0.008, "decode_ms": 0.1}, 256, 350, 10, 50, 200, 1500, ()),
    "steps_20ms": ({"step_ms": 17, "prefill_ms": 0.02, "decode_ms": 0.2}, 512, 300, 6, 50, 200, 1500, ()),
    "steps_60ms": ({"step_ms": 52, "prefill_ms": 0.05, "decode_ms": 0.5}, 256, 200, 2.4, 40, 200, 1500, ()),
    "steps_100ms": ({"step_ms": 85, "prefill_ms": 0.1, "decode_ms": 1, "jitter": 0.05}, 512, 150, 1.4, 40, 200, 1500, ()),
    "silent_20ms": ({"step_ms": 17, "prefill_ms": 0.02, "decode_ms": 0.2}, 256, 200, 2.5, 8, 700, 1500, ()),
    "preempted_20ms": (
        {"step_ms": 17, "prefill_ms": 0.02, "decode_ms": 0.2}, 512, 200, 6, 60, 200, 1000,
        ("--num-gpu-blocks-override", "90", "--max-model-len", "2048"),
    ),
    "drafts_20ms": (
        {"step_ms": 17, "prefill_ms": 0.02, "decode_ms": 0.2}, 512, 250, 11, 60, 200, 1000,
        ("--speculative-config", '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3}'),
    ),
}  # fmt: skip


def scored(name: str, folder: Path, *, known_budget: bool = False) -> Score:
    """Reconstruct one recorded run and score it."""
    run = load(name, folder / f"{name}-{known_budget}.trace", known_budget=known_budget)
    got = reconstruct(run.trace)
    return score(run.steps, run.members, got.steps, got.residency, run.prompts)


def main() -> None:
    """Score and print."""
    good: list[tuple[float, bool]] = []
    with tempfile.TemporaryDirectory() as told:
        folder = Path(told)
        print("run: step | batch | emitting | exact | ends | ends net | error ms (median, 95 %, 99 %) | silent found | chunks")
        for name in names():
            result = scored(name, folder)
            good += result.good
            print(f"{name}: {result.line()}")
            known = scored(name, folder, known_budget=True)
            print(f"{name}, budget told: {known.line()}")
            run = load(name, folder / f"{name}-observed.trace", observed=True)
            tokens, chunks = members_right(run.members, steps_of(run.trace).residency, run.prompts)
            print(f"{name}, observed steps: tokens in their step {tokens:.2%}, chunks {chunks:.2%}")
        for low, n, share in reliability(good):
            print(f"confidence of {low} and more: {n} steps, {share:.2%} exact")
        speed = _speed(folder)
    print(f"reconstruct: {speed:,.0f} tokens per CPU-second")


def _speed(folder: Path) -> float:
    trace = load("steps_5ms", folder / "speed.trace").trace
    reconstruct(trace)
    times = []
    for _ in range(_ROUNDS):
        start = time.process_time()
        reconstruct(trace)
        times.append(time.process_time() - start)
    return trace.rows("tokens") / sorted(times)[_ROUNDS // 2]


# -- recording ----------------------------------------------------------------------------------------------------------


def record(wanted: list[str]) -> None:
    """Run vLLM and keep what was seen and what was true."""
    for name in wanted or list(_RUNS):
        times, budget, requests, rate, output, median, most, arguments = _RUNS[name]
        with tempfile.TemporaryDirectory() as told:
            folder = Path(told)
            (folder / "times.json").write_text(json.dumps({**times, "budget": budget}))
            with _server(folder, budget, arguments) as port, _proxy(folder, port) as proxy:
                load_at = [sys.executable, str(_HERE / "load.py"), f"http://127.0.0.1:{proxy}", str(requests), str(rate), "1"]
                subprocess.run([*load_at, str(output), str(most), str(median)], check=True)
            trace = hoptrace.open(folder / "run.trace")
            steps, members = truth_of(folder / "truth.jsonl", trace)
            info = {"budget": budget, "requests": requests, "rate_per_s": rate, "modelled": times}
            save(name, trace, steps, members, info)
            print(f"{name}: {steps.height} steps kept", flush=True)


@contextmanager
def _server(folder: Path, budget: int, arguments: tuple[str, ...]) -> Iterator[int]:
    port = _free_port()
    environment = os.environ | {
        "MODELLED_TRUTH": str(folder / "truth.jsonl"), "MODELLED_TIMES": str(folder / "times.json"),
        "MODELLED_MODEL": str(folder),
    }  # fmt: skip
    command = [str(_HERE / "modelled_server.sh"), str(port), "--max-num-batched-tokens", str(budget), "--max-num-seqs", "32"]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen([*command, *arguments], env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait(f"http://127.0.0.1:{port}/health", server, folder / "server.log")
            yield port
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


@contextmanager
def _proxy(folder: Path, port: int) -> Iterator[int]:
    own = _free_port()
    command = [sys.executable, "-m", "hoptrace", "attach", f"http://127.0.0.1:{port}", "--proxy", f"127.0.0.1:{own}"]
    attach = subprocess.Popen([*command, "--every", "1s", "-q", "--no-hashes", "-o", str(folder / "run.trace")])
    try:
        _wait(f"http://127.0.0.1:{own}/health", attach, None)
        yield own
    finally:
        attach.send_signal(signal.SIGTERM)
        attach.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path | None) -> None:
    for _ in range(240):
        if process.poll() is not None:
            raise SystemExit(f"It did not start.{'' if log is None else log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"{url} does not answer.")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


if __name__ == "__main__":
    if "--record" in sys.argv:
        record([a for a in sys.argv[1:] if not a.startswith("-")])
    else:
        main()
