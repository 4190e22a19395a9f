"""From the prefill engine to the decode engine: choosing it, room there, the transfer, whole or per layer."""

from __future__ import annotations

from heapq import heappush

from hoptrace.replay.outcome import MOVE_HANDOVER, MOVE_STREAM
from hoptrace.replay.plain.engine import Engine
from hoptrace.replay.plain.kv import Hits
from hoptrace.replay.plain.loading import room_for_load
from hoptrace.replay.plain.requests import ROW, Request
from hoptrace.replay.plain.world import World

__all__ = ["begin_streams", "drop_room", "end_streams", "hand_over", "join", "plan_streams", "pull"]


def whole_there(w: World, r: Request) -> int:
    """Tokens that a request knows when it reaches its decode engine."""
    assert w.plan.handover is not None
    return r.prompt_tokens + (w.plan.handover.first_token == "handover")


def choose(w: World, r: Request, now: int) -> Engine:
    """The decode engine of a request, chosen once."""
    if r.decode_at < 0:
        assert w.decode is not None
        r.decode_at = w.decode.route(r, now).index
        r.put("decode_engine", r.decode_at)
    return w.engines[r.decode_at]


def take_room(w: World, r: Request, e: Engine) -> Hits | None:
    """Room for the prompt on the decode engine, if there is; the hits there."""
    whole = whole_there(w, r)
    hits = e.kv.look_up(r, whole - 1, False)
    if not room_for_load(e, r, hits, r.prompt_tokens, whole):
        return None
    e.kv.admit(r, hits, r.prompt_tokens)
    w.number_load(r)
    e.loading[r.number] = r
    return hits


def way_of(w: World, r: Request) -> int:
    """The way from its prefill to its decode engine."""
    assert w.plan.handover is not None
    return w.plan.handover.ways[w.plan.entry.index(r.row[ROW["engine"]])][w.plan.decoders.index(r.decode_at)]


def hand_over(w: World, r: Request, e: Engine, now: int) -> None:
    """A request's prompt has ended on a prefill engine: it leaves for its decode engine, its room here stays for now."""
    assert w.plan.handover is not None
    choose(w, r, now)
    r.handed = True
    r.coming = 0
    r.driven_out = False
    w.entry.gone(e.index)
    w.end_on(r, e)
    e.held[r.number] = r
    end_streams(w, r, e, now)
    if r.streaming and r.pending == 0:
        give_back(w, r, now)
    heappush(w.joins, (now + w.plan.handover.arrange_ns, r.number))


def join(w: World, r: Request, now: int) -> None:
    """A request reaches the queue of its decode engine."""
    assert w.plan.handover is not None
    e = w.engines[r.decode_at]
    r.engine = e.index
    r.joined = True
    r.put("decode_queued_ns", now)
    e.waits(r)
    e.unseen.append(r)
    e.awake = True
    if r.streaming:
        if r.pending == 0:
            arrived(w, r, now)
        return
    if w.plan.handover.start == "push":
        hits = take_room(w, r, e)
        if hits is not None:
            prefill = w.engines[r.row[ROW["engine"]]]
            send_whole(w, r, e, hits, prefill, r.prompt_step, now)
            return
    e.enqueue(r)


def pull(w: World, r: Request, e: Engine, now: int) -> bool:
    """A pass of the decode engine comes to a request that is still on its prefill engine; whether there was room."""
    hits = take_room(w, r, e)
    if hits is None:
        return False
    send_whole(w, r, e, hits, e, e.steps, now)
    return True


def send_whole(w: World, r: Request, e: Engine, hits: Hits, starter: Engine, step: int, now: int) -> None:
    """Start the transfer of what the decode engine ``e`` does not have."""
    r.put("decode_cached_tokens", hits.tokens)
    tokens = r.prompt_tokens - hits.tokens
    r.add("handover_tokens", tokens)
    r.first("handover_start_ns", now)
    if tokens == 0:
        r.put("handover_end_ns", now)
        give_back(w, r, now)
        arrived(w, r, now)
        return
    r.pending += 1
    w.network.start(
        now, way_of(w, r), tokens * w.plan.kv_token_bytes, e.kv.blocks(tokens), request=r.number, engine=starter.index,
        kind=MOVE_HANDOVER, step=step, tier=-1, done=lambda at: sent(w, r, r.streams, at),
    )  # fmt: skip


