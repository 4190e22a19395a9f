"""Residency, compiled: what a request does from step to step, written when it changes only."""

from __future__ import annotations

import numpy as np

from hoptrace.replay.compiled.columns import (
    N_RUNS,
    NONE,
    RUN_CONTEXT,
    RUN_EMITTED,
    RUN_FIRST,
    RUN_PHASE,
    RUN_TOKENS,
)  # fmt: skip
from hoptrace.replay.jit import lean
from hoptrace.replay.outcome import DECODE

__all__ = ["end_run", "set_run", "start_run"]


@lean()
def end_run(s: np.ndarray, g: np.ndarray, runs: np.ndarray, r: int, e: int, last: int) -> None:
    """Write request ``r``'s open run, which ended with step ``last`` of engine ``e``; a run of no step is not written."""
    first = s[r, RUN_FIRST]
    if s[r, RUN_PHASE] >= 0 and last >= first:
        n = g[N_RUNS]
        runs[n, 0], runs[n, 1], runs[n, 2], runs[n, 3] = r, e, first, last
        runs[n, 4], runs[n, 5], runs[n, 6] = s[r, RUN_PHASE], s[r, RUN_TOKENS], s[r, RUN_CONTEXT]
        runs[n, 7] = s[r, RUN_EMITTED]
        g[N_RUNS] = n + 1
    s[r, RUN_PHASE] = NONE


@lean()
def start_run(s: np.ndarray, r: int, step: int, phase: int, tokens: int, context: int, emitted: int) -> None:
    """Open a run."""
    s[r, RUN_FIRST], s[r, RUN_PHASE], s[r, RUN_TOKENS], s[r, RUN_CONTEXT] = step, phase, tokens, context
    s[r, RUN_EMITTED] = emitted


@lean()
def set_run(
    s: np.ndarray, g: np.ndarray, runs: np.ndarray, r: int, e: int, step: int, phase: int, tokens: int, context: int, emitted: int
) -> None:
    """What ``r`` did in ``step``: its open run goes on, or another begins."""
    if s[r, RUN_PHASE] == phase and s[r, RUN_TOKENS] == tokens and (phase != DECODE or s[r, RUN_EMITTED] == emitted):
        s[r, RUN_EMITTED] = emitted
        return
    end_run(s, g, runs, r, e, step - 1)
    start_run(s, r, step, phase, tokens, context, emitted)
