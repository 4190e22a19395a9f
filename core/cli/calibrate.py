"""`hoptrace calibrate`: what a step costs, out of captures of a server, kept in a file; and a probe that widens it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hoptrace.cli.attach import Duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hoptrace.replay.calibration.fitting import Calibrated


@click.command("calibrate", short_help="Fit what a step costs, and keep it; probe a server for a wider domain.")
@click.argument("traces", nargs=-1, type=click.Path(path_type=Path), metavar="[T.trace ...]")
@click.option("--probe", "url", metavar="URL", help="Send a designed set of requests to this server while recording it.")
@click.option(
    "-o",
    "--output",
    "out",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="The cost file to write; with --probe the trace of the probe. Must not exist.",
)
@click.option(
    "--cost", "cost", type=click.Path(path_type=Path), metavar="cost.json", help="With --probe: the cost file to write."
)
@click.option("--server", metavar="NAME", help="Of a trace of several unlike servers: the one to calibrate.")
@click.option(
    "--requests", type=click.IntRange(min=8, max=2000), default=60, show_default=True, metavar="N", help="Requests of a probe."
)
@click.option(
    "--at-most", "at_most", type=Duration(), default="120s", show_default=True, metavar="TIME", help="A probe takes no longer."
)
@click.option("--model", metavar="NAME", help="With --probe: the model to ask for; the first that the server names if not given.")
@click.option(
    "--even-if-busy", "busy", is_flag=True, help="Probe a server that has requests running; they are slowed, and the fit is off."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask before loading the server.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def command(
    traces: tuple[Path, ...],
    url: str | None,
    out: Path | None,
    cost: Path | None,
    server: str | None,
    requests: int,
    at_most: float,
    model: str | None,
    busy: bool,
    yes: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Fit what a step of a server costs, and what time passes outside its steps, to one or several captures of it.

    Two to five minutes of ordinary traffic are enough. Several captures are fitted as one: how fast the machine was in each is
    taken out as a factor first, and printed. What comes out is printed with its errors, with what the steps held, and with up to
    what settings of the engine what-ifs are covered; -o keeps it for `--cost file:cost.json` of replay, sweep, fidelity, advise.

    With --probe a designed set of requests is sent to a live server while it is recorded: prompts alone of many lengths, decoders
    alone from one to as many as it runs, prompts beside decoders, long contexts. It loads the server, and asks before it does;
    it is not sent while other requests are running. Ctrl-C ends it, and what was recorded until then is kept.

    \b
    Examples:
      hoptrace calibrate run.trace -o cost.json
      hoptrace calibrate monday.trace tuesday.trace -o cost.json
      hoptrace calibrate --probe http://127.0.0.1:8000 -o probe.trace --cost cost.json
      hoptrace calibrate run.trace --probe http://127.0.0.1:8000 --at-most 60s -o probe.trace --cost cost.json
      hoptrace replay run.trace --cost file:cost.json --policy one-slot -o one.trace
    """
    from hoptrace.errors import InputError, UsageError

    for n, path in enumerate(traces):  # twice the same steps would halve the errors that are printed, and tell nothing more
        if path.resolve() in [p.resolve() for p in traces[:n]]:
            raise UsageError(f"{path} is given twice: that is one capture, not two.", hint="Name each trace once.")
    if url is None:
        if not traces:
            raise UsageError("There is nothing to calibrate on.", hint="Name a trace, or a server: --probe URL -o probe.trace.")
        if cost is not None:
            raise UsageError("--cost names the cost file of a probe.", hint="Without --probe it goes to -o.")
        given = [n for n, v in (("--model", model), ("--even-if-busy", busy), ("--yes", yes)) if v]
        if given:
            raise UsageError(f"{given[0]} belongs to --probe.", hint="Add --probe URL, or leave it out.")
        _free(out)
        _done(_fit(traces, server), out, as_json, quiet)
        return
    if out is None:
        raise UsageError("Where shall the probe's trace go?", hint="Name it: -o probe.trace.")
    if server is not None:
        raise UsageError("--server belongs to traces of several servers.", hint="A probe is of the server at its URL.")
    _free(out)
    _free(cost)
    from hoptrace.cli.calibrate_probe import probe

    probe(url, out, requests=requests, at_most_s=at_most, model=model, busy=busy, yes=yes, quiet=quiet or as_json)
    try:
        made = _fit([*traces, out], None)
    except InputError as e:
        raise InputError(e.message, hint=f"The probe's trace is kept: {out}. Give it longer: --at-most 5m.") from None
    _done(made, cost, as_json, quiet)


def _free(path: Path | None) -> None:
    from hoptrace.errors import UsageError

    if path is not None and path.exists():
        raise UsageError(f"{path} is already there.", hint="Choose another name, or remove it first.")


def _fit(traces: Sequence[Path], server: str | None) -> Calibrated:
    import hoptrace
    from hoptrace.replay.calibration.fitting import calibrate

    return calibrate([hoptrace.open(t) for t in traces], server=server)


def _done(made: Calibrated, out: Path | None, as_json: bool, quiet: bool) -> None:
    from hoptrace.cli.calibrate_view import as_dict, show
    from hoptrace.replay.calibration.cost_file import cost_file, write_cost_file

    if out is not None:
        write_cost_file(out, cost_file(made))
    if as_json:
        click.echo(json.dumps(as_dict(made, out)))
    elif not quiet:
        show(made, out)
