"""`hoptrace diff`."""

from __future__ import annotations

import click


@click.command("diff")
@click.argument("a", type=click.Path(), metavar="A")
@click.argument("b", type=click.Path(), metavar="B")
@click.option("--fail-on", "rules", multiple=True, metavar="RULE", help="Exit 1 if RULE holds: 'ttft_p95>+5%'. Repeatable.")
@click.option("--beyond-noise", is_flag=True, help="A change within noise fails no rule.")
@click.option("--noise", multiple=True, type=click.Path(), metavar="A2", help="Another run of A's policy. Repeatable.")
@click.option("--noise-b", multiple=True, type=click.Path(), metavar="B2", help="Another run of B's policy. Repeatable.")
@click.option("--anyway", is_flag=True, help="Compare even though the work is not the same.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON and nothing else.")
@click.option("-q", "--quiet", is_flag=True, help="Print the verdict's three answers and the rules' outcomes only.")
def command(
    a: str,
    b: str,
    rules: tuple[str, ...],
    beyond_noise: bool,
    noise: tuple[str, ...],
    noise_b: tuple[str, ...],
    anyway: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare trace B against trace A: latencies, where the time goes, what moves, coordination; and the verdict.

    Traces that did not do the same work (requests, tokens, model, precision, load) are refused, since their latencies say nothing
    about each other. Settings that differ are listed: they are what a comparison is about. Each difference of a latency bears
    a 95 % interval from a bootstrap over requests; with --noise, also what two runs of one policy differ by. A change within
    either is within noise.

    \b
    A rule is FIGURE>LIMIT or FIGURE<LIMIT and speaks of the change from A to B:
      ttft_p95>+5%               p95 of TTFT rose by more than 5 %
      e2e.mean>50ms              mean end-to-end time rose by more than 50 ms
      output_tokens_per_s<-5%    throughput fell by more than 5 %
      queue_slots.p95>20%        a part of latency, of the requests around p95
      coordination_share>+2pp    a class's share, in percentage points
      bytes_per_token.counted>1KiB
    Figures: ttft, visible_ttft, itl, tpot, after_ttft, e2e, queue and each part with .mean .p50 .p95 .p99 (or _p95); the classes'
    shares; ledger and coordination per output token. --json lists all. A rule on a figure that is unknown in one trace fails.

    \b
    Examples:
      hoptrace diff before.trace after.trace
      hoptrace diff before.trace after.trace --noise before2.trace --noise before3.trace
      hoptrace diff before.trace after.trace --fail-on 'ttft_p95>+5%' --fail-on 'e2e.mean>5%' --beyond-noise
      hoptrace diff recorded.trace replayed.trace --json | jq .verdict
    """
    import json
    import sys

    from rich.console import Console
    from rich.markup import escape

    import hoptrace
    from hoptrace.analysis.compare.diff import diff
    from hoptrace.analysis.compare.rules import check, parse
    from hoptrace.cli.console import PlainConsole

    parsed = [parse(r) for r in rules]
    _told_apart("--noise", noise)
    _told_apart("--noise-b", noise_b)
    # On a terminal only: a million tokens take seconds.
    with Console(stderr=True, quiet=quiet).status(f"Comparing {escape(b)} with {escape(a)} …"):
        result = diff(
            hoptrace.open(a),
            hoptrace.open(b),
            anyway=anyway,
            repeats_of_a=[hoptrace.open(n) for n in noise],
            repeats_of_b=[hoptrace.open(n) for n in noise_b],
        )
    outcomes = check(parsed, result, beyond_noise=beyond_noise)
    if as_json:
        json.dump({**result.as_dict(), "rules": [o.as_dict() for o in outcomes]}, sys.stdout, indent=1, ensure_ascii=False)
        click.echo()
    else:
        from hoptrace.analysis.compare.diff_text import outcome_text, render, short

        console = PlainConsole(width=None if sys.stdout.isatty() else 110, highlight=False)
        console.print(short(result) if quiet else render(result))
        for o in outcomes:
            console.print(outcome_text(o))
    # A figure that cannot be judged does not pass a gate.
    if not all(o.passed for o in outcomes):
        sys.exit(1)


def _told_apart(option: str, runs: tuple[str, ...]) -> None:
    """Refuse a run that is given twice: as a repeat of itself it would say that runs do not differ at all."""
    import os

    from hoptrace.errors import UsageError

    seen: set[str] = set()
    for run in runs:
        path = os.path.realpath(run)
        if path in seen:
            raise UsageError(f"{option} names {run} twice: that is one run, not two.", hint="Name each repeat once.")
        seen.add(path)
