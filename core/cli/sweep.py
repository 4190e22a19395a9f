"""`hoptrace sweep`: many what-ifs of one trace, on all cores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hoptrace.cli.figures import amount, figure, span

if TYPE_CHECKING:
    import polars as pl

    from hoptrace.replay.sweep import Swept, Told

_SHOWN, _FAILURES = 40, 5
_ENDS = ("low", "high")


@click.command("sweep", short_help="Ask many what-ifs: the product of policies, platforms and loads.")
@click.argument("trace", type=click.Path(path_type=Path), metavar="T.trace")
@click.option("--grid", "grid_path", required=True, type=click.Path(path_type=Path), metavar="G.toml", help="What to combine.")
@click.option("--jobs", type=click.IntRange(1, 4096), metavar="N", help="Processes at once. As many as there are cores.")
@click.option("--slo", metavar="LIMITS", help="Goodput under these limits, as in ttft=500ms,itl_p99=50ms.")
@click.option("--no-tokens", is_flag=True, help="Make no token rows: faster, but ITL is unknown.")
@click.option(
    "--intervals",
    "draws",
    type=click.IntRange(0, 1000),
    default=0,
    metavar="N",
    help="Replays of each side of a point to draw its intervals from (columns …_low, …_high).",
)
@click.option("--retry-failed", is_flag=True, help="Do points again that failed in an earlier run.")
@click.option("-o", "--output", "out", required=True, type=click.Path(path_type=Path), metavar="OUT.parquet", help="The table.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def command(
    trace: Path,
    grid_path: Path,
    jobs: int | None,
    slo: str | None,
    no_tokens: bool,
    draws: int,
    retry_failed: bool,
    out: Path,
    as_json: bool,
    quiet: bool,
) -> None:
    """Ask many what-ifs of one trace: every combination of the values in a grid, one row each in a Parquet table.

    A grid is a TOML file. [base] holds what all points share, [axes] a list of values for each axis. Both take the options of
    `hoptrace replay` (policy, cost, platform, model, rate, seed, arrivals, until) and keys of a policy.

    \b
      [base]
      policy = "vllm-default"
      [axes]
      rate = ["1x", "1.5x", "2x"]
      "batching.max_sequences" = [8, 16, 32]

    What is finished stays finished: after a kill, the same command goes on where it was. A point that cannot be replayed is a
    row with its error. Add values to the grid and only the new points are done.

    \b
    Examples:
      hoptrace sweep run.trace --grid grid.toml -o sweep.parquet
      hoptrace sweep run.trace --grid grid.toml --slo ttft=500ms,tpot=50ms --jobs 4 -o sweep.parquet
    """
    from hoptrace.replay.sweep import sweep
    from hoptrace.replay.sweep.grid import load_grid
    from hoptrace.slo import parse_slo

    limits = parse_slo(slo) if slo else None
    grid = load_grid(grid_path)
    with _bar(quiet or as_json, grid.size) as told:
        swept = sweep(
            trace, grid, out, jobs=jobs, slo=limits, tokens=not no_tokens, retry_failed=retry_failed, draws=draws, told=told
        )
    if as_json:
        click.echo(json.dumps({"table": str(out), "points": grid.size, "kept": swept.kept, "failed": swept.failed,
                               "rows": swept.table.to_dicts()}))  # fmt: skip
    elif not quiet:
        _print(swept, list(grid.axes), out)


@contextmanager
def _bar(silent: bool, size: int) -> Iterator[Told | None]:
    if silent:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("points"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("points", total=size)
        yield lambda done, of, what: progress.update(task, completed=done, total=of)


def _print(swept: Swept, axes: list[str], out: Path) -> None:
    import polars as pl
    from rich.markup import escape

    from hoptrace.cli.console import PlainConsole

    console = PlainConsole(highlight=False)
    console.print(_table(swept.table.head(_SHOWN), axes))
    if swept.table.height > _SHOWN:
        console.print(f"… {swept.table.height - _SHOWN} more points in the table.", soft_wrap=True)
    for row in swept.table.filter(pl.col("status") != "ok").head(_FAILURES).iter_rows(named=True):
        where = ", ".join(f"{a} = {row[a]}" for a in axes)
        console.print(f"[red]failed[/red] {escape(where)}: {escape(str(row['error']))}", soft_wrap=True)
    kept = f", {swept.kept} done before" if swept.kept else ""
    console.print(f"{swept.table.height} points{kept}, {swept.failed} failed. Written: {escape(str(out))}", soft_wrap=True)


def _table(rows: pl.DataFrame, axes: list[str]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for axis in axes:
        table.add_column(escape(axis.rpartition(".")[2]), justify="right", overflow="fold")
    shown = (("TTFT p50", "ttft_p50_ns"), ("TTFT p99", "ttft_p99_ns"), ("ITL p99", "itl_p99_ns"), ("E2E p50", "e2e_p50_ns"))
    for name, _ in shown:
        table.add_column(name, justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column("done", justify="right")
    for row in rows.iter_rows(named=True):
        cells = [escape(str(row[a])) for a in axes]
        if row["status"] == "ok":
            cells += [_cell(row, c, "ns") for _, c in shown]
            cells += [_cell(row, "output_tokens_per_s", "/s"), f"{row['finished']:,} of {row['requests']:,}"]
        else:
            cells += ["[red]failed[/red]"]
        table.add_row(*cells)
    return table


def _cell(row: dict[str, Any], column: str, unit: str) -> str:
    """A figure, and below it its interval where the row has one."""
    low, high = (row.get(column.replace("_ns", f"_{end}_ns") if unit == "ns" else f"{column}_{end}") for end in _ENDS)
    value = row[column]
    if value is None or low is None or high is None:
        return figure(value, unit) if unit == "ns" else "unknown" if value is None else f"{value:,.0f}"
    return f"{amount(value, unit)}\n{span(low, high, value, unit)}"
