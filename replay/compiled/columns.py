"""The columns of the compiled engine's tables, by name. All tables are int64; a row is a request or an engine.

``World`` holds every array whose size is fixed for a run; what grows (the cache's table and entries) is passed beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NONE = -1
NEVER = (1 << 61) - 1
"""Later than any time: doubled, it still fits."""

# --- s: a request while it is under way
(
    PROMPT, OUTPUT, KEY, STATE, COMPUTED, GENERATED, SINCE, DUE, DUE_NEXT, PHASE, SEQ, BEFORE, AFTER, SHARE, LINK, PRIVATE,
    SHARED, NEXT_BLOCK, OWN, TAIL_RUN, SLOT, RUN_FIRST, RUN_PHASE, RUN_TOKENS, RUN_CONTEXT, RUN_EMITTED, TAKEN, KEPT_PRIVATE,
    KEPT_SHARED, PENDING, FLAGS, EXPECTED, BEGUN, OFFERED, OFFERS, OFFER_NEXT, ENDED_NEXT, ENDED_NEXT_DECODE, LOAD_FROM,
    LOAD_TO, LOAD_NEED, NEW_ENTRIES, KEPT_NEXT, PROMPT_STEP, REST, STREAMS,
) = range(46)  # fmt: skip
S_COLUMNS = 46
# PROMPT, OUTPUT: tokens; KEY: of the order. COMPUTED: tokens in the KV space, GENERATED: output tokens; of an aggregated decoder
#     both as they were at SINCE (a reading of the engine's decode clock).
# DUE, DUE_NEXT, PHASE: where an aggregated decoder stands in the calendar, and which block-boundary count it is in.
# BEFORE, AFTER: neighbours in the running list; SEQ: the how-many-th admission. SHARE: tokens in this step; TAKEN:
#     proposals taken.
# LINK: the next in a list of the engine's (not seen yet; driven out; fresh decoders).
# PRIVATE, SHARED, NEXT_BLOCK: KV room of its own and in cached blocks, next block of its prompt to enter the cache.
# OWN, TAIL_RUN: what it left in the cache when it was driven out. KEPT_*: room on the prefill engine during a hand-over.
# OFFERED: its first block that the first tier was not offered yet; OFFERS, OFFER_NEXT: whether it is in its engine's
#     list of those
#     with blocks to offer, and the next there; ENDED_NEXT: the next of those that have ended on its entry (decode)
#     engine since its
#     last pass. LOAD_FROM, LOAD_TO: blocks that it loads; LOAD_NEED: room that it still needs to be whole, while it loads or has
#     arrived.
# RUN_*: its open run. PENDING: transfers not ended; BEGUN: order in which the load began.

# --- STATE
WAITING, PROMPTED, DECODING, AGGREGATED, PADDED, DRIVEN_OUT, LOADING, ARRIVED, ENDED = range(9)

# --- FLAGS
HANDED, JOINED, HOLDS, STREAMED, STARTED, NEVER_FITS = 1, 2, 4, 8, 16, 32
# HANDED: its prefill engine has done its part; JOINED: its decode engine's queue has it; HOLDS: it has room on the prefill engine
#     still; STREAMED: it is sent per layer; STARTED: a part has been sent. NEVER_FITS: refused when it arrives.

# --- eng: an engine
(
    MAX_SEQUENCES, BUDGET, MODE, CHUNKED, CAPACITY, BLOCK, CACHE, CACHE_CAPACITY, GAP, COST, WATERMARK, ROLE, POSITION,
    CALENDAR, RING, COUNTS, EXPLICIT, WHEN, PLACE, BUSY, READY, STEPS, RUNNING, HEAD, TAIL, DECODERS, DECODE_CONTEXT, CLOCK,
    BOUNDARY, UNFINISHED, TAIL_FIRST, UNSEEN, FRESH_FIRST, FRONT, QUEUED_N, QUEUED_TOKENS, QUEUED_DECODE,
    QUEUED_DECODE_TOKENS, LOADING_N, NEED, ADMITTED, PADS, PADS_CONTEXT, DECODE_PHASE, SEPARATE, TOOK_DECODERS, LEFT, P_N,
    P_TOKENS, P_CONTEXT, D_N, D_TOKENS, D_CONTEXT, PROPOSED, ACCEPTED, VICTIMS, ALL_VICTIMS, BLOCKED, CALM, LATE_DECODERS,
    FIRST_SLOT, WRITES, HELD_N, PROPOSES, OFFER_FIRST, OFFER_LAST, WRITE_FIRST, WRITE_LAST, WRITE_TOKENS, ENDED_FIRST,
    ENDED_LAST, STASH_FIRST, STASH_LAST, COMING, HERE, MIDWAY, OF_DECODE, OF_PREFILL, OF_MIXED, PASSED, LONE,
) = range(81)  # fmt: skip
E_COLUMNS = 81
# RING, CALENDAR: size (a power of two) and begin of its ring of due decoders in ``cal``; COUNTS: begin of its counts of decoders
#     by distance to a block's boundary. EXPLICIT: whether every decoder is gone through in every step.
# WHEN: its next event, 4 × time (a step ends), 4 × time + 1 (it tries to begin one), or + 2 (it tries in the next
#     round); PLACE: in the heap of engines.
# DECODERS … BOUNDARY: of the aggregated decoders: how many, their tokens, steps they have taken, the count that is due next.
# QUEUED_*: who waits (queued, loading, arrived) with a prompt to compute; QUEUED_DECODE_*: driven out or handed over.
# P_N … BLOCKED: of the step that is being made. CALM: the next step is like this one unless something happens.

# OFFER_*: list of those that run and have blocks to offer to the first tier. WRITE_*: what was put there for the step
#     that is made:
#     entries whose MARK is the tier's entry. ENDED_*: who has ended since the last pass. STASH_*: blocks evicted
#     outside a pass, to be
#     written back at the next: entries whose MARK is the block. COMING: those that load or have arrived, by BEFORE and AFTER.
# LONE: decoders that cannot be aggregated yet. OF_*: its steps so far with decoders only, prompts only, both.
# HERE: entries that its running requests may add to the store in one event, at most (sum of NEW_ENTRIES); MIDWAY: its
#     pass waits for
#     more room in the store (g's WANTED) to go on.
# PASSED: those that the pass has passed over, by LINK, the last one first. NEED: sum of their LOAD_NEED; LOADING_N: how
#     many of them load.

# --- MODE, CACHE, ROLE
MIXED, PREFILL_FIRST, STATIC, PROMPTS_FIRST = 0, 1, 2, 3
NO_CACHE, POOL, SLOTTED = 0, 1, 2
BOTH, PREFILL, DECODE_ROLE = 0, 1, 2

# --- g: of the whole run
(
    N_STEPS, N_RUNS, N_MOVES, DONE_N, HORIZON, END, BEFORE_NS, AFTER_NS, FROM_ARRIVAL, REQUEUE, SEED, SUCCESSORS, CLIENTS,
    THINK, NEXT_CLIENT, OWN_IDS, SPEC_TOKENS, SPEC_PPM, SPEC_DRAFT, SPEC_OFF, ENTRIES_N, DECODERS_N, ENGINES, ROUTER_QUEUE,
    JOIN_QUEUE, CLIENT_QUEUE, LOADS, HANDOVER, PUSH, LAYERS, RECOMPUTE, ARRANGE, LOCAL_BELOW, TOKEN_BYTES, TIERS_N,
    BREAK_EVEN, DISTINCT, ASSIGNED, BACK, PASSES, READING, WANTED, LOOKS, LOOKED, FLYING, NOW, STAGE, SWEEP,
) = range(48)  # fmt: skip
G_COLUMNS = 48
# STAGE: what happens at this instant (docs/replay-engine.md, Time): 0 transfers, 1 ends of steps, 2 clients, 3 the
#     router, 4 decode
#     queues, 5 begins of steps; SWEEP: the last engine that tried in this round. FLYING: entries that those on their
#     way may add to the store at once, at most. BACK: tiers are written at eviction; PASSES: so far; READING: the first
#     of the engines' sets of blocks that are being loaded, in
#     ``caches``.


class World(NamedTuple):
    """Arrays of fixed size. n requests, b prompt blocks, e engines."""

    s: np.ndarray  # [n, S_COLUMNS]
    out: np.ndarray  # [n, len(REQUEST)]
    nodes: np.ndarray  # [n, ·] queues' nodes: hoptrace.replay.compiled.heap
    queues: np.ndarray  # [2e + 3, ·] of each engine: waiting; of each: arrived; router, decode engines, freed clients
    eng: np.ndarray  # [e, E_COLUMNS]
    order: np.ndarray  # [e] heap of engines by WHEN
    cal: np.ndarray  # rings and counts of all engines
    g: np.ndarray  # [G_COLUMNS]
    ptr: np.ndarray  # [n + 1], block_id, block_end: [b] the prompts' blocks
    bid: np.ndarray
    bend: np.ndarray
    btok: np.ndarray  # [distinct]
    held: np.ndarray  # uint8[b] bits: held on the entry engine, on the decode engine
    caches: np.ndarray  # [e, ·]: hoptrace.replay.compiled.store
    head: np.ndarray
    found: np.ndarray  # scratch: entries of a prompt's blocks
    slot: np.ndarray  # [·, 3]
    costs: np.ndarray
    work: np.ndarray  # [n, 5] arrival, after's first successor, next successor, think, floor
    number: np.ndarray  # [n] position in the work
    session: np.ndarray  # [n]
    steps: np.ndarray  # rows until Python takes them
    runs: np.ndarray
    moves: np.ndarray
    ways: np.ndarray  # hoptrace.replay.compiled.transfers
    links: np.ndarray
    under_way: np.ndarray  # rows of transfers; there are always enough free ones: the loop comes back for more
    left: np.ndarray
    thead: np.ndarray
    ways_of: np.ndarray  # [entry engines, decode engines] ways of hand-overs
    router: np.ndarray  # [2, 16] entry, decode: hoptrace.replay.compiled.routers
    load: np.ndarray  # [2, e] by position: requests in flight
    value: np.ndarray  # [2, e] what a router knows of each
    capacity: np.ndarray  # [2, e] room of each
    members: np.ndarray  # [2, e] which engine
    scratch: np.ndarray
    tier: np.ndarray  # [tiers × e, 4]: its cache, ways to read, to write, and to the next tier


INSTANCE, READ_WAY, WRITE_WAY, DEMOTE_WAY = 0, 1, 2, 3
"""Columns of ``tier``."""

ARRIVAL_NS, FIRST_AFTER, NEXT_AFTER, THINK_NS, FLOOR = 0, 1, 2, 3, 4
"""Columns of ``work``."""
