"""How long a request takes from the server's front to the engine, where the engine takes requests only between steps.

Who comes during a step is stamped at its end, whenever it got there: of its way only bounds are known. It is longer than until
the last moment at which the engine looked and did not find it, and no longer than until it was taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["mean_way_ns"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_LEAST_NS = 10_000
_PLACES = 400
_ROUNDS = 500
_MOST = 4_000


def mean_way_ns(exact: _Ints, low: _Ints, high: _Ints) -> int | None:
    """Mean of the way in ns, from ways that are known (``exact``) and ways between ``low`` (not included) and ``high``.

    The distribution that makes these most likely without assuming its form, by self-consistency: Turnbull, "The empirical
    distribution function with arbitrarily grouped, censored and truncated data", J. R. Stat. Soc. B 38 (1976). Ways are told
    apart to 3 %, from 10 microseconds on. Bounds that exclude each other (low ≥ high) are left out. Null without any request.
    """
    exact, low, high = (np.maximum(np.asarray(x, dtype=np.float64), 0) for x in (exact, low, high))
    fine = low < high
    low, high = _some(low[fine]), _some(high[fine])
    exact = _some(exact)
    if not len(low):
        return round(float(exact.mean())) if len(exact) else None
    most = max(float(high.max()), float(exact.max(initial=0)), 2.0 * _LEAST_NS)
    at = np.geomspace(_LEAST_NS, most, _PLACES)
    # Bounds between two places hold the place above.
    first, last = np.searchsorted(at, low, side="right"), np.searchsorted(at, high, side="right")
    first = np.minimum(first, _PLACES - 1)
    last = np.maximum(last, first + 1)
    known = np.bincount(np.minimum(np.searchsorted(at, exact), _PLACES - 1), minlength=_PLACES).astype(np.float64)
    total = len(exact) + len(low)
    share = np.full(_PLACES, 1 / _PLACES)
    for _ in range(_ROUNDS):
        upto = np.concatenate([[0.0], np.cumsum(share)])
        weight = 1 / np.maximum(upto[last] - upto[first], 1e-300)
        # Each request's one is shared out over the places that it may have, as likely as they are.
        each = np.zeros(_PLACES + 1)
        np.add.at(each, first, weight)
        np.add.at(each, last, -weight)
        new = (share * np.cumsum(each)[:-1] + known) / total
        new = np.maximum(new, 0)
        if float(np.abs(new - share).sum()) < 1e-6:
            share = new
            break
        share = new
    bounded = share - known / total
    return round(float((exact.sum() + total * (np.maximum(bounded, 0) * at).sum()) / total))


def _some(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Every k-th, so that at most so many are left."""
    return values[:: max(1, -(-len(values) // _MOST))]
