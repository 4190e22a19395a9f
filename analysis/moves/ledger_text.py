"""The ledger on the terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.moves.ledger import Amplification, Ledger
from hoptrace.analysis.moves.ledger_links_text import busy_lines, links
from hoptrace.analysis.moves.tiering import tier_says
from hoptrace.analysis.text import bytes_text, count_text, counted, percent

__all__ = ["blocks"]

_ROWS = 4
# What was counted first, the largest first: derived and assumed figures are another matter.
_ORDER = {"counted": 0, "derived": 1, "assumed": 2}


def blocks(book: Ledger, *, full: bool = False) -> list[RenderableType]:
    """What moved per token, re-use, and what does not add up; ``full``: every row, links, tiers, what could be re-used, geometry,
    law 2."""
    out: list[RenderableType] = []
    if book.rows.height:
        out += _moved(book, full=full)
    elif full:
        out.append(Text("No moves are known."))
    if full and book.amplification:
        said = "; ".join(_amplified(a, book) for a in book.amplification)
        out.append(Text(f"Moved ÷ size counted once: {said}."))
    if full:
        out += [Text(line) for line in _assumed(book)]
        out += links(book.link_uses)
        out += [Text(line) for line in tier_says(book.tier_pages, book.tiering_off)]
    out += [Text(line, style="yellow") for line in _odd(book)]
    out += [Text(line) for line in (_reuse(book, full=full))]
    out += [Text(line) for line in _reusable(book, full=full)]
    if full:
        out += [Text(g.says) for g in book.geometry]
        out += [Text(line) for line in _resident(book)]
    return out


def _moved(book: Ledger, *, full: bool) -> list[RenderableType]:
    first = "object" if full or not book.output_tokens else "moved per token"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first)
    for name in ("bytes", "transfers", "hops", *(("control (assumed)",) if full else ()), "total"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("way")
    table.add_column("basis")
    n = book.output_tokens or 1

    def each(value: int | None) -> str:
        return count_text(None if value is None else value / n)

    rows = sorted(book.rows.to_dicts(), key=lambda r: (_ORDER.get(r["basis"], 3), -(r["bytes"] or 0), r["object"]))
    for r in rows if full else rows[:_ROWS]:
        control = f"{each(r['control_ops'])} ({each(r['control_ops_assumed'])})"
        table.add_row(
            Text(r["object"]),
            _bound(None if r["bytes"] is None else r["bytes"] / n, book.is_bound(r)),
            each(r["transfers"]),
            each(r["payload_hops"]),
            *((control,) if full else ()),
            _bound(r["bytes"], book.is_bound(r)),
            Text(f"{r['src']} → {r['dst']}"),
            Text(r["basis"]),
        )
    out: list[RenderableType] = [table]
    if any(book.is_bound(r) and r["bytes"] is not None for r in rows):
        out.append(
            Text("≥: a lower bound; not all moves were recorded or say their bytes, or not all steps are known.", style="dim")
        )
    if len(rows) > _ROWS and not full:
        out.append(Text(f"{counted(len(rows) - _ROWS, 'more row')}: --section moves", style="dim"))
    return out


def _amplified(a: Amplification, book: Ledger) -> str:
    """The basis of what moved is said where there are several."""
    several = sum(x.object == a.object for x in book.amplification) > 1
    of = f" of what is {a.moved_basis}" if several else ""
    return f"{a.object} {'≥ ' if a.at_least else ''}×{_factor(a.factor)}{of} ({a.size_is})"


def _assumed(book: Ledger) -> list[str]:
    found = book.density_assumed()
    if found is None:
        return []
    size, ops = found
    per = "" if not book.output_tokens else f" ({count_text(ops / book.output_tokens)} per output token)"
    return [
        f"Assumed, since moves do not say them: {count_text(ops)} control operations{per}, from the access paths of their "
        f"mechanisms; {bytes_text(size / ops)} of payload for each."
    ]


def _odd(book: Ledger) -> list[str]:
    """What a reader should see without asking: full links, data on another wire, laws that do not hold."""
    out = busy_lines(book.link_uses)
    out += book.notes
    freed = [b for b in book.residency.blocks if b.unseen_blocks]
    out += [f"{b.server}, {b.medium}: {counted(b.unseen_blocks, 'block')} freed that never came." for b in freed]
    return out


def _reuse(book: Ledger, *, full: bool) -> list[str]:
    r = book.reuse
    if r.share is None:
        return []
    tiers = ", ".join(f"{t} {v:,}" for t, v in r.by_tier.items() if v)
    said = (
        f"Reuse: {r.cached_tokens:,} of {r.prompt_tokens:,} prompt tokens came from a cache "
        f"({percent(r.share)}{'; ' + tiers if tiers else ''})"
    )
    if r.resumed_tokens:
        said += f"; {r.resumed_tokens:,} more were own tokens found again after a preemption, which is no reuse"
    if r.handed_over_tokens:
        said += f"; {r.handed_over_tokens:,} were handed over to decode servers, which is no reuse"
    out = [said + "."]
    if full:
        out.append(f"That is over {counted(r.stays, 'stay')}, weighted by tokens; {r.stays_with_a_hit:,} of them had any hit.")
        for e in book.engine_rates:
            out.append(f"{e.server} itself tells {percent(e.share)} ({e.name}): {e.window}.")
        if book.upkeep is not None:
            out += _upkeep(book)
    return out


def _upkeep(book: Ledger) -> list[str]:
    k = book.upkeep
    assert k is not None
    out = []
    if k.moved_per_byte_served is not None:
        size = f"{'at least ' if k.at_least else ''}{bytes_text(k.moved_bytes)}"
        out.append(
            f"Keeping the cache moved {size} between tiers ({k.moved_basis}, from {k.moved_from}) for "
            f"{bytes_text(k.served_bytes)} that hits served: {count_text(k.moved_per_byte_served)} bytes a byte."
        )
    if k.stored_per_byte_served is not None:
        out.append(
            f"{bytes_text(k.stored_bytes)} were stored, {count_text(k.stored_per_byte_served)} bytes for each byte served."
        )
    for medium, m in k.by_medium.items():
        told = ", ".join(f"{what.replace('_', ' ')} {bytes_text(n)}" for what, n in m.items() if n is not None)
        if told:
            out.append(f"Blocks, {medium}: {told}.")
    return out


def _reusable(book: Ledger, *, full: bool) -> list[str]:
    r = book.reusable
    if r is None or (not full and not r.unlimited.hit_blocks):
        return []
    tokens = "" if r.unlimited.token_share is None else f", {percent(r.unlimited.token_share)} of the prompt tokens"
    out = [
        f"One shared cache without a limit would have had {percent(r.unlimited.block_share)} of {r.unlimited.blocks:,} prompt "
        f"blocks{tokens} (of {counted(r.requests, 'request')} with block hashes; assumed)."
    ]
    if full and r.curve:
        points = "; ".join(f"{p.capacity_blocks:,} blocks {p.block_share:.1%}" for p in r.curve)
        out.append(f"Limited, dropping the least recently used: {points}.")
    return out


def _resident(book: Ledger) -> list[str]:
    out = []
    for b in book.residency.blocks:
        out.append(
            f"{b.server}, {b.medium}: {b.resident_blocks:,} blocks at the end = {b.before_blocks:,} before + "
            f"{b.produced_blocks:,} stored + {b.copied_in_blocks:,} copied in - {b.freed_blocks:,} freed; peak {b.peak_blocks:,}."
        )
    return out + [c.says for c in book.residency.checks if c.holds]


def _factor(x: float) -> str:
    return count_text(round(x, 1) if x < 100 else round(x))


def _bound(n: float | None, at_least: bool) -> str:
    return f"≥ {bytes_text(n)}" if at_least and n is not None else bytes_text(n)
