"""Requests that wait in many queues at once, compiled; int64 throughout.

Any number of queues over one table of nodes, each ordered by (key, arrival, number), least first. A node is in one
queue at most. Requests that come in order are appended to a list, in O(1); the others go into a pairing heap (Fredman,
Sedgewick, Sleator, Tarjan 1986), O(log n) amortised. Nothing depends on the number of queues::

    nodes = queue_nodes(n); queues = queue_heads(engines)
    enqueue(queues, nodes, q, node, key, arrival, number)
    queues[q, COUNT]; first(queues, nodes, q)   # node, -1 if there is none
    dequeue(queues, nodes, q)                   # takes the first one out and returns it; there must be one
"""

from __future__ import annotations

import numpy as np

from hoptrace.compiling import cached_njit
from hoptrace.replay.jit import lean

__all__ = ["ARRIVAL", "COUNT", "KEY", "NUMBER", "dequeue", "enqueue", "first", "queue_heads", "queue_nodes"]

KEY, ARRIVAL, NUMBER, _NEXT, _CHILD = 0, 1, 2, 3, 4
"""Columns of a node. ``_NEXT``: the next one in the list, or the next sibling in the heap."""

_HEAD, _TAIL, _ROOT, COUNT = 0, 1, 2, 3
"""Columns of a queue: its list's ends, its heap's root, how many wait."""


@cached_njit
def queue_nodes(n: int) -> np.ndarray:
    """Nodes 0 … n − 1, in no queue: int64[n, 5]."""
    return np.full((n, 5), -1, dtype=np.int64)


@cached_njit
def queue_heads(n: int) -> np.ndarray:
    """``n`` empty queues: int64[n, 4]."""
    queues = np.full((n, 4), -1, dtype=np.int64)
    queues[:, COUNT] = 0
    return queues


@lean()
def _less(nodes: np.ndarray, x: int, y: int) -> bool:
    """Whether node x comes before node y."""
    if nodes[x, KEY] != nodes[y, KEY]:
        return nodes[x, KEY] < nodes[y, KEY]
    if nodes[x, ARRIVAL] != nodes[y, ARRIVAL]:
        return nodes[x, ARRIVAL] < nodes[y, ARRIVAL]
    return nodes[x, NUMBER] < nodes[y, NUMBER]


@lean()
def _link(nodes: np.ndarray, x: int, y: int) -> int:
    """Make the later one of two roots the other's first child: the root."""
    if _less(nodes, y, x):
        x, y = y, x
    nodes[y, _NEXT] = nodes[x, _CHILD]
    nodes[x, _CHILD] = y
    return x


@lean()
def enqueue(queues: np.ndarray, nodes: np.ndarray, q: int, node: int, key: int, arrival: int, number: int) -> None:
    """Put ``node``, which is in no queue, into queue ``q``."""
    nodes[node, KEY], nodes[node, ARRIVAL], nodes[node, NUMBER] = key, arrival, number
    nodes[node, _NEXT], nodes[node, _CHILD] = -1, -1
    queues[q, COUNT] += 1
    tail = queues[q, _TAIL]
    if tail < 0:
        queues[q, _HEAD], queues[q, _TAIL] = node, node
    elif not _less(nodes, node, tail):
        nodes[tail, _NEXT] = node
        queues[q, _TAIL] = node
    else:
        root = queues[q, _ROOT]
        queues[q, _ROOT] = node if root < 0 else _link(nodes, root, node)


@lean()
def first(queues: np.ndarray, nodes: np.ndarray, q: int) -> int:
    """The node that comes first in queue ``q``, -1 if it is empty."""
    head, root = queues[q, _HEAD], queues[q, _ROOT]
    if head < 0:
        return root
    return root if root >= 0 and _less(nodes, root, head) else head


@lean()
def dequeue(queues: np.ndarray, nodes: np.ndarray, q: int) -> int:
    """Take the first node out of queue ``q``, which must not be empty, and return it."""
    queues[q, COUNT] -= 1
    node = first(queues, nodes, q)
    if node == queues[q, _HEAD]:
        queues[q, _HEAD] = nodes[node, _NEXT]
        if queues[q, _HEAD] < 0:
            queues[q, _TAIL] = -1
    else:
        queues[q, _ROOT] = _merged(nodes, nodes[node, _CHILD])
    nodes[node, _NEXT], nodes[node, _CHILD] = -1, -1
    return node


@lean()
def _merged(nodes: np.ndarray, child: int) -> int:
    """One heap of a root's children, in two passes: pairs from the left, then all from the right; -1 if there are none."""
    pairs = -1  # a stack of roots
    while child >= 0:
        x, y = child, nodes[child, _NEXT]
        if y < 0:
            child = -1
        else:
            child = nodes[y, _NEXT]
            x = _link(nodes, x, y)
        nodes[x, _NEXT] = pairs
        pairs = x
    root = -1
    while pairs >= 0:
        x = pairs
        pairs = nodes[x, _NEXT]
        root = x if root < 0 else _link(nodes, root, x)
    if root >= 0:
        nodes[root, _NEXT] = -1
    return root
