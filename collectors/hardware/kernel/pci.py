"""PCIe links: speed and width now and at most, links that train down, and errors (AER). Entity ``pcie:BDF``.

A device counts as linked where the kernel tells its link: virtual functions and virtio devices have none. Bytes of a PCIe link
are in no file of the kernel's: see the GPU's own counters and the uncore.
"""

from __future__ import annotations

from pathlib import Path

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.kernel.pci_files import AER, Link, aer, gigatransfers, lanes
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, status_of
from hoptrace.collectors.hardware.topology.pci import PciDevice, pci_devices

__all__ = ["PciSource"]

_ERRORS_EVERY = 5
_LIST_EVERY = 60
_OF_INTEREST = ("gpu", "nvme", "nic", "cxl")


class _Device:
    """One function with a link: its files, its series, what it said last.

    Going down from a root port, each link's upper end (root port, a switch's port to a device) is followed by its lower one (a
    switch's port to the host, a device): the lower one tells of the link's changes, once.
    """

    def __init__(self, device: PciDevice, folder: Path, life: str) -> None:
        self.bdf, self.life = device.bdf, life
        lower = len(device.bridges) % 2 == 1
        self.tells = lower or device.kind in _OF_INTEREST
        self.speed, self.width = KeptFile(folder / "current_link_speed"), KeptFile(folder / "current_link_width")
        self.errors = {kind: KeptFile(folder / name) for name, kind in AER if (folder / name).exists()}
        self.most = _most(folder)
        if lower:  # a link is no better than its worse end
            self.most = _worse(self.most, _most(folder.parent))
        self.link: Link | None = None
        self.told: dict[str, tuple[int, dict[str, int]]] = {}
        self.gauges: list[int] = []
        self.counts: list[int] = []
        self.gone = False

    def close(self) -> None:
        for file in (self.speed, self.width, *self.errors.values()):
            file.close()


