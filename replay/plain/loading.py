"""Blocks from tiers: is it worth it, is there room, and what happens when they have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoptrace.replay.outcome import MOVE_READ
from hoptrace.replay.plain.engine import Engine
from hoptrace.replay.plain.kv import Hits
from hoptrace.replay.plain.requests import ROW, Request
from hoptrace.replay.plain.tiers import Found
from hoptrace.stepcost_kernel import step_ns

if TYPE_CHECKING:
    from hoptrace.replay.plain.world import World

__all__ = ["find", "load", "room_for_load", "watermark"]


def watermark(e: Engine) -> int:
    """Tokens of room that an admission leaves."""
    return e.spec.watermark_tokens if e.running else 0


def room_for_load(e: Engine, r: Request, hits: Hits, tokens: int, whole: int) -> bool:
    """Whether a load or hand-over of ``tokens`` tokens (hits included) may take its room: beside what the others still need."""
    there = e.kv.available(hits) - watermark(e)
    if max(0, e.kv.rounded(whole) - hits.shared) > there:
        return False
    others = sum(e.kv.need(x, x.whole) for x in e.running if not x.decoding and not x.padding)
    others += sum(e.kv.need(x, x.whole + x.coming) for x in e.waiting_with_room())
    return max(0, e.kv.rounded(tokens) - hits.shared) + others <= there


def find(w: World, r: Request, e: Engine, device: Hits) -> Found | None:
    """What the tiers have of a prompt beyond the device's hits; null if that is nothing, or not worth loading."""
    if w.tiers is None or r.handed:
        return None
    found = w.tiers.look_up(r, e.index, device, r.whole)
    if not any(found.blocks):
        return None
    if w.plan.reuse == "break_even":
        loads = zip(w.tiers.specs, found.tokens, found.blocks, strict=True)
        load_ns = max(
            w.network.alone_ns(t.read[e.index], n * w.plan.kv_token_bytes, e.kv.blocks(n)) for t, n, blocks in loads if blocks
        )
        at = w.cost_at[e.index]
        rest, left = r.whole - device.tokens, r.whole - found.end
        saved = int(step_ns(w.costs, at, -1, 1, rest, device.tokens, 0, 0, 0))
        saved -= int(step_ns(w.costs, at, -1, 1, left, found.end, 0, 0, 0)) if left else 0
        if load_ns >= saved:
            return None
    return found


def load(w: World, r: Request, e: Engine, device: Hits, found: Found, now: int) -> None:
    """Take room and start the transfers, one a tier."""
    assert w.tiers is not None
    e.kv.admit(r, device, found.end)
    w.number_load(r)
    e.loading[r.number] = r
    r.offered = len(device.blocks) + sum(len(b) for b in found.blocks)
    r.first("load_start_ns", now)
    found_tokens = list(found.tokens)
    if found.end == r.whole:
        found_tokens[found.last] -= 1
    if r.row[ROW["cached_tokens"]] < 0:
        r.put("cached_tokens", device.tokens)
        for i in range(4):
            r.put(f"cached_tier{i}_tokens", found_tokens[i] if i < len(found_tokens) else 0)
    r.computed = found.end
    for level, (tokens, blocks) in enumerate(zip(found.tokens, found.blocks, strict=True)):
        if not blocks:
            continue
        r.pending += 1
        r.used.update(blocks)
        w.tiers.hold(level, blocks, e.index, 1)
        e.reading.update(dict.fromkeys(blocks, r.number))
        w.network.start(
            now, w.tiers.specs[level].read[e.index], tokens * w.plan.kv_token_bytes, e.kv.blocks(tokens), request=r.number,
            engine=e.index, kind=MOVE_READ, step=e.steps, tier=level,
            done=lambda at, level=level, blocks=blocks: _read(w, r, e, level, blocks, at),  # type: ignore[misc]
        )  # fmt: skip


def _read(w: World, r: Request, e: Engine, level: int, blocks: tuple[int, ...], now: int) -> None:
    assert w.tiers is not None
    w.tiers.hold(level, blocks, e.index, -1)
    r.pending -= 1
    if r.pending:
        return
    for b in [b for b, number in e.reading.items() if number == r.number]:
        del e.reading[b]
    r.put("load_end_ns", now)
    del e.loading[r.number]
    e.kv.enter(r, r.computed)
    r.computed = min(r.computed, r.whole - 1)
    e.arrive(r)
