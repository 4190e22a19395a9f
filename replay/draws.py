"""Random numbers without a state: a hash of the seed and of what is drawn. The same on every machine, in every order.

SplitMix64's finaliser (Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014) over the four words.
"""

from __future__ import annotations

import numpy as np

from hoptrace.compiling import cached_njit

__all__ = ["MILLION", "draw", "draw_plain"]

MILLION = 1_000_000
_MASK = (1 << 64) - 1


@cached_njit
def draw(seed: int, what: int, a: int, b: int) -> int:
    """A number in [0, 2^62), compiled. ``what``: a constant of the caller's, so that two uses do not share their numbers."""
    z = np.uint64(seed)
    for word in (what, a, b):
        z = (z + np.uint64(word)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return int(z >> np.uint64(2))


def draw_plain(seed: int, what: int, a: int, b: int) -> int:
    """The same in plain Python."""
    z = seed & _MASK
    for word in (what, a, b):
        z = ((z + (word & _MASK)) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z >> 2
