"""`hoptrace diff`."""

from __future__ import annotations

import click


@click.command("diff")
@click.argument("a", type=click.Path(), metavar="A")
@click.argument("b", type=click.Path(), metavar="B")
@click.option("--fail-on", "rules", multiple=True, metavar="RULE", help="Exit 1 if RULE holds: 'ttft.p95>10%'. Repeatable.")
@click.option("--beyond-noise", is_flag=True, help="A change within noise (95 % interval over requests) fails no rule.")
@click.option("--anyway", is_flag=True, help="Compare even though the work is not the same.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON and nothing else.")
@click.option("-q", "--quiet", is_flag=True, help="Print the rules' outcomes only.")
def command(a: str, b: str, rules: tuple[str, ...], beyond_noise: bool, anyway: bool, as_json: bool, quiet: bool) -> None:
    """Compare trace B against trace A: metrics, parts of latency, moves per token.

    Traces that did not do the same work (requests, tokens) are refused, since their latencies say nothing about each other.
    Each difference bears a 95 % interval from a bootstrap over requests; where that holds 0, the difference is within noise.

    \b
    A rule is FIGURE>LIMIT or FIGURE<LIMIT and speaks of the change from A to B:
      ttft.p95>10%               p95 of TTFT rose by more than 10 %
      e2e.mean>50ms              mean end-to-end time rose by more than 50 ms
      output_tokens_per_s<-5%    throughput fell by more than 5 %
      queue_slots.mean>20%       a part of latency
    Figures: ttft, itl, tpot, e2e, queue with .mean .p50 .p95 .p99; each part with .mean; output_tokens_per_s, requests_per_s;
    transfers_per_token.counted and the like. A rule on a figure that is unknown in one trace fails.

    \b
    Examples:
      hoptrace diff before.trace after.trace
      hoptrace diff before.trace after.trace --fail-on 'ttft.p95>10%' --fail-on 'e2e.mean>5%' --beyond-noise
      hoptrace diff recorded.trace replayed.trace --json | jq .metrics
    """
    import json
    import sys

    from rich.console import Console

    import hoptrace
    from hoptrace.analysis.diff import diff
    from hoptrace.analysis.rules import check, parse

    parsed = [parse(r) for r in rules]
    # On a terminal only: a million tokens take seconds.
    with Console(stderr=True, quiet=quiet).status(f"Comparing {b} with {a} …"):
        result = diff(hoptrace.open(a), hoptrace.open(b), anyway=anyway)
    outcomes = check(parsed, result, beyond_noise=beyond_noise)
    if as_json:
        json.dump({**result.as_dict(), "rules": [o.as_dict() for o in outcomes]}, sys.stdout, indent=1, ensure_ascii=False)
        click.echo()
    else:
        from hoptrace.analysis.diff_text import outcome_text, render

        console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
        if not quiet:
            console.print(render(result))
        for o in outcomes:
            console.print(outcome_text(o))
    # A figure that cannot be judged does not pass a gate.
    if any(o.failed is not False for o in outcomes):
        sys.exit(1)
