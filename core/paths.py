"""What it costs to move a KV block, or a message, from one place to another: hops, fixed time, bandwidth, control operations.

:func:`way_of` puts a mechanism of :mod:`hoptrace.paths_mechanisms` on a machine: ``time = operations × cost of one + bytes ÷
bandwidth``, the operations counted from how the block really lies (:class:`hoptrace.paths_layout.Layout`). Nothing is guessed: a
cost that nobody has measured is asked for by name.
"""

from __future__ import annotations

import difflib

from hoptrace.errors import InputError, UsageError
from hoptrace.paths_builder import Builder
from hoptrace.paths_collective import Collective, collective
from hoptrace.paths_cost import HopCost, PathCost
from hoptrace.paths_hops import PLACES, Mechanism
from hoptrace.paths_layout import Layout
from hoptrace.paths_links import PathLink
from hoptrace.paths_mechanisms import MECHANISMS
from hoptrace.paths_system import System, system_of

__all__ = [
    "Collective", "HopCost", "Layout", "PathCost", "PathLink", "System", "collective", "default_mechanism", "mechanism",
    "system_of", "way_of",
]  # fmt: skip


def mechanism(name: str) -> Mechanism:
    """A mechanism by its name. Raises UsageError for one that is not there."""
    if name not in MECHANISMS:
        near = [k for k in MECHANISMS if k.startswith(name)] or difflib.get_close_matches(name, MECHANISMS, n=3)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(f"There is no mechanism {name!r}.", hint=f"{hint}`hoptrace paths` lists them: {', '.join(MECHANISMS)}.")
    return MECHANISMS[name]


def default_mechanism(system: System, src: str, dst: str) -> str:
    """What usually moves data between two places: the device's copy engine, the chip-to-chip link where there is no PCIe, RDMA …

    Raises:
        UsageError: nothing joins the two.
    """
    _ends(src, dst)
    if {src, dst} == {"hbm", "dram"} and not system.has_link("pcie") and "c2c" in system.parts.get("device", {}).get("links", {}):
        return "c2c"
    found = [m.name for m in MECHANISMS.values() if (src, dst) in m.ends]
    preferred = (
        "copy_engine", "peer_copy", "rdma_write", "rdma_read", "nt_store", "flush_read", "cxl_load_store", "dram_load_store",
        "cxl_copy", "mmio_read", "write_combining", "nvme_read", "nvme_write",
    )  # fmt: skip
    first = next((n for n in preferred if n in found), found[0] if found else None)
    if first is None:
        raise UsageError(f"No mechanism joins {src} and {dst}.", hint="Go over a place between them, as hbm, dram, nvme.")
    return first


def _ends(src: str, dst: str) -> None:
    for place in (src, dst):
        if place not in PLACES:
            near = difflib.get_close_matches(place, PLACES, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise UsageError(f"There is no place {place!r}.", hint=f"{hint}There are: {', '.join(PLACES)}.")


def way_of(
    system: System,
    name: str,
    src: str,
    dst: str,
    *,
    block_bytes: int,
    pieces: int = 1,
    ranks: int = 1,
    nics: int | None = None,
    switches: int = 1,
) -> PathCost:
    """The way of a mechanism between two places of a machine.

    Args:
        system: of :func:`system_of`. name: of the mechanism. src, dst: of :data:`hoptrace.paths_hops.PLACES`.
        block_bytes: of one block, over all ranks. pieces: contiguous parts of a block on one rank (:class:`Layout` counts them).
        ranks: devices that hold a part each; they move theirs side by side, each over its own PCIe and scale-up link.
        nics: network adapters on each side; null: one for each rank. switches: between the two hosts.

    Raises:
        UsageError: no such mechanism or place, or it does not join the two. InputError: a cost or rate that it needs is unknown.
    """
    m = mechanism(name)
    _ends(src, dst)
    if (src, dst) not in m.ends:
        joined = ", ".join(f"{a} to {b}" for a, b in m.ends)
        raise UsageError(f"{name} does not lead from {src} to {dst}.", hint=f"It leads from {joined}.")
    nics = ranks if nics is None else nics
    counts = {"block_bytes": block_bytes, "pieces": pieces, "ranks": ranks, "nics": nics, "switches": switches}
    for what, value in counts.items():
        if value < 1:
            raise InputError(f"{what} must be at least 1, not {value}.")
    return Builder(system, m, src, dst, block_bytes, pieces, ranks, nics, switches).build()
