"""Whether things happen in the same order in two runs of the same requests, whatever the speed of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Order", "inversions", "order"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Order:
    """``pairs``: of requests that were in flight together; ``swapped``: those of them that end the other way round.

    Most pairs of a long trace are hours apart and in order whatever a prediction says: they are not counted.
    """

    pairs: int
    swapped: int

    @property
    def share(self) -> float:
        """Share of the pairs in order; 1 where no two requests were ever in flight together."""
        return max(0.0, 1 - self.swapped / self.pairs) if self.pairs else float(self.swapped == 0)

    def as_dict(self) -> dict[str, Any]:
        return {"pairs": self.pairs, "swapped": self.swapped, "share": round(self.share, 6)}


def order(observed_arrival: Ints, observed: Ints, predicted_arrival: Ints, predicted: Ints) -> Order:
    """Compare the order of an event (first token, finish; int64 ns) of the same requests at the same positions.

    Two requests were in flight together if the later one arrived before the event of the earlier one; of the two runs the one
    with more such pairs counts. Pairs with the event at the same instant in either run have no order and are never swapped.
    """
    pairs = max(_together(observed_arrival, observed), _together(predicted_arrival, predicted))
    # Equal instants observed are put in the predicted order, so that they are no inversion.
    first = np.lexsort((predicted, observed))
    return Order(pairs, inversions(np.unique(predicted[first], return_inverse=True)[1].astype(np.int64)))


def inversions(ranks: Ints) -> int:
    """Pairs i < j with ``ranks``[i] > ``ranks``[j]; ranks are whole numbers from 0 on. O(n log n).

    Two ranks differ first in some bit: the pair is an inversion if the one in front has it set. So for each bit, among those that
    agree in all higher ones, each zero counts the ones before it.
    """
    if not len(ranks):
        return 0
    total = 0
    for bit in reversed(range(int(ranks.max()).bit_length())):
        high = ranks >> (bit + 1)
        grouped = np.argsort(high, kind="stable")
        high, one = high[grouped], (ranks[grouped] >> bit & 1).astype(np.int64)
        before = np.cumsum(one) - one
        start = np.searchsorted(high, high, side="left")
        total += int(((before - before[start]) * (1 - one)).sum())
    return total


def _together(arrival: Ints, event: Ints) -> int:
    """Pairs of requests of which the later one arrived before the event of the earlier one."""
    by = np.argsort(arrival, kind="stable")
    upto = np.searchsorted(arrival[by], event[by], side="left")
    return int(np.maximum(upto - np.arange(1, len(by) + 1), 0).sum())
