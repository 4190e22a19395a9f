"""Where swapped pages lie: swap areas (/proc/swaps, swapon(8)) and compressed memory (zram, admin-guide/blockdev/zram.rst).

How many pages are swapped per second is in vmstat (pswpin, pswpout); zswap's sizes are in meminfo.
"""

from __future__ import annotations

import re

from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, found_by_error, status_of

__all__ = ["SwapSource", "areas", "zram_bytes"]

_OCTAL = re.compile(r"\\([0-7]{3})")
_KIB = 1024
_ZRAM = ("held_bytes", "compressed_bytes", "used_bytes")


def areas(data: bytes) -> dict[str, tuple[int, int, int]]:
    """Swap areas by path: size and used [bytes], priority. Lines that are none, and one without its end, are left out."""
    found: dict[str, tuple[int, int, int]] = {}
    for line in data.decode("utf-8", "replace").split("\n")[1:-1]:
        # Path (spaces as \040), type, size, used [KiB], priority. A path that was removed has " (deleted)" as \040(deleted).
        words = line.split()
        if len(words) == 5 and words[2].isdigit() and words[3].isdigit() and words[4].lstrip("-").isdigit():
            path = _OCTAL.sub(lambda m: chr(int(m[1], 8)), words[0])
            found[path] = int(words[2]) * _KIB, int(words[3]) * _KIB, int(words[4])
    return found


def zram_bytes(data: bytes) -> dict[str, int] | None:
    """Of mm_stat: what is held, its size compressed, and the memory that it takes in all; null if it is not in the format."""
    words = data.split()
    if len(words) < len(_ZRAM) or not data.endswith(b"\n") or not all(w.isdigit() for w in words[: len(_ZRAM)]):
        return None
    return dict(zip(_ZRAM, map(int, words), strict=False))


class SwapSource:
    """Entities ``swap:PATH`` and ``zram:NAME`` (zram devices that have been given a size)."""

    name = "swap"
    answers = "where swapped pages lie: on which disks, in how much compressed memory"
    pace: Pace = "slow"
    every_s = 2.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._file = KeptFile(self._roots.proc / "swaps")
        self._known: dict[str, list[int]] = {}
        self._zram: dict[str, KeptFile] = {}

    def probe(self) -> Found:
        zram = self._devices()
        try:
            swaps = areas(self._file.read())
        except OSError as e:
            if not zram:
                return found_by_error(e, "a kernel with CONFIG_SWAP")
            swaps = {}
        if not swaps and not zram:
            why = "no swap is in use (one that is added later is looked for)"
            return Found("absent", why, "nothing: a server is best without")
        return Found("ok", sees=f"{len(swaps)} swap area{'s' * (len(swaps) != 1)}, {len(zram)} zram")

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        before = out.now_ns()
        try:
            swaps = areas(self._file.read())
        except OSError as e:
            out.at(before, out.now_ns())
            for entity, numbers in self._known.items():
                if entity.startswith("swap:"):
                    out.fail(numbers, status_of(e))
        else:
            out.at(before, out.now_ns())
            for path, values in swaps.items():
                self._put(f"swap:{path}", dict(zip(("size_bytes", "used_bytes", "priority"), values, strict=True)), out)
            for entity in [e for e in self._known if e.startswith("swap:") and e[5:] not in swaps]:
                out.fail(self._known.pop(entity), "lost")
                out.event("configuration change", f"swap area {entity[5:]} is off")
        for name in self._devices():
            self._compressed(name, out)

    def close(self) -> None:
        for file in (self._file, *self._zram.values()):
            file.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _compressed(self, name: str, out: Sink) -> None:
        file = self._zram.setdefault(name, KeptFile(self._roots.sys / f"block/{name}/mm_stat"))
        before = out.now_ns()
        try:
            values = zram_bytes(file.read())
        except OSError as e:
            out.at(before, out.now_ns())
            out.fail(self._known.get(f"zram:{name}", []), status_of(e))
            return
        out.at(before, out.now_ns())
        if values is None:
            out.fail(self._known.get(f"zram:{name}", []), "error")
        else:
            self._put(f"zram:{name}", values, out)

    def _put(self, entity: str, values: dict[str, int], out: Sink) -> None:
        numbers = self._known.get(entity)
        if numbers is None:
            numbers = self._known[entity] = [
                out.series(entity, name, "bytes" if name.endswith("_bytes") else "1", "gauge") for name in values
            ]
        out.put_all(numbers, values.values())

    def _devices(self) -> list[str]:
        """zram devices that have been given a size; also those that were sampled and have gone, so that it is told."""
        try:
            names = [p.name for p in (self._roots.sys / "block").iterdir() if re.fullmatch(r"zram\d+", p.name)]
        except OSError:
            names = []
        sized = {n for n in names if _sized(self._roots, n)}
        return sorted(sized | self._zram.keys())


def _sized(roots: Roots, name: str) -> bool:
    try:
        return int((roots.sys / f"block/{name}/disksize").read_text()) > 0
    except (OSError, ValueError):
        return False
