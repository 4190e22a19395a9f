"""`hoptrace policies`: what policies there are."""

from __future__ import annotations

import json

import click


@click.command("policies", short_help="List the policies there are, or print one as TOML.")
@click.option("--show", metavar="NAME", help="Print this policy (or policy file) as TOML, to start a file of your own from.")
@click.option("--fields", is_flag=True, help="Print every key that a policy file may have, with its meaning.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of policy files.")
@click.option("--refused", is_flag=True, help="Print what is refused by name, and why.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(show: str | None, fields: bool, schema: bool, refused: bool, as_json: bool) -> None:
    """List the policies there are, or print one as TOML.

    A policy says how servers batch, what they keep, and how the work is spread over them. A policy file holds only what differs
    from the trace's own server; all the rest stays as it was captured.

    \b
    Examples:
      hoptrace policies
      hoptrace policies --fields
      hoptrace policies --show one-slot > mine.toml
      hoptrace replay run.trace --policy mine.toml -o what-if.trace
    """
    from hoptrace.errors import UsageError

    if sum((show is not None, fields, schema, refused)) > 1:
        raise UsageError("--show, --fields, --schema and --refused are one or the other.", hint="Give one of them.")
    if show is not None:
        _show(show, as_json)
    elif fields:
        _fields(as_json)
    elif schema:
        from hoptrace.replay.policy import Policy

        click.echo(json.dumps(Policy.model_json_schema(), indent=1))
    elif refused:
        _refused(as_json)
    else:
        _list(as_json)


def _show(name: str, as_json: bool) -> None:
    from hoptrace.replay.policy import load_policy

    policy = load_policy(name)
    if as_json:
        head = {"name": policy.name, "description": policy.description}
        click.echo(json.dumps(head | policy.changes(), indent=1))
    else:
        click.echo(policy.to_toml(), nl=False)


def _fields(as_json: bool) -> None:
    from hoptrace.replay.policy import Policy
    from hoptrace.replay.policy.docs import heading
    from hoptrace.replay.policy.errors import allowed, sections

    found = [
        {"section": s, "key": k, "allowed": allowed(f), "meaning": " ".join((f.description or "").split())}
        for s, m in sections(Policy).items()
        for k, f in m.model_fields.items()
    ]
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for section, model in sections(Policy).items():
        click.echo(f"{heading(section)}  {' '.join((model.__doc__ or '').split())}")
        _columns([(f["key"], f["meaning"]) for f in found if f["section"] == section], indent=True)
        click.echo()


def _refused(as_json: bool) -> None:
    from hoptrace.replay.policy.refused import REFUSED

    if as_json:
        click.echo(json.dumps([{"what": r.what, "why": r.why, "instead": r.instead} for r in REFUSED], indent=1))
        return
    for r in REFUSED:
        _columns([(r.what[0].upper() + r.what[1:], "")])
        _columns([("Why", f"{r.why}."), ("Instead", f"{r.instead}.")], indent=True)


def _list(as_json: bool) -> None:
    from hoptrace.replay.policy import presets

    known = presets()
    if as_json:
        click.echo(json.dumps([{"name": p.name, "description": p.description, "changes": p.changes()} for p in known.values()]))
        return
    _columns([(p.name, p.description) for p in known.values()])
    click.echo("\nKeys of a file of your own: --fields. What is refused by name, and why: --refused.")


def _columns(rows: list[tuple[str, str]], *, indent: bool = False) -> None:
    formatter = click.HelpFormatter(width=110)
    if indent:
        formatter.indent()
    formatter.write_dl(rows)
    click.echo(formatter.getvalue(), nl=False)
