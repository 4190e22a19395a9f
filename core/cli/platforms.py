"""`hoptrace platforms`: what devices a roofline knows, and the hosts, adapters and CXL memory that access paths go over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

_HEADS = {
    "device": "Devices (rates of one at its peak; links in one direction)",
    "host": "Hosts",
    "nic": "Network adapters (one port, one direction)",
    "cxl": "CXL memory",
}


@click.command("platforms", short_help="List the platforms there are, or print one as TOML.")
@click.option(
    "--show", metavar="NAME", help="Print this platform (or file, or what a trace's machine is) as TOML, for a file of your own."
)
@click.option("--kind", type=click.Choice(list(_HEADS)), help="List only this kind.")
@click.option("--sources", is_flag=True, help="List every figure with its source.")
@click.option("--keys", is_flag=True, help="List the keys that a platform file may have, with their meaning.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(show: str | None, kind: str | None, sources: bool, keys: bool, as_json: bool) -> None:
    """List the platforms there are, or print one as TOML.

    A device says what it can do at most: arithmetic (flops_per_s) and memory (memory_bytes_per_s). From it follows the least time
    that a step can take, and with it how much of a step is compute or state. Links and constants, its own and those of its host,
    network adapter and CXL memory, price the access paths (hoptrace paths). A file may hold what yours attains.

    \b
    Examples:
      hoptrace platforms
      hoptrace platforms --kind nic --sources
      hoptrace platforms --keys
      hoptrace platforms --show h100-sxm-80gb > mine.toml
      hoptrace platforms --show run.trace > found.toml    what `replay --platform from-trace` computes with
      hoptrace report run.trace --platform h100-sxm-80gb
      hoptrace replay run.trace --cost roofline --platform mine.toml -o bound.trace
    """
    from hoptrace.platform import catalogue, component, platform_text

    if keys:
        _keys(as_json)
        return
    if show is not None:
        if Path(show).is_dir():
            _of_trace(show, as_json)
        elif as_json:
            click.echo(json.dumps(component(show), indent=1))
        else:
            click.echo(platform_text(show), nl=False)
        return
    known = {n: p for n, p in catalogue().items() if kind in (None, p.get("kind", "device"))}
    if as_json:
        click.echo(json.dumps(list(known.values())))
        return
    for each, head in _HEADS.items():
        found = {n: p for n, p in known.items() if p.get("kind", "device") == each}
        if not found:
            continue
        click.echo(f"{head}:")
        formatter = click.HelpFormatter(width=110)
        formatter.indent()
        formatter.write_dl([(name, _line(p)) for name, p in found.items()])
        click.echo(formatter.getvalue(), nl=False)
        if sources:
            for name, p in found.items():
                for figure, source in _sources(p):
                    click.echo(f"    {name}  {figure}: {source}")
    if not sources:
        click.echo("`--show NAME` names the sources of each figure, `--sources` all of them.")


def _of_trace(path: str, as_json: bool) -> None:
    """What --platform from-trace computes with, as a platform file; what was taken from where goes into its comments."""
    import tomli_w

    from hoptrace.errors import InputError
    from hoptrace.manifest import Server
    from hoptrace.platform import platforms
    from hoptrace.platform_seen import platform_seen
    from hoptrace.reader import open_trace
    from hoptrace.roofline import platform_of

    manifest = open_trace(path).manifest
    servers = manifest.servers or [Server(name="engine")]
    told = [p for s in servers if (p := platform_of(manifest, s)) is not None]
    found, said = (told[0], ("Rates of the nodes of the trace's platform graph.",)) if told else platform_seen(manifest)
    if found is None:
        raise InputError(
            " ".join((f"{path} does not say what machine it was recorded on.", *said)),
            hint=f"There are: {', '.join(platforms())}.",
        )
    # A base would bring back what was left out because the machine does not have it.
    found = {k: v for k, v in found.items() if k != "base"}
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    click.echo("".join(f"# {sentence}\n" for sentence in said) + tomli_w.dumps(found), nl=False)


def _line(p: Mapping[str, Any]) -> str:
    what = str(p["description"]).split(":")[0].rstrip(".")
    figures = []
    if "flops_per_s" in p:
        figures = [f"{p['flops_per_s'] / 1e12:,.5g} TFLOP/s", f"{p['memory_bytes_per_s'] / 1e9:,.5g} GB/s"]
    for name, link in p.get("links", {}).items():
        rate = link.get("attained_bytes_per_s", link.get("together_bytes_per_s", link.get("bytes_per_s")))
        if name == "cxl" and "read_bytes_per_s" in link:
            figures.append(f"{link['read_bytes_per_s'] / 1e9:g} read, {link['write_bytes_per_s'] / 1e9:g} GB/s write")
        elif rate is not None:
            label = {"pcie": "PCIe ", "peer": "to peers ", "c2c": "C2C "}.get(name, "")
            figures.append(f"{label}{rate / 1e9:g}" + ("" if label else " GB/s"))
    for constant in ("load_ns", "cxl_load_ns", "rdma_write_ns"):
        if constant in p.get("constants", {}):
            figures.append(f"{p['constants'][constant]['value']:g} ns {constant.removesuffix('_ns').replace('_', ' ')}")
    return f"{what}: {', '.join(figures)}"


def _sources(p: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each figure of a platform with its source."""
    for key, source in p.get("sources", {}).items():
        value = p.get(key)
        yield (f"{key} = {value:g}" if isinstance(value, int | float) else f"{key} = {value}"), str(source)
    for name, link in p.get("links", {}).items():
        rates = ", ".join(f"{k} {v / 1e9:g} GB/s" for k, v in link.items() if k != "source")
        yield f"links.{name} ({rates or 'rate not known'})", str(link.get("source", ""))
    for name, entry in p.get("constants", {}).items():
        yield f"{name} = {entry['value']:g}", str(entry.get("source", ""))
    for row in p.get("allreduce", []):
        yield f"allreduce of {row['ranks']} ranks, {len(row['bytes'])} sizes", str(row.get("source", ""))


def _keys(as_json: bool) -> None:
    from hoptrace.platform_file import CONSTANTS, LINKS

    if as_json:
        click.echo(json.dumps({"constants": dict(CONSTANTS), "links": {k: list(v) for k, v in LINKS.items()}}, indent=1))
        return
    click.echo("[constants]  NAME = number, or NAME = {value = number, low = number, high = number, source = text}")
    formatter = click.HelpFormatter(width=130)
    formatter.indent()
    formatter.write_dl(list(CONSTANTS.items()))
    click.echo(formatter.getvalue(), nl=False)
    for link, rates in LINKS.items():
        click.echo(f"[links.{link}]  {', '.join(rates)}, source")
    click.echo("[[allreduce]]  ranks, bytes = […], ns = […], source")
