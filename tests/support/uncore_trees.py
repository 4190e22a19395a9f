"""sysfs of uncore devices, written by hand: no recorded tree of such a machine is at this project's disposal.

After the kernel's own text: Documentation/ABI/testing/sysfs-bus-event_source-devices-{format,events}, …/sysfs-devices-mapping,
arch/x86/events/intel/uncore_snbep.c (formats, events, scales of IIO and iMC), arch/x86/events/amd/uncore.c (amd_df, amd_umc),
drivers/perf/cxl_pmu.c and Documentation/admin-guide/perf/cxl.rst. Names, bits and scales are theirs, numbers of devices chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["AMD_DF", "AMD_UMC", "CXL", "CXL_EVENTS", "FREE", "IIO_SKX", "IIO_SNR", "IMC", "cpus", "device", "free_ports"]

IIO_SKX = {
    "event": "config:0-7", "umask": "config:8-15", "edge": "config:18", "inv": "config:23", "thresh": "config:24-35",
    "ch_mask": "config:36-43", "fc_mask": "config:44-46",
}  # fmt: skip
IIO_SNR = {**IIO_SKX, "ch_mask": "config:36-47", "fc_mask": "config:48-50"}
FREE = {"event": "config:0-7", "umask": "config:8-15"}
IMC = {"event": "config:0-7", "umask": "config:8-15", "edge": "config:18", "inv": "config:23", "thresh": "config:24-31"}
AMD_DF = {"event": "config:0-7,32-37", "umask": "config:8-15,24-27"}
AMD_UMC = {"event": "config:0-7", "rdwrmask": "config:8-9"}
CXL = {
    "mask": "config:0-31", "gid": "config:32-47", "vid": "config:48-63", "threshold": "config1:0-15", "invert": "config1:16",
    "edge": "config1:17", "hdm_filter_en": "config1:18", "hdm": "config2:0-15",
}  # fmt: skip
CXL_EVENTS = {
    "clock_ticks": "vid=0x1e98,gid=0x0,mask=0x1", "m2s_rwd_memwr": "vid=0x1e98,gid=0x21,mask=0x2",
    "m2s_rwd_memwrptl": "vid=0x1e98,gid=0x21,mask=0x4", "s2m_drs_memdata": "vid=0x1e98,gid=0x25,mask=0x1",
}  # fmt: skip


def device(
    sys: Path, name: str, kind: int, formats: Mapping[str, str], events: Mapping[str, str] | None = None, cpumask: str = "0"
) -> Path:
    """One device under bus/event_source."""
    folder = sys / "bus/event_source/devices" / name
    (folder / "format").mkdir(parents=True)
    (folder / "events").mkdir()
    (folder / "type").write_text(f"{kind}\n")
    (folder / "cpumask").write_text(f"{cpumask}\n")
    for table, where in ((formats, "format"), (events or {}, "events")):
        for key, text in table.items():
            (folder / where / key).write_text(f"{text}\n")
    return folder


def free_ports(ports: int, scale: str, *, out: bool = False) -> dict[str, str]:
    """Events of an IIO free running device: bw_in_portK and, where asked for, bw_out_portK."""
    found = {"ioclk": "event=0xff,umask=0x10"}
    for way, base in (("in", 0x20), ("out", 0x30)) if out else (("in", 0x20),):
        for n in range(ports):
            name = f"bw_{way}_port{n}"
            found |= {name: f"event=0xff,umask={base + n:#x}", f"{name}.scale": scale, f"{name}.unit": "MiB"}
    return found


def cpus(sys: Path, packages: Mapping[int, int]) -> None:
    """CPU → its package."""
    for cpu, package in packages.items():
        folder = sys / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
