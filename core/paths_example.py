"""The worked example of docs/access-paths.md: one start-up routine over one kind of memory after another.

The routine follows small words from one to the next (tables, headers, lists of a driver or a loader), each address known only
when the word before has come. Nothing but the access path changes; the link's bandwidth is the same from first to last.
"""

from __future__ import annotations

from dataclasses import dataclass

from hoptrace.paths import PathCost, system_of, way_of

__all__ = ["READS", "WORD_BYTES", "Row", "startup"]

READS = 2_000_000_000
"""Dependent reads of the routine."""
WORD_BYTES = 8
"""Bytes of each. Eight of them lie in a line of 64 bytes, so cacheable memory is asked once for eight."""


@dataclass(frozen=True, slots=True)
class Row:
    """The routine over one memory.

    Attributes:
        memory: in words. path: the access path.
        crossings: times that a core waits for the memory. hops: steps of the path, with data and without.
        seconds: of the path, and of the cached reads after it where it is a copy; low_s, high_s over the measured range.
        bandwidth_s: what the bytes alone would take at the link's bandwidth; null where that is not known.
    """

    memory: str
    path: PathCost
    crossings: int
    hops: int
    seconds: float
    low_s: float
    high_s: float
    bandwidth_s: float | None


def startup(platform: str = "h100-sxm-80gb", reads: int = READS) -> list[Row]:
    """The routine of ``reads`` dependent reads over each memory, the same bytes copied whole last.

    Raises:
        UsageError, InputError: as :func:`hoptrace.paths.system_of` and :func:`hoptrace.paths.way_of`.
    """
    # Each read asks for one word, however wide a core could load.
    system = system_of(platform, constants={"uncached_read_bytes": WORD_BYTES})
    nbytes = reads * WORD_BYTES
    rate = system.rate("pcie", ("attained_bytes_per_s", "bytes_per_s"))[0]
    cases = (
        ("local DRAM, cached", "dram_load_store", "dram", "core", None),
        ("DRAM of the other socket, cached", "remote_socket_load_store", "dram", "core", None),
        ("CXL.mem expander, cached", "cxl_load_store", "cxl_expander", "core", ("read_bytes_per_s", "bytes_per_s")),
        ("CXL.mem pool behind a switch, cached", "cxl_load_store", "cxl_pool", "core", ("read_bytes_per_s", "bytes_per_s")),
        ("device memory on PCIe, uncacheable", "mmio_read", "window", "core", None),
        ("the same, copied whole by DMA first", "copy_engine", "hbm", "dram", None),
    )
    rows: list[Row] = []
    for memory, name, src, dst, keys in cases:
        path = way_of(system, name, src, dst, block_bytes=nbytes)
        bandwidth = system.rate("cxl", keys, (src, dst))[0] if keys else rate if src in ("window", "hbm") else None
        low, high = path.range_ns()
        # What has been copied is read from local DRAM, as the first row has it.
        then = rows[0] if name == "copy_engine" else Row("", path, 0, 0, 0.0, 0.0, 0.0, None)
        rows.append(
            Row(
                memory,
                path,
                max(h.charged for h in path.hops) + then.crossings,
                path.payload_hops + path.control_ops + then.hops,
                path.time_ns() / 1e9 + then.seconds,
                low / 1e9 + then.low_s,
                high / 1e9 + then.high_s,
                nbytes / bandwidth if bandwidth else None,
            )
        )
    return rows
