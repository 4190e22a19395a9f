"""Start the dashboard as a process of its own and stop it again; for the command line and the demo."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import webbrowser
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import IO

from hoptrace.app.traces import checked
from hoptrace.errors import EnvironmentProblem

__all__ = ["FIRST_PORT", "Dashboard", "start"]

FIRST_PORT = 8501
_HOST = "127.0.0.1"
_PORTS_TRIED = 50
_START_S = 60.0

# Flags win over the config.toml of the working folder and of the user's home, so the dashboard looks the same everywhere.
_FLAGS = {
    "server.address": _HOST,
    "server.headless": "true",
    "server.fileWatcherType": "none",
    "server.runOnSave": "false",
    "browser.gatherUsageStats": "false",
    "client.toolbarMode": "viewer",
    "client.showErrorDetails": "type",
    "theme.light.primaryColor": "#0072B2",
    "theme.dark.primaryColor": "#56B4E9",
    "theme.baseRadius": "small",
    "theme.paddingTop": "2.5rem",
    "theme.paddingBottom": "3rem",
}


class Dashboard:
    """A running dashboard: ``url``, ``process``. Leave a ``with`` block, or call :meth:`stop`, to end it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
        self.process = process
        self.url = url
        self._log = log
        atexit.register(self.stop)

    def wait(self) -> int:
        """Wait until the dashboard ends; its exit code."""
        return self.process.wait()

    def stop(self) -> None:
        """End it, kindly at first. Harmless if it has ended."""
        atexit.unregister(self.stop)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()

    def log_tail(self, lines: int = 5) -> str:
        """The last lines that the dashboard's process wrote."""
        self._log.seek(0)
        text = self._log.read().decode("utf-8", errors="replace")
        return " | ".join(x.strip() for x in text.splitlines()[-lines:] if x.strip())

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def start(traces: Sequence[Path | str] = (), port: int | None = None, open_browser: bool = True) -> Dashboard:
    """Start the dashboard on ``traces`` (none: the samples) and wait until it answers.

    Without ``port`` the first free one from 8501 is taken. It listens on 127.0.0.1 only.

    Raises:
        InputError: one of the traces cannot be opened.
        EnvironmentProblem: the port is taken, or the dashboard did not come up.
    """
    paths = checked(traces)
    chosen = _port(port)
    flags = [x for key, value in {**_FLAGS, "server.port": str(chosen)}.items() for x in (f"--{key}", value)]
    script = str(files("hoptrace.app") / "main.py")
    # -P: a file in the working folder that bears a library's name must not be imported instead of the library.
    command = [sys.executable, "-P", "-m", "streamlit", "run", script, *flags, "--", *map(str, paths)]
    log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=_environment())
    dashboard = Dashboard(process, f"http://{_HOST}:{chosen}", log)
    try:
        _await(dashboard)
    except BaseException:
        dashboard.stop()
        raise
    if open_browser and _has_display():
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(dashboard.url)
    return dashboard


def _environment() -> dict[str, str]:
    # Streamlit reads STREAMLIT_* before flags in some places; the dashboard's settings are the flags above.
    return {k: v for k, v in os.environ.items() if not k.startswith("STREAMLIT_")}


def _await(dashboard: Dashboard) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if dashboard.process.poll() is not None:
            raise EnvironmentProblem(f"The dashboard ended at once: {dashboard.log_tail()}", hint="Run: pip install -U streamlit")
        if _healthy(dashboard.url):
            return
        time.sleep(0.1)
    said = dashboard.log_tail()
    raise EnvironmentProblem(f"The dashboard did not answer within {_START_S:.0f} s: {said}", hint="Try another --port.")


def _healthy(url: str) -> bool:
    try:
        with _direct.open(f"{url}/_stcore/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


# A proxy in the environment must not be asked for our own machine.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _port(wanted: int | None) -> int:
    if wanted is not None:
        if not _free(wanted):
            raise EnvironmentProblem(f"Port {wanted} is taken.", hint="Choose another with --port, or leave it out.")
        return wanted
    for port in range(FIRST_PORT, FIRST_PORT + _PORTS_TRIED):
        if _free(port):
            return port
    raise EnvironmentProblem(
        f"No free port from {FIRST_PORT} to {FIRST_PORT + _PORTS_TRIED - 1}.", hint="Choose one with --port."
    )


def _free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        # As the server will bind it: what is left of a closed connection does not count as taken.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((_HOST, port))
        except OSError:
            return False
    return True


def _has_display() -> bool:
    """Whether a browser window can open. Without one, Python would start a text browser inside the user's terminal."""
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER"))
