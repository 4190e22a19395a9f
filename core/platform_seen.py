"""What a replay on the machine of a trace computes with: the catalogue's device for the GPUs of the platform graph, with what was
found of this machine laid over it where that is less.

A graph tells which devices there are and how they are joined; what they attain it does not tell. So the rates are the
catalogue's, and a link that is found narrower than the catalogue's takes its attained rates down in proportion: an assumption,
which the figure's source says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from hoptrace.errors import InputError
from hoptrace.manifest import Manifest
from hoptrace.platform import Graph, Link, Node, catalogue, graph_of
from hoptrace.platform_file import checked

__all__ = ["AS_FOUND", "DEVICES", "device_named", "platform_seen"]

DEVICES: dict[str, str] = {
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA B200": "b200-sxm",
    "NVIDIA GB200": "gb200",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA GH200 120GB": "gh200",
    "NVIDIA L40S": "l40s",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI300X OAM": "mi300x",
}
"""Name of a GPU as its driver tells it → device of the catalogue. NVIDIA: table of compatible GPUs in the README of
NVIDIA/open-gpu-kernel-modules, which has the names that NVML tells (120GB and 480GB of a GH200 are the CPU's memory; the GPU,
device 2342, is one); B200 and GB200: as `nvidia-smi` lists them. AMD: "Card series" of rocm-smi, with and without its OAM.
H100 NVL, H100 PCIe, H200 NVL, GH200 144G and the like are other devices, which the catalogue does not have."""

AS_FOUND = "-as-found"
"""Ends the name of a platform that is the catalogue's with what was found of a machine."""

_NVLINKS = {"a100-sxm-80gb": 12, "h100-sxm-80gb": 18, "h200-sxm": 18, "b200-sxm": 18, "gb200": 18}
"""NVLinks that the catalogue's rate to peers is of: generation 3 has 12 a GPU, 4 and 5 have 18 (NVIDIA, NVLink generations)."""

_AMOUNT = "Scaled in proportion from the catalogue's, an assumption"


def device_named(model: str | None) -> str | None:
    """The catalogue's device of a GPU's name; null if it has none.

    Compared as it is, but for runs of blanks, and for the maker's name in front, which drivers before R470 leave out.
    """
    name = " ".join((model or "").split())
    return DEVICES.get(name) or DEVICES.get(f"NVIDIA {name}")


def platform_seen(manifest: Manifest) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """The platform of the machine that a trace's graph describes, as the content of a platform file (with ``base``, the device
    of the catalogue), and what to know of it, in sentences.

    Null where it is not known, with the reason; without any reason where the trace has no graph of a machine. Of a replay it is
    the platform that the replay was made for, where its manifest names one.
    """
    if (made := _made_for(manifest)) is not None:
        return made
    graph = graph_of(manifest)
    gpus = [n for n in graph.nodes.values() if _is_gpu(n)]
    if not gpus:
        there = [n for n in graph.nodes.values() if n.kind == "compute"]
        return None, (f"{_listed(there)}: no rates are known of it.",) if there else ()
    kinds: dict[str | None, list[Node]] = {}
    for gpu in gpus:
        kinds.setdefault(device_named(gpu.model) or gpu.model, []).append(gpu)
    if len(kinds) > 1:
        each = "; ".join(_listed(found) for found in kinds.values())
        return None, (f"{each}: several kinds of GPUs, and which of them did the work is not told.",)
    device = device_named(gpus[0].model)
    if device is None:
        return None, (f"{_listed(gpus)}: the catalogue has no GPU of that name.",)
    seen = _Seen(device, graph, gpus)
    try:
        return checked(seen.platform(), "The trace's platform graph"), tuple(seen.said)
    except InputError as e:  # a figure out of all proportion
        return None, (str(e),)


def _made_for(manifest: Manifest) -> tuple[dict[str, Any] | None, tuple[str, ...]] | None:
    """Of a replay: what its steps, else its transfers went by; null where that is not told (then it is the parent's machine)."""
    if manifest.replay is None:
        return None
    for told in (manifest.replay.cost_model.get("platform"), manifest.replay.policy.get("platform")):
        data = catalogue().get(told) if isinstance(told, str) else told
        if isinstance(told, str) and data is None:
            return None, (f"The replay was made for {told}, whose figures its manifest does not hold.",)
        if not isinstance(data, Mapping) or not all(data.get(k) for k in ("flops_per_s", "memory_bytes_per_s")):
            continue
        try:
            return checked(data, "the replay's platform"), (
                f"The replay was made for {data.get('name', 'a platform of its own')}.",
            )
        except InputError as e:
            return None, (str(e),)
    return None


