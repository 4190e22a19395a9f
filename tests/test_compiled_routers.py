"""The compiled routers against the page's sentences in plain Python."""

from __future__ import annotations

from random import Random
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoptrace.replay.compiled import routers as ro
from hoptrace.replay.compiled import store
from hoptrace.replay.draws import draw_plain
from hoptrace.replay.plan import Routing

EMPTY = np.zeros(0, dtype=np.int64)


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def route(kind: str, load: list[int], value: list[int], numbers: list[tuple[int, int]], **more: int) -> list[int]:
    of = {"seed": 0, "shift": 0, "age_ns": 0, "load_tokens": 0} | more
    router = ro.new_router(ro.KINDS.index(kind), len(load), of["seed"], of["shift"], of["age_ns"], of["load_tokens"])
    return [ro.choose(router, ints(load), ints(value), number, session, 0) for number, session in numbers]


def test_kinds_are_those_of_a_plan() -> None:
    assert set(ro.KINDS) == set(get_args(get_type_hints(Routing)["kind"]))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(ro.KINDS),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(-1, 5)), max_size=12),
    st.integers(0, (1 << 63) - 1),
    st.sampled_from([0, 2]),
    st.integers(0, 2),
)
def test_as_the_page_says(
    kind: str, engines: list[tuple[int, int]], numbers: list[tuple[int, int]], seed: int, shift: int, weight: int
) -> None:
    n, load, value = len(engines), [a for a, _ in engines], [b for _, b in engines]
    expected, alone = [], 0
    for i, (number, session) in enumerate(numbers):
        a = draw_plain(seed, 2, number, shift) % n
        b = draw_plain(seed, 2, number, shift + 1) % (n - 1) if n > 1 else 0
        b = b + 1 if b >= a else b
        expected.append(
            {
                "round_robin": i % n,
                "random": draw_plain(seed, 1, number, shift) % n,
                "least_load": min(range(n), key=lambda p: (load[p], p)),
                "power_of_two": 0 if n == 1 else min((a, b), key=lambda p: load[p % n]),
                "prefix_aware": min(range(n), key=lambda p: (weight * load[p] - value[p], load[p], p)),
                "kv_use": min(range(n), key=lambda p: (value[p], p)),
                "session": draw_plain(seed, 3, session, shift) % n if session >= 0 else alone % n,
            }[kind]
        )
        alone += session < 0
    assert route(kind, load, value, numbers, seed=seed, shift=shift, load_tokens=weight) == expected


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 130),
    st.lists(st.tuples(st.integers(0, 129), st.integers(0, 9), st.booleans()), max_size=150),
    st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_prefixes_are_those_in_the_caches_up_to_the_first_gap(
    n: int, script: list[tuple[int, int, bool]], prompts: list[list[int]], chance: Random
) -> None:
    caches, table, entries, head, log = store.store(n + 1, False, n)
    there: list[set[int]] = [set() for _ in range(n)]
    for i in range(n):
        store.open_cache(caches, i, 1 << 40, 16)
    for i, block, comes in script:
        table, entries, log = store.room(table, entries, head, log, 1)
        i %= n
        e = store.find(table, entries, i, block)
        assert (e >= 0) == (block in there[i])
        if comes and e < 0:
            store.enter(caches, table, entries, head, i, block, 16)
            there[i].add(block)
        elif not comes and e >= 0:
            store.withdraw(caches, table, entries, head, i, e)
            there[i].remove(block)
    every = chance.sample(range(n), chance.randint(1, n))
    engines, value, scratch = ints(every), ints([-1] * len(every)), ints([-1] * 2 * len(every))
    block_id = ints([5] + [b for p in prompts for b in p])
    block_end = ints(list(range(100, 100 + len(block_id))))
    first = 1
    for prompt in prompts:
        ro.prefixes(value, scratch, table, entries, head, engines, block_id, block_end, first, first + len(prompt))
        for p, i in enumerate(every):
            hits = next((k for k, b in enumerate(prompt) if b not in there[i]), len(prompt))
            assert value[p] == (block_end[first + hits - 1] if hits else 0)
        first += len(prompt)
    for i in range(n):
        for block in there[i]:
            store.withdraw(caches, table, entries, head, i, store.find(table, entries, i, block))
    assert head[store.LIVE] == 0 and (table == -1).all()


@pytest.mark.parametrize("age", [0, 10])
def test_kv_use_as_it_was_at_the_last_multiple_of_its_age(age: int) -> None:
    caches, _, _, _, _ = store.store(3, False)
    for i in range(3):
        store.open_cache(caches, i, 100, 1)
    engines, capacity, value, load = ints([1, 2]), ints([100, 100]), ints([0, 0]), ints([0, 0])
    router = ro.new_router(ro.KINDS.index("kv_use"), 2, 0, 0, age, 0)
    seen = []
    # At each instant: free tokens of the two engines before its events, then after the first of them, then a routing or not.
    script = [
        (3, (50, 60), (50, 60), False),
        (5, (90, 100), (100, 90), True),  # the first routing: multiples are 5, 15, 25 …
        (14, (100, 0), (100, 0), True),
        (17, (99, 100), (0, 1), True),  # as it was before 17: nothing happened from 15 on
        (24, (0, 100), (0, 100), True),
        (25, (100, 0), (0, 100), True),  # 25 itself, before its events
        (58, (0, 50), (50, 0), False),
        (64, (7, 8), (8, 7), True),  # as before 58, when 55 had passed
    ]
    for now, before, after, routes in script:
        caches[1:, store.FREE] = before
        ro.see(router, value, capacity, caches, engines, now)
        caches[1:, store.FREE] = after
        if routes:
            ro.use(router, value, capacity, caches, engines)
            seen.append(int(ro.choose(router, load, value, 0, -1, now)))
    assert seen == ([0, 0, 1, 1, 1, 0] if age == 0 else [1, 1, 1, 1, 0, 1])
