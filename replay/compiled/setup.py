"""A plan and its work as the tables of the compiled engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from hoptrace.replay.compiled import columns as c
from hoptrace.replay.compiled import heap, routers, store, transfers
from hoptrace.replay.jit import lean
from hoptrace.replay.outcome import DECODE, MOVE, REQUEST, RUN, STEP, UNFINISHED, UNLIMITED
from hoptrace.replay.plan import EngineSpec, Plan
from hoptrace.replay.workload import Workload
from hoptrace.stepcost_pack import pack

__all__ = ["ROWS", "ints", "prepare", "refused", "requests"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]

_RESUMED, _RECOMPUTED = REQUEST.index("resumed_tokens"), REQUEST.index("recomputed_tokens")
_PREEMPTIONS, _PREFILL_PREEMPTIONS = REQUEST.index("preemptions"), REQUEST.index("prefill_preemptions")
_GENERATED, _STATUS = REQUEST.index("generated_tokens"), REQUEST.index("status")

ROWS = 65536
"""Rows of a kind that are handed on at once."""

_MODES = {"mixed": c.MIXED, "prefill_first": c.PREFILL_FIRST, "static": c.STATIC, "prompts_first": c.PROMPTS_FIRST}
_CACHES = {None: c.NO_CACHE, "pool": c.POOL, "slot": c.SLOTTED}
_ROLES = {"both": c.BOTH, "prefill": c.PREFILL, "decode": c.DECODE_ROLE}
# Longer blocks than that: every step is gone through one by one.
_LONGEST_BLOCK = 4096
_LONGEST_RING = 2048


def ints(array: _Ints) -> _Ints:
    """As the compiled code wants it: one layout, so that it is compiled once."""
    fit = array.dtype == np.int64 and array.flags.c_contiguous and array.flags.writeable and array.flags.aligned
    return array if fit else np.array(array, dtype=np.int64, order="C")


def _limit(value: int | None) -> int:
    return UNLIMITED if value is None else value


def refused(work: Workload, plan: Plan) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[n] which requests could never fit the engines that they may reach (docs/replay-engine.md, Refusals)."""
    entry, decode = [plan.engines[i] for i in plan.entry], [plan.engines[i] for i in plan.decoders]
    local = np.zeros(work.n, dtype=bool)
    if plan.handover is not None:
        local = work.prompt_tokens < plan.handover.local_below_tokens
    more = 0 if plan.speculation is None else plan.speculation.tokens
    out = np.zeros(work.n, dtype=bool)

    def unfit(e: EngineSpec, first: bool) -> np.ndarray[Any, np.dtype[np.bool_]]:
        prefill = e.role == "prefill"
        total = work.prompt_tokens + (1 if prefill else work.output_tokens)
        bad = total > _limit(e.context_tokens)
        if e.capacity_tokens is not None:
            kv = work.prompt_tokens if prefill else work.prompt_tokens + work.output_tokens - 1 + more
            block = e.block_size_tokens
            bad |= -(-kv // block) > e.capacity_tokens // block
        whole = not e.chunked_prefill and e.mode != "prompts_first"
        if first and whole and e.max_batched_tokens is not None:
            bad |= work.prompt_tokens > e.max_batched_tokens
        return bad

    for e in entry:
        out |= ~local & unfit(e, True)
    goes_on = ~local & (work.output_tokens > 1) if any(e.role == "prefill" for e in entry) else np.zeros(work.n, dtype=bool)
    for e in decode:
        out |= (local & unfit(e, True)) | (goes_on & unfit(e, False))
    return out


def _engines(plan: Plan, work: Workload, separate: bool) -> tuple[_Ints, _Ints]:
    """(eng, cal)."""
    eng = np.zeros((len(plan.engines), c.E_COLUMNS), dtype=np.int64)
    _, starts = pack(plan.costs)
    longest = int(work.output_tokens.max(initial=1)) + 1
    ring = 16
    while ring < min(longest, _LONGEST_RING):
        ring *= 2
    at = slots = 0
    positions = {i: k for group in (plan.entry, plan.decoders) for k, i in enumerate(group)}
    for i, spec in enumerate(plan.engines):
        row = eng[i]
        block = spec.block_size_tokens
        row[[c.MAX_SEQUENCES, c.BUDGET]] = _limit(spec.max_sequences), _limit(spec.max_batched_tokens)
        row[[c.MODE, c.CHUNKED, c.BLOCK]] = _MODES[spec.mode], spec.chunked_prefill, block
        row[c.CAPACITY] = _limit(spec.capacity_tokens) // block * block
        row[[c.CACHE, c.CACHE_CAPACITY]] = _CACHES[spec.cache], _limit(spec.cache_capacity_tokens)
        row[[c.GAP, c.COST, c.WATERMARK]] = spec.gap_ns, starts[spec.cost], spec.watermark_tokens
        row[[c.ROLE, c.POSITION, c.PLACE]] = _ROLES[spec.role], positions[i], i
        explicit = separate or plan.speculation is not None or block > _LONGEST_BLOCK
        row[[c.EXPLICIT, c.CALENDAR, c.RING]] = explicit, at, ring
        at += ring
        row[c.COUNTS] = at
        at += 1 if explicit else block
        row[c.WHEN] = 4 * c.NEVER
        row[[c.READY, c.DECODE_PHASE]] = -c.NEVER, DECODE
        row[[c.HEAD, c.TAIL, c.UNFINISHED, c.TAIL_FIRST, c.UNSEEN, c.FRESH_FIRST, c.FRONT]] = c.NONE
        row[[c.OFFER_FIRST, c.OFFER_LAST, c.WRITE_FIRST, c.ENDED_FIRST, c.STASH_FIRST, c.COMING, c.PASSED]] = c.NONE
        if spec.cache == "slot":
            row[c.FIRST_SLOT] = slots
            slots += _limit(spec.max_sequences)
    cal = np.full(at, -1, dtype=np.int64)
    for row in eng:
        n = 1 if row[c.EXPLICIT] else row[c.BLOCK]
        cal[row[c.COUNTS] : row[c.COUNTS] + n] = 0
    return eng, cal


def _globals(plan: Plan, work: Workload, sessions: bool) -> _Ints:
    g = np.zeros(c.G_COLUMNS, dtype=np.int64)
    n = len(plan.engines)
    g[c.HORIZON] = c.NEVER - 1 if plan.horizon_ns is None else plan.horizon_ns
    g[[c.BEFORE_NS, c.AFTER_NS, c.SEED]] = plan.before_ns, plan.after_ns, plan.seed & ((1 << 63) - 1)
    g[[c.FROM_ARRIVAL, c.REQUEUE]] = plan.order.from_arrival, plan.order.requeue
    g[[c.SUCCESSORS, c.CLIENTS, c.THINK]] = sessions and plan.clients is None, plan.clients is not None, plan.think_ns
    g[[c.ENGINES, c.ROUTER_QUEUE, c.JOIN_QUEUE, c.CLIENT_QUEUE]] = n, 2 * n, 2 * n + 1, 2 * n + 2
    g[[c.ENTRIES_N, c.DECODERS_N, c.DISTINCT]] = len(plan.entry), len(plan.decoders), len(work.block_tokens)
    g[c.END] = -c.NEVER
    if plan.handover is not None:
        h = plan.handover
        g[[c.HANDOVER, c.PUSH, c.RECOMPUTE]] = 1, h.start == "push", h.first_token == "recompute"
        g[[c.LAYERS, c.ARRANGE, c.LOCAL_BELOW]] = h.layers if h.start == "push" else 1, h.arrange_ns, h.local_below_tokens
    if plan.speculation is not None:
        spec = plan.speculation
        g[[c.SPEC_TOKENS, c.SPEC_PPM, c.SPEC_DRAFT]] = spec.tokens, spec.accept_ppm, spec.tokens * spec.draft_ns
        g[c.SPEC_OFF] = _limit(spec.off_above)
    return g


def _caches(plan: Plan, eng: _Ints, g: _Ints) -> tuple[_Ints, _Ints, _Ints, _Ints, _Ints, _Ints]:
    """(tier, caches, table, entries, head, log): a cache for each engine, tier instance, and set of blocks being loaded."""
    n = len(eng)
    rows = []
    at = n
    for spec in plan.tiers:
        for e in range(n):
            rows.append((at if spec.shared else at + e, spec.read[e], spec.write[e], spec.demote[e] if spec.demote else -1))
        at += 1 if spec.shared else n
    g[[c.TIERS_N, c.READING, c.TOKEN_BYTES]] = len(plan.tiers), at, plan.kv_token_bytes
    g[[c.BREAK_EVEN, c.BACK]] = plan.reuse == "break_even", bool(plan.tiers) and plan.tiers[0].policy == "back"
    indexed = n if "prefix_aware" in (plan.routing.kind, plan.decode_routing.kind) else 0
    caches, table, entries, head, log = store.store(at + (n if plan.tiers else 0), bool(plan.tiers), indexed)
    for i, row in enumerate(eng):
        store.open_cache(caches, i, int(row[c.CAPACITY]), int(row[c.BLOCK]))
    for k, (instance, *_) in enumerate(rows):
        store.open_cache(caches, instance, _limit(plan.tiers[k // n].capacity_tokens), 1)
    return np.array(rows, dtype=np.int64).reshape(-1, 4), caches, table, entries, head, log


def _routers(plan: Plan, eng: _Ints, g: _Ints) -> dict[str, _Ints]:
    """The World's fields for routing."""
    n = len(plan.engines)
    router = np.zeros((2, 16), dtype=np.int64)
    members, room = np.zeros((2, n), dtype=np.int64), np.zeros((2, n), dtype=np.int64)
    for k, (group, how) in enumerate(((plan.entry, plan.routing), (plan.decoders, plan.decode_routing))):
        kind = routers.KINDS.index(how.kind)
        router[k] = routers.new_router(kind, len(group), int(g[c.SEED]), 2 * k, how.age_ns, how.load_tokens)
        members[k, : len(group)] = group
        room[k, : len(group)] = eng[list(group), c.CAPACITY]
        g[c.LOOKS] |= how.kind == "kv_use" and how.age_ns > 0
    g[[c.LOOKED, c.NOW]] = -c.NEVER, -c.NEVER
    return {
        "router": router, "load": np.zeros((2, n), dtype=np.int64), "value": np.zeros((2, n), dtype=np.int64), "capacity": room,
        "ways_of": np.array(plan.handover.ways if plan.handover else (), dtype=np.int64).reshape(-1, max(1, len(plan.decoders))),
        "members": members, "scratch": np.zeros(2 * n + 64, dtype=np.int64),
    }  # fmt: skip


@lean(c)
def _fill(
    s: np.ndarray, out: np.ndarray, prompt: np.ndarray, output: np.ndarray, key: np.ndarray, ptr: np.ndarray, unfit: np.ndarray,
    per_block: int,
) -> None:  # fmt: skip
    """What requests are before anything has happened. One pass, for the tables are large."""
    for r in range(s.shape[0]):
        for k in range(c.S_COLUMNS):
            s[r, k] = 0
        for k in range(out.shape[1]):
            out[r, k] = -1
        s[r, c.PROMPT], s[r, c.OUTPUT], s[r, c.KEY] = prompt[r], output[r], key[r] if key.size > 0 else 0
        s[r, c.OWN], s[r, c.TAIL_RUN], s[r, c.RUN_PHASE] = c.NONE, c.NONE, c.NONE
        s[r, c.BEFORE], s[r, c.AFTER], s[r, c.LINK] = c.NONE, c.NONE, c.NONE
        s[r, c.NEW_ENTRIES] = per_block * (ptr[r + 1] - ptr[r]) + 4 if per_block > 0 else 0
        s[r, c.FLAGS] = c.NEVER_FITS if unfit[r] else 0
        out[r, _RESUMED], out[r, _RECOMPUTED], out[r, _PREEMPTIONS], out[r, _GENERATED] = 0, 0, 0, 0
        out[r, _PREFILL_PREEMPTIONS], out[r, _STATUS] = 0, UNFINISHED


def requests(work: Workload, plan: Plan, unfit: np.ndarray[Any, Any], index: _Ints | None) -> dict[str, Any]:
    """The World's fields of the requests at the positions ``index`` (null: of all)."""
    prompt, output, ptr, bid, bend = work.prompt_tokens, work.output_tokens, work.block_ptr, work.block_id, work.block_end
    key = np.empty(0, dtype=np.int64) if plan.order.key is None else plan.order.key
    session = np.full(work.n, -1, dtype=np.int64) if work.session_id is None else work.session_id
    if index is not None:
        counts = (ptr[1:] - ptr[:-1])[index]
        new = np.zeros(len(index) + 1, dtype=np.int64)
        np.cumsum(counts, out=new[1:])
        at = np.repeat(ptr[:-1][index] - new[:-1], counts) + np.arange(new[-1])
        prompt, output, ptr, bid, bend, unfit, session = (
            prompt[index], output[index], new, bid[at], bend[at], unfit[index], session[index],
        )  # fmt: skip
        key = key[index] if key.size else key
    n = len(prompt)
    pooled = any(e.cache == "pool" for e in plan.engines)
    s, out = np.empty((n, c.S_COLUMNS), dtype=np.int64), np.empty((n, len(REQUEST)), dtype=np.int64)
    per_block = 5 if plan.tiers else 2 if pooled else 0
    _fill(s, out, ints(prompt), ints(output), ints(key), ints(ptr), np.array(unfit), per_block)
    return {
        "s": s, "out": out, "nodes": heap.queue_nodes(n), "ptr": ints(ptr), "bid": ints(bid), "bend": ints(bend),
        "held": np.zeros(len(bid), dtype=np.uint8), "session": ints(session),
        "number": np.arange(n, dtype=np.int64) if index is None else index,
        "found": np.zeros(int(np.diff(ptr).max(initial=0)) + 1, dtype=np.int64),
    }  # fmt: skip


def prepare(
    work: Workload, plan: Plan, unfit: np.ndarray[Any, Any], index: _Ints | None, *, separate: bool = False
) -> tuple[c.World, _Ints, _Ints, _Ints]:
    """(World, table, entries, log), with the requests at the positions ``index`` (null: all). ``unfit``: :func:`refused`;
    ``separate``: go through every decoder in every step (slow; for tests)."""
    n = work.n
    after = np.full(n, -1, dtype=np.int64) if work.after is None else work.after
    sessions = bool((after >= 0).any())
    extra = np.full((n if sessions else 0, 5), -1, dtype=np.int64)
    if sessions:
        extra[:, c.ARRIVAL_NS] = work.arrival_ns
        extra[:, c.THINK_NS] = 0 if work.think_ns is None else work.think_ns
        extra[:, c.FLOOR] = 0 if work.floor is None else work.floor
        for x in np.flatnonzero(after >= 0)[::-1]:
            extra[x, c.NEXT_AFTER] = extra[after[x], c.FIRST_AFTER]
            extra[after[x], c.FIRST_AFTER] = x
    g = _globals(plan, work, sessions)
    eng, cal = _engines(plan, work, separate)
    tier, caches, table, entries, head, log = _caches(plan, eng, g)
    ways, links = transfers.packed(plan)
    under_way, left, thead = transfers.transfers(ways)
    slots = sum(_limit(e.max_sequences) for e in plan.engines if e.cache == "slot")
    slot = np.full((slots, 3), -1, dtype=np.int64)
    slot[:, 0] = 0
    w = c.World(
        queues=heap.queue_heads(2 * len(eng) + 3), eng=eng, order=np.arange(len(eng), dtype=np.int64), cal=cal, g=g,
        btok=ints(work.block_tokens), caches=caches, head=head, slot=slot, costs=ints(pack(plan.costs)[0]), work=extra,
        steps=np.empty((ROWS, len(STEP)), dtype=np.int64), runs=np.empty((ROWS, len(RUN)), dtype=np.int64),
        moves=np.empty((ROWS if plan.ways else 1, len(MOVE)), dtype=np.int64), ways=ways, links=links, under_way=under_way,
        left=left, thead=thead, tier=tier, **_routers(plan, eng, g), **requests(work, plan, unfit, index),
    )  # fmt: skip
    return w, table, entries, log
