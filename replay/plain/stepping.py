"""The begin and the end of an engine's step."""

from __future__ import annotations

from heapq import heappush

from hoptrace.replay.draws import MILLION, draw_plain
from hoptrace.replay.outcome import CHUNK, DECODE, SKIPPED
from hoptrace.replay.plain.engine import Engine, StepSoFar
from hoptrace.replay.plain.handover import begin_streams, end_streams, hand_over
from hoptrace.replay.plain.passes import Pass
from hoptrace.replay.plain.requests import Request
from hoptrace.replay.plain.stored import Stored
from hoptrace.replay.plain.world import World
from hoptrace.stepcost_kernel import RUN, step_ns

__all__ = ["end_step", "try_step"]


def try_step(w: World, e: Engine, now: int) -> None:
    """Passes until one schedules something or drives nobody out; then the step begins, if there is one."""
    for r in e.unseen:
        r.first("decode_seen_ns" if r.handed else "first_seen_ns", now)
    e.unseen.clear()
    _drop_padding(e, now)
    while True:
        p = Pass(w, e, now)
        p.go()
        if p.scheduled() or not p.victims:
            break
        _drop_padding(e, now)
    scheduled = p.scheduled()
    stored = _write_tiers(w, e, now, scheduled)
    if scheduled:
        begin_streams(w, e, now)
        _begin(w, e, p, stored, now)
    if w.tiers is not None:
        for r in w.finished.pop(e.index, ()):
            w.tiers.ended(r, e.index)


def _write_tiers(w: World, e: Engine, now: int, scheduled: bool) -> Stored | None:
    """What a pass evicts is written back, or what its step computes is put into the first tier, for its end to write."""
    if w.tiers is None:
        return None
    evicted, e.kv.evicted = e.kv.evicted, []
    if w.tiers.specs[0].policy == "back":
        _used(e)
        stored = w.tiers.put(0, evicted, e)
        w.tiers.send(stored, e, e.steps, now)
        w.tiers.demote(stored, e, e.steps, now)
        return None
    if not e.kv.cached:
        return None
    stored = Stored()
    for r in e.running:
        if r.share:
            w.tiers.offer(r, _full(r), e, stored)
    for r in w.finished.get(e.index, ()):
        w.tiers.offer(r, len(r.ids), e, stored)
    if not scheduled:
        w.tiers.hold(0, stored.blocks, e.index, -1)
        w.tiers.send(stored, e, e.steps, now)
    w.tiers.demote(stored, e, e.steps, now)
    return stored


def _full(r: Request) -> int:
    """Units with ids that a request has when the step has ended."""
    return sum(end <= r.computed + r.share for end in r.ends)


def _used(e: Engine) -> None:
    """Blocks count as used as if they were written through."""
    for r in e.running:
        if r.share:
            upto = _full(r)
            r.used.update(r.ids[r.offered : upto])
            r.offered = max(r.offered, upto)


def _begin(w: World, e: Engine, p: Pass, stored: Stored | None, now: int) -> None:
    prompts = [r for r in e.running if r.share and not r.decoding]
    decoders = [r for r in e.running if r.share and r.decoding]
    padding = [r for r in e.running if r.padding]
    prefill = len(prompts), sum(r.share for r in prompts), sum(r.computed for r in prompts)
    decode = len(decoders) + len(padding), sum(r.computed for r in [*decoders, *padding])
    tokens = sum(r.share for r in decoders) + len(padding)
    draw = _residual_draw(w, e, (2 if decode[0] else 1) if prefill[0] else 0)
    cost = int(step_ns(w.costs, w.cost_at[e.index], draw, *prefill, *decode, tokens - decode[0]))
    spec = w.plan.speculation
    if spec is not None and p.proposes and decoders:
        cost += spec.tokens * spec.draft_ns
    end = now + max(1, cost)
    if w.clock is not None:
        end = max(now + 1, w.clock.end_ns(e.index, now, max(1, cost)))
    row = [
        e.index, e.steps, now, end, *prefill, decode[0], tokens, decode[1], len(e.running), e.waiting[0] + e.waiting[2],
        e.kv.used, e.preempted, *e.waiting, p.blocked, tokens - decode[0], 0,
    ]  # fmt: skip
    e.step = StepSoFar(row, end, stored)
    e.steps += 1
    e.preempted = 0
    w.wake_at(e, end)


