"""RDMA ports: what the adapter counted, in bytes and packets, and its back-pressure and errors.

`/sys/class/infiniband/DEVICE/ports/PORT/{counters,hw_counters}` and DEVICE/hw_counters. Anybody may clear the counters
(`perfquery -R`): one that falls was reset, so no width is declared. Old and small ones stop at their end: there is no value from
there on (`stale`), only an event. hw_counters are read from the adapter at most every `lifespan` milliseconds: reading faster
gives the same again. A file is often a command to the adapter's firmware, which may hang: this source has its own thread.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile, read_int, read_text
from hoptrace.collectors.hardware.network.rdma_names import HOT, What, hw_meaning, meaning
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, status_of

__all__ = ["InfinibandSource"]

_LIST_S, _SLOW_S, _SOONEST_S, _LATEST_S = 30.0, 1.0, 1.0, 60.0
_ACTIVE = 4


class _Counter:
    """One file. ``ended``: it has been said that it stopped."""

    def __init__(self, path: Path, what: What, out: Sink, entity: str, incarnation: str) -> None:
        self.file, self.what, self.ended = KeptFile(path), what, False
        self.number = out.series(
            entity, what.name, what.unit, what.semantics, direction=what.direction,
            incarnation=incarnation if what.semantics == "cumulative" else None,
        )  # fmt: skip


class _Group:
    """Files that are read together, every ``every_s``."""

    def __init__(self, counters: list[_Counter], every_s: float) -> None:
        self.counters, self.every_s, self.due_s = counters, every_s, 0.0


class _Port:
    """A port, or what a device counts for all of its ports. Counters of the two must not share an entity: they share names."""

    def __init__(self, entity: str, groups: list[_Group], state: Path | None) -> None:
        self.entity, self.groups, self.folder = entity, [g for g in groups if g.counters], state
        self.state: int | None = None

    def series(self) -> list[int]:
        return [c.number for g in self.groups for c in g.counters]

    def close(self) -> None:
        for group in self.groups:
            for counter in group.counters:
                counter.file.close()


class InfinibandSource:
    """Entities ``rdma:DEVICE/PORT``, and ``rdma:DEVICE`` for what a device counts as a whole; sent is what leaves the host. State
    and rate are gauges; a change of state is an event."""

    name = "rdma"
    answers = "what crossed each RDMA port, and what held it up (no credits, retries, losses)"
    pace: Pace = "own"
    every_s = 0.1

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._base = self._roots.sys / "class/infiniband"
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._ports: dict[str, _Port] = {}
        self._came: dict[str, int] = {}
        self._due_s = 0.0
        self._wait_s = _SOONEST_S

    def probe(self) -> Found:
        devices = _entries(self._base)
        if not devices:
            return Found(
                "absent",
                f"this machine has no RDMA device ({self._base})",
                "an adapter and its driver (mlx5_ib, irdma, efa …)",
            )
        ports = [(d, p) for d in devices for p in _entries(self._base / d / "ports")]
        if not ports:
            return Found("absent", f"no port of {', '.join(devices)} is told", "mount the host's /sys, run in its network")
        silent = [d for d, p in ports if not _files(self._base / d / "ports" / p / "counters")]
        # Soft-RoCE and EFA have none: what they count is in hw_counters.
        why = f"no port counters: {', '.join(dict.fromkeys(silent))} (hw_counters only)" if silent else None
        return Found("ok", why, sees=f"{len(devices)} devices, {len(ports)} ports")

    def open(self, out: Sink) -> None:
        self._list(out)

    def sample(self, out: Sink) -> None:
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._list(out)
        answered = False
        tried = False
        for port in list(self._ports.values()):
            due = [g for g in port.groups if now_s >= g.due_s]
            for group in due:
                group.due_s = now_s + group.every_s
            tried = tried or bool(due)
            answered = self._read([c for g in due for c in g.counters], port.entity, out) or answered
        if tried and not answered and self._ports:
            # Nothing at all answers: they may be gone. Looked for ever less often.
            self._due_s = min(self._due_s, now_s + self._wait_s)
            self._wait_s = min(2 * self._wait_s, _LATEST_S)
        elif answered:
            self._wait_s = _SOONEST_S

    def close(self) -> None:
        for port in self._ports.values():
            port.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _list(self, out: Sink) -> None:
        began = bool(self._came)
        self._due_s = time.monotonic() + _LIST_S
        present = set()
        for device in _entries(self._base):
            places = [(f"rdma:{device}/{p}", self._base / device / "ports" / p) for p in _entries(self._base / device / "ports")]
            places.append((f"rdma:{device}", self._base / device))
            for entity, folder in places:
                present.add(entity)
                if entity not in self._ports:
                    self._ports[entity] = self._of(entity, folder, out)
                    if began and "/" in entity:
                        out.event("device", f"{entity} came")
                self._state(self._ports[entity], out)
        for entity in sorted(self._ports.keys() - present):
            gone = self._ports.pop(entity)
            out.at(at := out.now_ns(), at)
            out.fail(gone.series(), "lost")
            gone.close()
            if "/" in entity:
                out.event("device error", f"{entity} is gone")

    def _of(self, entity: str, folder: Path, out: Sink) -> _Port:
        """A port that came back counts from 0 again: it is another incarnation."""
        came = self._came[entity] = self._came.get(entity, 0) + 1
        life = f"{self._boot}/{came}"
        port = "/" in entity
        names = _files(folder / "counters") if port else []
        extended = any(n.startswith("unicast_") for n in names)
        hot: list[_Counter] = []
        slow: list[_Counter] = []
        for name in names:
            counter = _Counter(folder / "counters" / name, meaning(name, extended=extended), out, entity, life)
            (hot if name in HOT else slow).append(counter)
        hw = [_Counter(folder / "hw_counters" / n, hw_meaning(n), out, entity, life) for n in _files(folder / "hw_counters")]
        lifespan_s = max(_SLOW_S, (read_int(folder / "hw_counters/lifespan") or 0) / 1000)
        return _Port(entity, [_Group(hot, 0.0), _Group(slow, _SLOW_S), _Group(hw, lifespan_s)], folder if port else None)

    def _state(self, port: _Port, out: Sink) -> None:
        if port.folder is None:
            return
        out.at(at := out.now_ns(), at)
        state = (read_text(port.folder / "state") or "").split(":")[0]
        if not state.isdigit():
            return
        out.put(out.series(port.entity, "state", "1", "gauge"), int(state))
        if port.state is not None and port.state != int(state):
            out.event("link", f"{port.entity}: state {port.state} -> {int(state)} ({_ACTIVE} is active)")
        port.state = int(state)
        rate = out.series(port.entity, "rate_bytes_per_s", "bytes/s", "gauge")
        if port.state != _ACTIVE:
            out.put(rate, None, "absent")  # what the file says then is the slowest there is, not a rate of this link
            return
        gigabits = (read_text(port.folder / "rate") or "").split(" ")[0]
        with suppress(ValueError):
            out.put(rate, float(gigabits) * 1e9 / 8)

    def _read(self, counters: list[_Counter], entity: str, out: Sink) -> bool:
        """Whether any of them could be read."""
        if not counters:
            return False
        before = out.now_ns()
        answers: list[bytes | OSError] = []
        for counter in counters:
            try:
                answers.append(counter.file.read())
            except OSError as e:
                answers.append(e)
        out.at(before, out.now_ns())
        any_read = False
        for counter, answer in zip(counters, answers, strict=True):
            if isinstance(answer, OSError):
                out.put(counter.number, None, status_of(answer))
                continue
            any_read = True
            self._put(counter, answer.strip(), entity, out)
        return any_read

    def _put(self, counter: _Counter, text: bytes, entity: str, out: Sink) -> None:
        what = counter.what
        if not text.isdigit():
            # "N/A (no PMA)" is what the kernel writes where the device does not answer the query.
            out.put(counter.number, None, "unsupported" if text.startswith(b"N/A") else "error")
            return
        value = int(text)
        if value != what.end:
            counter.ended = False
            out.put(counter.number, value * what.one)
            return
        out.put(counter.number, None, "stale")
        if not counter.ended:
            counter.ended = True
            out.event("counter", f"{entity}: {counter.file.path.name} stands at its end ({value}) and counts no more until reset")


def _entries(folder: Path) -> list[str]:
    """Folders in a folder."""
    try:
        return sorted(p.name for p in folder.iterdir() if p.is_dir())
    except OSError:
        return []


def _files(folder: Path) -> list[str]:
    """Files that hold counters."""
    try:
        return sorted(e.name for e in os.scandir(folder) if e.is_file() and e.name not in ("lifespan", "uevent"))
    except OSError:
        return []
