"""What `hoptrace paths` prints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hoptrace.paths import PathCost
    from hoptrace.paths_example import Row

__all__ = ["example_text", "figures", "listing", "row", "text"]


def listing(as_json: bool) -> None:
    """Prints every mechanism."""
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


def figures(way: PathCost, platform: str, blocks: int) -> dict[str, Any]:
    """A path and its time for ``blocks`` blocks, as plain values."""
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


def text(way: PathCost, platform: str, blocks: int, sources: bool) -> str:
    """The same as lines."""
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


def row(row: Row) -> dict[str, Any]:
    """A row of the worked example, as plain values."""
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


def example_text(rows: list[Row], platform: str) -> str:
    """The worked example as a table."""
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
