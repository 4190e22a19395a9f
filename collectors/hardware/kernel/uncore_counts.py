"""What to count of each kind of uncore device, and what a count stands for.

Events that the kernel lists in sysfs bear its names and scales. The others are those of Intel's and AMD's event lists, as perf
has them (tools/perf/pmu-events/arch/x86, tools/perf/arch/x86/util/iostat.c), for the CPUs that the lists are of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hoptrace.collectors.hardware.file import read_int, read_text
from hoptrace.collectors.hardware.kernel.pmu import Pmu, bytes_per_count, pmus
from hoptrace.collectors.hardware.perf.events import Event
from hoptrace.collectors.hardware.sink import Direction

__all__ = ["Counted", "Refused", "amd_fabric", "amd_memory", "cxl", "intel_memory", "intel_ports", "intel_stacks"]


@dataclass(frozen=True, slots=True)
class Counted:
    """One counter to open: on ``cpu``, of ``pmu``. ``factor``: units of the value per count."""

    pmu: str
    event: Event
    cpu: int
    entity: str
    name: str
    unit: str
    direction: Direction | None
    factor: float


@dataclass(frozen=True, slots=True)
class Refused:
    """What is there but is not counted, and why."""

    what: str
    why: str


_Found = Iterator[Counted | Refused]
_CACHE_LINE = 64
_DWORD = 4


# -- Intel -----------------------------------------------------------------------------------------------------------------


def intel_ports(sys: Path, proc: Path) -> _Found:
    """IIO free running counters: ``iio:SOCKET/STACK/PORT``; tx is what devices send to the host, as everywhere.

    Ice Lake, Snow Ridge and Sapphire Rapids have eight ports and count 32 bytes; before Linux 6.15 (and its fixes of April 2025)
    their scale in sysfs says 4. Such numbers are not recorded.
    """
    for pmu in pmus(sys, "uncore_iio_free_running"):
        stack = pmu.name.rpartition("_")[2]
        for name, terms in sorted(pmu.events.items()):
            match = re.fullmatch(r"bw_(in|out)_port(\d+)", name)
            if match is None:
                continue
            size = bytes_per_count(pmu, name)
            if size is None:
                yield Refused(pmu.name, f"{name} has no scale in bytes")
            elif size == _DWORD and f"bw_{match[1]}_port4" in pmu.events:
                yield Refused(pmu.name, f"this kernel's scale of {name} is wrong by 8 (4 bytes, the hardware counts 32)")
            else:
                way: Direction = "tx" if match[1] == "in" else "rx"
                yield from _each(sys, pmu, terms, f"iio:SOCKET/{stack}/{match[2]}", "data_bytes", way, size)


_IOSTAT: Final = (
    ("event=0x83,umask=0x04", "inbound_read_bytes"), ("event=0x83,umask=0x01", "inbound_write_bytes"),
    ("event=0xc0,umask=0x04", "outbound_read_bytes"), ("event=0xc0,umask=0x01", "outbound_write_bytes"),
)  # fmt: skip
"""As `perf iostat`: 4 bytes a count. Inbound: a device reads or writes the host's memory. Outbound: a CPU reads or writes a
device's registers or memory; its writes are doorbells for the most part. Two counters of a stack take the first kind, two the
second, so the ports of a stack are counted together."""


def intel_stacks(sys: Path, proc: Path) -> _Found:
    """IIO programmable counters, all ports of a stack: ``iio:SOCKET/STACK/all``."""
    for pmu in pmus(sys, "uncore_iio"):
        channels = pmu.formats.get("ch_mask")
        if not {"event", "umask", "fc_mask"} <= pmu.formats.keys() or channels is None:
            yield Refused(pmu.name, "its events are of another generation than perf iostat knows")
            continue
        # Skylake and Cascade Lake have four ports in a mask of 8 bits, later ones eight in one of 12.
        mask = 0x0F if len(channels[1]) <= 8 else 0xFF
        stack = pmu.name.rpartition("_")[2]
        for terms, name in _IOSTAT:
            terms = f"{terms},ch_mask={mask:#x},fc_mask=0x07"
            yield from _each(sys, pmu, terms, f"iio:SOCKET/{stack}/all", name, None, _DWORD)


_MEMORY: Final = (
    ("uncore_imc", re.compile(r"(?:cas_count_|data_)(read|write)s?(?:_sch(\d))?")),
    ("uncore_imc_free_running", re.compile(r"(?:data_)?(read|write)()")),
)
"""Prefix of the devices, names of their events: read or write, and the half of the channel from Granite Rapids on."""


def intel_memory(sys: Path, proc: Path) -> _Found:
    """Memory controllers: ``imc:SOCKET/CHANNEL``, programmable or free running, whichever the kernel lists events of."""
    for prefix, names in _MEMORY:
        some = False
        for pmu in pmus(sys, prefix):
            channel = pmu.name.removeprefix(prefix).lstrip("_") or "0"
            for event, terms in sorted(pmu.events.items()):
                match = names.fullmatch(event)
                if match is None:
                    continue
                size = bytes_per_count(pmu, event)
                if size is None:
                    yield Refused(pmu.name, f"{event} has no scale in bytes")
                    continue
                some = True
                place = f"imc:SOCKET/{channel}" + (f"/{match[2]}" if match[2] else "")
                yield from _each(sys, pmu, terms, place, "data_bytes", "read" if match[1] == "read" else "write", size)
        if some:
            return  # the free running ones count the same bytes


# -- AMD -------------------------------------------------------------------------------------------------------------------


def amd_memory(sys: Path, proc: Path) -> _Found:
    """Memory controllers of Zen 4 and later: ``umc:N``. A CAS command moves 64 bytes (umc_cas_cmd.rd, .wr)."""
    for pmu in pmus(sys, "amd_umc"):
        number = pmu.name.removeprefix("amd_umc").lstrip("_") or "0"
        ways: tuple[tuple[str, Direction], ...] = (("event=0x0a,rdwrmask=0x1", "read"), ("event=0x0a,rdwrmask=0x2", "write"))
        for terms, way in ways:
            yield from _each(sys, pmu, terms, f"umc:{number}", "data_bytes", way, _CACHE_LINE)


def amd_fabric(sys: Path, proc: Path) -> _Found:
    """What devices read and write of the memory of their own socket, by IO root complex of Zen 4 and Zen 5 servers (four, eight):
    ``iom:SOCKET/N``. The fabric counts beats of 64 bytes. What goes to the other socket's memory is not in it."""
    family, model = _cpu_model(proc)
    if family == 25 and (0x10 <= model <= 0x1F or 0xA0 <= model <= 0xAF):
        complexes = 4
    elif family == 26 and model <= 0x1F:
        complexes = 8
    else:
        complexes = 0
    for pmu in pmus(sys, "amd_df"):
        if not complexes or len(pmu.formats.get("umask", ("", ()))[1]) < 12:
            yield Refused(pmu.name, f"events of the data fabric are not known for CPU family {family}, model {model:#x}")
            continue
        for n in range(complexes):
            ways: tuple[tuple[int, Direction], ...] = ((0x7FE, "read"), (0x7FF, "write"))
            for umask, way in ways:
                terms = f"event={0x81F + 0x40 * n:#x},umask={umask:#x}"
                yield from _each(sys, pmu, terms, f"iom:SOCKET/{n}", "local_memory_bytes", way, _CACHE_LINE)


