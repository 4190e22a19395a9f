"""Memory nodes and what reaches them: NUMA nodes, CXL memory, the firmware's latencies and bandwidths (HMAT), memory tiers.

Documentation/admin-guide/mm/numaperf.rst (access classes: 0 is the best initiator of any kind, 1 the best CPU), sysfs-bus-cxl,
sysfs-bus-dax, sysfs-kernel-mm-memory-tiers. A distance (SLIT) is no latency: it is kept as it is, and nothing is made of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hoptrace.collectors.hardware.file import read_int, read_text
from hoptrace.collectors.hardware.source import Roots

__all__ = ["cpu_list", "cxl_nodes", "memory_graph", "node_numbers"]

_NODE = re.compile(r"node(\d+)")
_TOTAL = re.compile(r"MemTotal:\s+(\d+) kB")
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
    for n in numbers:
        cpus = cpu_list(read_text(base / f"node{n}/cpulist"))
        names[n] = f"dram{n}" if cpus else f"cxl{n}" if n in cxl else f"memory{n}"
        total = _TOTAL.search(read_text(base / f"node{n}/meminfo") or "")
        node: dict[str, Any] = {
            "name": names[n], "kind": "dram" if cpus else "cxl" if n in cxl else "memory", "numa": n,
            "capacity_bytes": int(total[1]) * 1024 if total else None,
            "tier": tiers.get(n), "interleave_weight": read_int(roots.sys / f"kernel/mm/mempolicy/weighted_interleave/node{n}"),
            "distances": _distances(base / f"node{n}/distance"), "device": cxl.get(n),
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


def cpu_list(text: str | None) -> set[int]:
    """Numbers of a kernel list (0-3,8); empty where there is none."""
    found: set[int] = set()
    for part in (text or "").split(","):
        low, _, high = part.strip().partition("-")
        if low.isdigit() and (not high or high.isdigit()):
            found |= set(range(int(low), min(int(high or low), int(low) + 65536) + 1))
    return found


def cxl_nodes(roots: Roots) -> dict[int, str]:
    """Which NUMA nodes are CXL memory: node → region or DAX device.

    By the DAX device's target_node: a memdev's own numa_node is where it is plugged in. A DAX device belongs to CXL if a region
    is above it; a persistent one (a region → nd_region → dax) too.
    """
    found: dict[int, str] = {}
    for target in sorted((roots.sys / "devices").rglob("target_node")) if (roots.sys / "bus/cxl").exists() else ():
        node = read_int(target)
        parts = target.parts
        region = next((p for p in reversed(parts) if re.fullmatch(r"region\d+", p)), None)
        if node is not None and node >= 0 and (region or "ndbus" in str(target)):
            found.setdefault(node, region or target.parent.name)
    return found


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
        link["entity"] = f"cxl:{cxl}"
    for access in (1, 0):
        folder = base / f"node{n}/access{access}/initiators"
        told = {f: read_int(folder / f) for f in ("read_latency", "write_latency", "read_bandwidth", "write_bandwidth")}
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


def _initiators(folder: Path, numbers: list[int]) -> list[int]:
    return [n for n in numbers if (folder / f"node{n}").exists() or (folder / f"node{n}").is_symlink()]


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
