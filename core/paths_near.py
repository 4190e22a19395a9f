"""Access paths within a host: registers and windows of a device, DMA, copy engines, copy kernels, the scale-up link."""

from __future__ import annotations

from collections.abc import Iterable

from hoptrace.access import ACCESS, Hop
from hoptrace.paths_hops import COPY, LOAD, Mechanism, Step, both, copy_steps, steps_of

__all__ = ["near"]

_HOST = (("hbm", "dram"), ("hbm", "cxl_expander"), ("hbm", "cxl_pool"))


def near() -> Iterable[Mechanism]:
    """The mechanisms of a device and its host."""
    posted = Hop("wire", "the stores cross PCIe as posted packets; nothing comes back", payload=True, who="core")
    yield Mechanism(
        "mmio_read",
        "uncached",
        "A core reads a device window word by word; each read waits for the one before.",
        "core",
        (("window", "core"),),
        steps_of("uncached", ("uncached_read_ns", "read", ""), ("uncached_read_ns", "read", "")),
        ACCESS["uncached"].source,
    )
    yield Mechanism(
        "mmio_write",
        "uncached",
        "A core stores into an uncacheable device window; the stores are posted.",
        "core",
        (("core", "window"),),
        (Step(posted, "posted_write_ns", "transfer", "uncached_write_bytes_per_s"),),
        "PCI Express Base Specification: memory writes are posted",
    )
    yield Mechanism(
        "window_read",
        "uncached",
        "A core copies out of a device's window that is mapped write-combining.",
        "core",
        (("window", "core"),),
        tuple(
            Step(h, "window_read_ns", "transfer", "window_read_bytes_per_s" if h.payload else "")
            for h in ACCESS["uncached"].per_link
        ),
        "NVIDIA gdrcopy README: reads are not prefetched, so they run at a fraction of the writes",
    )
    yield Mechanism(
        "write_combining",
        "uncached",
        "A core stores into a write-combining window; full lines go out as posted packets.",
        "core",
        (("core", "window"),),
        (
            Step(
                Hop("copy", "the core fills its write-combining buffers", payload=True, who="core"), "posted_write_ns", "transfer"
            ),
            Step(posted, "", "transfer", "window_write_bytes_per_s"),
        ),
        "Intel SDM volume 3, write-combining memory; NVIDIA gdrcopy README",
    )
    yield Mechanism(
        "flag",
        "uncached",
        "A message without data: a core writes a flag into the device, the device polls it and answers.",
        "core",
        (("core", "window"),),
        (
            Step(Hop("doorbell", "the core's posted write", who="core"), "flag_round_trip_ns"),
            Step(Hop("poll", "the device finds the flag", who="device"), "flag_round_trip_ns"),
            Step(Hop("completion", "the device writes its answer to host memory", who="device"), "flag_round_trip_ns"),
            Step(Hop("poll", "the core finds the answer", who="core"), "flag_round_trip_ns"),
        ),
        "NVIDIA gdrcopy README, its ping-pong test",
    )
    # The descriptor is stored into the core's cache, the completion written while the core polls: neither adds to the least.
    device = [
        ("", "piece", ""), ("posted_write_ns", "transfer", ""), ("device_read_ns", "piece", ""),
        ("device_read_ns#2", "piece", "link"), ("", "piece", "link"), ("", "transfer", ""), ("load_ns", "transfer", ""),
    ]  # fmt: skip
    yield Mechanism(
        "dma",
        "dma",
        "Doorbell, descriptor, DMA, completion, poll: a device fetches a descriptor and reads host memory.",
        "core",
        (("dram", "hbm"), ("dram", "window")),
        steps_of("dma", *device),
        ACCESS["dma"].source,
    )
    yield Mechanism(
        "dma_interrupt",
        "dma",
        "The same, but the completion interrupts the host instead of being polled.",
        "core",
        (("dram", "hbm"), ("dram", "window")),
        (
            *steps_of("dma", *device)[:-1],
            Step(Hop("interrupt", "the device interrupts; the kernel wakes the process", who="kernel"), "interrupt_ns"),
        ),
        "PCI Express Base Specification, message signalled interrupts",
    )
    yield Mechanism(
        "copy_engine",
        "dma",
        "The device's copy engine (cudaMemcpy, hipMemcpy), once for each contiguous piece.",
        "driver",
        both(*_HOST),
        copy_steps(COPY),
        ACCESS["dma"].source,
    )
    launch = (
        Step(Hop("queue entry", "the driver writes the launch into the channel", who="driver"), "launch_ns"),
        Step(Hop("doorbell", "a posted register write tells the device", who="driver"), "launch_ns"),
        Step(Hop("copy", "the kernel's threads load and store all pieces", payload=True, who="device"), "", "transfer", "link"),
        Step(Hop("wire", "the packets cross the link", payload=True, who="link")),
        Step(Hop("completion", "the device writes a semaphore", who="device")),
        Step(Hop("poll", "the host finds it", who="core"), "?wait_ns"),
    )
    staged = Step(ACCESS["memcpy"].hops[0], "", "transfer", "memcpy_bytes_per_s")
    for name, ends in (("out", ("hbm", "dram_pageable")), ("in", ("dram_pageable", "hbm"))):
        yield Mechanism(
            f"pageable_{name}",
            "dma",
            "The copy engine and pinned memory, and a core's copy from or to pageable memory.",
            "driver",
            (ends,),
            (*copy_steps(COPY), staged) if name == "out" else (staged, *copy_steps(COPY)),
            "CUDA C++ best practices guide: pageable transfers are staged through pinned memory",
        )
    yield Mechanism(
        "kernel_copy",
        "memcpy",
        "One kernel on the device copies all pieces.",
        "driver",
        both(*_HOST, ("hbm", "peer_hbm")),
        launch,
        "vLLM blog 2026-01-08: copy kernel against DMA for KV offload",
    )
    yield Mechanism(
        "c2c",
        "load_store",
        "One kernel on the device reads or writes host memory over the chip-to-chip link.",
        "driver",
        both(("hbm", "dram"), ("hbm", "dram_pageable")),
        launch,
        "NVIDIA Grace Hopper: the host's memory is in the device's address space",
    )
    yield Mechanism(
        "c2c_load_store",
        "load_store",
        "A device loads or stores host memory over the chip-to-chip link, each line after the one before.",
        "device",
        both(("hbm", "dram")),
        (Step(LOAD, "c2c_load_ns", "line"),),
        ACCESS["load_store"].source,
    )
    yield Mechanism(
        "peer_copy",
        "dma",
        "A copy to a device over the scale-up link (NVLink, Infinity Fabric), once for each piece.",
        "driver",
        both(("hbm", "peer_hbm")),
        copy_steps("peer_copy_ns"),
        ACCESS["dma"].source,
    )
    yield Mechanism(
        "peer_pcie",
        "dma",
        "A copy to another device over PCIe, without the scale-up link.",
        "driver",
        both(("hbm", "peer_hbm")),
        copy_steps(COPY),
        ACCESS["dma"].source,
    )
    yield Mechanism(
        "peer_load_store",
        "load_store",
        "A device loads or stores a peer's memory (NVLink, Infinity Fabric), each line after the one before.",
        "device",
        both(("hbm", "peer_hbm")),
        (Step(LOAD, "peer_load_ns", "line"),),
        ACCESS["load_store"].source,
    )