class PciSource:
    """Links once a second, errors every five seconds, the tree once a minute or when a device has gone."""

    name = "pcie"
    answers = "whether a PCIe link runs below what it could, and whether links have errors"
    pace: Pace = "slow"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._devices: dict[str, _Device] = {}
        self._lives: dict[str, int] = {}
        self._beat = 0

    def probe(self) -> Found:
        every = pci_devices(self._roots)
        if not every:
            return Found("absent", f"{self._roots.sys / 'devices'} has no PCI devices")
        linked = _wanted(every)
        if not linked:
            none = f"none of the {len(every)} PCI devices tells of a link: they are emulated (virtio) or virtual functions"
            return Found("unsupported", none, "run hoptrace on the host, or pass the device through with its PCIe capability")
        errors = sum(1 for d in linked if (self._folder(d) / AER[0][0]).exists())
        why = None if errors else "without errors: the firmware keeps AER to itself, or the kernel has no CONFIG_PCIEAER"
        return Found("ok", why, sees=f"{len(linked)} links, {errors} with error counts")

    def open(self, out: Sink) -> None:
        self._list(out, first=True)

    def sample(self, out: Sink) -> None:
        self._beat += 1
        if self._beat % _LIST_EVERY == 0:
            self._list(out, first=False)
        for device in self._devices.values():
            self._one(device, out)
            if self._beat % _ERRORS_EVERY == 1:
                self._errors(device, out)
        for device in [d for d in self._devices.values() if d.gone]:
            self._lost(device, out)

    def close(self) -> None:
        for device in self._devices.values():
            device.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _folder(self, device: PciDevice) -> Path:
        below = Path(*device.bridges, device.bdf)
        tops = [t for t in (self._roots.sys / "devices").glob("pci*") if (t / below).is_dir()]
        return tops[0] / below if tops else self._roots.sys / "devices" / below

    def _list(self, out: Sink, *, first: bool) -> None:
        present = {d.bdf: d for d in _wanted(pci_devices(self._roots))}
        for bdf, found in present.items():
            if bdf not in self._devices:
                n = self._lives.get(bdf)
                life = f"{self._boot}/{n}" if n else self._boot
                self._devices[bdf] = _Device(found, self._folder(found), life)
                if not first:
                    out.event("device", f"pcie:{bdf} is {'back' if n else 'there now'}")
        for bdf in self._devices.keys() - present.keys():
            self._devices[bdf].gone = True

    def _lost(self, device: _Device, out: Sink) -> None:
        out.fail([*device.gauges, *device.counts], "lost")
        out.event("device", f"pcie:{device.bdf} is gone")
        device.close()
        del self._devices[device.bdf]
        self._lives[device.bdf] = self._lives.get(device.bdf, 0) + 1

    def _one(self, device: _Device, out: Sink) -> None:
        if not device.gauges:
            device.gauges = [
                self._gauge(device, out, "link_speed_gt_per_s", "GT/s"), self._gauge(device, out, "link_width_lanes", "lanes"),
                self._gauge(device, out, "most_link_speed_gt_per_s", "GT/s"),
                self._gauge(device, out, "most_link_width_lanes", "lanes"),
            ]  # fmt: skip
        before = out.now_ns()
        try:
            link = Link(gigatransfers(device.speed.read()), lanes(device.width.read()))
        except OSError as e:
            out.at(before, out.now_ns())
            out.fail(device.gauges[:2], status_of(e))
            device.gone = status_of(e) in ("lost", "absent")
            return
        out.at(before, out.now_ns())
        for number, value in zip(device.gauges, (*link, *device.most), strict=True):
            out.put(number, value, "ok" if value is not None else "absent")
        if device.tells:
            self._compare(device, link, out)
        device.link = link

    @staticmethod
    def _compare(device: _Device, link: Link, out: Sink) -> None:
        last = device.link
        if last is None:
            if link.below(device.most):
                out.event(
                    "link", f"pcie:{device.bdf} runs at {link}, its ends could do {device.most} (an idle link may save power)"
                )
        elif link != last:
            word = "is down" if link == (None, None) else "trained down" if link.below(last) else "changed"
            out.event("link", f"pcie:{device.bdf} {word}: {last} before, {link} now; its ends could do {device.most}")

    def _errors(self, device: _Device, out: Sink) -> None:
        for kind, file in device.errors.items():
            before = out.now_ns()
            name = f"aer_{kind}_errors"
            try:
                total, kinds = aer(file.read())
            except OSError as e:
                out.at(before, out.now_ns())
                out.put(self._count(device, out, name), None, status_of(e))
                continue
            after = out.now_ns()
            out.at(before, after)
            if total is not None:
                out.put(self._count(device, out, name), total)
            told_at, told = device.told.get(kind, (0, {}))
            for error, n in kinds.items():
                # Dozens of kinds stay at 0 for good: one is written once it has risen, with the 0 that was seen before.
                last = told.get(error)
                if not n and not last:
                    continue
                number = self._count(device, out, f"aer_{kind}_{error}_errors")
                if last == 0:
                    out.at(told_at, told_at)
                    out.put(number, 0)
                    out.at(before, after)
                out.put(number, n)
            device.told[kind] = (after, kinds)

    @staticmethod
    def _gauge(device: _Device, out: Sink, name: str, unit: str) -> int:
        return out.series(f"pcie:{device.bdf}", name, unit, "gauge", incarnation=device.life)

    @staticmethod
    def _count(device: _Device, out: Sink, name: str) -> int:
        number = out.series(f"pcie:{device.bdf}", name, "errors", "cumulative", incarnation=device.life, width_bits=64)
        if number not in device.counts:
            device.counts.append(number)
        return number


def _wanted(devices: list[PciDevice]) -> list[PciDevice]:
    """Devices that move data and tell of a link, and the bridges above them."""
    linked = {d.bdf: d for d in devices if d.width is not None or d.most_width is not None}
    chosen = {d.bdf for d in linked.values() if d.kind in _OF_INTEREST}
    above = {b for bdf in chosen for b in linked[bdf].bridges}
    return [d for bdf, d in linked.items() if bdf in chosen or bdf in above]


def _most(folder: Path) -> Link:
    try:
        return Link(gigatransfers((folder / "max_link_speed").read_bytes()), lanes((folder / "max_link_width").read_bytes()))
    except OSError:
        return Link(None, None)


def _worse(a: Link, b: Link) -> Link:
    """What both ends can do; what one does not tell the other does."""
    speeds = [v for v in (a.gigatransfers_per_s, b.gigatransfers_per_s) if v is not None]
    widths = [v for v in (a.lanes, b.lanes) if v is not None]
    return Link(min(speeds, default=None), min(widths, default=None))
