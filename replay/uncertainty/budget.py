"""How many draws a what-if can afford, and on which engine: by the size of the work alone, so that the same work gets as many."""

from __future__ import annotations

from dataclasses import dataclass

from hoptrace.replay.simulation import Engine, is_small
from hoptrace.replay.workload import Workload

__all__ = ["DRAWS", "FEWEST", "LEVEL", "Affordable", "affordable"]

DRAWS = 40
LEVEL = 0.9
"""The share of runs that an interval is to hold, where nothing else is asked for."""
FEWEST = 8
"""Under so many the interval would be mostly that of its own luck."""
_BUDGET_S = 8.0
# CPU seconds of one core: measured on a 2.x GHz x86 core, plain and compiled engine, figures included.
_RUN_S = {"plain": 4e-3, "compiled": 4e-3}
_REQUEST_S = {"plain": 100e-6, "compiled": 6e-6}
_TOKEN_S = {"plain": 15e-6, "compiled": 0.3e-6}


@dataclass(frozen=True)
class Affordable:
    """``draws``: 0 if not even :data:`FEWEST` are. ``note``: in a sentence, where they are fewer than :data:`DRAWS`."""

    draws: int
    engine: Engine
    note: str = ""


def affordable(works: tuple[Workload, ...], engine: Engine, plugins: bool = False) -> Affordable:
    """Draws of a replay of each of ``works`` within some eight CPU-seconds. ``plugins``: parts that
    only the plain engine runs."""
    small = all(is_small(w) for w in works)
    chosen: Engine = "plain" if plugins or engine == "plain" or (engine == "auto" and small) else "compiled"
    each = sum(_RUN_S[chosen] + _REQUEST_S[chosen] * w.n + _TOKEN_S[chosen] * int(w.output_tokens.sum()) for w in works)
    draws = min(DRAWS, int(_BUDGET_S / each))
    if draws >= DRAWS:
        return Affordable(DRAWS, chosen)
    size = f"{works[-1].n:,} requests on the {chosen} engine"
    faster = " or --engine compiled" if chosen == "plain" and not plugins else ""
    if draws < FEWEST:
        return Affordable(0, chosen, f"No intervals: {size} take {each:.1f} s a draw (--intervals {DRAWS}{faster}).")
    return Affordable(draws, chosen, f"Intervals of {draws} draws instead of {DRAWS}: {size} (--intervals {DRAWS}{faster}).")
