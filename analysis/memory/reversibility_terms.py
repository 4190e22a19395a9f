"""The terms of reversibility: what could be handed over, and how fast."""

from __future__ import annotations

from hoptrace.analysis.term import Term

__all__ = ["TERMS"]

_KIND = "reversibility"

TERMS: tuple[Term, ...] = (
    Term(
        "reclaimable",
        _KIND,
        "reclaimable within T",
        "share of the KV space, or of the slots",
        "(capacity − used + given back within T) ÷ capacity; given back = max(0, min(used, Σ held) − Σ held by those still "
        "there after T)",
        "At 500 evenly spaced moments; T = 0.1, 1, 10, 100 s. Free space is handed over at once: cached blocks that no request "
        "holds are dropped. Requests give back what they hold when they end, as recorded; blocks that several share with the "
        "last of them. Nothing has to move for it. No new work is taken in; what those that stay will still take is `growth`.",
    ),
    Term(
        "reclaimable_moved",
        _KIND,
        "reclaimable within T with moving",
        "share of the KV space",
        "reclaimable + min(used − given back, bytes_per_s × (T − latency) ÷ KV bytes per token) ÷ capacity",
        "What is left is moved out over the fastest link that leaves the server, at the link's full rate. Unknown without such "
        "a link.",
    ),
    Term(
        "drain_time",
        _KIND,
        "drain time",
        "ns",
        "max over stays that began by t of their end − t, 0 where none is left",
        "How long a server, or all that work in one role, takes from a moment until the last request that runs or waits there "
        "is gone, if no new work comes. As recorded, so an upper bound: later requests slowed those that were there.",
    ),
    Term(
        "growth",
        _KIND,
        "growth of those that stay",
        "share of the KV space",
        "Σ over requests that are there of (KV at their last step − KV now) ÷ capacity",
        "What running requests will still take before they leave: free space that is handed over is missing then.",
    ),
)
