"""Two counters of one thing that cannot both be right: over the same time one stands still and the other moved clearly.

Known cases are real: dcgm-exporter prints zeros for PCIe on some cards (dcgm-exporter issue 721) while NVML's byte counters move;
a port's counters are read where the traffic goes by another port; a multipath head without statistics of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["LEAST_BYTES", "LEAST_COVER", "LEAST_NS", "STILL", "Contradiction", "Seen", "contradictions", "thing_of"]

LEAST_BYTES = 1 << 20
"""What one counter must have seen at least before another's silence is told: background chatter is less."""
STILL = 0.001
"""A counter that saw less than this share of the other's bytes stands still: headers and rounding are far more."""
LEAST_NS = 1_000_000_000
"""The shortest common time."""
LEAST_COVER = 0.8
"""What each of the two must cover of the common time: of 20 ms windows read once a second a burst may be in none."""

_LINKS = ("pcie", "nvlink", "c2c", "xgmi", "rdma", "net", "block", "cxl")
_TRAFFIC = re.compile(r"(data|raw)(_bytes|_bytes_per_s)?(_total)?")
_PATH = re.compile(r"block:(nvme\d+)c\d+(n\d+)")  # nvme0c0n1 is a path of the multipath head nvme0n1
_WAYS = {"tx": "sent", "rx": "received", "read": "read", "write": "written"}


@dataclass(frozen=True, slots=True)
class Seen:
    """What one counter saw: ``bytes`` within the common time of all that see this thing, ``covered_ns`` of which its samples
    cover; ``direction`` may be empty."""

    host: str
    entity: str
    name: str
    direction: str
    source: str
    bytes: float
    covered_ns: int
    common_ns: int

    @property
    def who(self) -> str:
        """The counter in words: name, entity, source."""
        return f"{self.name} of {self.entity}{f' ({self.source})' if self.source else ''}"


@dataclass(frozen=True, slots=True)
class Contradiction:
    """``still`` saw nothing of what ``moved`` saw. ``says``: in a sentence, with the likely reason."""

    still: Seen
    moved: Seen
    says: str

    def __str__(self) -> str:
        return self.says

    def as_dict(self) -> dict[str, Any]:
        return {
            "host": self.moved.host,
            "entity": self.moved.entity,
            "direction": self.moved.direction or None,
            "still": {"entity": self.still.entity, "name": self.still.name, "source": self.still.source,
                      "bytes": round(self.still.bytes)},
            "moved": {"entity": self.moved.entity, "name": self.moved.name, "source": self.moved.source,
                      "bytes": round(self.moved.bytes)},
            "common_ns": self.moved.common_ns,
            "says": self.says,
        }  # fmt: skip


def thing_of(entity: str, name: str) -> str:
    """What a counter counts: counters of the same thing, host and direction see the same bytes.

    Payload and payload with protocol of a link are one traffic, whoever tells of it; the paths of an NVMe namespace and its
    multipath head too. All else is the same only under the same name.
    """
    if (path := _PATH.fullmatch(entity)) is not None:
        return thing_of(f"block:{path[1]}{path[2]}", name)
    if entity.partition(":")[0] in _LINKS and _TRAFFIC.fullmatch(name):
        return f"traffic of {entity}"
    return f"{name} of {entity}"


def contradictions(seen: Iterable[Seen]) -> list[Contradiction]:
    """What contradicts itself, most bytes first: of each thing the counters that stood still against the one that saw most.

    No word where the busiest saw less than :data:`LEAST_BYTES`, where the common time is shorter than :data:`LEAST_NS`, or where
    either of the two covers less than :data:`LEAST_COVER` of it.
    """
    groups: dict[tuple[str, str, str], list[Seen]] = {}
    for s in _paths_together(seen):
        if s.common_ns >= LEAST_NS and s.covered_ns >= LEAST_COVER * s.common_ns:
            groups.setdefault((s.host, thing_of(s.entity, s.name), s.direction), []).append(s)
    found = []
    for mine in groups.values():
        moved = max(mine, key=lambda s: (s.bytes, s.name, s.source))
        if moved.bytes < LEAST_BYTES:
            continue
        still = [s for s in mine if s.bytes < STILL * moved.bytes]
        found += [Contradiction(s, moved, _says(s, moved)) for s in sorted(still, key=lambda s: (s.source, s.name))]
    return sorted(found, key=lambda c: (-c.moved.bytes, c.moved.entity, c.moved.direction, c.still.name))


def _paths_together(seen: Iterable[Seen]) -> list[Seen]:
    """The paths to one namespace are told as one: a path that stands still beside another that works is none that is wrong."""
    out: dict[tuple[str, ...], Seen] = {}
    for s in seen:
        path = _PATH.fullmatch(s.entity)
        key = (s.host, f"block:{path[1]}c{path[2]}" if path else s.entity, s.name, s.direction, s.source)
        known = out.get(key) if path else None
        out[key] = s if known is None else replace(
            known, bytes=known.bytes + s.bytes, covered_ns=min(known.covered_ns, s.covered_ns)
        )  # fmt: skip
    return list(out.values())


def _says(still: Seen, moved: Seen) -> str:
    way = f" {_WAYS[moved.direction]}" if moved.direction in _WAYS else ""
    saw = "nothing" if not still.bytes else f"{_size(still.bytes)} only"
    return (
        f"{still.who} saw {saw}{way} over {moved.common_ns / 1e9:.3g} s in which {moved.who} saw {_size(moved.bytes)}: "
        f"one of the two is wrong. {_why(still)}"
    )


def _why(still: Seen) -> str:
    kind = still.entity.partition(":")[0]
    if kind == "block":
        return "Likely the device without a count of its own is the multipath head, or statistics are off (queue/iostats)."
    if kind in ("rdma", "net"):
        return "Likely the silent one does not see this kind of traffic (RDMA bypasses the network stack), or is another port."
    if kind in ("pcie", "nvlink", "c2c", "xgmi"):
        return "Likely the silent one is not counted on this card or by this driver or exporter, and prints 0 for unknown."
    return "Likely the silent one is not counted here, and 0 stands for unknown."


def _size(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:,.3g} TiB"
