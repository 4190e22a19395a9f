"""`hoptrace report`."""

from __future__ import annotations

import click


@click.command("report")
@click.argument("trace", type=click.Path(), metavar="TRACE")
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON (schema: docs/report.md) and nothing else.")
@click.option("-q", "--quiet", is_flag=True, help="Print the headline only.")
@click.option("--width", type=click.IntRange(60), default=None, help="Columns to use; by default those of the terminal.")
def command(trace: str, as_json: bool, quiet: bool, width: int | None) -> None:
    """Say where the time went, what moved, and what coordination cost.

    TRACE is a folder that `hoptrace attach`, `import` or `replay` wrote. The parts of each request's time add up to its
    end-to-end time exactly; what the recording cannot show is listed at the end, never guessed. `hoptrace explain PART` says
    what a part means.

    \b
    Examples:
      hoptrace report run.trace
      hoptrace report run.trace -q                    one sentence
      hoptrace report run.trace --json | jq .accounting.compositions.p99
    """
    import json
    import sys

    from rich.console import Console

    import hoptrace
    from hoptrace.analysis.report import report

    with Console(stderr=True, quiet=quiet).status(f"Reading {trace} …"):
        result = report(hoptrace.open(trace))
    if as_json:
        json.dump(result.as_dict(), sys.stdout, indent=1, ensure_ascii=False)
        click.echo()
        return
    if quiet:
        click.echo(result.headline)
        return
    from hoptrace.analysis.report_text import print_report

    # Piped into a file there is no terminal to ask: 110 columns hold every table.
    columns = width or (None if sys.stdout.isatty() else 110)
    print_report(result, Console(width=columns, highlight=False, soft_wrap=False))
