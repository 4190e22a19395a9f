"""Whether each network adapter's link is up, how fast it is, how often it went: /sys/class/net/INTERFACE (Documentation/ABI/
testing/sysfs-class-net). A link that negotiated a lower speed, or flaps, makes everything over it slow."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, status_of

__all__ = ["STATES", "CarrierSource", "adapters"]

STATES = ("unknown", "notpresent", "down", "lowerlayerdown", "testing", "dormant", "up")
"""operstate by number, as RFC 2863 and linux/if.h (IF_OPER_*) have it: 6 is up."""

_LIST_S, _SPEED_S = 30.0, 10.0
_MBIT_BYTES = 125_000


def adapters(sys: Path) -> list[str]:
    """Interfaces that are devices: no loopback, bridge, tunnel or container's end."""
    try:
        return sorted(p.name for p in (sys / "class/net").iterdir() if (p / "device").exists())
    except OSError:
        return []


@dataclass(slots=True)
class _Link:
    state_file: KeptFile
    changes_file: KeptFile
    speed_file: Path
    state: int
    changes: int
    rate: int
    speed_due_s: float = 0.0
    was: str | None = None
    speed: int | None = None


class CarrierSource:
    """Entities ``net:INTERFACE``: gauges `state` and `rate_bytes_per_s`, count `carrier_changes`; changes are events too."""

    name = "network-links"
    answers = "whether each adapter's link is up, at which speed, and how often it went down"
    pace: Pace = "slow"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._links: dict[str, _Link] = {}
        self._came: dict[str, int] = {}
        self._due_s = 0.0

    def probe(self) -> Found:
        names = adapters(self._roots.sys)
        if not names:
            return Found("absent", "there is no network adapter here (only virtual interfaces)", "run hoptrace on the host")
        return Found("ok", sees=", ".join(names[:6]) + (" …" if len(names) > 6 else ""))

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + _LIST_S
            self._list(out)
        for name, link in list(self._links.items()):
            self._one(name, link, now_s, out)

    def close(self) -> None:
        for link in self._links.values():
            link.state_file.close()
            link.changes_file.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _list(self, out: Sink) -> None:
        names = adapters(self._roots.sys)
        for name in names:
            if name in self._links:
                continue
            came = self._came[name] = self._came.get(name, 0) + 1
            folder, entity = self._roots.sys / "class/net" / name, f"net:{name}"
            self._links[name] = _Link(
                KeptFile(folder / "operstate"), KeptFile(folder / "carrier_changes"), folder / "speed",
                out.series(entity, "state", "1", "gauge"),
                out.series(entity, "carrier_changes", "times", "cumulative", incarnation=f"{self._boot}/{came}"),
                out.series(entity, "rate_bytes_per_s", "bytes/s", "gauge"),
            )  # fmt: skip
        for name in self._links.keys() - set(names):
            gone = self._links.pop(name)
            gone.state_file.close()
            gone.changes_file.close()
            out.at(at := out.now_ns(), at)
            out.fail((gone.state, gone.changes, gone.rate), "lost")
            out.event("device error", f"net:{name} is gone")

    def _one(self, name: str, link: _Link, now_s: float, out: Sink) -> None:
        before = out.now_ns()
        told: dict[int, bytes | OSError] = {}
        for number, file in ((link.state, link.state_file), (link.changes, link.changes_file)):
            try:
                told[number] = file.read().strip()
            except OSError as e:
                told[number] = e
        out.at(before, out.now_ns())
        for number, value in told.items():
            if isinstance(value, OSError):
                out.put(number, None, status_of(value))
                self._due_s = min(self._due_s, now_s + 2)  # it may be gone
            elif number == link.changes:
                out.put(number, *((int(value), "ok") if value.isdigit() else (None, "error")))
            else:
                self._state(name, link, value.decode("ascii", "replace"), out)
        if now_s >= link.speed_due_s:
            link.speed_due_s = now_s + _SPEED_S
            self._speed(name, link, out)

    def _state(self, name: str, link: _Link, text: str, out: Sink) -> None:
        if text not in STATES:
            out.put(link.state, None, "error")
            return
        out.put(link.state, STATES.index(text))
        if link.was is not None and link.was != text:
            out.event("link", f"net:{name}: {link.was} -> {text}")
            link.speed_due_s = 0.0
        link.was = text

    def _speed(self, name: str, link: _Link, out: Sink) -> None:
        """In Mbit/s; -1 or EINVAL where the link is down or the adapter has none (virtio)."""
        mbit: int | None = None
        with suppress(OSError, ValueError):
            mbit = int(link.speed_file.read_bytes())
        out.at(at := out.now_ns(), at)
        if mbit is None or not 0 < mbit < 1 << 31:
            out.put(link.rate, None, "absent")
            return
        out.put(link.rate, mbit * _MBIT_BYTES)
        if link.speed is not None and link.speed != mbit:
            out.event("link", f"net:{name}: {link.speed} -> {mbit} Mbit/s")
        link.speed = mbit
