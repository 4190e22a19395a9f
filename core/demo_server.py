"""A real llama.cpp server as a child process, for the demo and the end-to-end tests.

``python -m hoptrace.demo_server MODEL --port N`` runs it in the foreground; :class:`DemoServer` starts and stops it.
It is the C++ llama-server inside a Python process (``xllamacpp``, extra ``demo``).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from hoptrace.errors import EnvironmentProblem

__all__ = ["CONTEXT_TOKENS", "HOST_CACHE_MIB", "DemoServer", "default_threads", "free_port"]

CONTEXT_TOKENS = 2048
"""Longest context of one slot."""

BATCH_TOKENS = 2048
"""Tokens of one iteration at most (llama.cpp's own default)."""

HOST_CACHE_MIB = 0
"""The cache in host memory is off: it would serve prompts across slots, unseen from outside."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def default_threads() -> int:
    """Compute threads of the server: all cores but one, which the load generator and the proxy share."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


class DemoServer:
    """Starts on entering, stops on leaving. ``url`` and ``pid`` say where it is; its own words go to ``log``."""

    def __init__(self, model: Path, *, slots: int, log: Path, threads: int | None = None, port: int | None = None) -> None:
        self.model = model
        self.slots = slots
        self.log = log
        self.threads = threads or default_threads()
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Start it and wait until it answers.

        Raises:
            EnvironmentProblem: xllamacpp is not installed, or the server ended or stayed silent; quotes its last line.
        """
        command = [sys.executable, "-m", "hoptrace.demo_server", str(self.model), "--port", str(self.port)]
        command += ["--slots", str(self.slots), "--threads", str(self.threads)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EnvironmentProblem(
                    f"The llama.cpp server ended at once: {self._last_words()}", hint=f"Its log is {self.log}."
                )
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        self.stop()
        raise EnvironmentProblem(f"The llama.cpp server did not answer within {timeout_s:.0f} s.", hint=f"Its log is {self.log}.")

    def stop(self) -> None:
        """Stop it; kill it if it does not go."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> DemoServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _last_words(self) -> str:
        lines = [x for x in self.log.read_text(errors="replace").splitlines() if x.strip()]
        return lines[-1][:300] if lines else "it said nothing"


def _serve(model: Path, port: int, slots: int, threads: int) -> None:
    # If the demo is killed, the server must not stay behind (PR_SET_PDEATHSIG = 1).
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        import xllamacpp
    except ImportError:
        sys.exit("xllamacpp is not installed; run: pip install 'hoptrace[demo]'")
    p = xllamacpp.CommonParams()
    p.model.path = str(model)
    p.port = port
    p.n_parallel = slots
    p.n_ctx = CONTEXT_TOKENS * slots
    p.n_batch = BATCH_TOKENS
    p.endpoint_metrics = p.endpoint_slots = p.endpoint_props = True
    # Fitting parameters to free memory would make two runs differ.
    p.fit_params = False
    p.cache_ram_mib = HOST_CACHE_MIB
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(p)
    print(f"listening on {server.listening_address}", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="python -m hoptrace.demo_server", description="A llama.cpp server on 127.0.0.1.")
    _parser.add_argument("model", type=Path)
    _parser.add_argument("--port", type=int, required=True)
    _parser.add_argument("--slots", type=int, default=4)
    _parser.add_argument("--threads", type=int, default=default_threads())
    _a = _parser.parse_args()
    _serve(_a.model, _a.port, _a.slots, _a.threads)
