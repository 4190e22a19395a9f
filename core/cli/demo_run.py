"""The demo's six steps, and what it shows where the model can't be had."""

from __future__ import annotations

import asyncio
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import hoptrace
from hoptrace.cli.console import PlainConsole
from hoptrace.cli.demo_plan import SLICE, measure, write_workload
from hoptrace.cli.demo_view import drift, print_comparison, quiet_enough
from hoptrace.demo_model import fetch_model
from hoptrace.demo_server import HOST_CACHE_MIB, DemoServer
from hoptrace.errors import EnvironmentProblem
from hoptrace.manifest import read_manifest, write_manifest
from hoptrace.reader import Trace

if TYPE_CHECKING:
    from hoptrace.comparison import Comparison

__all__ = ["Options", "Results", "run"]

_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Results:
    """What came out: the traces by name, and three comparisons.

    ``own``: four slots replayed, against the capture. ``one``: one slot predicted, against its own capture. ``steady``: the
    same with each step at the speed of the second capture, so that what is left is not the machine's drift. ``slower``: time of
    steps in the second capture ÷ time of equal steps in the first.
    """

    traces: dict[str, Trace]
    own: Comparison | None
    one: Comparison
    steady: Comparison
    slower: float | None
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for."""

    folder: Path
    requests: int
    span_s: float
    app: bool
    browser: bool
    as_json: bool
    quiet: bool


def run(o: Options) -> None:
    """Run the demo; see `hoptrace demo --help`. Raises HoptraceError for whatever stands in the way."""
    err = Console(stderr=True, highlight=False, quiet=o.quiet)
    try:
        with err.status("fetching the model (98 MB, once)"):
            model = fetch_model()
    except EnvironmentProblem as e:
        _samples_instead(o, err, e)
        return
    o.folder.mkdir(parents=True, exist_ok=True)
    with Progress(
        SpinnerColumn(finished_text="[green]✓[/green]"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        disable=o.quiet,
    ) as progress:
        results = _steps(o, model, progress)
    _show(o, err, results)


def _steps(o: Options, model: Path, progress: Progress) -> Results:
    from hoptrace.comparison import compare, speed
    from hoptrace.reconstruct import steps_of
    from hoptrace.replay.run import predict, write
    from hoptrace.samples import sample
    from hoptrace.stepcost import fit

    paths = {
        n: o.folder / f"{n}.trace" for n in ("workload", "four-slots", "four-slots-replayed", "one-slot-predicted", "one-slot")
    }
    log = o.folder / "server.log"

    with DemoServer(model, slots=_SLOTS, log=log) as server:
        task = progress.add_task("measuring this machine", total=1)
        # Compiling the replay's kernel takes seconds of CPU on a first run: not while the server is being measured.
        predict(hoptrace.open(sample(SLICE)), "four-slots", cost="fixed:1,1")
        write_workload(sample(SLICE), paths["workload"], measure(server.url), requests=o.requests, span_s=o.span_s)
        progress.update(task, advance=1)
        _capture(server, paths["workload"], paths["four-slots"], progress, f"capturing the real server, {_SLOTS} slots")

    four = hoptrace.open(paths["four-slots"])
    task = progress.add_task("replaying: its own policy, then one slot", total=2)
    own = predict(four, "as-recorded")
    write(own, paths["four-slots-replayed"])
    progress.update(task, advance=1)
    predicted = predict(four, "one-slot")
    write(predicted, paths["one-slot-predicted"])
    progress.update(task, advance=1)

    with DemoServer(model, slots=1, log=log) as server:
        measure(server.url)  # warms it up as the first was
        _capture(server, paths["workload"], paths["one-slot"], progress, "capturing the real server, one slot")

    traces = {name: hoptrace.open(path) for name, path in paths.items()}
    steps = steps_of(traces["one-slot"]).steps
    steady = predict(four, "one-slot", cost=fit(steps))
    info = traces["one-slot-predicted"].manifest.replay
    return Results(
        traces=traces,
        own=own.own,
        one=compare(traces["one-slot"], traces["one-slot-predicted"]),
        steady=compare(traces["one-slot"], steady.trace),
        slower=speed(steps, predicted.cost),
        warnings=[] if info is None else info.warnings,
    )


def _capture(server: DemoServer, workload: Path, out: Path, progress: Progress, title: str) -> None:
    from hoptrace.collectors.attached import attached
    from hoptrace.replay.drive import drive

    work = hoptrace.open(workload)
    task = progress.add_task(title, total=work.rows("requests"))
    with attached(server.url, out, proxy=("127.0.0.1", 0), pid=server.pid) as session:
        result = asyncio.run(drive(work, session.proxy_url, progress=lambda done: progress.update(task, completed=done)))
    # The server does not tell the size of its host prompt cache; who started it knows.
    manifest = read_manifest(out)
    manifest.servers[0].config["cache_ram_mib"] = HOST_CACHE_MIB
    write_manifest(out, manifest)
    if result.failed:
        raise EnvironmentProblem(
            f"{result.failed} of {result.sent} requests failed (the first: {result.errors[0]}).",
            hint=f"The server's log is {server.log}.",
        )


def _show(o: Options, err: Console, r: Results) -> None:
    from hoptrace.analysis.report import report
    from hoptrace.analysis.report_text import print_report

    result = report(r.traces["four-slots"])
    quiet, words = quiet_enough({name: _others(r.traces[name]) for name in ("four-slots", "one-slot")})
    if o.as_json:
        figures = {
            "traces": {name: str(t.path) for name, t in r.traces.items()},
            "own_policy": None if r.own is None else r.own.as_dict(),
            "one_slot": r.one.as_dict(),
            "one_slot_at_its_own_speed": r.steady.as_dict(),
            "time_of_equal_steps": r.slower,
            "quiet": quiet,
            "warnings": [words, *r.warnings],
            "report": result.as_dict(),
        }
        click.echo(json.dumps(figures))
        return
    out = Console(highlight=False)
    out.print()
    if not o.quiet:
        print_report(result, out)
        if r.own is not None:
            print_comparison(out, f"The same {_SLOTS} slots replayed: the error of the method", r.own)
            out.print()
    print_comparison(out, "One slot instead of four: predicted from the capture above, then measured", r.one)
    out.print(drift(r.slower, r.steady), soft_wrap=True)
    out.print(words if quiet else f"[yellow]{words}[/yellow]", soft_wrap=True)
    if o.quiet:
        return
    for warning in r.warnings:
        out.print(f"[yellow]note[/yellow] {warning}", soft_wrap=True)
    out.print("\nKept:")
    for trace in r.traces.values():
        out.print(f"  {trace.path}", soft_wrap=True)
    four = r.traces["four-slots"].path
    next_one = f"Next: hoptrace replay {shlex.quote(str(four))} --set batching.max_sequences=2 -o two-slots.trace"
    out.print(next_one, soft_wrap=True, markup=False)
    if o.app:
        shown = ("four-slots", "one-slot-predicted", "one-slot", "four-slots-replayed", "workload")
        _dashboard([r.traces[n].path for n in shown], o.browser, err)


def _others(trace: Trace) -> float | None:
    from hoptrace.analysis.arranging.coordination import coordination

    figures = coordination(trace).os
    return None if figures is None else figures.foreign_cpu_share


def _dashboard(paths: list[Path], browser: bool, err: Console) -> None:
    from hoptrace.app.launch import start

    with err.status("starting the dashboard"):
        dashboard = start(paths, None, browser)
    err.print(f"\nDashboard: {dashboard.url}   (Ctrl-C ends it)")
    with dashboard:
        try:
            dashboard.wait()
        except KeyboardInterrupt:
            err.print("Stopped.")


def _samples_instead(o: Options, err: Console, problem: EnvironmentProblem) -> None:
    from hoptrace.analysis.report import report
    from hoptrace.analysis.report_text import print_report
    from hoptrace.samples import sample, samples

    err.print(f"[yellow]The model can't be had here.[/yellow] {problem}\nThe sample traces are shown instead.", soft_wrap=True)
    result = report(hoptrace.open(sample("llamacpp-four-slots")))
    if o.as_json:
        click.echo(
            json.dumps({"traces": {p.stem: str(p) for p in samples()}, "problem": str(problem), "report": result.as_dict()})
        )
        return
    print_report(result, PlainConsole(highlight=False))
    if o.app:
        _dashboard(samples(), o.browser, err)