def sent(w: World, r: Request, stream: int, now: int) -> None:
    """A transfer of a request has ended; ``stream`` tells whether its room on the decode engine is still the one it went to."""
    if stream != r.streams:
        return
    r.pending -= 1
    r.put("handover_end_ns", now)
    if r.pending == 0 and r.handed:
        give_back(w, r, now)
        if r.joined:
            arrived(w, r, now)


def give_back(w: World, r: Request, now: int) -> None:
    """The room on the prefill engine is free again."""
    e = w.engines[r.row[ROW["engine"]]]
    if e.held.pop(r.number, None) is not None:
        e.kv.leave(r, r.prompt_tokens)
        e.awake = True


def arrived(w: World, r: Request, now: int) -> None:
    """All of a request's KV is on its decode engine."""
    assert w.plan.handover is not None
    e = w.engines[r.decode_at]
    r.first("handover_start_ns", now)
    r.first("handover_end_ns", now)
    r.first("handover_tokens", 0)
    del e.loading[r.number]
    e.kv.enter(r, r.prompt_tokens)
    r.streaming = False
    r.computed = r.prompt_tokens - (w.plan.handover.first_token == "recompute")
    r.decoding = True
    e.arrive(r)


def plan_streams(w: World, r: Request, e: Engine, now: int) -> None:
    """A prompt is scheduled on a prefill engine for the first time: per layer, choose the decode engine and take room there."""
    h = w.plan.handover
    if h is None or h.start != "push" or h.layers <= 1 or not e.hands_over or r.output_tokens == 1 or r.decode_at >= 0:
        return
    to = choose(w, r, now)
    hits = take_room(w, r, to)
    if hits is not None:
        r.streaming = True
        r.started = False
        r.coming = whole_there(w, r) - r.prompt_tokens
        r.put("decode_cached_tokens", hits.tokens)


def begin_streams(w: World, e: Engine, now: int) -> None:
    """A step begins: what it computes of prompts that are sent per layer goes on its way, but for the last layer."""
    h = w.plan.handover
    if h is None or h.layers <= 1:
        return
    for r in e.running:
        if not r.streaming or r.share == 0:
            continue
        to = w.engines[r.decode_at]
        there = r.row[ROW["decode_cached_tokens"]]
        begin = max(there, r.computed if r.started else 0)
        r.started = True
        tokens = max(0, r.computed + r.share - begin)
        r.rest = -1
        if tokens == 0:
            continue
        r.add("handover_tokens", tokens)
        r.first("handover_start_ns", now)
        size = tokens * w.plan.kv_token_bytes
        first = size * (h.layers - 1) // h.layers
        r.rest = size - first
        _stream(w, r, e, first, to.kv.blocks(tokens), now)


def end_streams(w: World, r: Request, e: Engine, now: int) -> None:
    """A step has ended: the last layer of what it computed goes."""
    if r.streaming and r.rest >= 0:
        _stream(w, r, e, r.rest, 0, now)
    r.rest = -1


def _stream(w: World, r: Request, e: Engine, size: int, blocks: int, now: int) -> None:
    r.pending += 1
    stream = r.streams
    step = e.steps if e.step is None else e.steps - 1
    w.network.start(
        now, way_of(w, r), size, blocks, request=r.number, engine=e.index, kind=MOVE_STREAM, step=step, tier=-1,
        done=lambda at: sent(w, r, stream, at),
    )  # fmt: skip


def drop_room(w: World, r: Request) -> None:
    """A request that is sent per layer is driven out: its room on the decode engine goes, what is under way goes for nothing."""
    if not r.streaming or r.handed:
        return
    e = w.engines[r.decode_at]
    r.streaming = False
    r.streams += 1
    r.pending = 0
    r.rest = -1
    r.coming = 0
    del e.loading[r.number]
    e.kv.leave(r, 0)
    e.awake = True
