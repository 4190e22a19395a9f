"""Memory nodes and what reaches them: NUMA nodes, CXL memory, the firmware's latencies and bandwidths (HMAT), memory tiers.

Documentation/admin-guide/mm/numaperf.rst (access classes: 0 is the best initiator of any kind, 1 the best CPU), sysfs-bus-cxl,
sysfs-bus-dax, sysfs-kernel-mm-memory-tiers. A distance (SLIT) is no latency: it is kept as it is, and nothing is made of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hoptrace.collectors.hardware.file import cpu_list, read_int, read_text
from hoptrace.collectors.hardware.source import Roots

__all__ = ["cxl_nodes", "memory_graph", "node_numbers"]

_NODE = re.compile(r"node(\d+)")
_TOTAL = re.compile(r"MemTotal:\s+(\d+) kB")
_APART = 0.05  # what the files of nodes may lack of the machine's
_BLOCK = re.compile(r"memory\d+")
_REGION = re.compile(r"region\d+")
_BLOCKS = 16
_HMAT = "HMAT, as the firmware tells it (/sys/devices/system/node/node{n}/access{c}/initiators)"


def memory_graph(roots: Roots) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Nodes (sockets, DRAM, memory without CPUs) and the links between sockets and memory."""
    base = roots.sys / "devices/system/node"
    numbers = node_numbers(roots)
    cxl = cxl_nodes(roots)
    tiers = _tiers(roots)
    sockets = _sockets(roots)
    nodes: list[dict[str, Any]] = [
        {"name": f"socket{s}", "kind": "compute", "cores": len(cpus), "model": _model(roots)}
        for s, cpus in sorted(sockets.items())
    ]
    links: list[dict[str, Any]] = []
    names: dict[int, str] = {}
    sizes = _sizes(roots, numbers)
    for n in numbers:
        cpus = cpu_list(read_text(base / f"node{n}/cpulist"))
        names[n] = f"dram{n}" if cpus else f"cxl{n}" if n in cxl else f"memory{n}"
        node: dict[str, Any] = {
            "name": names[n], "kind": "dram" if cpus else "cxl" if n in cxl else "memory", "numa": n,
            "capacity_bytes": sizes[n],
            "tier": tiers.get(n), "interleave_weight": read_int(roots.sys / f"kernel/mm/mempolicy/weighted_interleave/node{n}"),
            "distances": _distances(base / f"node{n}/distance"), "device": cxl.get(n),
            "memory_side_caches": _caches(base / f"node{n}/memory_side_cache"),
            "best_initiators": _initiators(base / f"node{n}/access0/initiators", numbers) or None,
        }  # fmt: skip
        nodes.append({k: v for k, v in node.items() if v is not None})
        links.append(_link(base, n, names[n], cpus, sockets, cxl.get(n), numbers))
    links += [
        {"name": f"socket{a}-socket{b}", "a": f"socket{a}", "b": f"socket{b}", "kind": "socket"}
        for a in sorted(sockets)
        for b in sorted(sockets)
        if a < b
    ]
    return nodes, [k for k in links if k.get("a")]


def _sizes(roots: Roots, numbers: list[int]) -> dict[int, int | None]:
    """Bytes of each node, by its own MemTotal.

    Some virtual machines that were given memory while running count it in /proc/meminfo and not in the node's file (seen on a
    6.18 guest: 5.8 GiB of 23.5). Then the node's blocks of memory are counted; where they don't add up either, nothing is told.
    """
    base = roots.sys / "devices/system/node"
    own = {n: _total(base / f"node{n}/meminfo") for n in numbers}
    whole = _total(roots.proc / "meminfo")
    if whole is None or sum(b or 0 for b in own.values()) >= whole * (1 - _APART):
        return own
    try:
        each = int(read_text(roots.sys / "devices/system/memory/block_size_bytes") or "", 16)
    except ValueError:
        return dict.fromkeys(numbers)
    blocks = {
        n: sum(1 for p in _entries(base / f"node{n}") if _BLOCK.fullmatch(p.name) and _is_online(p)) * each for n in numbers
    }
    # Blocks hold what the kernel keeps for itself too.
    fits = whole <= sum(blocks.values()) <= whole * (1 + 2 * _APART)
    return {n: (b if fits else None) for n, b in blocks.items()}


