"""`hoptrace calibrate --probe`: look at a server, ask, send the probe while recording it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hoptrace.manifest import Server
    from hoptrace.replay.calibration.probing import Probed

__all__ = ["probe"]


def probe(
    url: str, out: Path, *, requests: int, at_most_s: float, model: str | None, busy: bool, yes: bool, quiet: bool
) -> Probed:
    """Probe the server at ``url`` into the trace ``out``.

    Raises:
        UsageError: nobody can be asked, and --yes was not given.
        EnvironmentProblem: nothing answers there; other requests run there and ``busy`` is false; no request succeeds.
        click.Abort: the user said no.
    """
    from hoptrace.collectors.apart import recording
    from hoptrace.replay.calibration.probing import limits_of, probing

    server, going = asyncio.run(_look(url))
    _refuse_if_busy(url, going, busy)
    limits, assumed = limits_of(server)
    if not quiet:
        for note in (*assumed, *_untold(going)):
            click.echo(note, err=True)
    if not yes:
        _ask(url, requests, at_most_s)
    with recording(url, out) as address, _progress(quiet) as tell:
        done = probing(address, limits, requests=requests, at_most_s=at_most_s, model=model, progress=tell)
    if not quiet:
        _print(done, out)
    return done


async def _look(url: str) -> tuple[Server, int | None]:
    """The server as it describes itself, and how many requests it has in flight."""
    from hoptrace.collectors.context import Options
    from hoptrace.collectors.engines.running import running
    from hoptrace.collectors.target import Target

    target = await Target.find(url, key=None, pid="auto", options=Options())
    try:
        return target.server, await running(url)
    finally:
        await target.ctx.api.close()


def _refuse_if_busy(url: str, going: int | None, busy: bool) -> None:
    from hoptrace.errors import EnvironmentProblem

    if going and not busy:
        what = "1 request is" if going == 1 else f"{going} requests are"
        raise EnvironmentProblem(
            f"{what} in flight at {url}: a probe would slow them, and they would spoil it.",
            hint="Wait until it is idle, or say --even-if-busy.",
        )


def _untold(going: int | None) -> list[str]:
    return [] if going is not None else ["Whether other requests are running is not told by /metrics or /slots."]


def _ask(url: str, requests: int, at_most_s: float) -> None:
    from hoptrace.errors import UsageError

    if not sys.stdin.isatty():
        raise UsageError("A probe loads the server, and there is nobody to ask.", hint="Say --yes.")
    click.confirm(
        f"{requests} requests will load {url} for up to {at_most_s:.0f} s: as many at once as it runs, and prompts up to its "
        "context. Go on?",
        abort=True,
        err=True,
    )


@contextmanager
def _progress(silent: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    if silent:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("pace", total=None)
        yield lambda kind, sent, planned: bar.update(task, description=kind, completed=sent, total=planned)


def _print(done: Probed, out: Path) -> None:
    by_kind: dict[str, int] = {}
    for p in done.phases:
        by_kind[p["kind"]] = by_kind.get(p["kind"], 0) + p["requests"]
    took = sum(p["took_s"] for p in done.phases)
    parts = ", ".join(f"{n} {kind}" for kind, n in by_kind.items())
    click.echo(f"{done.sent} requests in {took:.0f} s ({parts}), recorded into {out}.")
    if done.stopped:
        click.echo("Stopped by Ctrl-C: what was recorded until then is kept.")
    if done.skipped:
        click.echo(f"Left out, since --at-most did not allow it: {', '.join(dict.fromkeys(done.skipped))}.")
    for why, n in done.failures.items():
        click.echo(f"{n} failed: {why}")
    most = max((p["requests"] for p in done.phases if p["kind"] == "decoders alone"), default=0)
    if 0 < most < done.limits.sequences and not done.stopped:
        click.echo(f"{most} decoders at once were tried; the server runs {done.limits.sequences:,}: more --requests reach more.")
