"""The fast engine: numba over tables of integers. docs/replay-engine.md says what it does."""

from hoptrace.replay.compiled.simulate import simulate

__all__ = ["simulate"]
