"""`hoptrace report`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoptrace.analysis.layers.ceilings import Ceiling
    from hoptrace.analysis.report import Report
    from hoptrace.reader import Trace


@click.command("report")
@click.argument("trace", type=click.Path(), metavar="TRACE")
@click.option("--full", is_flag=True, help="All sections in full instead of one screen.")
@click.option(
    "--section", "names", multiple=True, metavar="NAME", help="One section in full; may be repeated, or list names by commas."
)
@click.option("--slo", metavar="LIMITS", help="Goodput under limits, for example ttft=500ms,tpot=50ms,itl_p99=200ms,e2e=10s.")
@click.option(
    "--platform",
    metavar="NAME|FILE",
    help="Rates of one device, for the layers: a name (`hoptrace platforms`) or a TOML file; by default what the trace says.",
)
@click.option("--ceilings", is_flag=True, help="Replay the trace with one cost taken away at a time: the most each could gain.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON (schema: docs/report.md) and nothing else.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False),
    metavar="F",
    help="Write all of it as one self-contained HTML file; replaces an earlier report, no other file.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print the headline and the latencies only.")
@click.option("--width", type=click.IntRange(60), default=None, help="Columns to use; by default those of the terminal.")
def command(
    trace: str,
    full: bool,
    names: tuple[str, ...],
    slo: str | None,
    platform: str | None,
    ceilings: bool,
    as_json: bool,
    html: str | None,
    quiet: bool,
    width: int | None,
) -> None:
    """Say where the time went, what moved, and what coordination cost.

    TRACE is a folder that `hoptrace attach`, `import` or `replay` wrote. The report is one screen; --section and --full give all
    of it. The parts of each request's time add up to its end-to-end time exactly; what the recording cannot show is listed, never
    guessed. `hoptrace explain NAME` says what a figure means.

    \b
    Sections: latency, time, moves, coordination, hardware, hidden, layers, stranding, reversibility, unseen.

    \b
    Examples:
      hoptrace report run.trace
      hoptrace report run.trace -q                    the headline
      hoptrace report run.trace --section time        every part of the latency
      hoptrace report run.trace --slo ttft=500ms,tpot=50ms
      hoptrace report run.trace --ceilings --section layers
      hoptrace report run.trace --html run.html       one file to send to somebody
      hoptrace report run.trace --json | jq .accounting.compositions.p99
    """
    import json
    import sys

    from rich.console import Console
    from rich.markup import escape

    import hoptrace
    from hoptrace.analysis.report import SECTIONS, quick, quick_lines, report
    from hoptrace.cli.console import PlainConsole
    from hoptrace.errors import UsageError
    from hoptrace.platform import load_platform
    from hoptrace.printable import printable
    from hoptrace.slo import parse_slo

    if full and names:
        raise UsageError("--full and --section exclude each other: --full is all sections.")
    if quiet and (full or names or as_json or (ceilings and not html)):
        raise UsageError("-q prints the headline alone; it goes with none of --full, --section, --json and --ceilings.")
    chosen = [n for given in names for n in given.replace(" ", "").split(",") if n]
    if names and not chosen:
        raise UsageError("--section names no section.", hint=f"Sections: {', '.join(SECTIONS)}.")
    limits = parse_slo(slo) if slo is not None else None
    rates = load_platform(platform) if platform is not None else None
    if html:
        _check_page(html)
    wanted = list(SECTIONS) if html else () if quiet else chosen or list(SECTIONS)
    opened = hoptrace.open(trace)
    if quiet and not html:
        click.echo("\n".join(printable(line) for line in quick_lines(*quick(opened))))
        return
    with Console(stderr=True, quiet=quiet).status(f"Reading {escape(trace)} …") as status:
        asked = _ceilings(opened, platform, lambda text: status.update(escape(text))) if ceilings else ()
        result = report(opened, sections=wanted, slo=limits, platform=rates, ceilings=asked)
        if html:
            _write(result, opened, html)
    if html and not as_json and not quiet:
        click.echo(f"Wrote {html}.", err=True)
    if as_json:
        json.dump(result.as_dict(), sys.stdout, indent=1, ensure_ascii=False, allow_nan=False)
        click.echo()
        return
    if quiet:
        click.echo(printable(result.headline))
        return
    if html and not full and not chosen:
        return
    from hoptrace.analysis.report_text import print_report

    # Piped into a file there is no terminal to ask: 110 columns hold every table.
    columns = width or (None if sys.stdout.isatty() else 110)
    shown = chosen or (list(SECTIONS) if full else None)
    print_report(result, PlainConsole(width=columns, highlight=False, soft_wrap=False), sections=shown)


def _ceilings(trace: Trace, platform: str | None, progress: Callable[[str], None]) -> list[Ceiling]:
    from hoptrace.analysis.layers.ceilings import Ceiling
    from hoptrace.replay.ceilings import ceilings

    return [Ceiling.from_dict(c) for c in ceilings(trace, platform=platform, progress=progress)]


def _check_page(path: str) -> None:
    """Say before the work that the page cannot be written: its folder is not there, or a file is that is no such page."""
    from pathlib import Path

    from hoptrace.analysis.export.whole_file import check_target
    from hoptrace.errors import EnvironmentProblem, UsageError

    file = Path(path)
    check_target(file, force=True)
    if not file.absolute().parent.is_dir():
        raise EnvironmentProblem(f"{path} cannot be written: there is no folder {file.parent}.")
    try:
        with file.open("rb") as given:
            start = given.read(8192)
    except FileNotFoundError:
        return
    except OSError as e:
        raise EnvironmentProblem(f"{path} cannot be read, so it is not replaced: {e.strerror}.") from None
    if start and b": hoptrace report</title>" not in start:
        raise UsageError(f"{path} is there and is no report of hoptrace.", hint="Name another file after --html, or remove it.")


def _write(result: Report, trace: Trace, path: str) -> None:
    from pathlib import Path

    from hoptrace.analysis.export.whole_file import whole_file
    from hoptrace.app.static_report import page

    text = page(result, trace)
    with whole_file(Path(path), force=True) as file:
        file.write(text.encode("utf-8", "replace"))
