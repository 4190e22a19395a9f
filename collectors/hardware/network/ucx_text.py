"""UCX statistics as text: what `UCX_STATS_DEST=file:F` writes at each trigger (src/ucs/stats/serialization.c of UCX).

A report is a tree: `HOST:PID:`, then counters `name: value` and nodes `class-0x…:` below it, two blanks a level; an empty line.
`UCX_STATS_FORMAT=agg` adds up nodes of a class (`class*:`); `summary` writes one line, `HOST:PID:class:{name:value …} …`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hoptrace.collectors.hardware.sink import Direction

__all__ = ["is_report", "meaning", "report_of"]

_ROOT = re.compile(r"[^\s:{},]+:\d+:(?=\s*$|[^\s:{},]+:\{)", re.M)
_COUNTER = re.compile(r"(\w+): ?(\d{1,20})")
_GROUP = re.compile(r"([^\s:{}]+):\{([^{}]*)\}")
_PAIR = re.compile(r"(\w+):(\d{1,20})\b")

_KNOWN: dict[str, tuple[str, str, Direction | None]] = {
    # A get moves bytes the other way than a put, and the endpoint counts both: no direction.
    "bytes_short": ("short_bytes", "bytes", None), "bytes_bcopy": ("copied_bytes", "bytes", None),
    "bytes_zcopy": ("zero_copy_bytes", "bytes", None), "rx_am_bytes": ("message_bytes", "bytes", "rx"),
    "am": ("messages", "ops", "tx"), "rx_am": ("messages", "ops", "rx"), "put": ("puts", "ops", None),
    "get": ("gets", "ops", None), "atomic": ("atomics", "ops", None), "flush": ("flushes", "ops", None),
    "fence": ("fences", "ops", None), "flush_wait": ("flush_waits", "times", None), "no_res": ("no_resources", "times", None),
    "pending": ("pending", "times", None), "tx_no_desc": ("no_descriptors", "times", "tx"),
}  # fmt: skip
"""The classes uct_ep and uct_iface (src/uct/base/uct_iface.c). no_res, pending and flush_wait are waits."""

Report = dict[tuple[str, str], int]


def is_report(begin: str) -> bool:
    """Whether a file's first text is of UCX."""
    return _ROOT.match(begin.lstrip("\n")) is not None


def meaning(name: str) -> tuple[str, str, Direction | None]:
    """Our name, unit and direction of a counter; others keep their own name."""
    return _KNOWN.get(name, (name, "1", None))


def report_of(lines: Sequence[str]) -> tuple[Report, int]:
    """Values of one report by (path of the node, counter), and how many lines are of no known form. Of nodes of one path the
    second and later ones bear a number: they are never added up."""
    if not lines or not _ROOT.match(lines[0]):
        return {}, len(lines)
    if "{" in lines[0]:
        return _summary(lines[0]), len(lines) - 1
    found: Report = {}
    path: list[str] = [lines[0].rstrip().removesuffix(":")]
    seen = {path[0]}
    odd = 0
    for line in lines[1:]:
        text = line.strip()
        depth, rest = divmod(len(line) - len(line.lstrip(" ")), 2)
        if rest or not 1 <= depth <= len(path):
            odd += 1
        elif (match := _COUNTER.fullmatch(text)) is not None:
            found["/".join(path[:depth]), match[1]] = int(match[2])
        elif text.endswith(":"):
            del path[depth:]
            path.append(_unique("/".join(path), text[:-1], seen))
        else:
            odd += 1
    return found, odd


def _unique(above: str, name: str, seen: set[str]) -> str:
    number, told = 1, name
    while f"{above}/{told}" in seen:
        number += 1
        told = f"{name}#{number}"
    seen.add(f"{above}/{told}")
    return told


def _summary(line: str) -> Report:
    root = _ROOT.match(line)
    assert root is not None
    process = root[0].removesuffix(":")
    return {
        (f"{process}/{group[1]}", pair[1]): int(pair[2])
        for group in _GROUP.finditer(line, root.end())
        for pair in _PAIR.finditer(group[2])
    }