def _is_gpu(n: Node) -> bool:
    return n.kind == "compute" and bool(n.uuid or n.bdf or re.fullmatch(r"gpu\d+", n.name))


def _listed(nodes: Sequence[Node]) -> str:
    """``gpu0, gpu1 (NVIDIA H200)``, ``socket0 (AMD EPYC, 2 CPUs)``."""
    kinds: dict[str, list[str]] = {}
    for n in nodes:
        what = ", ".join(t for t in (n.model, f"{n.cores} CPUs" if n.cores else None) if t) or "of no known model"
        kinds.setdefault(what, []).append(n.name)
    return "; ".join(f"{', '.join(names)} ({what})" for what, names in kinds.items())


class _Seen:
    """A device of the catalogue with what a graph tells; ``said`` grows with what was taken from where."""

    def __init__(self, device: str, graph: Graph, gpus: Sequence[Node]) -> None:
        self._device, self._graph, self._gpus = device, graph, gpus
        self._found = deepcopy(catalogue()[device])
        self._links: dict[str, dict[str, Any]] = self._found.setdefault("links", {})
        self._sources: dict[str, str] = self._found.setdefault("sources", {})
        self.said: list[str] = []

    def platform(self) -> dict[str, Any]:
        self._found |= {"name": self._device + AS_FOUND, "base": self._device}
        what = f"{len(self._gpus)} × {self._gpus[0].model}, as the trace's platform graph has it: rates of {self._device}"
        self._found["description"] = f"{what}, and what was found of this machine."
        self.said.append(f"Platform from the trace: {what} in the catalogue.")
        self._memory()
        self._pcie()
        self._peers()
        self._c2c()
        self._adapters()
        self._cxl()
        self._found.pop("pool", None)  # no graph tells one, and what it costs is not this machine's
        return self._found

    def _of(self, kinds: Iterable[str], gpu: Node) -> list[Link]:
        kinds = set(kinds)
        return [k for k in self._graph.links.values() if k.kind in kinds and gpu.name in (k.a, k.b)]

    def _memory(self) -> None:
        sizes = []
        for gpu in self._gpus:
            own = {k.b if k.a == gpu.name else k.a for k in self._of(("hbm",), gpu)}
            near = (n.capacity_bytes for name, n in self._graph.nodes.items() if name in own and n.kind == "hbm")
            sizes.append(gpu.capacity_bytes or next((b for b in near if b), None))
        told = [b for b in sizes if b]
        if told:
            self._found["memory_bytes"] = min(told)
            self._sources["memory_bytes"] = "The device's memory, as the trace's platform graph tells it."
            self.said.append(f"Device memory of {min(told):,} bytes is as found.")

    def _pcie(self) -> None:
        if "pcie" not in self._links:
            return
        links = [k for gpu in self._gpus for k in self._of(("pcie",), gpu) if k.bytes_per_s]
        if not links:
            self.said.append(f"What the GPUs' PCIe links carry is not told: the catalogue's rate of {self._device} is taken.")
            return
        least = min(links, key=lambda k: k.bytes_per_s or 0)
        what = f"PCIe Gen{least.generation} x{least.width}" if least.generation and least.width else "PCIe"
        self._narrower("pcie", least.bytes_per_s or 0, f"{what} ({least.name}: {least.source or 'the trace graph'})")

    def _peers(self) -> None:
        """NVLinks that are up, counted at the GPU's own end, each at its rate: but at most at the catalogue's, since some tools
        tell the rate before the encoding."""
        if "peer" not in self._links:
            return
        full = _NVLINKS.get(self._device)
        rate = float(self._links["peer"]["bytes_per_s"])
        found = []
        for gpu in self._gpus:
            links = self._of(("nvlink",), gpu)
            own = [k for k in links if k.a == gpu.name and re.fullmatch(r"nvlink:.+/\d+", k.entity or "")]
            found.append((len(own), sum(min(k.bytes_per_s or rate, rate / full) for k in own) if full else 0.0))
        count, least = min(found, key=lambda f: f[1])
        if full is None or not any(n for n, _ in found):
            # Pairs (nvidia-smi topo -m) don't tell how many links lead to a switch, and none at all may be none or not told.
            del self._links["peer"]
            self.said.append("Links between the GPUs are not told one by one: the rate to peers is not known.")
        elif not count:
            del self._links["peer"]
            self.said.append("Some of the GPUs have no NVLink that is up: the rate to peers is not known.")
        else:
            before = len(self.said)
            self._narrower("peer", least, f"{count} of {full} NVLinks are up")
            if len(self.said) > before and "allreduce" in self._found:
                self.said.append("Measured all-reduces are the catalogue's, of all NVLinks: a lower bound here.")

    def _c2c(self) -> None:
        told = [k.bytes_per_s for gpu in self._gpus for k in self._of(("c2c",), gpu) if k.bytes_per_s]
        if told and "bytes_per_s" in self._links.get("c2c", {}):
            self._narrower("c2c", min(told), "C2C links that are up")

    def _adapters(self) -> None:
        """One RDMA port for each GPU, as the catalogue has it: the slowest of as many as there are GPUs."""
        adapter = self._found.get("nic")
        if adapter is None or not any(n.kind == "dram" for n in self._graph.nodes.values()):
            return
        ports = [k for k in self._graph.links.values() if k.kind in ("infiniband", "roce")]
        if not ports:
            del self._found["nic"]
            self.said.append("No RDMA adapter was found: what leads to another host is not known.")
            return
        rates = sorted((k.bytes_per_s or 0 for k in ports), reverse=True)
        rate = rates[min(len(rates), len(self._gpus)) - 1]
        self._links["nic"] = dict(catalogue()[adapter]["links"]["nic"])
        if len(rates) < len(self._gpus):
            self.said.append(f"{len(rates)} RDMA ports for {len(self._gpus)} GPUs, which replays count as one for each server.")
        if rate:
            self._narrower("nic", rate, "the slowest RDMA port of as many as there are GPUs")

    def _cxl(self) -> None:
        """CXL memory: what the firmware tells of it (HMAT), of several the slowest."""
        nodes = {n.name for n in self._graph.nodes.values() if n.kind == "cxl"}
        if not nodes:
            if any(n.kind == "dram" for n in self._graph.nodes.values()) and self._found.pop("expander", None):
                self.said.append("No CXL memory was found: what it costs is not known.")
            return
        links = [k for k in self._graph.links.values() if k.b in nodes and k.kind == "cxl"]
        source = next((k.source for k in links if k.source), None) or "The trace's platform graph"
        latencies = [k.latency_ns for k in links if k.latency_ns]
        if latencies:
            value = {"value": max(latencies), "low": min(latencies), "high": max(latencies), "source": f"{source}."}
            self._found.setdefault("constants", {})["cxl_load_ns"] = value
        rates: dict[str, Any] = {}
        for key in ("bytes_per_s", "read_bytes_per_s", "write_bytes_per_s"):
            told = [float(v) for k in links if (v := getattr(k, key))]
            if told:
                rates[key] = min(told)
        if rates:
            rates["bytes_per_s"] = max(rates.values())  # the peak, which neither direction is above
            self._links["cxl"] = rates | {"source": f"{source}: the firmware's figures, which nobody measured."}
        said = [w for w, there in (("latency", latencies), ("bandwidth", rates)) if there]
        rest = [w for w, there in (("latency", latencies), ("bandwidth", rates)) if not there]
        if said:
            self.said.append(f"CXL memory: its {' and '.join(said)} as the firmware tells it (HMAT).")
        if rest:
            self.said.append(f"CXL memory: its {' and '.join(rest)} is not told; that of the catalogue's expander is assumed.")

    def _narrower(self, name: str, rate: float, what: str) -> None:
        """Takes a link's rates down to ``rate`` where that is less than the catalogue's."""
        link = self._links[name]
        peak = float(link["bytes_per_s"])
        if rate >= peak:
            return
        changed = {k: v * (rate / peak) for k, v in link.items() if k != "source"} | {"bytes_per_s": rate}
        kept = f" {_AMOUNT}: what it attains." if len(changed) > 1 else ""
        self._links[name] = changed | {"source": f"As found: {what}.{kept} Before: {link.get('source', 'the catalogue')}"}
        assumed = ", what it attains in proportion (assumed)" if len(changed) > 1 else ""
        self.said.append(f"links.{name}: {rate / 1e9:.4g} GB/s instead of {peak / 1e9:.4g}: {what}{assumed}.")
