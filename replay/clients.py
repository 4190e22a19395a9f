"""Which client of a closed loop sent which request: they follow from who ended when."""

from __future__ import annotations

import numpy as np

from hoptrace.replay.outcome import DONE, REFUSED
from hoptrace.replay.setting import Ints, Setting

__all__ = ["client_slots"]


def client_slots(s: Setting) -> Ints:
    """The slot of each request, by position in the work; -1 for those that never came.

    The first N requests are those of the N slots; each further one, in the order of the work, is let in by the next end (by time,
    then by number), and comes from the slot of the one that ended.
    """
    every = np.arange(s.work.n)
    status, arrival = s.column("status", every), s.column("arrival_ns", every)
    n = min(s.plan.clients or 0, s.work.n)
    last = s.column("last_token_ns", every) + s.plan.after_ns
    end = np.where(status == REFUSED, arrival, last)
    over = np.flatnonzero((status == DONE) | (status == REFUSED))
    over = over[np.lexsort((over, end[over]))]
    slot = np.full(s.work.n, -1, dtype=np.int64)
    slot[:n] = every[:n]
    for ended, came in zip(over.tolist(), range(n, s.work.n), strict=False):
        slot[came] = slot[ended]
    slot[arrival < 0] = -1
    return slot
