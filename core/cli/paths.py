"""`hoptrace paths`: by which hops data and messages go, and what they cost on a platform."""

from __future__ import annotations

import json

import click


@click.command("paths", short_help="List the ways that data moves, by hops, or price one on a platform.")
@click.option("--mechanism", "-m", metavar="NAME", help="Price this mechanism (or the first of a family, as rdma).")
@click.option("--from", "src", metavar="PLACE", help="Where the data lies: hbm, dram, cxl_pool, …")
@click.option("--to", "dst", metavar="PLACE", help="Where it goes. With --from alone the usual mechanism is taken.")
@click.option("--bytes", "nbytes", type=click.IntRange(1, 2**50), default=16384, metavar="N", help="Bytes of one block. [16384]")
@click.option("--pieces", type=click.IntRange(1, 2**32), default=1, metavar="N", help="Contiguous parts of it on one rank. [1]")
@click.option("--blocks", type=click.IntRange(1, 2**32), default=1, metavar="N", help="Blocks of one transfer. [1]")
@click.option("--ranks", type=click.IntRange(1, 2**16), default=1, metavar="N", help="Devices that hold a part each. [1]")
@click.option("--nics", type=click.IntRange(1, 2**16), metavar="N", help="Network adapters of each side. [one a rank]")
@click.option("--switches", type=click.IntRange(1, 64), default=1, metavar="N", help="Switches between two hosts. [1]")
@click.option("--platform", default="h100-sxm-80gb", metavar="NAME|FILE", help="The machine. [h100-sxm-80gb]")
@click.option("--host", metavar="NAME|FILE", help="Its host, in place of the platform's.")
@click.option("--nic", metavar="NAME|FILE", help="Its network adapter.")
@click.option("--expander", metavar="NAME|FILE", help="Its CXL memory.")
@click.option("--pool", metavar="NAME|FILE", help="Its CXL pool.")
@click.option("--sources", is_flag=True, help="Name the source of each figure.")
@click.option("--example", is_flag=True, help="Print the worked example: one start-up routine over one memory after another.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(
    mechanism: str | None,
    src: str | None,
    dst: str | None,
    nbytes: int,
    pieces: int,
    blocks: int,
    ranks: int,
    nics: int | None,
    switches: int,
    platform: str,
    host: str | None,
    nic: str | None,
    expander: str | None,
    pool: str | None,
    sources: bool,
    example: bool,
    as_json: bool,
) -> None:
    """List the ways that data and messages move, by hops, or price one on a platform.

    Every mechanism is a path of hops: who performs each, whether it carries the payload, and what it costs. The time of a
    transfer is operations x cost of one + bytes / bandwidth. A cost that nobody has measured is asked for, not guessed.

    \b
    Examples:
      hoptrace paths
      hoptrace paths --mechanism rdma --bytes 16384 --platform h100-sxm-80gb
      hoptrace paths --from hbm --to dram --bytes 2097152 --pieces 64
      hoptrace paths -m copy_engine --sources
      hoptrace paths -m copy_engine --platform mine.toml --json
      hoptrace paths --example
    """
    from hoptrace.cli.paths_view import example_text, figures, listing, row, text
    from hoptrace.paths import default_mechanism, system_of, way_of

    if example:
        from hoptrace.paths_example import startup

        rows = startup(platform)
        click.echo(json.dumps([row(r) for r in rows], indent=1) if as_json else example_text(rows, platform))
        return
    if mechanism is None and src is None and dst is None:
        listing(as_json)
        return
    system = system_of(platform, host=host, nic=nic, expander=expander, pool=pool)
    if mechanism is None:
        if src is None or dst is None:
            raise click.UsageError("Give both --from and --to, or --mechanism.")
        mechanism = default_mechanism(system, src, dst)
    name, a, b = _resolve(mechanism, src, dst)
    way = way_of(system, name, a, b, block_bytes=nbytes, pieces=pieces, ranks=ranks, nics=nics, switches=switches)
    click.echo(json.dumps(figures(way, system.name, blocks), indent=1) if as_json else text(way, system.name, blocks, sources))


def _resolve(name: str, src: str | None, dst: str | None) -> tuple[str, str, str]:
    """The mechanism and its ends; the first of a family (`rdma`) that fits, and its first ends where none are given."""
    from hoptrace.errors import UsageError
    from hoptrace.paths import mechanism
    from hoptrace.paths_mechanisms import MECHANISMS

    names = [name] if name in MECHANISMS else [k for k in MECHANISMS if k.startswith(f"{name}_")]
    if not names:
        mechanism(name)
    for one in names:
        for a, b in MECHANISMS[one].ends:
            if src in (None, a) and dst in (None, b):
                return one, a, b
    joined = ", ".join(f"{a} to {b}" for one in names for a, b in MECHANISMS[one].ends)
    raise UsageError(f"{name} does not lead from {src or 'anywhere'} to {dst or 'anywhere'}.", hint=f"It leads from {joined}.")
