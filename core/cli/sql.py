"""`hoptrace sql`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hoptrace.schema import TABLES

if TYPE_CHECKING:
    import polars as pl

__all__ = ["command"]

_MOST_ROWS = 50
_TABLES = "\n".join(f"  {t.name:<11} {t.row}" for t in TABLES.values())

_HELP = f"""Query the tables of a trace by their names.

The SQL is DuckDB's (https://duckdb.org/docs/sql/introduction). Times are integer nanoseconds of the trace clock (since 1970),
sizes are bytes, unknown is NULL. The query sees the tables and nothing else: no files, no network, no extensions. On the terminal
at most {_MOST_ROWS} rows are shown; --json and --csv give all of them. QUERY may be - to read it from standard input.

\b
Tables (columns: DESCRIBE tokens, or docs/schema.md):
{_TABLES}

\b
Examples:
  hoptrace sql run.trace "SELECT count(*) FROM requests WHERE error IS NULL"
  hoptrace sql run.trace "SELECT request, (first_token_ns - arrival_ns) / 1e6 AS ttft_ms FROM requests ORDER BY 2 DESC LIMIT 10"
  hoptrace sql run.trace "SELECT object, src, dst, sum(bytes) AS bytes FROM moves GROUP BY ALL" --json
  hoptrace sql run.trace "FROM tokens" --csv > tokens.csv
  hoptrace sql run.trace - < query.sql
"""


@click.command("sql", help=_HELP)
@click.argument("trace", type=click.Path(path_type=Path))
@click.argument("query")
@click.option("--json", "as_json", is_flag=True, help="Print all rows as a JSON array of objects.")
@click.option("--csv", "as_csv", is_flag=True, help="Print all rows as CSV (lists as JSON).")
@click.option("-q", "--quiet", is_flag=True, help="On the terminal, print no line about rows left out.")
def command(trace: Path, query: str, as_json: bool, as_csv: bool, quiet: bool) -> None:
    import sys

    import hoptrace
    from hoptrace.errors import UsageError

    if as_json and as_csv:
        raise UsageError("--json and --csv exclude each other.")
    text = sys.stdin.read() if query == "-" else query
    if not text.strip():
        raise UsageError("The query is empty.", hint='For example: hoptrace sql run.trace "SELECT count(*) FROM requests"')
    frame = hoptrace.open(trace).sql(text)
    if as_json:
        _print_json(frame)
    elif as_csv:
        _print_csv(frame)
    else:
        _print_table(frame, quiet)


def _print_json(frame: pl.DataFrame) -> None:
    import json
    import math

    def plain(value: object) -> object:
        # JSON has no NaN; unknown is null.
        return None if isinstance(value, float) and not math.isfinite(value) else value

    click.echo("[")
    for i, row in enumerate(frame.iter_rows(named=True)):
        text = json.dumps({k: plain(v) for k, v in row.items()}, ensure_ascii=False, default=str)
        click.echo(f" {text}" if i == 0 else f",\n {text}", nl=False)
    click.echo("\n]" if frame.height else "]")


def _print_csv(frame: pl.DataFrame) -> None:
    import csv
    import json
    import sys

    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(frame.columns)
    for row in frame.iter_rows():
        out.writerow(json.dumps(v) if isinstance(v, list | dict) else v for v in row)


def _print_table(frame: pl.DataFrame, quiet: bool) -> None:
    import shutil
    import sys

    from rich.table import Table
    from rich.text import Text

    from hoptrace.cli.console import PlainConsole

    table = Table(show_edge=False, header_style="bold")
    for name, kind in frame.schema.items():
        # Text, not markup: what stands in a trace must not be read as formatting.
        table.add_column(Text(name), justify="right" if kind.is_numeric() else "left", overflow="fold")
    for row in frame.head(_MOST_ROWS).iter_rows():
        table.add_row(*(Text(_cell(v)) for v in row))
    # A pipe has no width: then no cell is folded.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    console = PlainConsole(width=width, highlight=False)
    if not sys.stdout.isatty():
        table.expand = False
    console.print(table)
    left = frame.height - _MOST_ROWS
    if left > 0 and not quiet:
        click.echo(f"… {left:,} more row{'' if left == 1 else 's'}; --csv or --json prints all.", err=True)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.1f}"
    if isinstance(value, list) and len(value) > 8:
        return f"[{', '.join(map(str, value[:8]))}, … {len(value)}]"
    return str(value)
