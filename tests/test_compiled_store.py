"""The compiled store of caches against a model of ordered dictionaries."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hoptrace.replay.compiled import store as s

UNIT = 4


class Model:
    """One cache: blocks held (block → [tokens, holders]), and evictable, oldest first (block, or ("run", n) → tokens)."""

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self.held: dict[Any, list[int]] = {}
        self.idle: OrderedDict[Any, int] = OrderedDict()

    def evict(self, log: list[int]) -> None:
        block = next(iter(self.idle))
        if isinstance(block, tuple):
            gone = min(UNIT, self.idle[block])
            self.idle[block] -= gone
            self.free += gone
            if not self.idle[block]:
                del self.idle[block]
        else:
            self.free += self.idle.pop(block)
            log.append(block)

    def take(self, tokens: int, log: list[int]) -> bool:
        if tokens > self.free + sum(self.idle.values()):
            return False
        while self.free < tokens:
            self.evict(log)
        self.free -= tokens
        return True


BLOCKS = st.integers(0, 40).map(lambda k: k if k < 30 else s.BLOCKS - 1 - k)
STEP = st.tuples(
    st.sampled_from(["enter", "hold", "release", "touch", "evict", "keep", "forget", "reclaim", "put", "take", "leading"]),
    st.integers(0, 2),
    BLOCKS,
    st.integers(1, 9),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEP, max_size=120), st.integers(0, 60))
def test_the_store_is_so_many_lru_caches(script: list[tuple[str, int, int, int]], capacity: int) -> None:
    caches, table, entries, head, log = s.store(3, True)
    models = [Model(capacity) for _ in range(3)]
    for i in range(3):
        s.open_cache(caches, i, capacity, UNIT)
    gone: list[int] = []
    runs: dict[tuple[str, int], int] = {}
    for n, (what, i, block, tokens) in enumerate(script):
        table, entries, log = s.room(table, entries, head, log, 1)
        model = models[i]
        e = s.find(table, entries, i, block)
        assert (e >= 0) == (block in model.held or block in model.idle)
        if what == "enter" and e < 0:
            taken = model.take(tokens, gone)
            assert s.take(caches, table, entries, head, log, i, tokens) == taken
            if taken:
                s.enter(caches, table, entries, head, i, block, tokens)
                model.held[block] = [tokens, 1]
        elif what == "take":
            if s.take(caches, table, entries, head, log, i, tokens):
                s.give(caches, i, tokens)
            if model.take(tokens, gone):
                model.free += tokens
        elif what == "hold" and e >= 0:
            s.hold(caches, entries, i, e)
            if block in model.idle:
                model.held[block] = [model.idle.pop(block), 1]
            else:
                model.held[block][1] += 1
        elif what == "release" and block in model.held:
            s.release(caches, entries, i, e)
            model.held[block][1] -= 1
            if not model.held[block][1]:
                model.idle[block] = model.held.pop(block)[0]
        elif what == "touch" and e >= 0:
            s.touch(caches, entries, i, e)
            if block in model.idle:
                model.idle.move_to_end(block)
        elif what == "evict" and model.idle:
            s.evict(caches, table, entries, head, log, i)
            model.evict(gone)
        elif what in ("keep", "forget") and model.take(tokens, gone):
            assert s.take(caches, table, entries, head, log, i, tokens)
            e = s.keep(caches, table, entries, head, i, tokens, n, what == "keep")
            assert entries[e, s.MARK] == n
            if what == "keep":
                runs["run", n] = int(entries[e, s.KEY])
            model.idle["run", n] = tokens
        elif what == "reclaim" and runs:
            name = sorted(runs)[tokens % len(runs)]
            e = s.kept(table, entries, runs.pop(name))
            where = [m for m in models if name in m.idle]
            assert (e >= 0) == bool(where)
            if where:
                here = models.index(where[0])
                left = where[0].idle.pop(name)
                assert s.reclaim(caches, table, entries, head, here, e) == left
                s.give(caches, here, left)
                where[0].free += left
        elif what == "put":
            there = block in model.held or block in model.idle
            taken = not there and model.take(tokens, gone)
            assert s.put(caches, table, entries, head, log, i, block, tokens) == taken
            if taken:
                model.idle[block] = tokens
        elif what == "leading":
            wanted = np.arange(block % 5, block % 5 + tokens, dtype=np.int64)
            found = np.empty(len(wanted), dtype=np.int64)
            hits, size, evictable = s.leading(table, entries, i, wanted, 0, len(wanted), found)
            there = [b in model.held or b in model.idle for b in wanted.tolist()]
            assert hits == (there.index(False) if False in there else len(there))
            blocks = [int(b) for b in wanted[:hits]]
            assert size == sum(model.idle.get(b, 0) or model.held[b][0] for b in blocks)
            assert evictable == sum(model.idle.get(b, 0) for b in blocks)
            assert [int(entries[e, s.KEY] & s.BLOCK) for e in found[:hits]] == blocks
        _same(models, caches, entries, head)
        assert log[: head[s.EVICTED]].tolist() == gone


def _same(models: list[Model], caches: np.ndarray, entries: np.ndarray, head: np.ndarray) -> None:
    for i, model in enumerate(models):
        idle = sum(model.idle.values())
        assert caches[i, s.FREE] == model.free
        assert caches[i, s.EVICTABLE] == idle
        assert caches[i, s.RESIDENT] == idle + sum(t for t, _ in model.held.values())
        order, e, back = [], caches[i, s.OLDEST], -1
        while e >= 0:
            assert entries[e, s.PREV] == back and entries[e, s.HOLDERS] == 0
            key = int(entries[e, s.KEY])
            assert key >> 40 == i
            order.append((None if key & s.BLOCKS else key & s.BLOCK, int(entries[e, s.SIZE])))
            back, e = e, entries[e, s.NEXT]
        assert caches[i, s.YOUNGEST] == back
        assert order == [(None if isinstance(b, tuple) else b, t) for b, t in model.idle.items()]
    assert head[s.LIVE] == sum(len(m.held) + len(m.idle) for m in models)


def test_it_grows_and_finds_all_again_and_no_more() -> None:
    caches, table, entries, head, log = s.store(300, False)
    blocks = [(i, 1000 * (i % 7) + k) for k in range(40) for i in range(300)]
    for i in range(300):
        s.open_cache(caches, i, 1 << 40, 16)
    for i, block in blocks:
        table, entries, log = s.room(table, entries, head, log, 1)
        assert s.put(caches, table, entries, head, log, i, block, 16)
    assert head[s.LIVE] == len(blocks) and table.size >= 2 * len(blocks)
    for i, block in blocks:
        e = s.find(table, entries, i, block)
        assert entries[e, s.KEY] == (i << 40) + block
        assert s.find(table, entries, i, block + 40) < 0
    for _ in range(40):
        for i in range(300):
            s.evict(caches, table, entries, head, log, i)
    assert head[s.LIVE] == 0 and (table == -1).all()
    assert (caches[:, s.FREE] == 1 << 40).all()
    assert log.size == 0 and head[s.EVICTED] == 0


def test_memory_is_of_what_is_cached_not_of_what_was() -> None:
    caches, table, entries, head, log = s.store(1, True)
    s.open_cache(caches, 0, 160, 16)
    for block in range(50_000):
        table, entries, log = s.room(table, entries, head, log, 1)
        head[s.EVICTED] = 0
        s.put(caches, table, entries, head, log, 0, block, 16)
        assert head[s.EVICTED] == (block >= 10) and (block < 10 or log[0] == block - 10)
    assert (entries.shape[0], table.size, log.size) == (1024, 4096, 1024)
    assert [s.find(table, entries, 0, b) >= 0 for b in (49_989, 49_990, 49_999)] == [False, True, True]


def test_last_block_first_and_a_run_from_its_end() -> None:
    # A request of three blocks with ids and 40 tokens of output in blocks of 16, two of them full, leaves: the output is the
    # oldest, then block 12, 11, 10.
    caches, table, entries, head, log = s.store(1, True)
    s.open_cache(caches, 0, 96, 16)
    assert s.take(caches, table, entries, head, log, 0, 96)
    held = [s.enter(caches, table, entries, head, 0, b, 16) for b in (10, 11, 12)]
    run = int(entries[s.keep(caches, table, entries, head, 0, 32, 3, True), s.KEY])
    s.give(caches, 0, 16)
    for e in reversed(held):
        s.release(caches, entries, 0, e)
    assert caches[0, [s.FREE, s.EVICTABLE, s.RESIDENT]].tolist() == [16, 80, 80]
    assert s.take(caches, table, entries, head, log, 0, 17)
    e = s.kept(table, entries, run)
    assert (entries[e, s.SIZE], entries[e, s.MARK]) == (16, 3)
    assert s.take(caches, table, entries, head, log, 0, 16) and s.kept(table, entries, run) < 0
    assert head[s.EVICTED] == 0
    assert s.take(caches, table, entries, head, log, 0, 32)
    assert log[: head[s.EVICTED]].tolist() == [12, 11]
    assert not s.take(caches, table, entries, head, log, 0, 32)


def test_fresh_ones_in_their_order() -> None:
    caches, table, entries, head, log = s.store(2, False)
    s.open_cache(caches, 1, 64, 16)
    assert s.take(caches, table, entries, head, log, 1, 64)
    for block in (7, 3, 5):
        s.mark_fresh(caches, entries, 1, s.enter(caches, table, entries, head, 1, block, 16))
    seen, e = [], caches[1, s.FRESH]
    while e >= 0:
        seen.append(int(entries[e, s.KEY] & s.BLOCK))
        e = entries[e, s.NEXT]
    assert seen == [7, 3, 5] and caches[0, s.FRESH] == -1


def test_a_part_undone_leaves_the_cache() -> None:
    caches, table, entries, head, log = s.store(1, False)
    s.open_cache(caches, 0, 64, 16)
    assert s.take(caches, table, entries, head, log, 0, 48)
    for block in (1, 2, 3):
        s.mark_fresh(caches, entries, 0, s.enter(caches, table, entries, head, 0, block, 16))
    for block, rest in ((2, [1, 3]), (3, [1]), (1, [])):
        e = s.find(table, entries, 0, block)
        s.unmark(caches, entries, 0, e)
        assert s.withdraw(caches, table, entries, head, 0, e) == 16
        s.give(caches, 0, 16)
        fresh, e = [], caches[0, s.FRESH]
        while e >= 0:
            fresh.append(int(entries[e, s.KEY]))
            e = entries[e, s.NEXT]
        assert fresh == rest
        assert s.find(table, entries, 0, block) < 0
    assert caches[0, [s.FREE, s.EVICTABLE, s.RESIDENT]].tolist() == [64, 0, 0]
    s.mark_fresh(caches, entries, 0, s.enter(caches, table, entries, head, 0, 4, 16))
    assert entries[caches[0, s.FRESH], s.KEY] == 4


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "renew", "pin", "unpin"]), st.integers(0, 12), st.integers(1, 9)), max_size=80),
    st.integers(0, 40),
)
def test_a_tier_evicts_its_oldest_that_is_not_being_read(script: list[tuple[str, int, int]], capacity: int) -> None:
    caches, table, entries, head, log = s.store(2, True)
    s.open_cache(caches, 1, capacity, 16)
    model: OrderedDict[int, list[int]] = OrderedDict()  # block → tokens, readers; oldest first
    gone: list[int] = []
    for what, block, tokens in script:
        table, entries, log = s.room(table, entries, head, log, 1)
        e = s.find(table, entries, 1, block)
        assert (e >= 0) == (block in model)
        if what == "put":
            free = capacity - sum(t for t, _ in model.values())
            fits = tokens <= free + sum(t for t, n in model.values() if not n)
            assert s.put(caches, table, entries, head, log, 1, block, tokens) == (e < 0 and fits)
            if e < 0 and fits:
                while free < tokens:
                    oldest = next(b for b, (_, n) in model.items() if not n)
                    free += model.pop(oldest)[0]
                    gone.append(oldest)
                model[block] = [tokens, 0]
        elif e >= 0:
            if what == "renew":
                s.renew(caches, entries, 1, e)
                model.move_to_end(block)
            elif what == "pin":
                s.pin(caches, entries, 1, e)
                model[block][1] += 1
            elif model[block][1]:
                s.unpin(caches, entries, 1, e)
                model[block][1] -= 1
        order, e = [], caches[1, s.OLDEST]
        while e >= 0:
            order.append((int(entries[e, s.KEY] & s.BLOCK), [int(entries[e, s.SIZE]), int(entries[e, s.HOLDERS])]))
            e = entries[e, s.NEXT]
        assert order == list(model.items())
        assert caches[1, s.EVICTABLE] == sum(t for t, n in model.values() if not n)
        assert log[: head[s.EVICTED]].tolist() == gone
