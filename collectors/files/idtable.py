"""Whole numbers seen before, in arrays: what block hashes stood for, which request a chat was. Compiled; millions fit."""

from __future__ import annotations

from typing import Any

import numpy as np

from hoptrace.compiling import cached_njit

__all__ = ["BlockIds", "ChatIds", "Scanned"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]

# At most this many different numbers are kept (18 to 34 bytes each): memory stays bounded whatever the file.
_MOST = 1 << 24
_NONE, _UNTRACKED = -1, -2
# The odd multiplier of Fibonacci hashing, 2^64 ÷ golden ratio, as a signed number.
_GOLDEN = np.int64(-7046029254386353131)
# Prefix hashes lie above 2^62, out of the way of numbers that count up from 0.
_HIGH = np.int64(1) << np.int64(62)
_LOW = np.int64(_HIGH - 1)


@cached_njit
def _find(index: Any, keys: Any, key: Any) -> Any:
    """Slot of a key, or the free slot where it belongs."""
    mask = len(index) - 1
    # Numbers that count up lie side by side, eight in a row, where the cache finds them; the rows are strewn. (Long rows that
    # overlap would have to be walked to their end.)
    h = (key >> np.int64(3)) * _GOLDEN
    slot = (((h ^ (h >> np.int64(32))) << np.int64(3)) + (key & np.int64(7))) & mask
    while index[slot] != 0 and keys[index[slot] - 1] != key:
        slot = (slot + 1) & mask
    return slot


@cached_njit
def _reindex(index: Any, keys: Any, used: Any) -> None:
    for entry in range(used):
        index[_find(index, keys, keys[entry])] = entry + 1


@cached_njit
def _scan(
    index: Any, keys: Any, sizes: Any, lines: Any, parents: Any, used: Any, most: Any,
    ids: Any, starts: Any, prompts: Any, rows: Any, block: Any, out: Any, conflict: Any, other: Any, moved: Any,
) -> Any:  # fmt: skip
    """Look at each block of each row in order; see :meth:`BlockIds.scan`. Returns the entries in use."""
    for r in range(len(prompts)):
        parent = _NONE
        raw = True
        h = np.int64(0)
        conflict[r] = -1
        moved[r] = False
        for j in range(starts[r], starts[r + 1]):
            key = ids[j]
            size = min(block, prompts[r] - (j - starts[r]) * block)
            slot = _find(index, keys, key)
            entry = index[slot] - 1
            if entry >= 0:
                if sizes[entry] != size and conflict[r] < 0:
                    conflict[r] = j
                    other[r] = entry
                raw = raw and parents[entry] == parent
            elif used < most:
                entry = used
                used += 1
                index[slot] = used
                keys[entry] = key
                sizes[entry] = size
                lines[entry] = rows[r]
                parents[entry] = parent
            else:
                entry = _UNTRACKED
            # The place in the prompt is hashed too: else 0 after 0 would hash to 0 again.
            h = (h ^ key) * _GOLDEN + np.int64(j - starts[r] + 1)
            h = h ^ (h >> np.int64(29))
            if raw:
                out[j] = key
            else:
                out[j] = (h & _LOW) | _HIGH
                moved[r] = True
            parent = entry
    return used


@cached_njit
def _link(
    index: Any,
    keys: Any,
    numbers: Any,
    roots: Any,
    used: Any,
    most: Any,
    ids: Any,
    before: Any,
    first: Any,
    parent: Any,
    root: Any,
) -> Any:
    """Parent request and root chat of each row; see :meth:`ChatIds.link`. Returns the entries in use."""
    for r in range(len(ids)):
        parent[r] = _NONE
        root[r] = ids[r]
        if before[r] >= 0:
            entry = index[_find(index, keys, before[r])] - 1
            if entry >= 0:
                parent[r] = numbers[entry]
                root[r] = roots[entry]
            else:
                root[r] = before[r]
        slot = _find(index, keys, ids[r])
        if index[slot] == 0:
            if used >= most:
                continue
            keys[used] = ids[r]
            used += 1
            index[slot] = used
        numbers[index[slot] - 1] = first + r
        roots[index[slot] - 1] = root[r]
    return used


