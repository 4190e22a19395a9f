"""Contending transfers: closed forms, a slow model written from docs/replay-engine.md, and law 5 against exact fractions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoptrace.replay.compiled import transfers as tr
from hoptrace.replay.plan import LinkSpec, Plan, Way
from hoptrace.stepcost import StepCost

GB = 1_000_000_000


@dataclass(frozen=True)
class Case:
    """Links' bytes per second, ways, and transfers: (start, way, blocks, bytes), by start."""

    links: tuple[int, ...]
    ways: tuple[Way, ...]
    starts: tuple[tuple[int, int, int, int], ...]

    def plan(self) -> Plan:
        return Plan(engines=(), costs=(), ways=self.ways, links=tuple(LinkSpec(f"l{i}", b) for i, b in enumerate(self.links)))


def ends(case: Case) -> list[tuple[int, int]]:
    """(number, end), in the order in which they ended."""
    ways, links = tr.packed(case.plan())
    t, left, head = tr.transfers(ways)
    waiting = list(enumerate(case.starts))
    out: list[tuple[int, int]] = []
    while True:
        now = tr.next_ns(t, head)
        if waiting and waiting[0][1][0] < now:
            number, (at, way, blocks, nbytes) = waiting.pop(0)
            t, left = tr.room(t, left, head, 1)
            x = tr.start(t, head, ways, at, way, blocks, nbytes)
            t[x, tr.TAG], t[x, tr.TAG + tr.TAGS - 1] = number, ~number
        elif now == tr.NEVER:
            assert (links[:, 1] == 0).all()
            return out
        else:
            n = tr.due(t, left, head, ways, links, now)
            for x in t[:n, tr.ENDED].tolist():
                number = int(t[x, tr.TAG])
                assert t[x, tr.TAG + tr.TAGS - 1] == ~number
                assert (t[x, tr.START], t[x, tr.WAY], t[x, tr.BLOCKS], t[x, tr.BYTES]) == case.starts[number]
                out.append((number, now))
                tr.free(t, head, x)


@dataclass
class Moving:
    number: int
    links: tuple[int, ...]
    joins: int
    left: Any
    since: int = -1
    rate: Any = 0
    end: int = -1


