"""The terms of stranding: memory that lay idle where it was not wanted."""

from __future__ import annotations

from hoptrace.analysis.term import Term, sql_of

__all__ = ["TERMS"]

_KIND = "stranding"

TERMS: tuple[Term, ...] = (
    Term(
        "kv_used",
        _KIND,
        "KV space in use",
        "bytes × s (tokens × s where the KV geometry is not told)",
        "∫ used dt; used = kv_used_tokens × KV bytes per token",
        "As the engine counts it: what requests hold, without cached blocks that none holds. A step's value holds from its "
        "start to its end; between two steps the lesser of their values, or 0 where no request was there. Only over recorded "
        "time. Where the engine does not say it, the contexts in its steps (derived: a lower bound).",
    ),
    Term(
        "kv_idle",
        _KIND,
        "idle KV space",
        "bytes × s",
        "∫ (capacity − used) dt, capacity = kv_capacity_tokens × KV bytes per token",
        "What was provisioned and held by nobody, cached blocks that no request holds included.",
    ),
    Term(
        "stranded",
        _KIND,
        "stranded memory",
        "bytes × s",
        "∫ (capacity − used) dt over the moments at which requests of another KV space wait for KV",
        "Provisioned, idle, and unusable where it was wanted. Requests wait for KV where a step preempts, or where a slot is "
        "free and either a wait for KV was recorded, or one waits and the free KV is less than the first in the queue needs (its "
        "prompt less the cached part; what it had, if it was preempted). How much of it would have been used is `lendable`.",
        sql_of("stranding_waits"),
    ),
    Term(
        "lendable",
        _KIND,
        "lendable memory",
        "bytes × s",
        "∫ min(Σ wanted, Σ idle of the spaces that lack none) dt; wanted = queued tokens × min(1, free slots ÷ waiting) − free",
        "How much of what requests waited for the idle KV of the other spaces would have held.",
    ),
    Term(
        "pool_saving",
        _KIND,
        "saving of a pool",
        "share",
        "1 − max over t of Σ used ÷ Σ over spaces of max over t of used",
        "What one pool behind all KV spaces would need less than spaces that are each as large as their own peak (Pond, ASPLOS "
        "2023: hosts do not peak at one moment). Over the time that is known of all. It says nothing of the pool's longer way.",
    ),
    Term(
        "cached_idle",
        _KIND,
        "cached, held by no request",
        "bytes",
        "mean of max(0, blocks stored − evicted since the last clear, in bytes, − used)",
        "Cached blocks that give way to whoever wants the space: a lower bound, since blocks in use need not be cached ones, "
        "and since what was cached before the recording is seen only when it goes.",
        sql_of("stranding_blocks"),
    ),
)
