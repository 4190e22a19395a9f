"""`hoptrace compact`."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["command"]


@click.command("compact")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing.")
def command(trace: Path, as_json: bool, quiet: bool) -> None:
    """Tidy a trace whose writer was killed, or whose disk was full.

    Journals become sorted Parquet parts, and files that an interrupted rotation left behind are removed. Reading needs none of
    this: it makes the trace smaller, faster to read, and readable by other tools. The trace still says that it was not closed
    cleanly.

    \b
    Exit code: 0 done, 2 the trace is still being written, 3 no trace there, 4 the disk refuses.

    \b
    Examples:
      hoptrace compact run.trace
    """
    import json
    from dataclasses import asdict

    from hoptrace.compaction import compact

    done = compact(trace)
    if as_json:
        click.echo(json.dumps(asdict(done)))
    elif not quiet:
        if done.journals or done.removed:
            click.echo(
                f"{trace}: {done.journals} journals became parts ({done.rows:,} rows), {done.removed} stray files removed."
            )
        else:
            click.echo(f"{trace}: nothing to do.")
