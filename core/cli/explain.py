"""`hoptrace explain`."""

from __future__ import annotations

import click

_LINE = 120


@click.command("explain")
@click.argument("metric", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the definitions as JSON and nothing else.")
def command(metric: str | None, as_json: bool) -> None:
    """Say what a figure means and how it is computed: words, formula, and the SQL that gives it.

    Without METRIC, lists every figure that there is: metrics, the parts and classes of latency, and the figures of each section
    of the report. docs/metrics.md has them all in one page.

    \b
    Examples:
      hoptrace explain                  the list
      hoptrace explain ttft
      hoptrace explain queue_slots      a part of latency
      hoptrace explain "semantic density"
    """
    import json

    from hoptrace.analysis.terms import find, terms

    if metric is None:
        known = list(terms().values())
        if as_json:
            click.echo(json.dumps([t.as_dict() for t in known], indent=1, ensure_ascii=False))
            return
        kind = ""
        width = max(len(t.name) for t in known)
        for t in known:
            if t.kind != kind:
                kind = t.kind
                click.echo(f"{'' if t is known[0] else chr(10)}{kind[0].upper() + kind[1:]}")
            # A metric is best told by its formula, a part or a class by its meaning.
            said = t.formula if t.kind == "metric" else t.doc.split(". ")[0].rstrip(".")
            click.echo(f"  {t.name:<{width}}  {said if len(said) <= _LINE else said[: _LINE - 2].rsplit(' ', 1)[0] + ' …'}")
        return
    t = find(metric)
    if as_json:
        click.echo(json.dumps(t.as_dict(), indent=1, ensure_ascii=False))
        return
    click.echo(f"{t.name}: {t.title} [{t.unit}], {t.kind}\n")
    click.echo(click.wrap_text(t.doc, width=100))
    click.echo("\n" + click.wrap_text(f"Formula: {t.formula}", width=100))
    if t.sql:
        click.echo(f"\nSQL, for `hoptrace sql TRACE`:\n\n{t.sql}")