# -- CXL -------------------------------------------------------------------------------------------------------------------

_CXL: Final[tuple[tuple[str, str, str, Direction | None, int], ...]] = (
    ("s2m_drs_memdata", "data_bytes", "bytes", "read", _CACHE_LINE),
    ("m2s_rwd_memwr", "data_bytes", "bytes", "write", _CACHE_LINE),
    ("m2s_rwd_memwrptl", "partial_writes", "requests", "write", 1),
)  # fmt: skip
"""Documentation/admin-guide/perf/cxl.rst: responses with 64 bytes of data, writes of 64 bytes, writes of some bytes of 64 (how
many is not told: they are in no sum of bytes)."""


def cxl(sys: Path, proc: Path) -> _Found:
    """CXL memory devices with a performance monitoring unit: ``cxl:memN``; by each of several, ``cxl:memN/K``."""
    try:
        names = sorted(p.name for p in (sys / "bus/event_source/devices").iterdir() if p.name.startswith("cxl_pmu_mem"))
    except OSError:
        names = []
    for name in names:
        device, _, unit = name.removeprefix("cxl_pmu_").partition(".")
        several = sum(1 for n in names if n.startswith(f"cxl_pmu_{device}.")) > 1
        entity = f"cxl:{device}/{unit}" if several else f"cxl:{device}"
        for pmu in (p for p in pmus(sys, name) if p.name == name):
            some = False
            for event, what, of, way, factor in _CXL:
                if event in pmu.events:
                    some = True
                    yield from _each(sys, pmu, pmu.events[event], entity, what, way, factor, of)
            if not some:
                yield Refused(name, "this device counts no reads or writes of memory")


# -- inside ----------------------------------------------------------------------------------------------------------------


def _each(
    sys: Path, pmu: Pmu, terms: str, entity: str, name: str, way: Direction | None, factor: float, unit: str = "bytes"
) -> _Found:
    """One counter for each CPU that the device is read from; SOCKET in ``entity`` is that CPU's."""
    try:
        event = pmu.event(terms)
    except ValueError as e:
        yield Refused(pmu.name, f"{terms}: {e}")
        return
    if not pmu.cpus:
        yield Refused(pmu.name, "it tells no CPU to read it from (cpumask)")
    for cpu in pmu.cpus:
        socket = read_int(sys / f"devices/system/cpu/cpu{cpu}/topology/physical_package_id")
        place = entity.replace("SOCKET", str(socket if socket is not None and socket >= 0 else 0))
        yield Counted(pmu.name, event, cpu, place, name, unit, way, factor)


def _cpu_model(proc: Path) -> tuple[int, int]:
    """Family and model of an x86 CPU; zeros where they are not told."""
    text = (read_text(proc / "cpuinfo") or "").partition("\n\n")[0]
    found = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in text.splitlines())}
    family, model = found.get("cpu family", ""), found.get("model", "")
    return (int(family), int(model)) if family.isdigit() and model.isdigit() else (0, 0)