@dataclass
class Model:
    """Slow: every transfer is looked at, at each instant at which anything may happen. ``exact``: with fractions."""

    case: Case
    exact: bool
    on: list[Moving] = field(default_factory=list)

    def run(self) -> list[tuple[int, int]]:
        soon = []
        for number, (at, way, blocks, nbytes) in enumerate(self.case.starts):
            w = self.case.ways[way]
            fixed = at + w.base_ns + blocks * w.per_block_ns
            soon.append(Moving(number, w.links, fixed, Fraction(nbytes) if self.exact else float(nbytes)))
        out: list[tuple[int, int]] = []
        while soon or self.on:
            now = min([m.joins for m in soon] + [m.end for m in self.on])
            while True:
                gone = [m for m in self.on if m.end == now] + [m for m in soon if m.joins == now and not m.links]
                if gone:
                    gone.sort(key=lambda m: m.number)
                    out += [(m.number, now) for m in gone]
                    self.on = [m for m in self.on if m not in gone]
                    soon = [m for m in soon if m not in gone]
                    self.retime(now, gone)
                    continue
                come = [m for m in soon if m.joins == now]
                if not come:
                    break
                soon = [m for m in soon if m not in come]
                for m in come:
                    m.since = now
                self.on += come
                self.retime(now, come)
        return out

    def retime(self, now: int, touched: list[Moving]) -> None:
        links = {k for m in touched for k in m.links}
        for m in sorted(self.on, key=lambda m: m.number):
            if not links.intersection(m.links):
                continue
            left = m.left - (now - m.since) * m.rate
            m.left = left if left > 0 else 0 * left
            counts = {k: sum(k in o.links for o in self.on) for k in m.links}
            if self.exact:
                m.rate = min(Fraction(self.case.links[k], n * GB) for k, n in counts.items())
            else:
                m.rate = min(self.case.links[k] / n for k, n in counts.items()) / 1e9
            m.since = now
            m.end = now + ceil(m.left / m.rate)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(1, 4))
    links = tuple(draw(st.sampled_from([1, 3, 10, 25, 64]) | st.integers(1, 1000)) * GB // 4 for _ in range(n))
    some = st.lists(st.integers(0, n - 1), max_size=3, unique=True).map(tuple)
    way = st.builds(Way, links=some, base_ns=st.sampled_from([0, 0, 5, 700]), per_block_ns=st.sampled_from([0, 3]))
    ways = draw(st.lists(way, min_size=1, max_size=4).map(tuple))
    one = st.tuples(
        st.integers(0, 3000),
        st.integers(0, len(ways) - 1),
        st.integers(0, 9),
        st.sampled_from([0, 4096]) | st.integers(0, 90_000),
    )
    return Case(links, ways, tuple(sorted(draw(st.lists(one, max_size=14)), key=lambda s: s[0])))


@settings(max_examples=400, deadline=None)
@given(cases())
def test_as_the_page_says(case: Case) -> None:
    assert ends(case) == Model(case, exact=False).run()


@settings(max_examples=200, deadline=None)
@given(cases())
def test_floats_move_no_end_by_more_than_a_nanosecond_each(case: Case) -> None:
    exact = dict(Model(case, exact=True).run())
    for number, end in ends(case):
        assert abs(end - exact[number]) <= len(case.starts)


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_law_5_a_faster_link_or_one_less_is_never_slower(case: Case, data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        k = data.draw(st.integers(0, len(case.links) - 1))
        by = data.draw(st.sampled_from([Fraction(2), Fraction(10, 9), Fraction(1_000_001, 1_000_000), Fraction(100)]))
        better = replace(case, links=tuple(int(b * by) if i == k else b for i, b in enumerate(case.links)))
    else:
        k = data.draw(st.integers(0, len(case.ways) - 1))
        fewer = replace(case.ways[k], links=case.ways[k].links[1:])
        better = replace(case, ways=tuple(fewer if i == k else w for i, w in enumerate(case.ways)))
    exact, exact_better = dict(Model(case, exact=True).run()), dict(Model(better, exact=True).run())
    assert all(exact_better[number] <= end for number, end in exact.items())
    # What the engine does, in float64: no later but for the rounding, a nanosecond for each transfer at most.
    before, after = dict(ends(case)), dict(ends(better))
    assert all(after[number] <= end + len(case.starts) for number, end in before.items())


@pytest.mark.parametrize("n", [1, 2, 3, 7, 48])
@pytest.mark.parametrize("nbytes", [1, 4096, 1_048_577, 5_000_000_000])
@pytest.mark.parametrize("bytes_per_s", [25 * GB, 64 * GB, 3_350 * GB, 7 * GB // 3])
def test_n_equal_ones_share_and_end_together(n: int, nbytes: int, bytes_per_s: int) -> None:
    case = Case((bytes_per_s,), (Way(links=(0,), base_ns=1500, per_block_ns=10),), ((1000, 0, 4, nbytes),) * n)
    seen = ends(case)
    end = 1000 + 1540 + ceil(Fraction(n * nbytes * GB, bytes_per_s))
    assert [number for number, _ in seen] == list(range(n))
    assert len({e for _, e in seen}) == 1
    assert 0 <= seen[0][1] - end <= 1  # float64: one that falls on a whole ns may end in the next


def test_by_hand() -> None:
    # Two links, 10 and 4 bytes/ns. A (100 bytes) is alone on link 0 from 0: 10 a ns. At 5 B joins over both (40 bytes): A has 50
    # left and goes at 5, B at min(5, 4) = 4. A ends at 15, B at 15 too. C comes at 12 with its fixed 3 and no link: 15.
    ways = (Way(links=(0,)), Way(links=(0, 1)), Way(base_ns=3))
    case = Case((10 * GB, 4 * GB), ways, ((0, 0, 0, 100), (5, 1, 0, 40), (12, 2, 0, 99)))
    assert ends(case) == [(0, 15), (1, 15), (2, 15)]
    # D joins link 1 at 7: B goes at 2 from then on (32 left, until 23), D (8 bytes) at 2 until 11; then B
    # (24 left) at 4 until 17. A has its 5 a ns until it ends at 15.
    case = replace(case, ways=(*ways, Way(links=(1,))), starts=((0, 0, 0, 100), (5, 1, 0, 40), (7, 3, 0, 8)))
    assert ends(case) == [(2, 11), (0, 15), (1, 17)]


def test_both_directions_apart() -> None:
    ways = (Way(links=(0,)), Way(links=(1,)))
    case = Case((GB, GB), ways, ((0, 0, 0, 1000), (0, 1, 0, 1000)))
    assert ends(case) == [(0, 1000), (1, 1000)]


def test_alone() -> None:
    ways, links = tr.packed(Case((25 * GB, 64 * GB), (Way(links=(1, 0), base_ns=7, per_block_ns=2), Way(base_ns=9)), ()).plan())
    assert tr.alone_ns(ways, links, 0, 3, 1000) == 7 + 6 + 40
    assert tr.alone_ns(ways, links, 1, 3, 1000) == 9


def test_rows_are_used_again() -> None:
    case = Case((GB,), (Way(links=(0,)),), tuple((i * 100, 0, 0, 100) for i in range(1000)))
    ways, links = tr.packed(case.plan())
    t, left, head = tr.transfers(ways)
    for at, way, blocks, nbytes in case.starts:
        t, left = tr.room(t, left, head, 1)
        tr.start(t, head, ways, at, way, blocks, nbytes)
        while tr.next_ns(t, head) < at + 100:
            assert tr.due(t, left, head, ways, links, tr.next_ns(t, head)) == 0
        assert tr.due(t, left, head, ways, links, at + 100) == 1
        tr.free(t, head, t[0, tr.ENDED])
    assert t.shape[0] == 64
    assert ends(case) == [(i, 100 * i + 100) for i in range(1000)]


def test_a_link_named_twice_counts_once() -> None:
    assert ends(Case((GB,), (Way(links=(0, 0)),), ((0, 0, 0, 500),))) == [(0, 500)]


def test_packed_rows_are_integers() -> None:
    ways, links = tr.packed(Plan(engines=(), costs=(StepCost,)))  # type: ignore[arg-type]
    assert ways.dtype == links.dtype == np.int64 and ways.shape == (0, 3) and links.shape == (0, 4)
