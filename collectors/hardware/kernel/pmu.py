"""A device's counters as perf offers them: their events and how a configuration is written, all read from sysfs.

Documentation/ABI/testing/sysfs-bus-event_source-devices-{format,events}. Nothing here is known of any device: the names, the bits
and the scales are those that the running kernel tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hoptrace.collectors.hardware.file import cpu_list, read_int, read_text
from hoptrace.collectors.hardware.perf.events import Event

__all__ = ["Pmu", "bytes_per_count", "encode", "pmus"]

_WORDS: Final = ("config", "config1", "config2")
_UNITS: Final = {"B": 1, "Bytes": 1, "KB": 1000, "KiB": 1 << 10, "MB": 10**6, "MiB": 1 << 20, "GB": 10**9, "GiB": 1 << 30}
_CLOSE = 1e-4


@dataclass(frozen=True, slots=True)
class Pmu:
    """``cpus``: on which its events are opened, one of each package or device. ``formats``: name → (word, its bits, low first).
    ``events``: name → configuration."""

    name: str
    folder: Path
    type: int
    cpus: tuple[int, ...]
    formats: dict[str, tuple[str, tuple[int, ...]]]
    events: dict[str, str]

    def event(self, terms: str) -> Event:
        """The numbers for `event=0x83,umask=0x04`. ValueError: this device has no such term, or the value is too large for it."""
        return encode(terms, self.type, self.formats)


def pmus(sys: Path, prefix: str) -> list[Pmu]:
    """The devices whose name is ``prefix`` and perhaps a number, in the order of their numbers."""
    try:
        folders = list((sys / "bus/event_source/devices").iterdir())
    except OSError:
        return []
    found = [p for f in folders if _is(f.name, prefix) and (p := _pmu(f)) is not None]
    return sorted(found, key=lambda p: (len(p.name), p.name))


def encode(terms: str, kind: int, formats: dict[str, tuple[str, tuple[int, ...]]]) -> Event:
    """See :meth:`Pmu.event`. A term without a value is 1; config=… sets a whole word."""
    words = dict.fromkeys(_WORDS, 0)
    for term in filter(None, (t.strip() for t in terms.split(","))):
        name, _, text = term.partition("=")
        value = int(text, 0) if text else 1
        if name in words and name not in formats:
            words[name] |= value
            continue
        if name not in formats:
            raise ValueError(f"no term {name!r} here (there are: {', '.join(sorted(formats)) or 'none'})")
        word, bits = formats[name]
        if word not in words:
            raise ValueError(f"{name!r} is in {word}, which is not written here")
        if value < 0 or value >> len(bits):
            raise ValueError(f"{value:#x} is too large for {name!r} ({len(bits)} bits)")
        for i, bit in enumerate(bits):
            words[word] |= (value >> i & 1) << bit
    return Event(kind, words["config"], words["config1"], words["config2"])


def bytes_per_count(pmu: Pmu, event: str) -> float | None:
    """From the event's .scale and .unit; null where they don't tell of bytes. Scales are printed with few digits (3.814697266e-6
    MiB): one within 0.01 % of a whole number of bytes is that number."""
    scale, unit = read_text(pmu.folder / "events" / f"{event}.scale"), read_text(pmu.folder / "events" / f"{event}.unit")
    if scale is None or unit not in _UNITS:
        return None
    try:
        size = float(scale) * _UNITS[unit]
    except ValueError:
        return None
    if not 0 < size < 1e9:
        return None
    whole = round(size)
    return float(whole) if whole and abs(size - whole) < _CLOSE * whole else size


def _is(name: str, prefix: str) -> bool:
    rest = name[len(prefix) :] if name.startswith(prefix) else None
    return rest is not None and (rest == "" or (rest[0] == "_" and rest[1:].isdigit()))


def _pmu(folder: Path) -> Pmu | None:
    kind = read_int(folder / "type")
    if kind is None:
        return None
    formats = {p.name: f for p in _files(folder / "format") if (f := _format(read_text(p) or "")) is not None}
    events = {p.name: text for p in _files(folder / "events") if "." not in p.name and (text := read_text(p))}
    return Pmu(folder.name, folder, kind, tuple(sorted(cpu_list(read_text(folder / "cpumask")))), formats, events)


def _format(text: str) -> tuple[str, tuple[int, ...]] | None:
    """config:0-7,32-35 → config and its bits; null for what is none."""
    word, _, ranges = text.partition(":")
    bits: list[int] = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        if not low.isdigit() or (high and not high.isdigit()) or len(part) > 5 or int(high or low) > 63:
            return None
        bits += range(int(low), int(high or low) + 1)
    return (word, tuple(bits)) if word and bits else None


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_file())
    except OSError:
        return []
