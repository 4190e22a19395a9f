"""The begin of a step, compiled: scheduling passes until one schedules something, and what the step costs."""

from __future__ import annotations

import numpy as np

from hoptrace import stepcost_kernel
from hoptrace.replay import draws
from hoptrace.replay.compiled import (
    admission,
    columns,
    handover,  # noqa: F401
    heap,
    kv,
    loading,
    moves,
    running,
    runs,
    slots,
    store,
    tiers,
    transfers,
)
from hoptrace.replay.compiled.admission import admit, candidate, take_back
from hoptrace.replay.compiled.columns import (
    ACCEPTED,
    AFTER,
    ALL_VICTIMS,
    BLOCKED,
    BUDGET,
    BUSY,
    CACHE,
    CALM,
    CAPACITY,
    COST,
    D_CONTEXT,
    D_N,
    D_TOKENS,
    DECODE_PHASE,
    EXPLICIT,
    FLAGS,
    GENERATED,
    HANDED,
    HEAD,
    HERE,
    HORIZON,
    LATE_DECODERS,
    LAYERS,
    LEFT,
    LINK,
    MIDWAY,
    MIXED,
    MODE,
    N_STEPS,
    NEW_ENTRIES,
    NONE,
    NOW,
    OF_DECODE,
    OF_MIXED,
    OF_PREFILL,
    OFFER_FIRST,
    OUTPUT,
    P_CONTEXT,
    P_N,
    P_TOKENS,
    PADS,
    PADS_CONTEXT,
    PASSED,
    POOL,
    PREFILL,
    PREFILL_FIRST,
    PROMPTED,
    PROMPTS_FIRST,
    PROPOSED,
    PROPOSES,
    QUEUED_DECODE,
    QUEUED_DECODE_TOKENS,
    QUEUED_N,
    QUEUED_TOKENS,
    ROLE,
    RUNNING,
    SEED,
    SEPARATE,
    SHARE,
    SLOT,
    SLOTTED,
    SPEC_DRAFT,
    SPEC_PPM,
    SPEC_TOKENS,
    STATE,
    STATIC,
    STEPS,
    TAIL_FIRST,
    TAKEN,
    TIERS_N,
    TOOK_DECODERS,
    UNFINISHED,
    UNSEEN,
    VICTIMS,
    WHEN,
    World,
)  # fmt: skip
from hoptrace.replay.compiled.handover import begin_streams, plan_stream
from hoptrace.replay.compiled.kv import fits, leave
from hoptrace.replay.compiled.running import ALL, DECODERS_ONLY, PROMPTS_ONLY, all_at_once, leave_running, one_by_one
from hoptrace.replay.compiled.slots import BUSY as SLOT_BUSY
from hoptrace.replay.compiled.slots import USED
from hoptrace.replay.compiled.store import EVICTABLE, FREE
from hoptrace.replay.compiled.tiers import end_pass
from hoptrace.replay.draws import MILLION, draw
from hoptrace.replay.jit import lean
from hoptrace.replay.outcome import DECODE, KV, REQUEST, SLOTS, STEP
from hoptrace.stepcost_kernel import step_ns

__all__ = ["begin", "chance_of", "end_batch", "write_step"]

_FIRST_SEEN, _DECODE_SEEN = REQUEST.index("first_seen_ns"), REQUEST.index("decode_seen_ns")
_COLUMNS = len(STEP)


@lean(columns, forceinline=True)
def write_step(steps: np.ndarray, eng: np.ndarray, caches: np.ndarray, n: int, e: int, now: int, end: int) -> None:
    """Row ``n``: the step that engine ``e`` has just made."""
    steps[n, 0], steps[n, 1], steps[n, 2], steps[n, 3] = e, eng[e, STEPS], now, end
    steps[n, 4], steps[n, 5], steps[n, 6] = eng[e, P_N], eng[e, P_TOKENS], eng[e, P_CONTEXT]
    pads = eng[e, PADS]
    steps[n, 7], steps[n, 8] = eng[e, D_N] + pads, eng[e, D_TOKENS] + pads
    steps[n, 9], steps[n, 10] = eng[e, D_CONTEXT] + eng[e, PADS_CONTEXT], eng[e, RUNNING]
    steps[n, 11] = eng[e, QUEUED_N] + eng[e, QUEUED_DECODE]
    steps[n, 12] = eng[e, CAPACITY] - caches[e, FREE] - caches[e, EVICTABLE]
    steps[n, 13], steps[n, 14], steps[n, 15] = eng[e, ALL_VICTIMS], eng[e, QUEUED_N], eng[e, QUEUED_TOKENS]
    steps[n, 16], steps[n, 17], steps[n, 18] = eng[e, QUEUED_DECODE], eng[e, QUEUED_DECODE_TOKENS], eng[e, BLOCKED]
    steps[n, 19], steps[n, 20] = eng[e, PROPOSED], eng[e, ACCEPTED]


