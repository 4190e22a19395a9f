"""How full this machine's memory and swap are: /proc/meminfo, proc_meminfo(5)."""

from __future__ import annotations

import re

from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, found_by_error, status_of

__all__ = ["MeminfoSource", "meminfo_bytes"]

_NAMES = {
    b"MemTotal": "total_bytes", b"MemFree": "free_bytes", b"MemUsed": "used_bytes", b"MemAvailable": "available_bytes",
    b"Cached": "cached_bytes", b"FilePages": "cached_bytes", b"AnonPages": "anonymous_bytes", b"Shmem": "shared_bytes",
    b"Mlocked": "locked_bytes", b"Committed_AS": "committed_bytes", b"AnonHugePages": "transparent_huge_bytes",
    b"SwapTotal": "swap_total_bytes", b"SwapFree": "swap_free_bytes", b"SwapCached": "swap_cached_bytes",
    b"Zswap": "zswap_pool_bytes", b"Zswapped": "zswap_held_bytes",
}  # fmt: skip
_COUNTS = {b"HugePages_Total": "huge_pages", b"HugePages_Free": "huge_pages_free"}
_LINE = re.compile(rb"^(?:Node \d+ )?(\w+): +(\d{1,20})( kB)?\n", re.M)


def meminfo_bytes(data: bytes) -> dict[str, int]:
    """Sizes in bytes by our names (huge pages: their number), of /proc/meminfo or a node's.

    Other lines are left out, as are a size without its unit (the kernel's kB are KiB) and a last line without its end: a file
    that was cut off there may have lost digits.
    """
    found: dict[str, int] = {}
    for m in _LINE.finditer(data):
        if m[3] is not None:
            if (name := _NAMES.get(m[1])) is not None:
                found[name] = int(m[2]) * 1024
        elif (name := _COUNTS.get(m[1])) is not None:
            found[name] = int(m[2])
    return found


class MeminfoSource:
    """Entity ``memory``."""

    name = "meminfo"
    answers = "how much memory, swap and compressed swap is left on this machine"
    pace: Pace = "fast"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._file = KeptFile((roots or Roots()).proc / "meminfo")
        self._numbers: dict[str, int] = {}

    def probe(self) -> Found:
        try:
            found = meminfo_bytes(self._file.read())
        except OSError as e:
            return found_by_error(e)
        if "total_bytes" not in found:
            return Found("error", "/proc/meminfo is not in the kernel's format")
        return Found("ok", sees=f"{found['total_bytes'] / (1 << 30):.4g} GiB")

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        before = out.now_ns()
        try:
            data = self._file.read()
        except OSError as e:
            out.at(before, out.now_ns())
            out.fail(self._numbers.values(), status_of(e))
            return
        out.at(before, out.now_ns())
        found = meminfo_bytes(data)
        for name, n in found.items():
            number = self._numbers.get(name)
            if number is None:
                number = self._numbers[name] = out.series(
                    "memory", name, "pages" if name.startswith("huge_pages") else "bytes", "gauge"
                )
            out.put(number, n)
        if len(found) < len(self._numbers):
            out.fail((n for name, n in self._numbers.items() if name not in found), "absent")

    def close(self) -> None:
        self._file.close()
