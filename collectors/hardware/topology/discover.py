"""The platform graph of this machine, or of a recorded one: memory nodes, devices, links, and who is coherent with whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hoptrace.collectors.hardware.source import Roots
from hoptrace.collectors.hardware.topology.devices import disks, networks
from hoptrace.collectors.hardware.topology.gpus import gpus
from hoptrace.collectors.hardware.topology.memory import memory_graph
from hoptrace.collectors.hardware.topology.pci import pci_devices
from hoptrace.collectors.hardware.topology.topo_text import as_graph, topo_of

__all__ = ["discover", "merged"]


def discover(roots: Roots | None = None, topo: str | None = None) -> dict[str, Any]:
    """``nodes``, ``links`` (as `manifest.platform` holds them, see :mod:`hoptrace.platform`) and ``coherent``: groups of nodes
    that see each other's memory through their caches. What nobody tells is left out, never guessed. Never raises for a file.
    ``topo``: what `nvidia-smi topo -m` printed on that machine, for what NVML can't be asked.

    Raises:
        InputError: ``topo`` is no such text.
    """
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
    graph = {"nodes": nodes, "links": links, "coherent": [together] if len(together) > 1 else []}
    return graph if topo is None else _with_text(graph, as_graph(topo_of(topo)))


def _with_text(graph: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """What only the text knows. NVLinks that were told one by one stay; its pairs would be the same again."""
    one_by_one = any(k["kind"] == "nvlink" for k in graph["links"])
    more = {**text, "links": [k for k in text["links"] if not (one_by_one and k["kind"] == "nvlink")]}
    return merged(graph, more) | {"coherent": graph["coherent"]}


def merged(session: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The graph of a capture (client, proxy, servers) with the machine's beside it; of two nodes or links of one name the
    capture's stays."""
    out: dict[str, Any] = {}
    for key in ("nodes", "links"):
        mine = [dict(x) for x in session.get(key, [])]
        taken = {x["name"] for x in mine}
        out[key] = mine + [dict(x) for x in found.get(key, []) if x["name"] not in taken]
    return out | {"coherent": list(found.get("coherent", []))}
