"""Files of lines "NAME number" that are read again and again: where the wanted names are is found once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

__all__ = ["Keyed", "pairs"]


def pairs(data: bytes) -> Iterator[tuple[str, int]]:
    """Names and numbers of all lines that are of this form; others are passed over."""
    for line in data.splitlines():
        words = line.split()
        if len(words) == 2 and words[1].isdigit():
            yield words[0].decode("ascii", "replace"), int(words[1])


class Keyed:
    """``wanted`` says of a name whether it is. Parsing all of /proc/vmstat costs ten times what reading it does."""

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self._wanted = wanted
        self._keys: list[tuple[bytes, str]] = []

    def read(self, data: bytes) -> dict[str, int]:
        """The wanted numbers. A file whose lines have changed is looked through anew."""
        found: dict[str, int] = {}
        at = 0
        for key, name in self._keys:
            begin = data.find(key, at)
            if begin < 0:
                break
            begin += len(key)
            end = data.find(b"\n", begin)
            word = data[begin : end if end >= 0 else None]
            if not word.isdigit():
                break
            found[name] = int(word)
            at = begin
        else:
            if self._keys:
                return found
        found = {name: n for name, n in pairs(data) if self._wanted(name)}
        # The first line has no line end before it: it is left to the whole look, so it can't be a key.
        first = data.split(b" ", 1)[0].decode("ascii", "replace")
        self._keys = [] if first in found else [(b"\n" + name.encode() + b" ", name) for name in found]
        return found
