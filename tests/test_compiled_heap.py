"""The compiled queues against sorted lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoptrace.replay.compiled import heap as h

SMALL = st.integers(0, 3)


@given(st.lists(st.tuples(st.integers(0, 2), st.one_of(st.none(), st.tuples(SMALL, SMALL)))))
def test_many_queues_each_in_its_own_order(script: list[tuple[int, tuple[int, int] | None]]) -> None:
    nodes, queues = h.queue_nodes(len(script) + 1), h.queue_heads(3)
    model: list[list[tuple[int, int, int, int]]] = [[], [], []]
    for node, (q, item) in enumerate(script):
        if item is not None:
            number = (node * 7) % (len(script) + 1)
            h.enqueue(queues, nodes, q, node, *item, number)
            model[q].append((*item, number, node))
            model[q].sort()
        elif model[q]:
            assert h.first(queues, nodes, q) == model[q][0][3]
            assert h.dequeue(queues, nodes, q) == model[q].pop(0)[3]
        for i in range(3):
            assert queues[i, h.COUNT] == len(model[i])
            assert h.first(queues, nodes, i) == (model[i][0][3] if model[i] else -1)
    for q in range(3):
        while model[q]:
            assert h.dequeue(queues, nodes, q) == model[q].pop(0)[3]
        assert h.first(queues, nodes, q) == -1


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
def test_a_long_queue_comes_out_sorted(order: str) -> None:
    n = 20_000
    keys = np.arange(n)
    keys = {"rising": keys, "falling": keys[::-1], "mixed": (keys * 7919) % n}[order]
    nodes, queues = h.queue_nodes(n), h.queue_heads(1)
    for node, key in enumerate(keys):
        h.enqueue(queues, nodes, 0, node, key, 0, node)
    assert [int(keys[h.dequeue(queues, nodes, 0)]) for _ in range(n)] == list(range(n))


def test_a_node_goes_from_queue_to_queue() -> None:
    nodes, queues = h.queue_nodes(2), h.queue_heads(2)
    h.enqueue(queues, nodes, 0, 0, 5, 0, 0)
    h.enqueue(queues, nodes, 0, 1, 4, 0, 1)
    assert h.dequeue(queues, nodes, 0) == 1
    h.enqueue(queues, nodes, 1, 1, 9, 0, 1)
    h.enqueue(queues, nodes, 1, h.dequeue(queues, nodes, 0), 5, 0, 0)
    assert [h.dequeue(queues, nodes, 1), h.dequeue(queues, nodes, 1)] == [0, 1]
