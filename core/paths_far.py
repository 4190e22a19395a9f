"""Access paths beyond the device: RDMA, CXL memory and its coherence by hand, DRAM, sockets, drives."""

from __future__ import annotations

from collections.abc import Iterable

from hoptrace.access import ACCESS, Hop
from hoptrace.paths_hops import COPY, LOAD, Mechanism, Step, both, copy_steps, steps_of

__all__ = ["far"]

_REMOTE = tuple((a, b) for a in ("hbm", "dram") for b in ("remote_hbm", "remote_dram"))


def far() -> Iterable[Mechanism]:
    """The mechanisms of memory beyond the device's and its host's pinned memory."""
    for op in ("write", "read"):
        base = f"rdma_{op}_ns"
        once = f"{base}@transfer"
        posted_list = (
            ("rdma_request_ns", "request", ""), (once, "transfer", ""), (once, "request", ""), (once, "request", "link"),
            (once, "request", "link"), (once, "request", "link"), (once, "transfer", ""), (once, "transfer", ""),
        )  # fmt: skip
        steps = steps_of("rdma", *posted_list)
        ends = _REMOTE if op == "write" else tuple((b, a) for a, b in _REMOTE)
        yield Mechanism(
            f"rdma_{op}",
            "rdma",
            f"One-sided RDMA {op} from and to pinned memory, requests posted together.",
            "core",
            ends,
            steps,
            ACCESS["rdma"].source,
        )
        sync = Step(Hop("poll", "core, device and adapter wait for each other", who="core"), "rdma_sync_ns", "request")
        each = tuple(Step(s.hop, base, "request", s.rate) for s in steps)
        yield Mechanism(
            f"rdma_{op}_sync",
            "rdma",
            f"RDMA {op} of device memory, a core driving and awaiting every request.",
            "core",
            tuple(e for e in ends if "hbm" in e),
            (*each, sync),
            "Beluga (SIGMOD'26), its breakdown of a 16 KB transfer",
        )
        stage = copy_steps(COPY)
        out = tuple(Step(s.hop, s.cost, s.times, "stage" if s.rate else "") for s in stage)
        back = tuple(Step(s.hop, f"{s.cost}#2", s.times, s.rate) for s in out)
        yield Mechanism(
            f"rdma_{op}_staged",
            "rdma",
            f"RDMA {op} through host memory at both ends: a copy, the transfer, a copy.",
            "core",
            tuple(e for e in ends if set(e) == {"hbm", "remote_hbm"}),
            (*out, *steps, *back),
            ACCESS["rdma"].source,
        )
    yield Mechanism(
        "cxl_load_store",
        "load_store",
        "A core loads or stores CXL memory (CXL.mem), each line after the one before.",
        "core",
        both(("cxl_expander", "core"), ("cxl_pool", "core")),
        (Step(LOAD, "cxl_load_ns", "line"),),
        ACCESS["load_store"].source,
    )
    yield Mechanism(
        "cxl_copy",
        "memcpy",
        "Cores copy between DRAM and CXL memory, many loads or stores under way at once.",
        "core",
        both(("dram", "cxl_expander"), ("dram", "cxl_pool")),
        (Step(ACCESS["memcpy"].hops[0], "cxl_load_ns", "transfer", "link"),),
        ACCESS["memcpy"].source,
    )
    yield Mechanism(
        "dram_load_store",
        "load_store",
        "A core loads or stores local DRAM, each line after the one before.",
        "core",
        both(("dram", "core")),
        (Step(LOAD, "load_ns", "line"),),
        ACCESS["load_store"].source,
    )
    yield Mechanism(
        "remote_socket_load_store",
        "load_store",
        "The same to the other socket's DRAM.",
        "core",
        both(("dram", "core")),
        (Step(LOAD, "remote_load_ns", "line"),),
        ACCESS["load_store"].source,
    )
    yield Mechanism(
        "cxl_cache",
        "load_store",
        "Coherent access (CXL.cache): hits stay local, misses and invalidations cross the link.",
        "core",
        both(("cxl_pool", "core"), ("cxl_expander", "core"), ("window", "core")),
        (
            Step(Hop("poll", "the local cache answers, or not", who="core"), "coherent", "line"),
            Step(Hop("wire", "on a miss the line crosses the link", payload=True, who="device"), "coherent", "line"),
            Step(Hop("wire", "the other side's copy is invalidated", who="device"), "coherent", "line"),
            Step(Hop("completion", "and that is confirmed", who="device"), "coherent", "line"),
        ),
        "Compute Express Link Specification, CXL.cache",
    )
    flush = Hop("completion", "each line is flushed, and a fence orders the flushes", who="core")
    yield Mechanism(
        "nt_store",
        "load_store",
        "Non-temporal stores into a pool that hosts share without coherence.",
        "core",
        (("core", "cxl_pool"), ("dram", "cxl_pool")),
        (
            Step(Hop("copy", "the core stores past its caches", payload=True, who="core"), "nt_store_line_ns", "line"),
            Step(Hop("wire", "the lines cross the switch", payload=True, who="link"), "cxl_load_ns", "transfer", "link"),
            Step(Hop("completion", "a fence waits for them", who="core")),
        ),
        "Beluga (SIGMOD'26), table 4",
    )
    yield Mechanism(
        "flush_write",
        "load_store",
        "Cached stores, then a flush of every line (software coherence of a CXL 2.0 pool).",
        "core",
        (("core", "cxl_pool"), ("dram", "cxl_pool")),
        (
            Step(Hop("copy", "the core stores into its cache", payload=True, who="core"), "flush_write_line_ns", "line"),
            Step(flush, "flush_write_line_ns", "line"),
            Step(Hop("wire", "the lines cross the switch", payload=True, who="link"), "cxl_load_ns", "transfer", "link"),
        ),
        "Beluga (SIGMOD'26), table 4",
    )
    yield Mechanism(
        "flush_read",
        "load_store",
        "A flush of every line, then cached loads (software coherence of a CXL 2.0 pool).",
        "core",
        (("cxl_pool", "core"), ("cxl_pool", "dram")),
        (
            Step(flush, "flush_read_line_ns", "line"),
            Step(Hop("copy", "the core loads the lines", payload=True, who="core"), "flush_read_line_ns", "line"),
            Step(Hop("wire", "the lines cross the switch", payload=True, who="link"), "cxl_load_ns", "transfer", "link"),
        ),
        "Beluga (SIGMOD'26), table 4",
    )
    yield Mechanism(
        "pool_uncached_read",
        "uncached",
        "Reads of pool memory that is mapped uncacheable.",
        "core",
        (("cxl_pool", "core"),),
        steps_of("uncached", *[("pool_uncached_read_line_ns", "line", "")] * 2),
        "Beluga (SIGMOD'26), table 4",
    )
    yield Mechanism(
        "pool_uncached_write",
        "uncached",
        "Stores to pool memory that is mapped uncacheable.",
        "core",
        (("core", "cxl_pool"),),
        (
            Step(Hop("wire", "the store crosses the switch", payload=True, who="core"), "pool_uncached_write_line_ns", "line"),
            Step(Hop("completion", "and is confirmed", who="device"), "pool_uncached_write_line_ns", "line"),
        ),
        "Beluga (SIGMOD'26), table 4",
    )
    for op, ends in (("write", (("dram", "cxl_pool"),)), ("read", (("cxl_pool", "dram"),))):
        yield Mechanism(
            f"dsa_{op}",
            "dma",
            f"The CPU's copy engine (DSA) {'fills' if op == 'write' else 'empties'} pool memory.",
            "core",
            ends,
            steps_of("dma", *[(f"dsa_{op}_ns", "piece", "link" if i == 4 else "") for i in range(7)]),
            "Beluga (SIGMOD'26), table 4",
        )
    yield Mechanism(
        "cpu_memcpy",
        "memcpy",
        "A core copies within the host's memory.",
        "core",
        both(("dram", "dram_pageable")),
        (Step(ACCESS["memcpy"].hops[0], "load_ns", "transfer", "memcpy_bytes_per_s"),),
        ACCESS["memcpy"].source,
    )
    yield Mechanism(
        "sockets",
        "message",
        "Messages by sockets to another server; the kernel copies at both ends.",
        "kernel",
        tuple(q for b in ("remote_dram", "remote_hbm") for q in (("dram", b), (b, "dram"))),
        steps_of("message", *[("socket_message_ns", "transfer", "link" if i == 5 else "") for i in range(11)]),
        ACCESS["message"].source,
    )
    yield Mechanism(
        "loopback",
        "message",
        "Messages by sockets within the host.",
        "kernel",
        (("dram", "dram"),),
        steps_of("loopback", *[("loopback_message_ns", "transfer", "loopback_bytes_per_s" if i == 0 else "") for i in range(6)]),
        ACCESS["loopback"].source,
    )
    for op, ends in (("read", (("nvme", "dram"), ("nvme", "hbm"))), ("write", (("dram", "nvme"), ("hbm", "nvme")))):
        file = ACCESS["file"]
        costs = [(f"nvme_{op}_ns", "transfer", "link" if i == 3 else "") for i in range(len(file.hops) + 1)]
        steps = steps_of("file", *costs)
        steps = (steps[0], Step(steps[1].hop, f"nvme_{op}_ns"), Step(steps[2].hop, "nvme_command_ns", "piece"), *steps[3:])
        yield Mechanism(f"nvme_{op}", "file", f"A {op} of a drive, commands queued together.", "kernel", ends, steps, file.source)
