"""Stretches of steps that are alike, compiled: decoders only, nobody comes, nobody goes."""

from __future__ import annotations

from hoptrace import stepcost_kernel
from hoptrace.replay import draws
from hoptrace.replay.compiled import begin, columns, store
from hoptrace.replay.compiled.begin import chance_of, write_step
from hoptrace.replay.compiled.columns import (
    BLOCK,
    BOUNDARY,
    CALENDAR,
    CLOCK,
    COST,
    COUNTS,
    D_CONTEXT,
    DECODE_CONTEXT,
    DECODERS,
    END,
    GAP,
    HORIZON,
    N_STEPS,
    OF_DECODE,
    PADS,
    PADS_CONTEXT,
    RING,
    SEED,
    STEPS,
    WHEN,
    World,
)  # fmt: skip
from hoptrace.replay.compiled.store import FREE
from hoptrace.replay.jit import lean
from hoptrace.stepcost_kernel import step_ns

__all__ = ["stretch"]


@lean(begin, columns, draws, store, stepcost_kernel, forceinline=True)
def stretch(w: World, e: int, until: int) -> bool:
    """End engine ``e``'s step and begin the next, as long as each next one begins before ``until`` and is like the one before.
    Whether there was one. The last one begun is under way."""
    eng, cal, caches, steps, g, costs = w.eng, w.cal, w.caches, w.steps, w.g, w.costs
    clock, context, boundary, step, now = (
        eng[e, CLOCK],
        eng[e, DECODE_CONTEXT],
        eng[e, BOUNDARY],
        eng[e, STEPS],
        eng[e, WHEN] >> 2,
    )
    ring, mask, counts, block, gap = eng[e, CALENDAR], eng[e, RING] - 1, eng[e, COUNTS], eng[e, BLOCK], eng[e, GAP]
    d, at, free, n, last = eng[e, DECODERS], eng[e, COST], caches[e, FREE], g[N_STEPS], steps.shape[0]
    drawn, horizon, pads, pads_context = costs[at + 5] > 0, g[HORIZON], eng[e, PADS], eng[e, PADS_CONTEXT]
    first, ended, used = step, now, eng[e, columns.CAPACITY] - caches[e, store.EVICTABLE]
    row, k = n, eng[e, OF_DECODE]
    # The columns of a row that stay; the first one is written whole, the next ones are copies with what changes.
    while now + gap < until and n < last and cal[ring + ((clock + 1) & mask)] < 0:
        below = boundary - 1 if boundary > 0 else block - 1
        need = cal[counts + below] * block
        if need > free:
            break
        free -= need
        clock += 1
        boundary = below
        context += d
        step += 1
        ended = now
        now += gap
        chance = 0
        if drawn:
            chance = chance_of(g[SEED], e, step, k)
            k += 1
        end = now + step_ns(costs, at, chance, 0, 0, 0, d + pads, context + pads_context, 0)
        if end <= horizon:
            if n == row:
                write_step(steps, eng, caches, n, e, now, end)
                steps[n, 13] = 0
            else:
                for i in range(21):
                    steps[n, i] = steps[n - 1, i]
                steps[n, 2], steps[n, 3] = now, end
            steps[n, 1], steps[n, 9], steps[n, 12] = step, context + pads_context, used - free
            n += 1
        now = end
    if step == first:
        return False
    eng[e, CLOCK], eng[e, DECODE_CONTEXT], eng[e, BOUNDARY], eng[e, STEPS], eng[e, WHEN] = clock, context, boundary, step, 4 * now
    eng[e, D_CONTEXT], eng[e, OF_DECODE] = context, k
    caches[e, FREE], g[N_STEPS] = free, n
    g[END] = max(g[END], ended)
    return True
