"""Files of lines "NAME number" that are read again and again: where the wanted names are is found once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

__all__ = ["Keyed", "pairs"]

_DIGITS = 20
"""Of the largest 64-bit number."""


def pairs(data: bytes) -> Iterator[tuple[str, int]]:
    """Names and numbers of all lines that are of this form; others are passed over, and a last line without its end: a file that
    was cut off there may have lost digits."""
    for line in data.split(b"\n")[:-1]:
        words = line.split()
        if len(words) == 2 and words[1].isdigit() and len(words[1]) <= _DIGITS:
            yield words[0].decode("ascii", "replace"), int(words[1])


class Keyed:
    """``wanted`` says of a name whether it is. Parsing all of /proc/vmstat costs ten times what reading it does."""

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self._wanted = wanted
        self._keys: list[tuple[bytes, str]] = []
        self._lines = 0

    def read(self, data: bytes) -> dict[str, int]:
        """The wanted numbers. A file whose lines have changed is looked through anew."""
        found: dict[str, int] = {}
        at = 0
        lines = data.count(b"\n")
        for key, name in self._keys if lines == self._lines else ():
            begin = data.find(key, at) if key[:1] == b"\n" else 0 if data.startswith(key) else -1
            if begin < 0:
                break
            begin += len(key)
            end = data.find(b"\n", begin)
            word = data[begin:end]
            if end < 0 or not word.isdigit() or len(word) > _DIGITS:
                break
            found[name] = int(word)
            at = end
        else:
            if found:
                return found
        found = {name: n for name, n in pairs(data) if self._wanted(name)}
        first = data.split(b" ", 1)[0].decode("ascii", "replace")
        self._keys = [((b"" if name == first else b"\n") + name.encode() + b" ", name) for name in found]
        self._lines = lines
        return found
