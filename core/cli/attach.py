"""`hoptrace attach`: capture a live server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hoptrace.collectors.session import Session

__all__ = ["Address", "Duration", "Pid", "command"]

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType[float]):
    """500ms, 60s, 5m, 1h as seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", str(value).strip())
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is not a duration; write it like 500ms, 60s, 5m or 1h", param, ctx)
        return float(match[1]) * _UNITS_S[match[2]]


class Address(click.ParamType[tuple[str, int]]):
    """[HOST]:PORT; without a host the proxy listens on 127.0.0.1 only."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        host, _, port = str(value).rpartition(":")
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            self.fail(f"{value!r} is not [HOST]:PORT; write it like :9000 or 0.0.0.0:9000", param, ctx)
        return host.strip("[]") or "127.0.0.1", int(port)


class Pid(click.ParamType[Any]):
    """auto, none, or a process's number."""

    name = "pid"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("auto", "none") or (isinstance(value, str) and value.isascii() and value.isdigit() and int(value) > 0):
            return int(value) if value.isdigit() else value
        return self.fail(f"{value!r} is not auto, none or the number of a process", param, ctx)


@click.command("attach", short_help="Capture a live server into a trace.")
@click.argument("url")
@click.option(
    "-o", "--output", "out", type=click.Path(path_type=Path), metavar="T.trace", help="The trace to write; must not exist."
)
@click.option("--proxy", type=Address(), metavar="[HOST]:PORT", help="Listen here and pass requests on. Port 0 takes a free one.")
@click.option("--pid", type=Pid(), default="auto", metavar="auto|N|none", show_default=True, help="The server's process.")
@click.option("--duration", type=Duration(), metavar="60s", help="Stop after this time; else at Ctrl-C.")
@click.option(
    "--every", type=Duration(), default="100ms", metavar="100ms", show_default=True, help="Time between samples of counters."
)
@click.option("--no-hashes", is_flag=True, help="Do not hash the prompts' prefixes.")
@click.option(
    "--group", default="default", metavar="NAME", show_default=True, help="Whose key hashes prompts: equal groups compare."
)
@click.option("--key-env", metavar="VAR", help="Environment variable with the server's API key, for hoptrace's own questions.")
@click.option("--explain", is_flag=True, help="Say what can be recorded here and what not, and why; record nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def command(
    url: str,
    out: Path | None,
    proxy: tuple[str, int] | None,
    pid: Any,
    duration: float | None,
    every: float,
    no_hashes: bool,
    group: str,
    key_env: str | None,
    explain: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Capture a live OpenAI-compatible server into a trace, until Ctrl-C or --duration.

    With --proxy, hoptrace listens on a port of its own and passes everything on to URL, byte for byte; point clients at it. Each
    request to /v1/completions, /v1/chat/completions or /completion is recorded: when it came, each token's time, totals, how it
    ended. Without it, only counters are: the server's /metrics and /slots (llama.cpp), and what the operating system knows of its
    process. No prompt and no answer is stored: of a prompt its length, and keyed hashes of its leading blocks (see --no-hashes).

    \b
    Tell the server to show more:
      llama-server … --metrics --slots --props
    Clients that stream should ask for totals: "stream_options": {"include_usage": true}.

    \b
    Examples:
      hoptrace attach http://127.0.0.1:8080 --explain
      hoptrace attach http://127.0.0.1:8080 --proxy :9000 -o run.trace
      hoptrace attach http://127.0.0.1:8080 --proxy :9000 --duration 60s --json -o run.trace
      hoptrace attach http://127.0.0.1:8080 -o counters.trace          counters only

    \b
    Exit code: 0 done, 2 wrong use, 4 nothing listens there, no OpenAI-compatible server, port taken, disk full.
    """
    import asyncio
    import json
    import os
    import sys

    from hoptrace.cli.attach_view import end, explained, summary
    from hoptrace.errors import UsageError

    if not re.fullmatch(r"[\w.-]{1,64}", group):
        raise UsageError(f"{group!r} can't be a group's name.", hint="Use letters, digits, dots and dashes.")
    key = os.environ.get(key_env) if key_env else None
    if key_env and not key:
        raise UsageError(f"The environment variable {key_env} is not set.", hint="Set it to the server's API key.")
    pid = None if pid == "none" else pid
    if explain:
        from hoptrace.collectors.explain import explain as look

        server, findings = asyncio.run(look(url, pid=pid, key=key))
        click.echo(explained(server, findings, as_json))
        return
    if out is None:
        raise UsageError("Where shall the trace go?", hint="Name it: -o run.trace.")
    # The proxy shares this process with threads that write: let none of them hold it up for the default 5 ms.
    sys.setswitchinterval(0.0005)
    from hoptrace.collectors.session import Session

    session = Session(url, out, proxy=proxy, pid=pid, every_s=every, hashes=not no_hashes, group=group, key=key)
    asyncio.run(_record(session, duration, quiet))
    if as_json:
        click.echo(json.dumps(summary(session), indent=1))
    elif not quiet:
        click.echo(end(session))


async def _record(session: Session, duration_s: float | None, quiet: bool) -> None:
    import asyncio
    import os
    import signal
    from contextlib import nullcontext, suppress

    from rich.console import Console
    from rich.live import Live

    from hoptrace.cli.attach_view import StatusLine, begin

    err = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def asked() -> None:
        if stop.is_set():
            # A second time: leave at once, by no way that could hang. What was recorded is on the disk, and reads.
            with suppress(OSError):
                os.write(2, b"Left without closing the trace; it reads all the same, and hoptrace compact tidies it.\n")
            os._exit(130)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            loop.add_signal_handler(number, asked)
    async with session:
        begin(err, session)
        line = StatusLine()
        show = Live(console=err, auto_refresh=False, transient=True) if err.is_terminal and not quiet else None
        with show or nullcontext():
            warned = False
            while not stop.is_set():
                status = session.status()
                if not warned and (why := next((r for r in status.dropped if r.startswith("disk: ")), None)):
                    warned = True
                    click.echo(
                        f"The disk of {session.out} refuses writes ({why[6:]}): rows are lost until it takes them.", err=True
                    )
                if show is not None:
                    show.update(line.text(status), refresh=True)
                left = 1.0 if duration_s is None else duration_s - status.elapsed_s
                if left <= 0:
                    break
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), min(1.0, left))
        stop.set()  # from here a signal leaves at once
        err.print("Closing the trace …")
