"""Work on the next pieces while the last one is used: the parsers let go of the interpreter's lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["ahead"]

_A = TypeVar("_A")
_B = TypeVar("_B")
# Two threads and one piece in hand: memory stays at a few pieces.
_THREADS = 2


def ahead(pieces: Iterable[_A], work: Callable[[_A], _B]) -> Iterator[_B]:
    """``work`` on each piece, in order, a little ahead of whoever takes the results. Exceptions come where the result would."""
    waiting: deque[Future[_B]] = deque()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hoptrace-parse") as pool:
        try:
            for piece in pieces:
                waiting.append(pool.submit(work, piece))
                if len(waiting) > _THREADS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
