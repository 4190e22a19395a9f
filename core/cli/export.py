"""`hoptrace export`."""

from __future__ import annotations

import click


@click.command("export")
@click.argument("trace", type=click.Path(), metavar="TRACE")
@click.option("-o", "--output", required=True, type=click.Path(), metavar="FILE.pftrace", help="File to write.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing.")
def command(trace: str, output: str, force: bool, quiet: bool) -> None:
    """Write a trace as a Perfetto timeline: requests with their parts of latency, steps per server, counters, events.

    Open the file at https://ui.perfetto.dev: it stays in your browser. Times are the trace's own nanoseconds, unchanged.

    \b
    Examples:
      hoptrace export run.trace -o run.pftrace
      hoptrace export run.trace -o run.pftrace --force -q
    """
    from pathlib import Path

    from rich.console import Console

    import hoptrace
    from hoptrace.analysis.perfetto import export

    console = Console(stderr=True, quiet=quiet, highlight=False, width=None if quiet else 200)
    opened = hoptrace.open(trace)
    with console.status("Writing …") as status:
        result = export(
            opened, Path(output), force=force, progress=lambda table, n: status.update(f"Writing … {table} done, {n:,} packets")
        )
    size = result.path.stat().st_size
    console.print(f"{result.path}: {result.slices:,} slices, {result.samples:,} counter samples, {size / 1e6:,.1f} MB.")
    for table, n in result.skipped.items():
        console.print(f"{n:,} rows of {table} were left out: they lie before 1970 or end before they start.")
    console.print("Open it at https://ui.perfetto.dev (Open trace file).")