def _total(path: Path) -> int | None:
    found = _TOTAL.search(read_text(path) or "")
    return int(found[1]) * 1024 if found else None


def _is_online(block: Path) -> bool:
    return (read_text(block / "state") or "online").strip() == "online"


def node_numbers(roots: Roots) -> list[int]:
    """NUMA nodes that are online; those that have a folder where the list can't be read."""
    base = roots.sys / "devices/system/node"
    listed = cpu_list(read_text(base / "online"))
    if listed:
        return sorted(listed)
    try:
        return sorted(int(m[1]) for p in base.iterdir() if (m := _NODE.fullmatch(p.name)))
    except OSError:
        return []


def cxl_nodes(roots: Roots) -> dict[int, str]:
    """Which NUMA nodes are CXL memory: node → region (or DAX device).

    By the DAX device's target_node: a memdev's own numa_node is where it is plugged in, and often -1. A DAX device belongs to CXL
    if a root of the CXL bus is above it (volatile: decoder → region → dax; persistent: nvdimm-bridge → nd region → dax, which has
    the number of the CXL region: cxl_pmem_region_probe). Where the firmware made the region there is no DAX device: then by the
    memory blocks in the region's range (its `resource` is for root).
    """
    found: dict[int, str] = {}
    bus = roots.sys / "bus/cxl/devices"
    known = {p.name for p in _entries(bus)}
    roots_of_cxl = {n for n in known if n.startswith("root")}
    if not roots_of_cxl:
        return {}
    for bus_of_dax in ("bus/dax/devices", "bus/nd/devices"):
        for device in _entries(roots.sys / bus_of_dax):
            parts = device.resolve().parts
            node = read_int(device / "target_node")
            if node is None or node < 0 or not roots_of_cxl.intersection(parts):
                continue
            region = next((p for p in reversed(parts) if _REGION.fullmatch(p) and p in known), None)
            if region or bus_of_dax == "bus/dax/devices":
                found.setdefault(node, region or device.name)
    for region in sorted(n for n in known if _REGION.fullmatch(n) and n not in found.values()):
        for node in _nodes_in(roots, bus / region):
            found.setdefault(node, region)
    return found