@lean(columns, kv, running, store)
def end_batch(w: World, table: np.ndarray, entries: np.ndarray, e: int) -> None:
    """A static batch of which only padding is left goes, in the order of running."""
    r = w.eng[e, HEAD]
    while r >= 0:
        after = w.s[r, AFTER]
        leave_running(w.s, w.eng, e, r)
        leave(w, table, entries, e, r, False)
        if w.eng[e, CACHE] == SLOTTED:
            w.slot[w.s[r, SLOT], SLOT_BUSY], w.slot[w.s[r, SLOT], USED] = 0, w.g[NOW]
        r = after
    w.eng[e, PADS], w.eng[e, PADS_CONTEXT] = 0, 0


@lean(columns, draws)
def _accept(w: World, e: int) -> None:
    """Which proposals of this step's decoders are taken."""
    s, eng = w.s, w.eng
    r = eng[e, HEAD]
    while r >= 0:
        s[r, TAKEN] = 0
        if s[r, SHARE] > 1 and s[r, STATE] == columns.DECODING:
            j = 0
            while j < s[r, SHARE] - 1 and draw(w.g[SEED], 4, w.number[r], s[r, GENERATED] + j) % MILLION < w.g[SPEC_PPM]:
                j += 1
            s[r, TAKEN] = min(j, s[r, OUTPUT] - s[r, GENERATED] - 1)
            eng[e, ACCEPTED] += s[r, TAKEN]
        r = s[r, AFTER]


