"""`hoptrace drive`: send a trace's work to a live server."""

from __future__ import annotations

import json
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from fractions import Fraction

    from hoptrace.replay.drive import DriveResult
    from hoptrace.replay.workload import Workload

_MOST_SCALE = 1e6
_MOST_TIMEOUT_S = 1e6


class _Finite(click.FloatRange):
    """A positive number: neither nan, which passes every comparison of click's, nor infinity."""

    name = "number"

    def __init__(self, most: float) -> None:
        super().__init__(min=0, min_open=True, max=most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class _Body(click.ParamType[dict[str, Any]]):
    """A JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            found = json.loads(value)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            self.fail(f'{str(value)[:60]!r} is not a JSON object; write it like \'{{"cache_salt": "x"}}\'', param, ctx)
        return found


@click.command("drive", short_help="Send a trace's work to a live server.")
@click.argument("trace", type=click.Path(path_type=Path), metavar="T.trace")
@click.option("--against", "url", required=True, metavar="URL", help="The server, or hoptrace's proxy in front of it.")
@click.option("--rate", default="1x", show_default=True, metavar="R", help="Arrivals so many times as fast: 1.5x.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N requests.")
@click.option(
    "--prompt-scale",
    type=_Finite(_MOST_SCALE),
    default=1.0,
    show_default=True,
    metavar="F",
    help="Prompts so many times as long.",
)
@click.option(
    "--output-scale",
    type=_Finite(_MOST_SCALE),
    default=1.0,
    show_default=True,
    metavar="F",
    help="Answers so many times as long.",
)
@click.option("--max-prompt-tokens", type=click.IntRange(min=1), metavar="N", help="No prompt longer than this.")
@click.option("--max-output-tokens", type=click.IntRange(min=1), metavar="N", help="No answer longer than this.")
@click.option(
    "--max-concurrency",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    metavar="N",
    help="So many requests on their way at most; others wait, and their lateness is reported.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=_Finite(_MOST_TIMEOUT_S),
    default=600.0,
    show_default=True,
    metavar="S",
    help="A request that takes longer than so many seconds has failed.",
)
@click.option("--model", metavar="NAME", help="Model to ask for; the first that the server names if not given.")
@click.option("--token-ids", is_flag=True, help="Prompts as token ids, of exactly the trace's lengths (vLLM, SGLang, llama.cpp).")
@click.option("--body", type=_Body(), metavar="JSON", help='Further fields of each request\'s body: \'{"cache_salt": "x"}\'.')
@click.option("--name", metavar="NAME", help="First part of the requests' ids: the same in two drives pairs their requests.")
@click.option(
    "-o",
    "--output",
    "out",
    type=click.Path(path_type=Path),
    metavar="OUT.trace",
    help="Record the server meanwhile into this trace.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def command(trace: Path, url: str, rate: str, out: Path | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Send a trace's work to a live server.

    Requests are sent at the trace's own times (an open loop: a slow server does not slow the arrivals), with prompts and answers
    of its lengths. The trace holds no text, so prompts are made of common words; where prompts of the trace begin alike, these
    do too; turns of one session say so in a header, and a request's priority goes in its body. Answers get exactly their length
    where the server knows `ignore_eos`.
    Ctrl-C stops it.

    With -o the server is recorded meanwhile, as `hoptrace attach --proxy` does, and each request's intended and sent times stand
    in the trace. For other choices run `hoptrace attach` yourself and drive at its proxy.

    \b
    Examples:
      hoptrace drive run.trace --against http://127.0.0.1:8000 --rate 1.5x -o faster.trace
      hoptrace attach http://127.0.0.1:8000 --proxy :9000 -o live.trace &
      hoptrace drive run.trace --against http://127.0.0.1:9000
      hoptrace drive azure.trace --against http://127.0.0.1:9000 --limit 60 --rate 0.5x --max-prompt-tokens 400
      hoptrace drive run.trace --against http://127.0.0.1:9000 --token-ids --body '{"cache_salt": "second run"}'
    """
    import hoptrace
    from hoptrace.collectors.apart import recording
    from hoptrace.errors import EnvironmentProblem
    from hoptrace.replay.workload import parse_rate, workload

    work = workload(hoptrace.open(trace))
    factor = parse_rate(rate)
    total = min(work.n, options["limit"] or work.n)
    for note in work.notes:
        if not quiet:
            click.echo(note, err=True)
    with nullcontext(url) if out is None else recording(url, out) as address:
        result = _drive(work, address, factor, total, quiet or as_json, options)
    figures = result.as_dict()
    if as_json:
        click.echo(json.dumps(figures | ({"trace": str(out)} if out else {})))
    elif not quiet:
        _print(figures)
        if out is not None:
            click.echo(f"Recorded into {out}. Next: hoptrace report {shlex.quote(str(out))}")
    if result.failed and result.failed == result.sent:
        raise EnvironmentProblem(f"All {result.sent} requests failed: {result.errors[0]}.", hint="See the server's log.")


def _drive(work: Workload, url: str, factor: Fraction, total: int, silent: bool, options: dict[str, Any]) -> DriveResult:
    from hoptrace.replay.drive import drive_until_stopped

    if silent:
        return drive_until_stopped(work, url, rate=factor, **options)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests answered", total=total)
        return drive_until_stopped(work, url, rate=factor, progress=lambda n: bar.update(task, completed=n), **options)


def _print(f: dict[str, Any]) -> None:
    click.echo(f"{f['finished']} of {f['planned']} requests finished" + (", stopped by Ctrl-C" if f["stopped"] else "") + ".")
    for reason, n in f["failures"].items():
        click.echo(f"{n} failed: {reason}")
    if f["prompt_tokens"] is not None and f["output_tokens"] is not None and f["finished"]:
        click.echo(f"{f['prompt_tokens']:,} prompt tokens, {f['output_tokens']:,} output tokens.")
    for name, key in (("TTFT", "ttft_ns"), ("end to end", "e2e_ns"), ("sent late by", "lateness_ns")):
        if f[key]:
            click.echo(f"{name:12} " + "  ".join(f"{k} {v / 1e6:,.1f} ms" for k, v in f[key].items()))
