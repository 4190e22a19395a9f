"""`hoptrace advise`: which flag of the captured engine to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.command("advise", short_help="Which flag of the captured engine to change, how much it gains, how to prove it.")
@click.argument("trace", type=click.Path(path_type=Path), metavar="T.trace")
@click.option("--slo", metavar="LIMITS", help="Better is: more requests within these limits, as in ttft=500ms,itl_p99=50ms.")
@click.option(
    "--objective",
    metavar="O",
    help="What is to become better: e2e (p50 and p95 together; the default), e2e_p50, e2e_p95, ttft_p50, ttft_p95, itl_p99, "
    "tpot_p50, throughput, goodput (with --slo).",
)
@click.option(
    "--try", "tries", multiple=True, metavar="FLAG=VALUE", help="Try this value too, as in max-num-seqs=32. May be repeated."
)
@click.option("--cost", metavar="C", help="What a step costs, as for `hoptrace replay`. Fitted to the trace's steps by default.")
@click.option("--platform", metavar="F", help="A platform's name (`hoptrace platforms`) or file, for --cost roofline.")
@click.option("--model", metavar="M", help="Model of a roofline: a name, or its config.json.")
@click.option("--recorded-on", metavar="F", help="Platform that the trace was recorded on, where its manifest does not tell.")
@click.option("--rate", default="1x", show_default=True, metavar="R", help="Advise for arrivals so many times as fast: 1.5x.")
@click.option("--arrivals", metavar="A", help="recorded, sessions or closed:N, as for `hoptrace replay`; follows the trace.")
@click.option(
    "--draws",
    type=click.IntRange(0, 1000),
    default=20,
    show_default=True,
    metavar="N",
    help="Replays of each change for its interval, each on other step costs, residuals and requests. 0: no intervals.",
)
@click.option("--seed", default=0, show_default=True, help="Of all that is drawn.")
@click.option(
    "--engine", type=click.Choice(["auto", "compiled", "plain"]), default="auto", show_default=True,
    help="Of the replays, as for `hoptrace replay`.",
)  # fmt: skip
@click.option("-o", "--output", "out", type=click.Path(path_type=Path), metavar="FILE", help="Write all of it as JSON too.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print the decision alone.")
def command(
    trace: Path,
    slo: str | None,
    tries: tuple[str, ...],
    out: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Which flag of the captured engine to change, how much that gains, and how to prove it.

    Replays the trace's requests under the changes that real flags of its engine (vLLM, SGLang, llama.cpp) can make, each against
    the replay of its own policy, and decides: change a flag, measure one first, or keep things as they are. Flags that could not
    matter by the trace's own evidence are left out, those whose effect a replay cannot tell are not judged: both with the reason.

    The interval holds 90 % of what comes of other draws of the step cost, the steps' scatter, the times outside steps and the
    requests; draws are the same for both sides. What rests on steps unlike any recorded one says so.

    \b
    Examples:
      hoptrace advise run.trace
      hoptrace advise run.trace --slo ttft=500ms,itl_p99=50ms
      hoptrace advise run.trace --objective ttft_p95 --try max-num-seqs=32 --try max-num-batched-tokens=1024
      hoptrace advise run.trace --rate 1.5x                 for half as much traffic again
      hoptrace advise run.trace --cost roofline --platform h100-sxm-80gb --model llama-3.1-8b    a recording without steps
    """
    import hoptrace
    from hoptrace.analysis.export.whole_file import check_target, whole_file
    from hoptrace.cli.advise_view import as_dict, show
    from hoptrace.cli.progress import progress
    from hoptrace.replay.advise import advise
    from hoptrace.slo import parse_slo

    if out is not None:
        check_target(out, force=force)
    limits = parse_slo(slo) if slo else None
    parent = hoptrace.open(trace)
    with progress(quiet or as_json, counted=True) as (say, tell):
        advice = advise(parent, slo=limits, tries=tries, say=say, tell=tell, **options)
    text = json.dumps(as_dict(advice, trace, options["rate"])) if as_json or out is not None else ""
    if out is not None:
        with whole_file(out, force=force) as file:
            file.write(text.encode() + b"\n")
    if as_json:
        click.echo(text)
    elif quiet:
        click.echo(advice.decision.sentence)
    else:
        show(advice, trace, options["rate"])
