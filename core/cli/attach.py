"""`hoptrace attach`: capture a live server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hoptrace.collectors.session import Session

__all__ = ["TOPO_CHARS", "Address", "Duration", "Percent", "Pid", "check_trees", "command", "which_machine"]

TOPO_CHARS = 1_000_000  # far more than the text of any machine
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


class Percent(click.ParamType[Any]):
    """A share of a core as 1% or 0.5%; none: no limit."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "none" or isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)%", str(value).strip())
        if match is None or not 0 < float(match[1]) <= 100:
            self.fail(f"{value!r} is not a share of a core; write it like 1% or 0.5%, or none", param, ctx)
        return float(match[1]) / 100


class Pid(click.ParamType[Any]):
    """auto, none, or a process's number."""

    name = "pid"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("auto", "none") or (isinstance(value, str) and value.isascii() and value.isdigit() and int(value) > 0):
            return int(value) if value.isdigit() else value
        return self.fail(f"{value!r} is not auto, none or the number of a process", param, ctx)


def which_machine(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options --proc, --sys and --topo (`proc`, `sysfs`, `topo`): whose machine is looked at."""
    for option in (
        click.option(
            "--topo",
            type=click.File("r", errors="replace"),
            metavar="FILE",
            help="Output of `nvidia-smi topo -m` of that machine, for its graph where NVML can't be asked.",
        ),
        click.option("--sys", "sysfs", type=click.Path(path_type=Path), default="/sys", metavar="DIR", help="Its /sys."),
        click.option(
            "--proc",
            type=click.Path(path_type=Path),
            default="/proc",
            metavar="DIR",
            help="The host's /proc, seen from a container.",
        ),
    ):
        command = option(command)
    return command


def check_trees(proc: Path, sysfs: Path) -> None:
    """EnvironmentProblem if another tree than this machine's own was named and is none: all would look absent there."""
    from hoptrace.errors import EnvironmentProblem

    for tree, own, holds in ((proc, "/proc", "stat"), (sysfs, "/sys", "devices")):
        if tree != Path(own) and not (tree / holds).exists():
            raise EnvironmentProblem(f"{tree} is no Linux {own}.", hint=f"Name where the host's {own} is mounted (/host{own}).")


@click.command("attach", short_help="Capture a live server into a trace.")
@click.argument("urls", nargs=-1, required=True, metavar="URL [URL ...]")
@click.option(
    "-o", "--output", "out", type=click.Path(path_type=Path), metavar="T.trace", help="The trace to write; must not exist."
)
@click.option("--proxy", type=Address(), metavar="[HOST]:PORT", help="Listen here and pass requests on. Port 0 takes a free one.")
@click.option("--sniff", metavar="IFACE:PORT", help="See requests on the wire instead, passively: any:8000 (plain HTTP, root).")
@click.option("--otlp", type=Address(), metavar="[HOST]:PORT", help="Receive OTLP spans: HTTP here (4318), gRPC one port below.")
@click.option("--kv-events", metavar="tcp://HOST:PORT", help="Where KV events are published; else from the server's own flags.")
@click.option("--kv-replay", metavar="tcp://HOST:PORT", help="Where missed KV events are given again.")
@click.option("--forward-pass", metavar="ENDPOINT", help="Where forward-pass metrics are published (SGLang, Dynamo).")
@click.option(
    "--log",
    "log",
    type=click.Path(path_type=Path, exists=True),
    metavar="FILE",
    help="The server's log, followed as it grows.",
)
@click.option("--pid", type=Pid(), default="auto", metavar="auto|N|none", show_default=True, help="The server's process.")
@click.option("--duration", type=Duration(), metavar="60s", help="Stop after this time; else at Ctrl-C.")
@click.option(
    "--every", type=Duration(), default="100ms", metavar="100ms", show_default=True, help="Time between samples of counters."
)
@click.option("--scrape", multiple=True, metavar="URL", help="Also record this Prometheus page (dcgm-exporter, node_exporter …).")
@click.option(
    "--counters-file",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Follow counters that another tool writes (PCM's CSV, UCX statistics).",
)
@click.option(
    "--tracepoints",
    type=click.Choice(["thread", "cpu"]),
    help="Count futex, poll, ioctl and yield calls: by thread of the server (slows it), or by CPU.",
)
@click.option(
    "--max-overhead",
    type=Percent(),
    default="1%",
    metavar="1%|none",
    show_default=True,
    help="What all counters of the machine may take of a core; what costs more is read half as often.",
)
@which_machine
@click.option("--no-hashes", is_flag=True, help="Do not hash the prompts' prefixes.")
@click.option(
    "--group", default="default", metavar="NAME", show_default=True, help="Whose key hashes prompts: equal groups compare."
)
@click.option("--key-env", metavar="VAR", help="Environment variable with the server's API key, for hoptrace's own questions.")
@click.option("--explain", is_flag=True, help="Say what can be recorded here and what not, and why; record nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def command(
    urls: tuple[str, ...],
    out: Path | None,
    proxy: tuple[str, int] | None,
    sniff: str | None,
    otlp: tuple[str, int] | None,
    kv_events: str | None,
    kv_replay: str | None,
    forward_pass: str | None,
    log: Path | None,
    pid: Any,
    duration: float | None,
    every: float,
    scrape: tuple[str, ...],
    files: tuple[Path, ...],
    tracepoints: Any,
    max_overhead: Any,
    proc: Path,
    sysfs: Path,
    topo: Any,
    no_hashes: bool,
    group: str,
    key_env: str | None,
    explain: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Capture live OpenAI-compatible servers into a trace, until Ctrl-C or --duration.

    hoptrace finds out what answers at URL (vLLM, SGLang, llama.cpp, TensorRT-LLM, Dynamo, TGI), how it is set, and which of its
    sources are there: metrics, steps from a plug-in or the log, KV events, spans, the process as the operating system sees it.
    --explain prints the plan: what each source gives, and which flag is missing for what is not there.

    Requests and tokens are seen from outside in one of two ways. --sniff reads the server's plain HTTP off the wire: no client
    changes anything, and the server notices nothing (needs CAP_NET_RAW). --proxy listens on a port of its own and passes
    everything on, byte for byte; point clients at it. No prompt and no answer is stored: of a prompt its length, and keyed
    hashes of its leading blocks (see --no-hashes).

    Beside the servers, the machine is recorded on the same clock: their threads' waits for a CPU, switches and faults, memory,
    links, disks, devices, as far as it has them (`hoptrace doctor` says what is here, and why not). What costs more than
    --max-overhead is read less often; the trace holds what all of it took.

    Several URLs (a prefill and a decode server, a router and its workers) go into one trace; with --proxy the second server has
    the next port, and so on. A request that a router hands on with the same x-request-id is one request with several stays.

    \b
    Tell the server to show more:
      llama-server … --metrics --slots --props
      vllm serve … --enable-logging-iteration-details       and hoptrace installed beside it: docs/vllm.md
    Clients that stream should ask for totals: "stream_options": {"include_usage": true}.

    \b
    Examples:
      hoptrace attach http://127.0.0.1:8000 --explain
      hoptrace attach http://127.0.0.1:8000 --sniff any:8000 -o run.trace
      hoptrace attach http://127.0.0.1:8080 --proxy :9000 --duration 60s --json -o run.trace
      hoptrace attach http://prefill:8100 http://decode:8200 --proxy :9000 -o pd.trace
      hoptrace attach http://127.0.0.1:8080 -o counters.trace          no requests, what the engine tells
      hoptrace attach http://127.0.0.1:8000 --proxy :9000 --scrape http://127.0.0.1:9400/metrics -o gpus.trace
      hoptrace attach http://127.0.0.1:8000 --proxy :9000 --tracepoints cpu -o waits.trace

    \b
    Exit code: 0 done, 2 wrong use, 4 nothing listens there, no OpenAI-compatible server, port taken, disk full.
    """
    import json
    import os
    import sys

    import uvloop

    from hoptrace.cli.attach_view import end, summary
    from hoptrace.cli.patience import patiently
    from hoptrace.collectors.context import Options
    from hoptrace.collectors.hardware.source import Roots
    from hoptrace.errors import UsageError

    if not re.fullmatch(r"[\w.-]{1,64}", group):
        raise UsageError(f"{group!r} can't be a group's name.", hint="Use letters, digits, dots and dashes.")
    key = os.environ.get(key_env) if key_env else None
    if key_env and not key:
        raise UsageError(f"The environment variable {key_env} is not set.", hint="Set it to the server's API key.")
    if proxy is not None and sniff is not None:
        raise UsageError(
            "--proxy and --sniff would see each request twice.", hint="Choose one; `--explain` says which is possible."
        )
    if kv_replay is not None and kv_events is None:
        raise UsageError("--kv-replay belongs to --kv-events.", hint="Give both, or neither: then the server's flags tell.")
    check_trees(proc, sysfs)
    options = Options(
        kv_events=kv_events, kv_events_replay=kv_replay, forward_pass=forward_pass, otlp=otlp, log=log, roots=Roots(proc, sysfs),
        tracepoints=tracepoints, scrape=scrape, files=files, max_overhead=None if max_overhead == "none" else max_overhead,
        topo=topo.read(TOPO_CHARS) if topo else None,
    )  # fmt: skip
    of_one = {"--kv-events": kv_events, "--forward-pass": forward_pass, "--log": log}
    given = [name for name, value in of_one.items() if value is not None]
    if len(urls) > 1 and given:
        raise UsageError(f"One {given[0]} can't be that of {len(urls)} servers.", hint="Attach to that server by itself.")
    pid = None if pid == "none" else pid
    if explain:
        from hoptrace.cli.attach_explain import explain as look

        told = look(urls, pid=pid, key=key, options=options, as_json=as_json)
        click.echo(uvloop.run(patiently(told, urls, quiet=quiet)))
        return
    if out is None:
        raise UsageError("Where shall the trace go?", hint="Name it: -o run.trace.")
    # The proxy shares this process with threads that write: let none of them hold it up for the default 5 ms.
    sys.setswitchinterval(0.0005)
    from hoptrace.collectors.session import Session

    target = None
    if sniff is not None:
        from hoptrace.collectors.engines.streams.sniff import parse_target

        target = parse_target(sniff)
    session = Session(
        urls, out, proxy=proxy, sniff=target, pid=pid, every_s=every, hashes=not no_hashes, group=group, key=key, options=options
    )  # fmt: skip
    if not uvloop.run(_record(session, urls, duration, quiet)):
        raise KeyboardInterrupt
    if as_json:
        click.echo(json.dumps(summary(session), indent=1))
    elif not quiet:
        click.echo(end(session))


async def _record(session: Session, urls: tuple[str, ...], duration_s: float | None, quiet: bool) -> bool:
    """Record until told to stop. False if that was before anything was recorded: then nothing is left."""
    import asyncio
    import os
    import signal
    from contextlib import AsyncExitStack, nullcontext, suppress

    from rich.console import Console
    from rich.live import Live

    from hoptrace.cli.attach_view import StatusLine, begin
    from hoptrace.cli.patience import patiently

    err = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    left = b"Stopped.\n"

    def asked() -> None:
        if stop.is_set():
            # A second time: leave at once, by no way that could hang. What was recorded is on the disk, and reads.
            with suppress(OSError):
                os.write(2, left)
            os._exit(130)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup has SIGHUP ignored, and that is to stay. A shell script has SIGINT ignored for what it starts with `&`: who sends
        # one to this process all the same (kill -INT) means it.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, asked)
    async with AsyncExitStack() as recording:
        try:
            await patiently(session.start(), urls, quiet=quiet, stop=stop)
        except asyncio.CancelledError:
            if stop.is_set():
                return False
            raise
        recording.push_async_exit(session)
        left = b"Left without closing the trace; it reads all the same, and hoptrace compact tidies it.\n"
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
                more_s = 1.0 if duration_s is None else duration_s - status.elapsed_s
                if more_s <= 0:
                    break
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), min(1.0, more_s))
        stop.set()  # from here a signal leaves at once
        err.print("Closing the trace …")
    return True
