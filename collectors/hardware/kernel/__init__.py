"""What the kernel counts of interrupts, disks, the PCI tree, control groups, caches, energy and the uncore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hoptrace.collectors.hardware.kernel import uncore_counts as counts
from hoptrace.collectors.hardware.kernel.block import BlockSource
from hoptrace.collectors.hardware.kernel.cgroups import CgroupSource
from hoptrace.collectors.hardware.kernel.energy import EnergySource
from hoptrace.collectors.hardware.kernel.interrupts import InterruptSource
from hoptrace.collectors.hardware.kernel.pci import PciSource
from hoptrace.collectors.hardware.kernel.resctrl import ResctrlSource
from hoptrace.collectors.hardware.kernel.uncore import UncoreSource
from hoptrace.collectors.hardware.source import Asked, Source

__all__ = ["sources"]

_FOLDER = "devices under /sys/bus/event_source"
_XEON = "a Xeon Scalable server with the kernel's intel_uncore module, not a virtual machine"
_EPYC = "an AMD EPYC server with the kernel's amd-uncore module, not a virtual machine"
_UNCORE: Final = (
    ("iio-ports", "how many bytes the devices of each PCIe port sent to the host and got from it", counts.intel_ports,
     (f"no uncore_iio_free_running {_FOLDER}", _XEON)),
    ("iio-stacks", "how many bytes devices read and wrote of the host's memory, and CPUs of devices (doorbells)",
     counts.intel_stacks, (f"no uncore_iio {_FOLDER}", _XEON)),
    ("imc", "how many bytes each memory controller read and wrote", counts.intel_memory,
     (f"no uncore_imc {_FOLDER}", _XEON)),
    ("umc", "how many bytes each memory controller read and wrote", counts.amd_memory,
     (f"no amd_umc {_FOLDER}", f"Zen 4 or later, {_EPYC}")),
    ("data-fabric", "how many bytes devices read and wrote of the host's memory", counts.amd_fabric,
     (f"no amd_df {_FOLDER}", f"Zen 4 or Zen 5, {_EPYC}")),
    ("cxl-pmu", "how many bytes were read from and written to CXL memory devices", counts.cxl,
     (f"no cxl_pmu {_FOLDER}", "a CXL device with a performance monitoring unit, Linux 6.5, CONFIG_CXL_PMU")),
)  # fmt: skip


def sources(asked: Asked) -> Iterator[Source]:
    """One source for each thing that is counted."""
    roots = asked.roots
    yield InterruptSource(roots)
    yield CgroupSource(tuple(asked.servers), roots)
    yield BlockSource(roots)
    yield PciSource(roots)
    yield ResctrlSource(roots)
    yield EnergySource(roots)
    for name, answers, list_them, missing in _UNCORE:
        yield UncoreSource(name, answers, list_them, missing, roots=roots)
