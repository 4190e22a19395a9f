"""RDMA ports: what the adapter counted, in bytes and packets, and its back-pressure and errors.

`/sys/class/infiniband/DEVICE/ports/PORT/{counters,hw_counters}`: Documentation/ABI/stable/sysfs-class-infiniband. port_*_data
count four octets. Anybody may clear the counters (perfquery -R), so one that falls was reset; old adapters' 32-bit ones stop at
their end. hw_counters are read from the adapter at most every `lifespan` milliseconds: reading them faster gives the same again.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile, read_int, read_text
from hoptrace.collectors.hardware.sink import Direction, Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, status_of

__all__ = ["InfinibandSource"]

_KNOWN: dict[str, tuple[str, str, int, Direction | None]] = {
    "port_xmit_data": ("data_bytes", "bytes", 4, "tx"), "port_rcv_data": ("data_bytes", "bytes", 4, "rx"),
    "port_xmit_packets": ("packets", "packets", 1, "tx"), "port_rcv_packets": ("packets", "packets", 1, "rx"),
    "port_xmit_wait": ("port_xmit_wait", "ticks", 1, None),
}  # fmt: skip
"""File → our name, unit, what one is, direction. The tick of port_xmit_wait (data to send, no credit) is the device's own."""

_LIST_S, _HW_S = 30.0, 1.0


class _Port:
    def __init__(self, device: str, port: str, folder: Path, own: Path | None) -> None:
        self.entity, self.folder = f"rdma:{device}/{port}", folder
        self.files: list[tuple[KeptFile, str, bool]] = []
        places = [(folder / "counters", False), (folder / "hw_counters", True)]
        if own is not None:
            places.append((own, True))  # of the device, told once: under its first port
        for place, hw in places:
            for name in _names(place):
                self.files.append((KeptFile(place / name), name, hw))
        self.lifespan_s = max([_HW_S, *((read_int(p / "lifespan") or 0) / 1000 for p, hw in places if hw)])
        self.due_s = 0.0
        self.series: dict[KeptFile, int] = {}

    def close(self) -> None:
        for file, _, _ in self.files:
            file.close()


class InfinibandSource:
    """Entities ``rdma:DEVICE/PORT``; sent is what leaves the host. State and rate are gauges; a change of state is an event."""

    name = "rdma"
    answers = "what crossed each RDMA port, and what held it up (no credits, retries, losses)"
    pace: Pace = "fast"
    every_s = None

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._base = self._roots.sys / "class/infiniband"
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._ports: dict[str, _Port] = {}
        self._state: dict[str, int] = {}
        self._due_s = 0.0
        self._began = False

    def probe(self) -> Found:
        devices = _names(self._base, folders=True)
        if not devices:
            return Found(
                "absent",
                "this machine has no RDMA device (/sys/class/infiniband)",
                "an adapter and its driver (mlx5_ib, irdma …)",
            )
        ports = [(d, p) for d in devices for p in _names(self._base / d / "ports", folders=True)]
        silent = [d for d, p in ports if not _names(self._base / d / "ports" / p / "counters")]
        why = f"without byte counters: {', '.join(dict.fromkeys(silent))} (soft-RoCE has none)" if silent else None
        return Found("ok", why, sees=f"{len(devices)} devices, {len(ports)} ports")

    def open(self, out: Sink) -> None:
        self._list(out)
        self._began = True

    def sample(self, out: Sink) -> None:
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._list(out)
        for port in list(self._ports.values()):
            hw_too = now_s >= port.due_s
            if hw_too:
                port.due_s = now_s + port.lifespan_s
            self._one(port, hw_too, out)

    def close(self) -> None:
        for port in self._ports.values():
            port.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _list(self, out: Sink) -> None:
        self._due_s = time.monotonic() + _LIST_S
        present = set()
        for device in _names(self._base, folders=True):
            for i, port in enumerate(_names(self._base / device / "ports", folders=True)):
                entity = f"rdma:{device}/{port}"
                present.add(entity)
                if entity not in self._ports:
                    own = self._base / device / "hw_counters" if i == 0 else None
                    self._ports[entity] = _Port(device, port, self._base / device / "ports" / port, own)
                    if self._began:
                        out.event("device", f"{entity} came")
                self._link(entity, self._ports[entity].folder, out)
        for entity in sorted(self._ports.keys() - present):
            gone = self._ports.pop(entity)
            out.at(at := out.now_ns(), at)
            out.fail(gone.series.values(), "lost")
            gone.close()
            out.event("device error", f"{entity} is gone")

    def _link(self, entity: str, folder: Path, out: Sink) -> None:
        out.at(at := out.now_ns(), at)
        state = (read_text(folder / "state") or "").split(":")[0]
        if state.isdigit():
            out.put(out.series(entity, "state", "1", "gauge"), int(state))
            was = self._state.get(entity)
            if was is not None and was != int(state):
                out.event("link", f"{entity}: state {was} -> {int(state)} (4 is active)")
            self._state[entity] = int(state)
        gigabits = (read_text(folder / "rate") or "").split(" ")[0]
        with suppress(ValueError):
            out.put(out.series(entity, "rate_bytes_per_s", "bytes/s", "gauge"), float(gigabits) * 1e9 / 8)

    def _one(self, port: _Port, hw_too: bool, out: Sink) -> None:
        before = out.now_ns()
        found: list[tuple[int, int]] = []
        broken: list[tuple[int, OSError]] = []
        for file, name, hw in port.files:
            if hw and not hw_too:
                continue
            known = _KNOWN.get(name) if not hw else None
            number = port.series.get(file)
            if number is None:
                ours, unit, _, way = known or (name, "1", 1, None)
                number = port.series[file] = out.series(
                    port.entity, ours, unit, "cumulative", direction=way, incarnation=self._boot,
                    # Sysfs does not tell the width: 64 bits where the adapter has extended counters, else 32 that saturate.
                )  # fmt: skip
            try:
                value = file.read().strip()
            except OSError as e:
                broken.append((number, e))
                continue
            if value.isdigit():
                found.append((number, int(value) * (known[2] if known else 1)))
            else:
                out.drop("values that are no numbers")
        out.at(before, out.now_ns())
        for number, value_int in found:
            out.put(number, value_int)
        for number, error in broken:
            out.put(number, None, status_of(error))
        if broken and not found:
            self._due_s = 0.0  # the device may be gone


def _names(folder: Path, *, folders: bool = False) -> list[str]:
    """Entries of a folder: folders, or the files that hold counters."""
    try:
        entries = sorted(p.name for p in folder.iterdir() if p.is_dir() == folders)
    except OSError:
        return []
    return entries if folders else [n for n in entries if n not in ("lifespan", "uevent")]
