"""`hoptrace paths`: by which hops data and messages go, and what they cost on a platform."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hoptrace.paths import PathCost
    from hoptrace.paths_example import Row


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
    from hoptrace.paths import default_mechanism, system_of, way_of

    if example:
        from hoptrace.paths_example import startup

        rows = startup(platform)
        click.echo(json.dumps([_row(r) for r in rows], indent=1) if as_json else _example(rows, platform))
        return
    if mechanism is None and src is None and dst is None:
        _list(as_json)
        return
    system = system_of(platform, host=host, nic=nic, expander=expander, pool=pool)
    if mechanism is None:
        if src is None or dst is None:
            raise click.UsageError("Give both --from and --to, or --mechanism.")
        mechanism = default_mechanism(system, src, dst)
    name, a, b = _resolve(mechanism, src, dst)
    way = way_of(system, name, a, b, block_bytes=nbytes, pieces=pieces, ranks=ranks, nics=nics, switches=switches)
    click.echo(json.dumps(_figures(way, system.name, blocks), indent=1) if as_json else _text(way, system.name, blocks, sources))


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


def _list(as_json: bool) -> None:
    from hoptrace.paths_hops import PLACES
    from hoptrace.paths_mechanisms import MECHANISMS

    if as_json:
        click.echo(
            json.dumps(
                [
                    {
                        "name": m.name,
                        "mechanism": m.moves,
                        "what": m.what,
                        "initiator": m.initiator,
                        "ends": [list(e) for e in m.ends],
                        "payload_hops": sum(s.hop.payload for s in m.steps),
                        "control_ops": sum(not s.hop.payload for s in m.steps),
                        "hops": [
                            {"kind": s.hop.kind, "what": s.hop.what, "who": s.hop.who, "payload": s.hop.payload, "times": s.times}
                            for s in m.steps
                        ],
                        "needs": list(m.constants),
                        "source": m.source,
                    }
                    for m in MECHANISMS.values()
                ],
                indent=1,
            )
        )
        return
    formatter = click.HelpFormatter(width=130)
    rows = []
    for m in MECHANISMS.values():
        payload = sum(s.hop.payload for s in m.steps)
        rows.append((m.name, f"{payload} + {len(m.steps) - payload} hops. {m.what}"))
    formatter.write_dl(rows)
    click.echo(formatter.getvalue(), nl=False)
    click.echo("Hops: with the payload + control, of one piece. Places: " + ", ".join(PLACES) + ".")
    click.echo("`hoptrace paths --mechanism NAME --platform NAME` shows the hops of one and what each costs.")


def _figures(way: PathCost, platform: str, blocks: int) -> dict[str, Any]:
    low, high = way.range_ns(blocks=blocks)
    return {
        "platform": platform,
        "name": way.name,
        "mechanism": way.mechanism,
        "from": way.src,
        "to": way.dst,
        "block_bytes": way.block_bytes,
        "blocks": blocks,
        "descriptors": way.descriptors,
        "base_ns": way.base_ns,
        "per_block_ns": way.per_block_ns,
        "bytes_per_s": way.bytes_per_s,
        "total_ns": way.time_ns(blocks=blocks),
        "low_ns": low,
        "high_ns": high,
        "payload_hops": way.payload_hops,
        "control_ops": way.control_ops,
        "hops": [
            {
                "kind": h.kind,
                "what": h.what,
                "who": h.who,
                "payload": h.payload,
                "times": h.times,
                "constant": h.constant or None,
                "fixed_ns": h.fixed_ns,
                "charged": h.charged,
                "once": h.once,
                "bytes_per_s": h.bytes_per_s,
            }
            for h in way.hops
        ],
        "extras": [{"constant": n, "fixed_ns": ns, "charged": times, "once": once} for n, ns, times, once in way.extras],
        "links": [{"name": k.name, "end": k.end, "bytes_per_s": k.bytes_per_s, "source": k.source} for k in way.links],
        "sources": list(way.sources),
        "notes": list(way.notes),
    }


def _text(way: PathCost, platform: str, blocks: int, sources: bool) -> str:
    from hoptrace.platform_file import CONSTANTS

    lines = [
        f"{way.name} from {way.src} to {way.dst} on {platform}: {way.block_bytes:,} bytes in {way.descriptors:,} "
        f"piece{'s' if way.descriptors > 1 else ''}" + (f", {blocks:,} blocks" if blocks > 1 else ""),
        "",
        f"{'hop':<18} {'by':<14} {'times':>8}  {'data':<4} {'fixed ns':>14}  what",
    ]
    for h in way.hops:
        if h.fixed_ns is not None:
            fixed = f"{h.fixed_ns:,.5g}" + (f" x {h.charged:,}" if h.charged > 1 else "")
        else:
            fixed = '"' if h.constant else "-"
        lines.append(f"{h.kind:<18} {h.who:<14} {h.times:>8,}  {'yes' if h.payload else '':<4} {fixed:>14}  {h.what}")
    for name, ns, times, _ in way.extras:
        fixed = f"{ns:,.5g}" + (f" x {times:,}" if times > 1 else "")
        lines.append(f"{'':<18} {'':<14} {'':>8}  {'':<4} {fixed:>14}  {CONSTANTS[name]}")
    low, high = way.range_ns(blocks=blocks)
    total = way.time_ns(blocks=blocks)
    moved = way.block_bytes * blocks
    fixed_ns = way.base_ns + blocks * way.per_block_ns
    lines += [
        "",
        f"Fixed:     {way.base_ns:,} ns a transfer + {way.per_block_ns:,} ns a block = {fixed_ns:,} ns",
        f"Bytes:     {moved:,} over "
        + (", ".join(f"{k.name} {k.bytes_per_s / 1e9:,.4g} GB/s" for k in way.links) or "no link of their own")
        + f" = {total - fixed_ns:,} ns",
        f"Total:     {total:,} ns" + (f"  ({low:,} to {high:,} over the measured range)" if low < high else ""),
        f"Hops:      {way.payload_hops:,} with the payload, {way.control_ops:,} control operations a block",
        "",
    ]
    lines += [f"Note:      {n}" for n in way.notes]
    lines += [f"Source:    {s}" for s in way.sources] if sources else ["`--sources` names where each figure is from."]
    lines.append("A \" shares the time of the hop above: they were measured together. A core's own copying counts as fixed.")
    return "\n".join(lines)


def _row(row: Row) -> dict[str, Any]:
    return {
        "memory": row.memory,
        "mechanism": row.path.name,
        "crossings": row.crossings,
        "hops": row.hops,
        "seconds": row.seconds,
        "low_s": row.low_s,
        "high_s": row.high_s,
        "bandwidth_s": row.bandwidth_s,
    }


def _example(rows: list[Row], platform: str) -> str:
    from hoptrace.paths_example import READS, WORD_BYTES

    lines = [
        f"{READS:,} reads of {WORD_BYTES} bytes, each address known only when the read before has come ({platform}).",
        "",
        f"{'memory':<38} {'waits of a core':>15} {'hops':>14} {'time':>9}  {'range':>15}  {'bytes at the bandwidth':>22}",
    ]
    for r in rows:
        bandwidth = f"{r.bandwidth_s:,.2f} s" if r.bandwidth_s is not None else "-"
        spread = f"{_span(r.low_s)} - {_span(r.high_s)}" if r.high_s - r.low_s > 0.01 else ""
        lines.append(f"{r.memory:<38} {r.crossings:>15,} {r.hops:>14,} {_span(r.seconds):>9}  {spread:>15}  {bandwidth:>22}")
    return "\n".join(lines)


def _span(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.3g} s"
