"""`hoptrace doctor`: what can be collected on this machine, what not and why, what it costs; the platform graph."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hoptrace.cli.attach import TOPO_CHARS, Duration, check_trees, which_machine

if TYPE_CHECKING:
    from hoptrace.collectors.hardware.source import Asked

__all__ = ["command"]


@click.command("doctor", short_help="What can be collected here, what not and why; the platform graph.")
@click.option("--pid", type=click.IntRange(1), metavar="N", help="Look at this process; else at the servers that run here.")
@click.option("--scrape", multiple=True, metavar="URL", help="A Prometheus page to look at (may be given again).")
@click.option(
    "--tracepoints", type=click.Choice(["thread", "cpu"]), help="Look at counts of futex, poll, ioctl and yield calls, too."
)
@click.option(
    "--every", type=Duration(), default="100ms", metavar="100ms", show_default=True, help="The rate that costs are told at."
)
@click.option("--for", "seconds", type=Duration(), default="2s", metavar="2s", show_default=True, help="How long to sample.")
@which_machine
@click.option("--missing", is_flag=True, help="List only what is not there, with what would make it so.")
@click.option("--graph", "only_graph", is_flag=True, help="Print only the platform graph.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def command(
    pid: int | None,
    scrape: tuple[str, ...],
    tracepoints: Any,
    every: float,
    seconds: float,
    proc: Path,
    sysfs: Path,
    topo: Any,
    missing: bool,
    only_graph: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Look at this machine: which sources of counters it has, what each answers, what it costs, and how its parts are joined.

    Each source is probed and, where it is there, sampled for two seconds. Of a source that is not there it says exactly why, and
    what would make it so: a package, a permission, a driver, other hardware. Nothing is changed and nothing is kept.

    The platform graph (memory nodes, devices, links with their rates) is what a capture writes into its trace, and what
    `hoptrace replay --platform from-trace` replays on.

    \b
    Examples:
      hoptrace doctor
      hoptrace doctor --missing
      hoptrace doctor --json > machine.json
      hoptrace doctor --scrape http://127.0.0.1:9400/metrics          dcgm-exporter
      docker run --pid=host -v /proc:/host/proc:ro -v /sys:/host/sys:ro … hoptrace doctor --proc /host/proc --sys /host/sys

    \b
    Exit code: 0 done (whatever is missing), 2 wrong use, 4 this system has no /proc.
    """
    import json

    from hoptrace.cli.doctor_view import as_dict, missing_text, text
    from hoptrace.cli.progress import progress
    from hoptrace.collectors.hardware.topology.text import graph_text

    asked, here = _asked(pid, scrape, tracepoints, proc, sysfs)
    with progress(quiet or as_json) as (say, _):
        found = _look(asked, here, topo.read(TOPO_CHARS) if topo else None, 0.0 if only_graph else seconds, every, say)
    if as_json:
        click.echo(json.dumps(found.graph if only_graph else as_dict(found), indent=1))
    elif only_graph:
        click.echo(graph_text(found.graph))
    else:
        click.echo(missing_text(found) if missing else text(found))


def _asked(pid: int | None, scrape: tuple[str, ...], tracepoints: Any, proc: Path, sysfs: Path) -> tuple[Asked, list[Any]]:
    import os
    from functools import partial

    from hoptrace.collectors.hardware.here import servers_here
    from hoptrace.collectors.hardware.listener import Found
    from hoptrace.collectors.hardware.source import Asked, Roots, Server
    from hoptrace.errors import EnvironmentProblem, UsageError

    if not (proc / "stat").exists():
        raise EnvironmentProblem(
            f"{proc} is no Linux /proc.", hint="hoptrace reads counters of Linux; name a /proc after --proc."
        )
    check_trees(proc, sysfs)
    if pid is not None and not (proc / str(pid)).exists():
        raise UsageError(f"There is no process {pid}.", hint="Give the server's number, or leave --pid out.")
    here = servers_here(proc)
    # Where no server runs this process stands for one: what may be read of a process, and what it costs.
    pids = [pid] if pid is not None else [h.pid for h in here] or ([os.getpid()] if proc == Path("/proc") else [])
    servers = [Server(str(p), partial(Found, p)) for p in pids]
    if not servers:  # so that the sources of a server are listed too
        servers = [Server("none", partial(Found, None, "no inference server was found running there"))]
    return Asked(Roots(proc, sysfs), servers, tracepoints, scrape), here


def _look(asked: Asked, here: list[Any], topo: str | None, seconds: float, every_s: float, say: Any) -> Any:
    import tempfile

    import hoptrace
    from hoptrace.analysis.contradicted import contradictions_of
    from hoptrace.cli.doctor_view import Examined
    from hoptrace.collectors.hardware.examination import examine
    from hoptrace.collectors.hardware.host import own_host
    from hoptrace.collectors.hardware.topology.discover import discover

    with tempfile.TemporaryDirectory(prefix="hoptrace-doctor-") as folder:
        out = Path(folder) / "doctor.trace"
        entries = examine(asked, own_host(), out, seconds=seconds, every_s=every_s, say=say)
        say("looking at the platform")
        graph = discover(asked.roots, topo)
        doubts = [str(c) for c in contradictions_of(hoptrace.open(out))] if seconds > 0 else []
    return Examined(entries, graph, doubts, here, every_s)
