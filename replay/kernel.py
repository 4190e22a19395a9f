"""The event kernel: continuous batching on one engine, step by step, compiled by numba, int64 only, the same rows everywhere.

The rules are those of vLLM v1 and llama.cpp where the two agree:

* A step begins when the one before has ended (plus ``gap_ns``), or at an arrival if the engine is idle. It holds what had
  arrived by then.
* Running requests come first, in the order of their admission: a decoder takes one token, an unfinished prompt as many as the
  token budget leaves. Then waiting requests are admitted in the order of arrival (preempted ones before all others) while
  there is a place, budget and KV room. ``PREFILL_FIRST``: prompts first, and decoders only in steps without any prompt token.
* The step that computes the last token of a prompt yields the first output token, at its end.
* KV is allocated in blocks for the tokens computed so far. If a running request finds no room, the one admitted last gives all
  up and waits again, to compute prompt and output so far anew (preemption by recompute); the step then admits nobody.
* Prefix cache ``POOL`` (vLLM): prompt blocks stay in the KV space after their request has left and are evicted, least recently
  used first, when room is needed; a request holds the blocks that it shares. A prompt that is cached whole computes its last
  block again. ``SLOT`` (llama.cpp): each slot keeps its last prompt; a request takes the free slot with the longest common
  prefix if that is more than a tenth of the prompt, else the slot least recently used; at least one token is computed.

Requests that can never fit must be left out by the caller; the kernel then always ends. :mod:`hoptrace.replay.engine` calls it.

numba keeps the compiled code beside this file or in the user's cache; where neither can be written it compiles in each
run, unless NUMBA_CACHE_DIR names a folder.
"""

from __future__ import annotations

import numpy as np

from hoptrace import stepcost_kernel
from hoptrace.compiling import cached_njit
from hoptrace.replay import kvspace, lru, slots
from hoptrace.replay.jit import compiled
from hoptrace.replay.kvspace import EVICTABLE, FREE, NEXT, PRIVATE, SHARED, allocate, enter_cache, leave
from hoptrace.replay.lru import empty, remove
from hoptrace.replay.slots import BUSY, PROMPT, USED, choose_slot
from hoptrace.stepcost_kernel import cost_ns

__all__ = [
    "BUDGET", "KV", "MIXED", "NO_CACHE", "PARAMETERS", "POOL", "PREFILL_FIRST", "REQUEST", "RUN", "SLOT", "SLOTS", "STEP",
    "UNLIMITED", "simulate",
]  # fmt: skip

UNLIMITED = 1 << 60
MIXED, PREFILL_FIRST = 0, 1
NO_CACHE, POOL, SLOT = 0, 1, 2
# Why the first in the queue was not admitted in a step.
SLOTS, KV, BUDGET = 1, 2, 3
# Phases, in the order of schema.PHASES.
_CHUNK, _DECODE, _SKIPPED, _PREEMPTED = 0, 1, 2, 3

PARAMETERS = (
    "max_sequences", "max_batched_tokens", "mode", "chunked_prefill", "kv_capacity_tokens", "kv_block_tokens", "cache",
    "cache_capacity_tokens", "gap_ns", "cost_kind",
)  # fmt: skip
"""What ``parameters`` holds, in order."""

STEP = (
    "start_ns", "end_ns", "prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests",
    "decode_context_tokens", "running", "waiting", "kv_used_tokens", "preempted", "queued_prefill_requests",
    "queued_prefill_tokens", "queued_decode_requests", "queued_decode_context_tokens", "blocked_by",
)  # fmt: skip
"""Columns of the steps, in order. ``blocked_by``: 0, SLOTS, KV or BUDGET; ``running`` counts those that finish in the step."""

RUN = ("request", "first_step", "last_step", "phase", "tokens_per_step", "context_at_start")
"""Columns of the runs (residency), in order; ``phase`` is an index into ``schema.PHASES``."""

REQUEST = ("first_seen_ns", "scheduled_ns", "cached_tokens", "resumed_tokens", "recomputed_tokens", "preemptions")
"""Columns per request, in order. ``first_seen_ns``: start of the first step that could have held it."""

_FIRST, _LAST, _PHASE, _TOKENS, _CONTEXT = 0, 1, 2, 3, 4