class _Table:
    """Keys in the order of their first sight, an open-addressing index of them, and columns beside them."""

    def __init__(self, **columns: type[np.generic]) -> None:
        self.used = 0
        self.keys: _Ints = np.zeros(1 << 10, dtype=np.int64)
        self.index = np.zeros(1 << 11, dtype=np.int32)
        self.columns: dict[str, Any] = {n: np.zeros(1 << 10, dtype=t) for n, t in columns.items()}

    @property
    def full(self) -> bool:
        return self.used >= _MOST

    def reserve(self, more: int) -> None:
        """Room for so many more keys, the index at most half full."""
        need = min(self.used + more, _MOST)
        room = len(self.keys)
        while room < need:
            room *= 2
        if room > len(self.keys):
            self.keys = self._grown(self.keys, room)
            self.columns = {n: self._grown(c, room) for n, c in self.columns.items()}
        if len(self.index) < 2 * need:
            self.index = np.zeros(4 * room, dtype=np.int32)
            _reindex(self.index, self.keys, self.used)

    def _grown(self, column: Any, room: int) -> Any:
        """A larger array with the entries in use; the rest of its pages is not touched."""
        larger = np.empty(room, dtype=column.dtype)
        larger[: self.used] = column[: self.used]
        return larger


class Scanned:
    """What :meth:`BlockIds.scan` found: ``ids`` to write; ``moved`` [rows] whose ids were made prefix hashes; ``conflicts``: per
    row in conflict its position, the hash, its tokens there, the line where it stood for another number, and that number."""

    def __init__(self, ids: _Ints, moved: Any, conflicts: list[tuple[int, int, int, int, int]]) -> None:
        self.ids, self.moved, self.conflicts = ids, moved, conflicts


class BlockIds:
    """Block hashes of one file's prompts.

    A trace's hashes are chained: equal ones mean equal text from the prompt's start. Files differ: Mooncake's are chained, a
    synthetic one may give each text its number wherever it stands. So a hash that comes behind another block than at its first
    sight is replaced, and all after it in the prompt, by a hash of the whole prefix: equal prefixes stay equal, others apart.
    """

    def __init__(self) -> None:
        self._table = _Table(sizes=np.int32, lines=np.int64, parents=np.int32)

    @property
    def full(self) -> bool:
        """Whether there were too many different ones: later ones are not checked."""
        return self._table.full

    def scan(self, ids: _Ints, starts: _Ints, prompts: _Ints, rows: _Ints, block: int) -> Scanned:
        """Look at the blocks of rows, in order.

        Args:
            ids: [b] hashes of all rows; ``starts`` [n+1] where each row's begin.
            prompts: [n] tokens of the prompts; ``rows`` [n] their lines in the file.
            block: tokens of a whole block. The last block of a prompt may be shorter.
        """
        t = self._table
        t.reserve(len(ids))
        out = np.empty_like(ids)
        conflict, other = np.empty(len(prompts), dtype=np.int64), np.zeros(len(prompts), dtype=np.int64)
        moved = np.zeros(len(prompts), dtype=np.bool_)
        c = t.columns
        t.used = int(
            _scan(
                t.index, t.keys, c["sizes"], c["lines"], c["parents"], t.used, _MOST,
                ids, starts, prompts, rows, block, out, conflict, other, moved,
            )
        )  # fmt: skip
        found = []
        for r in np.flatnonzero(conflict >= 0):
            at, entry = int(conflict[r]), int(other[r])
            size = min(block, int(prompts[r]) - (at - int(starts[r])) * block)
            found.append((int(r), int(ids[at]), size, int(c["lines"][entry]), int(c["sizes"][entry])))
        return Scanned(out, moved, found)


class ChatIds:
    """Chats of one file that name the chat before them."""

    def __init__(self) -> None:
        self._table = _Table(numbers=np.int64, roots=np.int64)

    def link(self, ids: _Ints, before: _Ints, first: int) -> tuple[_Ints, _Ints]:
        """For rows numbered from ``first``: the number of the request that ``before`` names (negative: none), −1 where it was
        not seen; and the chat that the row's conversation began with."""
        t = self._table
        t.reserve(len(ids))
        parent, root = np.empty(len(ids), dtype=np.int64), np.empty(len(ids), dtype=np.int64)
        c = t.columns
        t.used = int(_link(t.index, t.keys, c["numbers"], c["roots"], t.used, _MOST, ids, before, first, parent, root))
        return parent, root
