"""`hoptrace policies`: what policies there are."""

from __future__ import annotations

import json

import click


@click.command("policies", short_help="List the policies there are, or print one as TOML.")
@click.option("--show", metavar="NAME", help="Print this policy (or policy file) as TOML, to start a file of your own from.")
@click.option("--fields", is_flag=True, help="Print every key that a policy file may have, with its meaning.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(show: str | None, fields: bool, as_json: bool) -> None:
    """List the policies there are, or print one as TOML.

    A policy says how an engine batches and what KV space and prefix cache it has. A policy file holds only what differs from
    the trace's own server; all the rest stays as it was captured.

    \b
    Examples:
      hoptrace policies
      hoptrace policies --fields
      hoptrace policies --show one-slot > mine.toml
      hoptrace replay run.trace --policy mine.toml -o what-if.trace
    """
    from hoptrace.replay.policy import Policy, load_policy, presets
    from hoptrace.replay.policy_errors import sections

    if show is not None:
        policy = load_policy(show)
        click.echo(json.dumps(policy.model_dump(exclude_none=True), indent=1) if as_json else policy.to_toml(), nl=as_json)
        return
    if fields:
        found = [
            {"section": s, "key": k, "meaning": " ".join((f.description or "").split())}
            for s, m in sections(Policy).items()
            for k, f in m.model_fields.items()
        ]
        if as_json:
            click.echo(json.dumps(found, indent=1))
            return
        for section, model in sections(Policy).items():
            click.echo(f"[{section}]  {(model.__doc__ or '').strip()}")
            formatter = click.HelpFormatter(width=110)
            formatter.indent()
            formatter.write_dl([(f["key"], f["meaning"]) for f in found if f["section"] == section])
            click.echo(formatter.getvalue())
        return
    known = presets()
    if as_json:
        click.echo(json.dumps([{"name": p.name, "description": p.description, "changes": p.changes()} for p in known.values()]))
        return
    formatter = click.HelpFormatter(width=110)
    formatter.write_dl([(p.name, p.description) for p in known.values()])
    click.echo(formatter.getvalue(), nl=False)
