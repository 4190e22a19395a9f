"""The platform graph of this machine, or of a recorded one: memory nodes, devices, links, and who is coherent with whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hoptrace.collectors.hardware.source import Roots
from hoptrace.collectors.hardware.topology.devices import disks, networks
from hoptrace.collectors.hardware.topology.gpus import gpus
from hoptrace.collectors.hardware.topology.memory import memory_graph
from hoptrace.collectors.hardware.topology.pci import pci_devices

__all__ = ["discover", "merged"]


def discover(roots: Roots | None = None) -> dict[str, Any]:
    """``nodes``, ``links`` (as `manifest.platform` holds them, see :mod:`hoptrace.platform`) and ``coherent``: groups of nodes
    that see each other's memory through their caches. What nobody tells is left out, never guessed. Never raises for a file."""
    roots = roots or Roots()
    nodes, links = memory_graph(roots)
    pci = pci_devices(roots)
    drams = [n["name"] for n in nodes if n["kind"] == "dram"]
    host = drams[0] if len(drams) == 1 else None  # of several the device's own NUMA node has to tell
    for more_nodes, more_links in (gpus(roots, pci, host), networks(roots, pci, host), disks(roots, pci, host)):
        nodes += more_nodes
        links += more_links
    together = [n["name"] for n in nodes if n["name"].startswith("socket") or n["kind"] in ("dram", "cxl", "memory")]
    together += [k["a"] for k in links if k["kind"] == "c2c"]
    return {"nodes": nodes, "links": links, "coherent": [together] if len(together) > 1 else []}


def merged(session: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The graph of a capture (client, proxy, servers) with the machine's beside it; of two nodes or links of one name the
    capture's stays."""
    out: dict[str, Any] = {}
    for key in ("nodes", "links"):
        mine = [dict(x) for x in session.get(key, [])]
        taken = {x["name"] for x in mine}
        out[key] = mine + [dict(x) for x in found.get(key, []) if x["name"] not in taken]
    return out | {"coherent": list(found.get("coherent", []))}
