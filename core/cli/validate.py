"""`hoptrace validate`."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["command"]


@click.command("validate")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def command(trace: Path, as_json: bool, quiet: bool) -> None:
    """Check that a trace is whole and keeps its laws.

    Reads every byte of every file: files present and undamaged, rows as the schema says, times in order, steps that do not
    overlap, residency that fits its steps, tokens that fit their requests, coverage, what was dropped, how a replay was made.

    An error means that a figure computed from the trace would be wrong. A warning means that something is missing and the trace
    says so, or that a figure may be coarser than it looks; warnings alone do not fail. The trace is not changed.

    \b
    Exit code: 0 no errors, 1 errors, 3 no trace there.

    \b
    Examples:
      hoptrace validate run.trace
      hoptrace validate run.trace --json | jq '.findings[] | select(.level == "error")'
    """
    import json
    import sys
    from dataclasses import asdict

    from rich.console import Console
    from rich.markup import escape

    import hoptrace
    from hoptrace.errors import GateFailed
    from hoptrace.validate import validate

    opened = hoptrace.open(trace)
    err = Console(stderr=True)
    with err.status("Checking …") as status:
        findings = validate(opened, progress=lambda what: status.update(f"Checking {escape(what)} …"))
    errors = [f for f in findings if f.level == "error"]
    if as_json:
        summary = {
            "trace": str(trace),
            "errors": len(errors),
            "warnings": len(findings) - len(errors),
            "findings": [asdict(f) for f in findings],
        }
        click.echo(json.dumps(summary, indent=1))
        sys.exit(1 if errors else 0)
    for f in errors if quiet else findings:
        place = f"{f.table}: " if f.table else ""
        click.echo(f"{f.level}: {place}{f.message} [{f.check}]")
    if errors:
        raise GateFailed(f"{trace} has {_n(len(errors), 'error')}.")
    if not quiet:
        click.echo(f"{trace}: no errors, {_n(len(findings), 'warning')}.")


def _n(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
