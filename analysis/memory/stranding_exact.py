"""Exact sums of int64 products, whatever their size: an integral of bytes over nanoseconds soon exceeds 64 bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Ints", "MOST_NS", "MOST_TOKENS", "distinct", "dot"]

Ints = npt.NDArray[np.int64]

MOST_TOKENS = 1 << 32
"""A KV space of more places than this is no value that a device can have: it is read as unknown."""

MOST_NS = (1 << 62) - 1
"""Instants beyond this (146 years from 0 on either side) are no times: the difference of two others fits into 64 bits."""

_LEFT, _RIGHT = 16, 22  # bits of a limb: 2^38 a product, so that 2^25 of them fit into 63 bits


def dot(a: Ints, b: Ints) -> int:
    """Σ a·b, exact, of two equally long arrays without negative values (fewer than 2^25)."""
    total = 0
    for i in range(4):
        left = (a >> (_LEFT * i)) & ((1 << _LEFT) - 1)
        if not left.any():
            continue
        for j in range(3):
            right = (b >> (_RIGHT * j)) & ((1 << _RIGHT) - 1)
            total += int(left @ right) << (_LEFT * i + _RIGHT * j)
    return total


def distinct(values: Ints) -> Ints:
    """Ascending, each once. (numpy's ``unique`` hashes, which takes twenty times as long on instants.)"""
    ordered = np.sort(values, kind="stable")
    found: Ints = ordered[np.append(True, ordered[1:] != ordered[:-1])]
    return found
