"""`hoptrace replay`: the same work under another policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hoptrace.cli.figures import figure, percent_off

if TYPE_CHECKING:
    from hoptrace.replay.fidelity import Comparison
    from hoptrace.replay.run import Replayed


@click.command("replay", short_help="Ask what-if: the same work under another policy.")
@click.argument("trace", type=click.Path(path_type=Path), metavar="T.trace")
@click.option(
    "--policy",
    "policy_name",
    default="as-recorded",
    show_default=True,
    metavar="P",
    help="A policy's name (`hoptrace policies`) or a TOML file. What it leaves out stays as the trace's server had it.",
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set one key on top, as in batching.max_sequences=1.")
@click.option(
    "--cost",
    default="fitted",
    show_default=True,
    metavar="C",
    help="What a step costs: fitted (to the trace's own steps), roofline, or fixed:PREFILL_MS,DECODE_MS.",
)
@click.option("--platform", metavar="F", help="Platform of a roofline: a name or a TOML file.")
@click.option("--rate", default="1x", show_default=True, metavar="R", help="Arrivals so many times as fast: 1.5x.")
@click.option("--seed", default=0, show_default=True, help="Kept in the manifest. Nothing is drawn at random today.")
@click.option(
    "-o",
    "--output",
    "out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="OUT.trace",
    help="The trace to write; must not exist.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def command(
    trace: Path,
    policy_name: str,
    settings: tuple[str, ...],
    cost: str,
    platform: str | None,
    rate: str,
    seed: int,
    out: Path,
    as_json: bool,
    quiet: bool,
) -> None:
    """Ask what-if: the same work under another policy.

    Takes the requests of a trace (arrivals, lengths, prefixes), sends them through a model of the engine under the policy, and
    writes what would have happened as another trace, in the same schema. What a step costs is fitted to the trace's own steps.

    Beside every answer stands its error: the trace is first replayed under its own policy and compared with what was observed.
    Where the answer rests on steps that the trace has never seen (larger batches, longer contexts), it says so.

    \b
    Examples:
      hoptrace replay run.trace -o again.trace                             its own policy: the error of the method
      hoptrace replay run.trace --policy one-slot -o one.trace
      hoptrace replay run.trace --set batching.max_sequences=8 --rate 1.5x -o eight.trace
      hoptrace replay azure.trace --policy vllm-default --cost fixed:50,12 -o azure-replay.trace
    """
    import hoptrace
    from hoptrace.errors import UsageError
    from hoptrace.replay.policy import load_policy, with_settings
    from hoptrace.replay.run import predict, write
    from hoptrace.replay.workload import parse_rate

    if out.exists():
        raise UsageError(f"{out} is already there.", hint="Choose another name after -o, or remove it first.")
    policy = with_settings(load_policy(policy_name), settings)
    parent = hoptrace.open(trace)
    with _status(quiet or as_json) as say:
        result = predict(parent, policy, cost=cost, platform=platform, seed=seed, rate=parse_rate(rate), progress=say)
        say("writing")
        write(result, out)
    if as_json:
        click.echo(json.dumps(_as_dict(result, out)))
    elif not quiet:
        _print(result, out, policy.description)


def _as_dict(result: Replayed, out: Path) -> dict[str, Any]:
    info = result.trace.manifest.replay
    assert info is not None
    return {
        "trace": str(out),
        "policy": info.policy,
        "cost_model": info.cost_model,
        "own_policy": None if result.own is None else result.own.as_dict(),
        "against_observed": None if result.against is None else result.against.as_dict(),
        "change": None if result.change is None else result.change.as_dict(),
        "warnings": info.warnings,
    }


def _status(silent: bool) -> Any:
    """A spinner on stderr; what it is told, it shows."""
    from contextlib import contextmanager

    @contextmanager
    def quietly() -> Any:
        yield lambda _: None

    @contextmanager
    def shown() -> Any:
        from rich.console import Console

        with Console(stderr=True).status("replaying") as status:
            yield lambda text: status.update(text)

    return quietly() if silent else shown()


def _print(result: Replayed, out: Path, description: str) -> None:
    from rich.markup import escape

    from hoptrace.cli.console import PlainConsole

    info = result.trace.manifest.replay
    assert info is not None
    console = PlainConsole(highlight=False)
    console.print(f"[bold]{escape(info.policy['name'])}[/bold]  {escape(description)}", soft_wrap=True)
    for section in ("batching", "kv", "prefix_cache"):
        console.print(f"  {section}: " + ", ".join(f"{k} = {v}" for k, v in info.policy[section].items()), soft_wrap=True)
    fit = info.cost_model["step"].get("error", {})
    known = f": a step is predicted to {100 * fit['p50']:.0f} % (median) and {100 * fit['p95']:.0f} % (p95)" if fit else ""
    console.print(f"  step cost: {info.cost_model['kind']}{known}", soft_wrap=True)
    if result.own is not None and result.against is not None:
        same = not info.policy["changes"] and info.arrivals == "recorded"
        console.print(_table(result.own, None if same else result.against, None if same else result.change))
        if not same:
            console.print(
                "error: own policy against observed. change: what-if against own policy, like with like.", soft_wrap=True
            )
    else:
        console.print(_alone(result))
    for warning in info.warnings:
        console.print(f"[yellow]note[/yellow] {escape(warning)}", soft_wrap=True)
    console.print(f"Written: {out}", soft_wrap=True, markup=False)


def _table(own: Comparison, against: Comparison | None, change: Comparison | None) -> Any:
    """Observed, the trace's own policy replayed, and the what-if (if it is another)."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("observed", "own policy", "error", *(("what-if", "change") if against else ())):
        table.add_column(name, justify="right")
    for d in own.differences:
        cells = [
            figure(d.observed, d.unit),
            figure(d.predicted, d.unit),
            percent_off(d.error_pct),
        ]
        if against:
            w = against.get(d.metric, d.statistic).predicted
            pct = None if change is None else change.get(d.metric, d.statistic).error_pct
            cells += [figure(w, d.unit), percent_off(pct)]
        table.add_row(f"{d.metric} {d.statistic}", *cells)
    return table


def _alone(result: Replayed) -> Any:
    """The replay's own figures, where nothing was observed to hold them against."""
    from rich.table import Table

    from hoptrace.metrics import summary

    table = Table(title="What-if", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("mean", "p50", "p95", "p99"):
        table.add_column(name, justify="right")
    s = summary(result.trace)
    for metric in ("ttft", "itl", "tpot", "e2e", "queue"):
        values = (getattr(s[metric], f"{x}_ns") for x in ("mean", "p50", "p95", "p99"))
        table.add_row(metric, *("unknown" if v is None else f"{v / 1e6:,.1f} ms" for v in values))
    return table
