"""`hoptrace fidelity`: predicted against observed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import click


@click.command("fidelity", short_help="Predicted against observed: how far a what-if is off.")
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="A.trace [B.trace ...]")
@click.option("--repeat", "repeats", multiple=True, type=click.Path(path_type=Path), metavar="A2.trace",
              help="Another run of A's policy, in the order in which they were made: the noise floor. Repeatable.")  # fmt: skip
@click.option("--truth", metavar="WHICH", default="auto", show_default=True,
              help="Tell where the error comes from: all, none, or some of arrival, step_time, batching, cache (commas between "
              "them). auto: all where the work is small.")  # fmt: skip
@click.option("--cost", metavar="C", help="What a step costs, as for `hoptrace replay`. Default: fitted to A's own steps.")
@click.option("--fail-on", "rules", multiple=True, metavar="RULE", help="Exit 1 if RULE holds: 'e2e_p50>3%'. Repeatable.")
@click.option("--anyway", is_flag=True, help="Compare even though B did other work than A, or a repeat is none.")
@click.option("--seed", default=0, show_default=True, help="Of all that is drawn: residuals of steps, random routing.")
@click.option("--engine", type=click.Choice(["auto", "compiled", "plain"]), default="auto", show_default=True,
              help="Which engine replays; the rows are the same.")  # fmt: skip
@click.option("-o", "--output", "out", type=click.Path(path_type=Path), metavar="FILE", help="Keep the JSON in a file too.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.option("--json", "as_json", is_flag=True, help="Print the study as JSON and nothing else.")
@click.option("-q", "--quiet", is_flag=True, help="Print a line for each policy and the rules' outcomes only.")
def command(
    traces: tuple[Path, ...],
    repeats: tuple[Path, ...],
    truth: str,
    cost: str | None,
    rules: tuple[str, ...],
    anyway: bool,
    seed: int,
    engine: str,
    out: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Predicted against observed: how far a what-if is off.

    Fits the step cost to A, a recording, and replays A under its own policy: the error of the method. Each B is a recording of
    the same work under another policy, which is read from its manifest: A is replayed under it, and the prediction held against
    what B really did. The headline of a changed policy is the ratio B ÷ A, predicted against observed: what one machine does to
    both runs cancels. Beside it stand B's own errors, and those with the machine's speed taken out.

    Latencies, throughput and queueing come with 95 % intervals; steps, cached tokens, preemptions and the order of events, which
    no machine's speed reaches, without. With --repeat, what runs of one policy differ by stands beside each error.

    \b
    A rule is FIGURE>LIMIT or FIGURE<LIMIT; errors count without their sign, of every policy:
      e2e_p50>3%               an error (of B ÷ A, for a changed policy) of more than 3 %
      own.ttft_p95>8%          of A's own policy only; changed. for the others only
      raw_e2e_p50>5%           B's own error; at_speed_e2e_p50 with the machine's speed taken out
      equal_steps<99%          fewer than 99 % of the steps hold the same tokens of the same requests
      wrong_signs>0            a change larger than the noise goes the other way than predicted
    Also output_tokens_per_s, requests_per_s, steps, cached_tokens, preemptions, alike_steps, equal_cached_tokens,
    first_token_order, finish_order. A rule on a figure that is unknown fails.

    \b
    Examples:
      hoptrace fidelity run.trace                                 the error under its own policy, and where it comes from
      hoptrace fidelity four-slots.trace one-slot.trace --repeat four-slots-again.trace
      hoptrace fidelity a.trace b.trace --truth none --fail-on 'changed.e2e_p50>3%' --fail-on 'wrong_signs>0' -q
      hoptrace fidelity a.trace b.trace c.trace -o fidelity.json
    """
    import hoptrace
    from hoptrace.analysis.export.whole_file import check_target, whole_file
    from hoptrace.analysis.fidelity.rules import gate, parse
    from hoptrace.cli.fidelity_run import measure
    from hoptrace.cli.fidelity_view import show, show_short
    from hoptrace.cli.progress import progress

    parsed = [parse(r) for r in rules]
    _told_apart(traces, repeats)
    if out is not None:
        check_target(out, force=force)
    asked = _truths(truth)
    opened = [hoptrace.open(t) for t in traces]
    again = [hoptrace.open(t) for t in repeats]
    with progress(quiet or as_json) as (say, tell):
        result = measure(
            opened[0], opened[1:], again, anyway=anyway, cost=cost, seed=seed, engine=engine,  # type: ignore[arg-type]
            truths=asked, say=say, tell=tell,
        )  # fmt: skip
    outcomes = gate(parsed, result)
    found = {**result.as_dict(), "rules": [o.as_dict() for o in outcomes]}
    text = json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False)
    if out is not None:
        with whole_file(out, force=force) as file:
            file.write(text.encode() + b"\n")
    if as_json:
        click.echo(text)
    elif quiet:
        show_short(result, outcomes)
    else:
        show(result, outcomes)
        if out is not None:
            click.echo(f"Written: {out}")
    # A figure that cannot be judged does not pass a gate.
    if not all(o.passed for o in outcomes):
        sys.exit(1)


def _truths(text: str) -> tuple[str, ...] | Literal["auto"]:
    from hoptrace.errors import UsageError
    from hoptrace.replay.truths import TRUTHS

    if text == "auto":
        return "auto"
    if text == "none":
        return ()
    names = list(TRUTHS) if text == "all" else [n.strip() for n in text.split(",")]
    for n in names:
        if n not in TRUTHS:
            there = ", ".join(TRUTHS)
            raise UsageError(f"There is no truth {n[:40]!r}.", hint=f"Write --truth all, none, auto, or some of {there}.")
    return tuple(t for t in TRUTHS if t in names)


def _told_apart(traces: tuple[Path, ...], repeats: tuple[Path, ...]) -> None:
    """Refuse a run that is given twice: held against itself it would say that nothing is ever off."""
    from hoptrace.errors import UsageError

    seen: dict[Path, Path] = {}
    for run in (*traces, *repeats):
        path = run.resolve()
        if path in seen:
            raise UsageError(f"{run} is given twice: that is one run, not two.", hint="Name each trace once.")
        seen[path] = run