@cached_njit
def _flush(runs: np.ndarray, n_runs: int, r: int, run: np.ndarray) -> np.ndarray:
    """Write request ``r``'s current run as row ``n_runs``; returns ``runs``, larger if it was full."""
    if n_runs == runs.shape[0]:
        bigger = np.empty((runs.shape[0] * 2, runs.shape[1]), dtype=np.int64)
        bigger[: runs.shape[0]] = runs
        runs = bigger
    runs[n_runs, 0] = r
    runs[n_runs, 1:] = run[r]
    return runs


@cached_njit
def _start(run: np.ndarray, r: int, step: int, phase: int, tokens: int, context: int) -> None:
    run[r, _FIRST], run[r, _LAST], run[r, _PHASE], run[r, _TOKENS], run[r, _CONTEXT] = step, step, phase, tokens, context


@compiled(kvspace, lru, slots, stepcost_kernel)
def simulate(
    arrival_ns: np.ndarray,
    prompt_tokens: np.ndarray,
    output_tokens: np.ndarray,
    block_ptr: np.ndarray,
    block_id: np.ndarray,
    block_end: np.ndarray,
    block_tokens: np.ndarray,
    parameters: np.ndarray,
    cost_vector: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Run the requests (sorted by arrival) through one engine.

    Args (all int64):
        arrival_ns, prompt_tokens, output_tokens: [n], lengths at least 1; the time each is ready for the engine.
        block_ptr: [n+1]; block_id, block_end: the prompt blocks in CSR form, with the prompt tokens through each block's end.
        block_tokens: [distinct] tokens that a cached block takes, never more than it covers in any request.
        parameters: [10], see PARAMETERS; UNLIMITED for no limit.
        cost_vector: ``StepCost.as_vector()``.

    Returns:
        steps [s, 16] (STEP), runs [m, 6] (RUN, in the order of their end), per request [n, 6] (REQUEST), and token_step
        [Σ output]: the step that yielded each output token, requests one after another. Steps come back empty if a request
        cannot be served (the caller's mistake).
    """
    max_sequences, budget_tokens, mode, chunked = parameters[0], parameters[1], parameters[2], parameters[3]
    capacity, kv_block, cache, cache_capacity = parameters[4], parameters[5], parameters[6], parameters[7]
    gap_ns, cost_kind = parameters[8], parameters[9]

    n = arrival_ns.size
    steps = np.empty((1024, 16), dtype=np.int64)
    runs = np.empty((4 * n + 16, 6), dtype=np.int64)
    n_steps, n_runs = 0, 0
    of_request = np.zeros((n, 6), dtype=np.int64)
    token_ptr = np.zeros(n + 1, dtype=np.int64)
    for r in range(n):
        token_ptr[r + 1] = token_ptr[r] + output_tokens[r]
    token_step = np.empty(token_ptr[n], dtype=np.int64)

    computed = np.zeros(n, dtype=np.int64)  # tokens in the KV space
    target = prompt_tokens.copy()  # tokens known: prompt and output so far
    generated = np.zeros(n, dtype=np.int64)
    decoding = np.zeros(n, dtype=np.bool_)
    share = np.zeros(n, dtype=np.int64)  # tokens in this step
    run = np.full((n, 5), -2, dtype=np.int64)  # the current run: RUN without its first column

    kv = np.zeros((n, 3), dtype=np.int64)
    pool = np.array([capacity, 0, 0], dtype=np.int64)
    held = np.zeros(block_id.size, dtype=np.bool_)  # whether the request holds its j-th block in the cache
    resident = np.zeros(block_tokens.size, dtype=np.bool_)
    holders = np.zeros(block_tokens.size, dtype=np.int64)
    prev, following = empty(block_tokens.size)
    slot = np.full((max_sequences if cache == SLOT else 0, 3), -1, dtype=np.int64)
    slot[:, BUSY] = 0
    slot_of = np.zeros(n, dtype=np.int64)

    running = np.empty(min(n, max_sequences), dtype=np.int64)
    n_running = 0
    preempted = np.empty(n, dtype=np.int64)  # a stack: the last one in is the next one out
    n_preempted = 0
    head, seen = 0, 0  # arrivals [head, seen) wait
    queued_tokens, queued_context = 0, 0
    now = np.int64(0)

    while True:
        if n_running == 0 and n_preempted == 0 and head == seen:
            if seen == n:
                break
            now = arrival_ns[seen] if n_steps == 0 else max(now, arrival_ns[seen])
        while seen < n and arrival_ns[seen] <= now:
            of_request[seen, 0] = now
            queued_tokens += prompt_tokens[seen]
            seen += 1

        budget = budget_tokens
        step_preempted, blocked = 0, 0
        prefill_n, prefill_tokens, prefill_context = 0, 0, 0
        decode_n, decode_context = 0, 0
        for i in range(n_running):
            share[running[i]] = 0

        # Mixed: one pass over the running ones, then admission. Prefill first: prompts, admission, then decoders if no prompt.
        for p in range(1 if mode == MIXED else 2):
            if p == 1 and prefill_tokens > 0:
                break
            i = 0
            while i < n_running and budget > 0:
                r = running[i]
                if mode == PREFILL_FIRST and decoding[r] != (p == 1):
                    i += 1
                    continue
                tokens = min(target[r] - computed[r], budget)
                room = (computed[r] + tokens + kv_block - 1) // kv_block * kv_block
                here = True
                while here:
                    want = max(0, room - kv[r, SHARED]) - kv[r, PRIVATE]
                    if want <= 0:
                        break
                    if allocate(want, pool, resident, block_tokens, prev, following):
                        kv[r, PRIVATE] += want
                        break
                    # No room: the one admitted last, of those that have no part in this step yet, gives up its place.
                    v = n_running - 1
                    while share[running[v]] > 0:
                        v -= 1
                    x = running[v]
                    for k in range(v, n_running - 1):
                        running[k] = running[k + 1]
                    n_running -= 1
                    leave(x, kv, block_ptr, block_id, block_tokens, held, holders, pool, prev, following)
                    if cache == SLOT:
                        slot[slot_of[x], BUSY], slot[slot_of[x], PROMPT] = 0, -1
                    runs = _flush(runs, n_runs, x, run)
                    n_runs += 1
                    _start(run, x, n_steps, _PREEMPTED, 0, computed[x])
                    of_request[x, 4] += computed[x]
                    of_request[x, 5] += 1
                    computed[x], decoding[x] = 0, False
                    preempted[n_preempted] = x
                    n_preempted += 1
                    queued_context += target[x]
                    step_preempted += 1
                    if v < i:
                        i -= 1
                    here = x != r
                if not here:
                    continue
                share[r] = tokens
                budget -= tokens
                if decoding[r]:
                    decode_n += 1
                    decode_context += computed[r]
                else:
                    prefill_n += 1
                    prefill_tokens += tokens
                    prefill_context += computed[r]
                    if cache == POOL:
                        enter_cache(
                            r, computed[r] + tokens, cache_capacity, kv, block_ptr, block_id, block_end, block_tokens, held,
                            holders, resident, pool, prev, following,
                        )  # fmt: skip
                i += 1

            while p == 0 and step_preempted == 0 and (n_preempted > 0 or head < seen):
                if n_running >= max_sequences:
                    blocked = SLOTS
                    break
                if budget <= 0:
                    blocked = BUDGET
                    break
                r = preempted[n_preempted - 1] if n_preempted > 0 else head
                first = block_ptr[r]
                hit, hits, hit_shared, hit_evictable, s = 0, 0, 0, 0, 0
                if cache == POOL:
                    while first + hits < block_ptr[r + 1] and resident[block_id[first + hits]]:
                        hits += 1
                    if hits > 0 and block_end[first + hits - 1] >= target[r]:
                        hits -= 1
                    for j in range(first, first + hits):
                        b = block_id[j]
                        hit_shared += block_tokens[b]
                        if holders[b] == 0:
                            hit_evictable += block_tokens[b]
                    if hits > 0:
                        hit = block_end[first + hits - 1]
                elif cache == SLOT:
                    s, hit = choose_slot(r, prompt_tokens[r], block_ptr, block_id, block_end, slot)
                    hit = min(hit, target[r] - 1)
                tokens = target[r] - hit
                if tokens > budget:
                    # Without chunks only a preempted one may go beyond the budget (its output has grown), as the only prompt.
                    if chunked == 0 and (n_preempted == 0 or prefill_n > 0):
                        blocked = BUDGET
                        break
                    tokens = budget if chunked else tokens
                want = max(0, (hit + tokens + kv_block - 1) // kv_block * kv_block - hit_shared)
                if want > pool[FREE] + pool[EVICTABLE] - hit_evictable:
                    blocked = KV
                    break
                for j in range(first, first + hits):
                    b = block_id[j]
                    if holders[b] == 0:
                        remove(prev, following, b)
                        pool[EVICTABLE] -= block_tokens[b]
                    holders[b] += 1
                    held[j] = True
                allocate(want, pool, resident, block_tokens, prev, following)
                kv[r, PRIVATE], kv[r, SHARED], kv[r, NEXT] = want, hit_shared, first + hits
                computed[r] = hit
                if cache == SLOT:
                    slot[s, BUSY], slot[s, PROMPT], slot_of[r] = 1, r, s
                if n_preempted > 0:
                    n_preempted -= 1
                    queued_context -= target[r]
                    of_request[r, 3] += hit
                    of_request[r, 4] -= hit
                    run[r, _LAST] = n_steps - 1
                else:
                    head += 1
                    queued_tokens -= prompt_tokens[r]
                    of_request[r, 1] = now
                    of_request[r, 2] = hit
                running[n_running] = r
                n_running += 1
                share[r] = tokens
                budget -= tokens
                prefill_n += 1
                prefill_tokens += tokens
                prefill_context += hit
                if cache == POOL:
                    enter_cache(
                        r, hit + tokens, cache_capacity, kv, block_ptr, block_id, block_end, block_tokens, held, holders,
                        resident, pool, prev, following,
                    )  # fmt: skip

        if prefill_n + decode_n == 0:
            return steps[:0], runs[:0], of_request, token_step
        if step_preempted > 0:
            blocked = KV

        end = now + cost_ns(cost_vector, cost_kind, prefill_n, prefill_tokens, prefill_context, decode_n, decode_context)
        if n_steps == steps.shape[0]:
            bigger = np.empty((2 * n_steps, 16), dtype=np.int64)
            bigger[:n_steps] = steps
            steps = bigger
        row = steps[n_steps]
        row[0], row[1], row[2], row[3], row[4] = now, end, prefill_n, prefill_tokens, prefill_context
        row[5], row[6], row[7], row[8] = decode_n, decode_context, n_running, n_preempted + seen - head
        # In use is what requests hold, as vLLM counts it: a cached block that no request holds gives way to whoever wants it.
        row[9], row[10] = capacity - pool[FREE] - pool[EVICTABLE], step_preempted
        row[11], row[12], row[13], row[14], row[15] = seen - head, queued_tokens, n_preempted, queued_context, blocked

        kept = 0
        for i in range(n_running):
            r = running[i]
            tokens = share[r]
            phase = _SKIPPED if tokens == 0 else (_DECODE if decoding[r] else _CHUNK)
            if run[r, _LAST] == n_steps - 1 and run[r, _PHASE] == phase and run[r, _TOKENS] == tokens:
                run[r, _LAST] = n_steps
            else:
                if run[r, _LAST] >= 0:
                    runs = _flush(runs, n_runs, r, run)
                    n_runs += 1
                _start(run, r, n_steps, phase, tokens, computed[r])
            computed[r] += tokens
            if tokens > 0 and computed[r] == target[r]:
                token_step[token_ptr[r] + generated[r]] = n_steps
                generated[r] += 1
                target[r] += 1
                decoding[r] = True
                if generated[r] == output_tokens[r]:
                    leave(r, kv, block_ptr, block_id, block_tokens, held, holders, pool, prev, following)
                    if cache == SLOT:
                        slot[slot_of[r], BUSY], slot[slot_of[r], USED] = 0, end
                    runs = _flush(runs, n_runs, r, run)
                    n_runs += 1
                    continue
            running[kept] = r
            kept += 1
        n_running = kept
        n_steps += 1
        now = end + gap_ns
    return steps[:n_steps], runs[:n_runs], of_request, token_step
