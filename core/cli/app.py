"""`hoptrace app`: the dashboard."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import click


@click.command("app", short_help="Open the dashboard.")
@click.argument("traces", nargs=-1, type=click.Path(path_type=Path), metavar="[T.trace ...]")
@click.option("--port", type=click.IntRange(1, 65535), metavar="N", help="Port to listen on; else the first free one from 8501.")
@click.option("--no-browser", is_flag=True, help="Only print the address; open no browser window.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but the address and errors.")
def command(traces: tuple[Path, ...], port: int | None, no_browser: bool, quiet: bool) -> None:
    """Open the dashboard on traces: overview, time, requests, and a comparison of any two.

    A folder of traces stands for all traces in it. Without any, the sample traces that come with hoptrace are shown. It listens
    on 127.0.0.1 only; Ctrl-C ends it. A trace that is still being recorded can be shown: reload the page to read it again.

    \b
    Examples:
      hoptrace app                              the sample traces
      hoptrace app run.trace what-if.trace      two traces, one beside the other
      hoptrace app captures/                    every trace in the folder
      hoptrace app run.trace --port 8600 --no-browser
    """
    from hoptrace.app.launch import start
    from hoptrace.app.traces import checked

    paths = checked(traces)
    # A plain `kill` must not leave the dashboard's process behind.
    signal.signal(signal.SIGTERM, _interrupt)
    if not quiet:
        click.echo("Starting the dashboard …", err=True)
    with start(paths, port, open_browser=not no_browser) as dashboard:
        click.echo(dashboard.url)
        if not quiet:
            click.echo("Ctrl-C ends it.", err=True)
        try:
            code = dashboard.wait()
        except KeyboardInterrupt:
            click.echo("\nThe dashboard has ended.", err=True)
            return
        if code:
            from hoptrace.errors import EnvironmentProblem

            raise EnvironmentProblem(f"The dashboard ended by itself: {dashboard.log_tail()}", hint="Start it again.")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