@lean(draws, forceinline=True)
def chance_of(seed: int, e: int, step: int, k: int) -> int:
    """The number that chooses the residual of engine ``e``'s ``step``, the ``k``-th of its kind."""
    if seed == 0:
        return 1009 * e + k
    h = draw(seed, 5, e, step // 16)
    return h + step % 16 - h % 16


@lean(columns, draws, stepcost_kernel, forceinline=True)
def _lasts(w: World, e: int) -> int:
    """What the step that is made costs."""
    eng, g, at = w.eng, w.g, w.eng[e, COST]
    pads = eng[e, PADS]
    chance = 0
    if w.costs[at + 5] > 0:
        kind = OF_DECODE if eng[e, P_N] == 0 else (OF_PREFILL if eng[e, D_N] + pads == 0 else OF_MIXED)
        chance = chance_of(g[SEED], e, eng[e, STEPS], eng[e, kind])
        eng[e, kind] += 1
    return step_ns(
        w.costs, at, chance, eng[e, P_N], eng[e, P_TOKENS], eng[e, P_CONTEXT], eng[e, D_N] + pads,
        eng[e, D_CONTEXT] + eng[e, PADS_CONTEXT], eng[e, D_TOKENS] - eng[e, D_N],
    )  # fmt: skip


@lean(columns, kv, running, store, forceinline=True)
def _running(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, again: bool) -> bool:
    """The first part of a pass: who runs already. Whether it goes on to admission."""
    eng, mode = w.eng, w.eng[e, MODE]
    eng[e, P_N], eng[e, P_TOKENS], eng[e, P_CONTEXT], eng[e, D_N], eng[e, D_TOKENS], eng[e, D_CONTEXT] = 0, 0, 0, 0, 0, 0
    eng[e, LEFT], eng[e, SEPARATE], eng[e, TOOK_DECODERS] = eng[e, BUDGET], 0, 0
    eng[e, VICTIMS], eng[e, PROPOSED], eng[e, ACCEPTED], eng[e, LATE_DECODERS], eng[e, BLOCKED] = 0, 0, 0, 0, 0
    eng[e, PROPOSES] = w.g[SPEC_TOKENS]
    if mode == STATIC and eng[e, PADS] > 0 and eng[e, PADS] == eng[e, RUNNING]:
        end_batch(w, table, entries, e)
    if eng[e, RUNNING] > 0:
        which = ALL if mode in (MIXED, STATIC) else PROMPTS_ONLY
        # Again: a pass that scheduled nothing has separated the decoders already.
        if again or eng[e, EXPLICIT] != 0 or not all_at_once(w, table, entries, log, e, which):
            one_by_one(w, table, entries, log, e, which)
    eng[e, TAIL_FIRST] = eng[e, UNFINISHED]
    if eng[e, VICTIMS] > 0:
        eng[e, BLOCKED] = KV
        return False
    if mode == STATIC and eng[e, RUNNING] > 0:
        if candidate(w, e) >= 0:
            eng[e, BLOCKED] = SLOTS
        return False
    return True


@lean(
    admission,
    loading,
    moves,
    tiers,
    transfers,
    columns,
    draws,
    heap,
    kv,
    running,
    runs,
    slots,
    store,
    stepcost_kernel,
    forceinline=True,
)
def begin(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, now: int) -> bool:
    """Engine ``e`` tries to begin a step: ``WHEN`` says what became of it. False: it stopped for want of places for entries."""
    s, eng, out = w.s, w.eng, w.out
    r = eng[e, UNSEEN]
    while r >= 0:
        out[r, _DECODE_SEEN if s[r, FLAGS] & HANDED else _FIRST_SEEN] = now
        r = s[r, LINK]
    eng[e, UNSEEN] = NONE
    mode = eng[e, MODE]
    pool = eng[e, CACHE] == POOL
    again = False
    while True:
        if eng[e, MIDWAY] != 0 or _running(w, table, entries, log, e, again):
            r = candidate(w, e)
            while r >= 0:
                if (pool or w.g[TIERS_N] > 0) and not fits(w, table, entries, log, s[r, NEW_ENTRIES] + eng[e, HERE]):
                    eng[e, MIDWAY] = 1
                    return False
                eng[e, BLOCKED] = admit(w, table, entries, log, e, now, r)
                if eng[e, BLOCKED] > 0:
                    break
                if w.g[LAYERS] > 1 and eng[e, ROLE] == PREFILL and s[r, STATE] == PROMPTED:
                    plan_stream(w, table, entries, log, e, r, now)
                r = candidate(w, e)
            eng[e, MIDWAY] = 0
            if eng[e, PASSED] >= 0:
                take_back(w, e)
        if eng[e, RUNNING] > 0 and (mode == PROMPTS_FIRST or (mode == PREFILL_FIRST and eng[e, P_N] == 0)):
            late = eng[e, EXPLICIT] != 0 or eng[e, LATE_DECODERS] > 0 or eng[e, SEPARATE] != 0
            if late or not all_at_once(w, table, entries, log, e, DECODERS_ONLY):
                one_by_one(w, table, entries, log, e, DECODERS_ONLY)
            if eng[e, VICTIMS] > 0:
                eng[e, BLOCKED] = KV
        if eng[e, P_N] + eng[e, D_N] > 0 or eng[e, VICTIMS] == 0:
            break
        again = True
    if w.g[TIERS_N] > 0:
        end_pass(w, table, entries, log, e, now, eng[e, P_N] + eng[e, D_N] > 0)
    if eng[e, P_N] + eng[e, D_N] == 0:
        eng[e, WHEN] = 4 * columns.NEVER
        return True
    if w.g[LAYERS] > 1 and eng[e, ROLE] == PREFILL:
        begin_streams(w, e, now)
    if eng[e, D_TOKENS] > eng[e, D_N]:
        _accept(w, e)
    lasts = _lasts(w, e)
    if eng[e, PROPOSES] > 0 and eng[e, D_N] > 0:
        lasts += w.g[SPEC_DRAFT]
    end = now + lasts
    eng[e, BUSY], eng[e, WHEN] = 1, 4 * end
    alike = eng[e, P_N] == 0 and eng[e, SEPARATE] == 0 and eng[e, UNFINISHED] < 0 and eng[e, DECODE_PHASE] == DECODE
    alike = alike and eng[e, OFFER_FIRST] < 0 and eng[e, TAIL_FIRST] < 0
    eng[e, CALM] = 1 if alike else 0
    if end <= w.g[HORIZON]:
        write_step(w.steps, eng, w.caches, w.g[N_STEPS], e, now, end)
        w.g[N_STEPS] += 1
    eng[e, ALL_VICTIMS] = 0
    return True