def _nodes_in(roots: Roots, region: Path) -> set[int]:
    """Nodes that have a memory block in a committed region; of a large one, some blocks are looked at."""
    begin, size = read_int(region / "resource"), read_int(region / "size")
    block = read_text(roots.sys / "devices/system/memory/block_size_bytes")  # hexadecimal, without 0x
    if not begin or not size or begin < 0 or size < 0 or read_int(region / "commit") != 1:
        return set()
    try:
        block_bytes = int(block or "", 16)
    except ValueError:
        return set()
    if block_bytes <= 0:
        return set()
    blocks = range(-(-begin // block_bytes), (begin + size) // block_bytes)
    some = blocks[:: max(1, len(blocks) // _BLOCKS)]
    base = roots.sys / "devices/system/node"
    return {n for n in node_numbers(roots) if any(os.path.lexists(base / f"node{n}/memory{b}") for b in some)}


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _link(
    base: Path, n: int, name: str, cpus: set[int], sockets: dict[int, set[int]], cxl: str | None, numbers: list[int]
) -> dict[str, Any]:
    """From the socket that the node belongs to (memory without CPUs: that of its best initiator) to the node."""
    near = cpus
    for access in (1, 0):
        if near:
            break
        for i in _initiators(base / f"node{n}/access{access}/initiators", numbers):
            near = near | cpu_list(read_text(base / f"node{i}/cpulist"))
    if not near:
        # Nobody tells who initiates: the nearest node that has CPUs, where one is nearer than all others; else it is not known.
        distances = _distances(base / f"node{n}/distance") or []
        with_cpus = {i: cpu_list(read_text(base / f"node{i}/cpulist")) for i in numbers}
        known = [(d, i) for d, i in zip(distances, numbers, strict=False) if with_cpus[i]]
        best = [i for d, i in known if d == min(d for d, _ in known)]
        near = with_cpus[best[0]] if len(best) == 1 else set().union(*with_cpus.values()) if len(sockets) == 1 else set()
    socket = next((s for s, theirs in sorted(sockets.items()) if near & theirs), None)
    if socket is None:
        return {}
    kind = "cxl" if cxl else "ddr" if cpus else "memory"
    link: dict[str, Any] = {"name": f"socket{socket}-{name}", "a": f"socket{socket}", "b": name, "kind": kind}
    if cxl:
        link["entity"] = f"cxl:{_device_of(base.parents[2], cxl)}"
    for access in (1, 0):
        folder = base / f"node{n}/access{access}/initiators"
        told = {f: _told(folder / f) for f in ("read_latency", "write_latency", "read_bandwidth", "write_bandwidth")}
        if told["read_latency"] or told["read_bandwidth"]:
            mb = 1_000_000
            link |= {
                "latency_ns": told["read_latency"], "write_latency_ns": told["write_latency"],
                "read_bytes_per_s": (told["read_bandwidth"] or 0) * mb or None,
                "write_bytes_per_s": (told["write_bandwidth"] or 0) * mb or None,
                "bytes_per_s": max(told["read_bandwidth"] or 0, told["write_bandwidth"] or 0) * mb or None,
                "source": _HMAT.format(n=n, c=access),
            }  # fmt: skip
            break
    return {k: v for k, v in link.items() if v is not None}


def _told(path: Path) -> int | None:
    """A figure of HMAT. 0 is what the kernel shows for an entry that the firmware's table does not have; of its 32 bits all are
    set where there is no value."""
    value = read_int(path)
    return value if value is not None and 0 < value < (1 << 32) - 1 else None


def _device_of(sysfs: Path, region: str) -> str:
    """The memory device of a region that has one only (its target's endpoint hangs on it), else the region: what a device counts
    is then a part of the link's traffic."""
    bus = sysfs / "bus/cxl/devices"
    target = read_text(bus / region / "target0")
    if read_int(bus / region / "interleave_ways") != 1 or not target:
        return region
    # The decoder is the endpoint port's, and that port's device is the memory (cxl_region_target).
    uport = (bus / target).resolve().parent / "uport"
    name = uport.readlink().name if uport.is_symlink() else ""
    return name if re.fullmatch(r"mem\d+", name) else region


def _initiators(folder: Path, numbers: list[int]) -> list[int]:
    return [n for n in numbers if (folder / f"node{n}").exists() or (folder / f"node{n}").is_symlink()]


def _caches(folder: Path) -> list[dict[str, int]] | None:
    """Caches in front of the memory, by level (1 is the nearest to it)."""
    found = []
    for path in _entries(folder):
        size = read_int(path / "size")
        if path.name.startswith("index") and path.name[5:].isdigit() and size:
            told = {"level": int(path.name[5:]), "size_bytes": size, "line_bytes": read_int(path / "line_size")}
            found.append({k: v for k, v in told.items() if v is not None})
    return found or None


def _distances(path: Path) -> list[int] | None:
    words = (read_text(path) or "").split()
    return [int(w) for w in words] if words and all(w.isdigit() for w in words) else None


def _tiers(roots: Roots) -> dict[int, int]:
    """Memory tier by node: the kernel's number, smaller is faster."""
    found: dict[int, int] = {}
    base = roots.sys / "devices/virtual/memory_tiering"
    try:
        tiers = [p for p in base.iterdir() if p.name.startswith("memory_tier") and p.name[11:].isdigit()]
    except OSError:
        return {}
    for tier in tiers:
        found |= dict.fromkeys(cpu_list(read_text(tier / "nodelist")), int(tier.name[11:]))
    return found


def _sockets(roots: Roots) -> dict[int, set[int]]:
    """CPUs by socket. Where the package is not told (some ARM machines), all are socket 0."""
    found: dict[int, set[int]] = {}
    base = roots.sys / "devices/system/cpu"
    cpus = cpu_list(read_text(base / "online")) or {
        c for n in node_numbers(roots) for c in cpu_list(read_text(roots.sys / f"devices/system/node/node{n}/cpulist"))
    }
    for cpu in sorted(cpus):
        package = read_int(base / f"cpu{cpu}/topology/physical_package_id")
        found.setdefault(package if package is not None and package >= 0 else 0, set()).add(cpu)
    return found


def _model(roots: Roots) -> str | None:
    for line in (read_text(roots.proc / "cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return value.strip() or None
    return None
