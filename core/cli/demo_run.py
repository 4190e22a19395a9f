"""The demo's six steps, and what it shows where the model can't be had."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import hoptrace
from hoptrace.cli.demo_plan import SLICE, measure, write_workload
from hoptrace.cli.demo_view import print_comparison, quiet_enough
from hoptrace.demo_model import fetch_model
from hoptrace.demo_server import DemoServer
from hoptrace.errors import EnvironmentProblem
from hoptrace.reader import Trace

__all__ = ["Options", "run"]

_SLOTS = 4


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
        traces, own, outcome, warnings = _steps(o, model, progress)
    _show(o, err, traces, own, outcome, warnings)


def _steps(o: Options, model: Path, progress: Progress) -> tuple[dict[str, Trace], Any, Any, list[str]]:
    from hoptrace.replay.fidelity import compare
    from hoptrace.replay.run import predict, write
    from hoptrace.samples import sample

    paths = {
        n: o.folder / f"{n}.trace" for n in ("workload", "four-slots", "four-slots-replayed", "one-slot-predicted", "one-slot")
    }
    log = o.folder / "server.log"

    with DemoServer(model, slots=_SLOTS, log=log) as server:
        task = progress.add_task("measuring this machine", total=1)
        # Compiling the replay's kernel takes seconds of CPU on a first run: not while the server is being measured.
        predict(hoptrace.open(sample(SLICE)), "four-slots", cost="fixed:1,1")
        speed = measure(server.url)
        write_workload(sample(SLICE), paths["workload"], speed, requests=o.requests, span_s=o.span_s)
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
    outcome = compare(traces["one-slot"], traces["one-slot-predicted"])
    info = traces["one-slot-predicted"].manifest.replay
    return traces, own.own, outcome, [] if info is None else info.warnings


def _capture(server: DemoServer, workload: Path, out: Path, progress: Progress, title: str) -> None:
    from hoptrace.collectors.session import attached
    from hoptrace.replay.drive import drive

    work = hoptrace.open(workload)
    task = progress.add_task(title, total=work.rows("requests"))
    with attached(server.url, out, proxy=("127.0.0.1", 0), pid=server.pid) as session:
        result = asyncio.run(drive(work, session.proxy_url, progress=lambda done: progress.update(task, completed=done)))
    if result.failed:
        raise EnvironmentProblem(
            f"{result.failed} of {result.sent} requests failed (the first: {result.errors[0]}).",
            hint=f"The server's log is {server.log}.",
        )


def _show(o: Options, err: Console, traces: dict[str, Trace], own: Any, outcome: Any, warnings: list[str]) -> None:
    from hoptrace.analysis.report import report
    from hoptrace.analysis.report_text import print_report

    result = report(traces["four-slots"])
    quiet, words = quiet_enough({name: _cpu_wait(traces[name]) for name in ("four-slots", "one-slot")})
    if o.as_json:
        figures = {
            "traces": {name: str(t.path) for name, t in traces.items()},
            "own_policy": own.as_dict(),
            "one_slot": outcome.as_dict(),
            "quiet": quiet,
            "warnings": [words, *warnings],
            "report": result.as_dict(),
        }
        click.echo(json.dumps(figures))
        return
    out = Console(highlight=False)
    out.print()
    if not o.quiet:
        print_report(result, out)
        print_comparison(out, f"The same {_SLOTS} slots replayed: the error of the method", own)
        out.print()
    print_comparison(out, "One slot instead of four: predicted from the capture above, then measured", outcome)
    out.print(words if quiet else f"[yellow]{words}[/yellow]", soft_wrap=True)
    if o.quiet:
        return
    for warning in warnings:
        out.print(f"[yellow]note[/yellow] {warning}", soft_wrap=True)
    out.print("\nKept:")
    for trace in traces.values():
        out.print(f"  {trace.path}", soft_wrap=True)
    out.print(
        f"Next: hoptrace replay {traces['four-slots'].path} --set batching.max_sequences=2 -o two-slots.trace", soft_wrap=True
    )
    if o.app:
        shown = ("four-slots", "one-slot-predicted", "one-slot", "four-slots-replayed", "workload")
        _dashboard([traces[n].path for n in shown], o.browser, err)


def _cpu_wait(trace: Trace) -> float | None:
    from hoptrace.analysis.coordination import coordination

    figures = coordination(trace).os
    return None if figures is None else figures.run_delay_share


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
    print_report(result, Console(highlight=False))
    if o.app:
        _dashboard(samples(), o.browser, err)