def _residual_draw(w: World, e: Engine, kind: int) -> int:
    """Which residual the step takes: in the order of the recording (seed 0), or drawn in runs of sixteen."""
    if w.plan.seed == 0:
        e.kinds[kind] += 1
        return 1009 * e.index + e.kinds[kind] - 1
    h = draw_plain(w.plan.seed, 5, e.index, e.steps // RUN)
    return h - h % RUN + e.steps % RUN


def end_step(w: World, e: Engine, now: int) -> None:
    """What a step has computed is there: tokens come out, requests leave."""
    step = e.step
    assert step is not None
    number = e.steps - 1
    e.ready_ns = now + e.spec.gap_ns
    accepted = 0
    stay: list[Request] = []
    for r in e.running:
        if r.padding:
            stay.append(r)
            continue
        ends_prompt = not r.decoding and r.share > 0 and r.computed + r.share == r.whole
        hands_over = ends_prompt and e.hands_over and r.output_tokens > 1
        r.emitted = _emitted(w, r, ends_prompt, hands_over)
        phase = SKIPPED if r.share == 0 else DECODE if r.decoding else CHUNK
        w.rows.step_of(r, e.index, number, phase, r.share, r.computed, r.emitted)
        if r.decoding and r.share:
            accepted += r.emitted - 1
        r.computed += r.emitted if r.decoding else r.share
        r.generated += r.emitted
        if r.emitted:
            r.first("first_token_ns", now)
        if ends_prompt:
            r.first("prefill_end_ns", now)
        if r.generated == r.output_tokens:
            _done(w, r, e, now, stay)
        elif hands_over:
            w.rows.close(r)
            r.prompt_step = number
            hand_over(w, r, e, now)
        else:
            end_streams(w, r, e, now)
            r.decoding = r.decoding or ends_prompt
            stay.append(r)
    e.running = stay
    step.row[-1] = accepted
    w.rows.add("step", step.row, now)
    if step.stored is not None and w.tiers is not None:
        w.tiers.hold(0, step.stored.blocks, e.index, -1)
        w.tiers.send(step.stored, e, number, now)
    e.step = None
    _drop_padding(e, now)
    e.awake = True


def _emitted(w: World, r: Request, ends_prompt: bool, hands_over: bool) -> int:
    """Output tokens that the step yields for a request."""
    if ends_prompt:
        recompute = w.plan.handover is not None and w.plan.handover.first_token == "recompute"
        return 0 if hands_over and recompute else 1
    if not r.decoding or r.share == 0:
        return 0
    taken = 0
    spec = w.plan.speculation
    if spec is not None:
        while taken < r.share - 1 and draw_plain(w.plan.seed, 4, r.number, r.generated + taken) % MILLION < spec.accept_ppm:
            taken += 1
    return min(1 + taken, r.output_tokens - r.generated)


def _done(w: World, r: Request, e: Engine, now: int, stay: list[Request]) -> None:
    r.put("last_token_ns", now)
    w.rows.close(r)
    w.sent_by(e).gone(e.index)
    w.done += 1
    heappush(w.ended, (now + w.plan.after_ns, r.number))
    w.end_on(r, e)
    if e.spec.mode == "static":
        r.padding = True
        stay.append(r)
    else:
        _leave(e, r, now)


def _leave(e: Engine, r: Request, now: int) -> None:
    e.kv.leave(r, r.computed)
    if e.slots is not None:
        e.slots.leave(r, now)


def _drop_padding(e: Engine, now: int) -> None:
    """A static batch of which only padding is left has ended."""
    if e.spec.mode == "static" and e.running and all(r.padding for r in e.running):
        for r in e.running:
            _leave(e, r, now)
        e.running.clear()
