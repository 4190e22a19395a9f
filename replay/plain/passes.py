"""One scheduling pass: who gets how many tokens of the next step, who is driven out, who is admitted."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from hoptrace.replay.outcome import BUDGET, KV, PREEMPTED, SLOTS
from hoptrace.replay.plain.engine import Engine
from hoptrace.replay.plain.handover import drop_room, plan_streams, pull
from hoptrace.replay.plain.kv import Hits
from hoptrace.replay.plain.loading import find, load, room_for_load, watermark
from hoptrace.replay.plain.parts import guarded, wrong
from hoptrace.replay.plain.requests import ROW, Request
from hoptrace.replay.plain.rows import Run
from hoptrace.replay.plain.world import World

__all__ = ["Pass"]


class Pass:
    """One pass of one engine at one instant.

    ``victims``: how many it drove out; ``blocked``: why the first of those who wait was not admitted (0: nobody waits).
    """

    def __init__(self, w: World, e: Engine, now: int) -> None:
        self.w, self.e, self.now = w, e, now
        self.budget = e.budget
        self.victims = 0
        self.blocked = 0
        spec = w.plan.speculation
        decoders = sum(r.decoding and not r.padding for r in e.running)
        self.proposes = spec is not None and (spec.off_above is None or decoders <= spec.off_above)
        self._most = 1 + spec.tokens if spec is not None and self.proposes else 1
        self._prompts = 0
        for r in e.running:
            r.share = 0
            r.entered = []

    def go(self) -> None:
        """Do it."""
        e = self.e
        if e.spec.mode == "static" and e.running:
            self._serve(lambda r: True)
            self.blocked = SLOTS if e.anybody_waits() else 0
        else:
            first_prompts = e.spec.mode in ("prefill_first", "prompts_first")
            self._serve(lambda r: not (first_prompts and r.decoding))
            if not self.victims:
                self._admit()
            if e.spec.mode == "prompts_first" or (first_prompts and not self._prompts):
                self._serve(lambda r: r.decoding)
        if self.victims:
            self.blocked = KV

    def scheduled(self) -> bool:
        """Whether anybody has a part in the step."""
        return any(r.share for r in self.e.running)

    # --- those who run

    def _serve(self, which: Callable[[Request], bool]) -> None:
        running = self.e.running
        i = 0
        while i < len(running) and self.budget > 0:
            r = running[i]
            tokens = 0 if r.padding or not which(r) else self._wanted(r)
            if tokens == 0:
                i += 1
                continue
            gone_before = self._make_room(r, r.computed + tokens, i)
            if gone_before is None:
                return
            i -= gone_before
            self._give(r, tokens)
            i += 1

    def _wanted(self, r: Request) -> int:
        if r.decoding:
            return min(self._most, self.budget)
        rest = r.whole - r.computed
        if rest <= self.budget:
            return rest
        return self.budget if self.e.spec.chunked_prefill else 0

    def _give(self, r: Request, tokens: int) -> None:
        self.e.kv.grow(r, r.computed + tokens)
        r.share = tokens
        self.budget -= tokens
        self._prompts += not r.decoding
        r.entered = self.e.kv.enter(r, r.computed + tokens)

    def _make_room(self, r: Request, tokens: int, at: int) -> int | None:
        """Drive out until ``r``, at position ``at``, has room; how many before it went. Null: it went itself."""
        before = 0
        while self.e.kv.need(r, tokens) > self.e.kv.available():
            candidates = [x for x in self.e.running if not x.padding]
            x = self._victim(candidates)
            place = self.e.running.index(x)
            before += place < at - before
            self.drive_out(x)
            if x is r:
                return None
        return before

    def _victim(self, candidates: list[Request]) -> Request:
        name, part = self.w.victim_name, self.w.victim
        i = guarded(name, "victim", lambda: part.victim(candidates))
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < len(candidates):
            raise wrong(name, i, f"the position of one of {len(candidates)} running requests, from 0")
        return candidates[i]

    def drive_out(self, r: Request, *, arrived: bool = False) -> None:
        """A request gives up all and waits again, to compute prompt and output so far anew."""
        w, e = self.w, self.e
        if arrived:
            e.arrived.remove((r.load_seq, r.number, r))
            e.waits(r, -1)
        else:
            e.running.remove(r)
            if r.share:
                self.budget += r.share
                self._prompts -= not r.decoding
                e.kv.undo(r, r.entered)
                r.share = 0
        drop_room(w, r)
        e.kv.leave(r, r.computed)
        if e.slots is not None:
            e.slots.leave(r, None)
        w.rows.close(r)
        run = Run(e.index, e.steps, PREEMPTED, 0, r.computed, 0)
        run.last = -1
        r.run = run
        r.add("recomputed_tokens", r.computed)
        r.add("preemptions", 1)
        r.add("prefill_preemptions", int(e.hands_over))
        r.computed = 0
        r.decoding = False
        r.driven_out = True
        self.victims += 1
        e.preempted += 1
        e.waits(r)
        if w.plan.order.requeue:
            e.enqueue(r)
        else:
            e.front.append(r)

    # --- those who wait

    def _admit(self) -> None:
        e = self.e
        passed: list[tuple[bool, Request]] = []
        while e.anybody_waits():
            if len(e.running) >= e.max_sequences:
                self.blocked = SLOTS
                break
            if self.budget <= 0:
                self.blocked = BUDGET
                break
            if e.arrived:
                if not self._admit_arrived(e.arrived[0][2]):
                    break
                continue
            front = bool(e.front)
            r = e.front[-1] if front else e.queue[0][1]
            if r.handed and not r.driven_out:
                if not pull(self.w, r, e, self.now):
                    self.blocked = KV
                    break
            elif not self._admit_or_load(r):
                if self.blocked:
                    break
                passed.append((front, r))
            if front:
                e.front.remove(r)
            else:
                heappop(e.queue)
        for front, r in reversed(passed):
            if front:
                e.front.append(r)
            else:
                heappush(e.queue, (r.rank, r))

    def _fits(self, need: int, hits: Hits | None) -> bool:
        return need + watermark(self.e) <= self.e.kv.available(hits)

    def _prompt_tokens(self, r: Request, rest: int) -> int:
        """How many of the ``rest`` of its tokens an admitted one computes; 0: the budget does not do."""
        if rest <= self.budget:
            return rest
        if self.e.spec.chunked_prefill:
            return self.budget
        alone = not self._prompts and (r.driven_out or self.e.spec.mode == "prompts_first")
        return rest if alone else 0

    def _admit_arrived(self, r: Request) -> bool:
        e = self.e
        rest = r.whole - r.computed
        if r.decoding:
            tokens = min(self._most, self.budget)
        else:
            tokens = self._prompt_tokens(r, rest)
            if tokens == 0:
                self.blocked = BUDGET
                return False
        if not self._fits(e.kv.need(r, max(r.whole, r.computed + tokens)), None):
            self.blocked = KV
            if not e.running and not e.loading and not e.held:
                self.drive_out(e.arrived[-1][2], arrived=True)
            return False
        e.arrived.pop(0)
        if r.decoding and e.spec.mode in ("prefill_first", "prompts_first"):
            tokens = 0
        self._run(r, tokens)
        return True

    def _admit_or_load(self, r: Request) -> bool:
        """Admit the next one, or begin its load. False: it is blocked, or (``blocked`` 0) to be passed over."""
        e = self.e
        slot = -1
        if e.slots is not None:
            slot, tokens = e.slots.choose(r)
            hits = Hits(tokens=min(tokens, r.whole - 1))
        else:
            hits = e.kv.look_up(r, r.whole - 1, r.driven_out)
        told = None if self.w.cached is None else self.w.cached.cached_tokens(r, max(0, r.row[ROW["preemptions"]]))
        if told is not None:
            # Blocks that are there count as held; what is told beyond them takes room of the request's own.
            there = e.kv.look_up(r, min(told, r.whole - 1), r.driven_out)
            hits = Hits(there.blocks, min(told, r.whole - 1), there.shared, there.evictable)
        found = find(self.w, r, e, hits) if told is None else None
        if found is not None:
            if any(b in e.reading for blocks in found.blocks for b in blocks):
                return False
            if not room_for_load(e, r, hits, found.end, r.whole):
                self.blocked = KV
                return False
            load(self.w, r, e, hits, found, self.now)
            return True
        rest = self._prompt_tokens(r, r.whole - hits.tokens)
        if rest == 0:
            self.blocked = BUDGET
            return False
        if not self._fits(max(0, e.kv.rounded(r.whole) - hits.shared), hits):
            self.blocked = KV
            return False
        e.kv.admit(r, hits, hits.tokens + rest)
        r.computed = hits.tokens
        if e.slots is not None:
            e.slots.take(r, slot)
        if r.row[ROW["cached_tokens"]] < 0:
            r.put("cached_tokens", hits.tokens)
            for i in range(4):
                r.put(f"cached_tier{i}_tokens", 0)
        self._run(r, rest)
        return True

    def _run(self, r: Request, tokens: int) -> None:
        """A request gets its place, and so many tokens."""
        e = self.e
        e.waits(r, -1)
        if r.driven_out:
            r.add("resumed_tokens", r.computed)
            r.row[ROW["recomputed_tokens"]] -= r.computed
            if isinstance(r.run, Run):
                r.run.last = e.steps - 1
                self.w.rows.close(r)
        r.first("decode_scheduled_ns" if r.handed else "scheduled_ns", self.now)
        e.running.append(r)
        r.share, r.entered = 0, []
        if tokens:
            self._give(r, tokens)
        plan_streams(self.w, r, e, self.now)
