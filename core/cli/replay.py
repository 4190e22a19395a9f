"""`hoptrace replay`: the same work under another policy, platform or load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
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
    metavar="C",
    help="What a step costs: fitted (to the trace's own steps; the default where it has some; fitted:mean without their "
    "scatter), roofline, table:FILE, aiconfigurator, or fixed:PREFILL_MS,DECODE_MS.",
)
@click.option("--platform", metavar="F", help="A platform's name (`hoptrace platforms`), a TOML file, or from-trace.")
@click.option(
    "--model", metavar="M", help="Model of a roofline: a name, or its config.json. As the trace's server, where it is told."
)
@click.option("--recorded-on", metavar="F", help="Platform that the trace was recorded on, where its manifest does not tell.")
@click.option(
    "--rate", default="1x", show_default=True, metavar="R", help="Arrivals (and think times) so many times as fast: 1.5x."
)
@click.option(
    "--arrivals",
    metavar="A",
    help="recorded; sessions (a turn comes its think time after its parent ends, a capped client waits for its slot); closed:N "
    "(N clients, each sends when it is answered). The default follows the trace and is printed.",
)
@click.option("--until", metavar="TIME", help="Stop so long after the first arrival, as in 10m; what is not done is unfinished.")
@click.option(
    "--seed", default=0, show_default=True, help="Of all that is drawn: residuals of steps, random routing, acceptance."
)
@click.option(
    "--no-tokens", "tokens", is_flag=True, flag_value=False, default=True, help="Write no rows of `tokens`: a third of the time."
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "compiled", "plain"]),
    default="auto",
    show_default=True,
    help="plain: the readable one that plug-ins extend; equal rows, slower, nothing to compile: auto takes it for small work.",
)
@click.option(
    "--intervals",
    "draws",
    type=click.IntRange(0, 1000),
    metavar="N",
    help="Replays of each side to draw intervals from; 0: none. As many, up to 40, as some eight CPU-seconds allow.",
)
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
    cost: str | None,
    platform: str | None,
    model: str | None,
    recorded_on: str | None,
    rate: str,
    arrivals: str | None,
    until: str | None,
    seed: int,
    tokens: bool,
    engine: str,
    draws: int | None,
    out: Path,
    as_json: bool,
    quiet: bool,
) -> None:
    """Ask what-if: the same work under another policy.

    Takes the requests of a trace (arrivals, lengths, prefixes), sends them through a model of the servers under the policy, and
    writes what would have happened as another trace, in the same schema. What a step costs is fitted to the trace's own steps.

    Beside every answer stands its error: the trace is first replayed under its own policy and compared with what was observed.
    Where the answer rests on steps that the trace has never seen (larger batches, longer contexts), it says so.

    Behind each figure stands the interval in which nine of ten further runs of the same requests would lie.

    \b
    Examples:
      hoptrace replay run.trace -o again.trace                             its own policy: the error of the method
      hoptrace replay run.trace --policy one-slot -o one.trace
      hoptrace replay run.trace --set batching.max_sequences=8 --rate 1.5x -o eight.trace
      hoptrace replay run.trace --policy pd-split.toml --platform h100-sxm-80gb --cost roofline -o split.trace
      hoptrace replay run.trace --arrivals closed:32 --until 10m -o closed.trace
      hoptrace replay azure.trace --policy vllm-default --cost fixed:50,12 --no-tokens -o azure-replay.trace
    """
    import hoptrace
    from hoptrace.cli.progress import progress
    from hoptrace.cli.replay_view import as_dict, show
    from hoptrace.errors import UsageError
    from hoptrace.replay.policy import load_policy, with_settings
    from hoptrace.replay.run import run

    if out.exists():
        raise UsageError(f"{out} is already there.", hint="Choose another name after -o, or remove it first.")
    policy = with_settings(load_policy(policy_name), settings)
    parent = hoptrace.open(trace)
    with progress(quiet or as_json) as (say, tell):
        result: Replayed = run(
            parent, policy, out=out, cost=cost, platform=platform, model=model, recorded_on=recorded_on, seed=seed, rate=rate,
            arrivals=arrivals, until=until, tokens=tokens, engine=engine,  # type: ignore[arg-type]
            draws="auto" if draws is None else draws, progress=say, fraction=tell,
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps(as_dict(result, out)))
    elif not quiet:
        show(result, out, policy.description)
