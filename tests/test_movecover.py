"""When moves were recorded: stretches of several sources, and what a ledger says of moves that only part of the time tells."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from support.memory import MemoryTrace

from hoptrace.analysis.moves.movecover import covered, length_within

Stretches = list[tuple[str, int, int]]


def trace(stretches: Stretches) -> MemoryTrace:
    return MemoryTrace({"coverage": [{"table": "moves", "source": s, "from_ns": a, "to_ns": z} for s, a, z in stretches]})


# (Rows of one source and one beginning are one row, whose end moved on.)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30), st.integers(0, 30)), max_size=6, unique_by=lambda s: s[:2]))
def test_a_moment_is_covered_if_each_source_covers_it(stretches: Stretches) -> None:
    found = covered(trace(stretches))
    sources = {s for s, _, _ in stretches}
    if not sources:
        assert found is None
        return
    assert found is not None and all(z < c for (_, z), (c, _) in pairwise(found))
    for t in range(31):
        told = all(any(a <= t < z for name, a, z in stretches if name == s) for s in sources)
        assert told == any(a <= t < z for a, z in found)
    assert length_within(found, 0, 31) == sum(any(a <= t < z for a, z in found) for t in range(31))
