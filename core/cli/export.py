"""`hoptrace export`."""

from __future__ import annotations

import click


@click.command("export")
@click.argument("trace", type=click.Path(), metavar="TRACE")
@click.option("-o", "--output", required=True, type=click.Path(), metavar="FILE", help="File to write.")
@click.option("--mooncake", is_flag=True, help="A Mooncake trace: arrivals, lengths, prefix hashes (JSON lines).")
@click.option("--azure", is_flag=True, help="An Azure LLM inference trace: arrivals and lengths (CSV).")
@click.option("--aiperf", is_flag=True, help="AIPerf's mooncake_trace: as --mooncake, with sessions and delays.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing.")
def command(trace: str, output: str, mooncake: bool, azure: bool, aiperf: bool, force: bool, quiet: bool) -> None:
    """Give a trace to other tools: as a Perfetto timeline, or its requests as a log that other tools replay.

    Without --mooncake, --azure or --aiperf it is a timeline: requests with their parts of latency, steps per server, counters,
    events. Open it at https://ui.perfetto.dev: it stays in your browser. Times are the trace's own nanoseconds, unchanged.

    What a format cannot hold is left out, counted and printed.

    \b
    Examples:
      hoptrace export run.trace -o run.pftrace
      hoptrace export run.trace -o run.jsonl --mooncake
      hoptrace export run.trace -o run.csv --azure --force -q
      hoptrace export run.trace -o run.jsonl --aiperf
    """
    from pathlib import Path

    from hoptrace.analysis.export.whole_file import check_target
    from hoptrace.errors import UsageError

    chosen = [name for name, on in (("mooncake", mooncake), ("azure", azure), ("aiperf", aiperf)) if on]
    if len(chosen) > 1:
        raise UsageError(f"An export has one format, not {len(chosen)} ({', '.join(chosen)}).", hint="Run it once for each.")
    check_target(Path(output), force=force)
    if chosen:
        _log(trace, output, chosen[0], force=force, quiet=quiet)
    else:
        _timeline(trace, output, force=force, quiet=quiet)


def _timeline(trace: str, output: str, *, force: bool, quiet: bool) -> None:
    from pathlib import Path

    import hoptrace
    from hoptrace.analysis.export.perfetto import export
    from hoptrace.cli.console import PlainConsole

    console = PlainConsole(stderr=True, quiet=quiet, highlight=False, width=None if quiet else 200)
    opened = hoptrace.open(trace)
    with console.status("Writing …") as status:
        result = export(
            opened, Path(output), force=force, progress=lambda table, n: status.update(f"Writing … {table} done, {n:,} packets")
        )
    size = result.path.stat().st_size
    console.print(f"{result.path}: {result.slices:,} slices, {result.samples:,} counter samples, {size / 1e6:,.1f} MB.")
    for table, n in result.skipped.items():
        console.print(f"{n:,} rows of {table} were left out: they lie before 1970 or end before they start.")
    if result.still:
        console.print(f"{result.still:,} counters that never change have no track (there are many of their kind).")
    console.print("Open it at https://ui.perfetto.dev (Open trace file).")


def _log(trace: str, output: str, kind: str, *, force: bool, quiet: bool) -> None:
    from pathlib import Path

    import hoptrace
    from hoptrace.analysis.export.export_azure import export_azure
    from hoptrace.analysis.export.export_mooncake import export_aiperf, export_mooncake

    write = {"mooncake": export_mooncake, "azure": export_azure, "aiperf": export_aiperf}[kind]
    done = write(hoptrace.open(trace), Path(output), force=force)
    if quiet:
        return
    click.echo(f"{done.path}: {done.requests:,} request{'' if done.requests == 1 else 's'}", err=True)
    for why, n in done.left_out.items():
        click.echo(f"  left out {n:,}: {why}", err=True)
    for note in done.notes:
        click.echo(f"  note: {note}", err=True)
    if done.unheld:
        lost = ", ".join(f"{name} ({n:,})" for name, n in done.unheld.items())
        click.echo(f"  this format has no place for: {lost}", err=True)
