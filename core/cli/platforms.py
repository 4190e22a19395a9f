"""`hoptrace platforms`: what devices a roofline knows."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command("platforms", short_help="List the platforms there are, or print one as TOML.")
@click.option("--show", metavar="NAME", help="Print this platform (or platform file) as TOML, to start a file of your own from.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(show: str | None, as_json: bool) -> None:
    """List the platforms there are, or print one as TOML.

    A platform says what one device can do at most: arithmetic (flops_per_s) and memory (memory_bytes_per_s). From it follows the
    least time that a step can take, and with it how much of a step is compute or state. A file may hold what yours attains.

    \b
    Examples:
      hoptrace platforms
      hoptrace platforms --show h100-sxm-80gb > mine.toml
      hoptrace report run.trace --platform h100-sxm-80gb
      hoptrace replay run.trace --cost roofline --platform mine.toml -o bound.trace
    """
    from hoptrace.platform import load_platform, platform_text, platforms

    if show is not None:
        if as_json:
            click.echo(json.dumps(load_platform(show), indent=1))
        else:
            click.echo(platform_text(show), nl=False)
        return
    known = platforms()
    if as_json:
        click.echo(json.dumps(list(known.values())))
        return
    formatter = click.HelpFormatter(width=110)
    formatter.write_dl([(name, _line(p)) for name, p in known.items()])
    click.echo(formatter.getvalue(), nl=False)
    click.echo("Rates are those of one device at its peak: `--show NAME` names their sources.")


def _line(p: dict[str, Any]) -> str:
    what = str(p["description"]).split(":")[0]
    return f"{what}: {p['flops_per_s'] / 1e12:,.5g} TFLOP/s, {p['memory_bytes_per_s'] / 1e9:,.5g} GB/s"
