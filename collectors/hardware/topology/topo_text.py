"""The text of `nvidia-smi topo -m`: which GPUs and adapters are how far apart, for machines that are only known by that text.

Legend (nvidia-smi): X self; NV# so many bonded NVLinks; PIX at most one PCIe bridge; PXB several bridges; PHB the host bridge;
NODE the bridges of one NUMA node; SYS across sockets. Columns are separated by tabs or runs of blanks; on a terminal the
header is underlined.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from hoptrace.errors import InputError

__all__ = ["Topology", "as_graph", "topo_of"]

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_DEVICE = re.compile(r"(GPU|NIC)\d+|mlx\d+_\d+|[a-z]+\d*_\d+")
_KIND = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|NVL|N/A")
_LEGEND = re.compile(r"\s*(NIC\d+):\s*(\S+)")


@dataclass(frozen=True, slots=True)
class Topology:
    """``names``: devices in their order; ``between``: (a, b) → PIX, NV18 …; ``numa``: of a GPU; ``nics``: NIC0 → mlx5_0."""

    names: tuple[str, ...]
    between: dict[tuple[str, str], str]
    numa: dict[str, int] = field(default_factory=dict)
    nics: dict[str, str] = field(default_factory=dict)


def topo_of(text: str) -> Topology:
    """The matrix in a text (which may hold other things before and behind it).

    Raises:
        InputError: there is no matrix, or a row of it has another number of columns than its header.
    """
    lines = [_ANSI.sub("", line).rstrip() for line in text.splitlines()]
    head = next((i for i, line in enumerate(lines) if re.match(r"\s+GPU0\b", line)), None)
    if head is None:
        raise InputError("This is no output of `nvidia-smi topo -m`: no line of column names that begins with GPU0.")
    columns = _cells(lines[head])
    devices = [c for c in columns if _DEVICE.fullmatch(c)]
    between: dict[tuple[str, str], str] = {}
    numa: dict[str, int] = {}
    rows: list[str] = []
    for line in lines[head + 1 :]:
        cells = _cells(line)
        if not cells or cells[0] not in devices:
            break
        kinds = cells[1 : 1 + len(devices)]
        if len(kinds) < len(devices) or not all(_KIND.fullmatch(k) for k in kinds):
            raise InputError(
                f"nvidia-smi topo -m: the row of {cells[0]} has {len(kinds)} columns, its header {len(devices)} devices.",
                hint="Was the text cut or wrapped? Print it into a file: nvidia-smi topo -m > topo.txt.",
            )
        rows.append(cells[0])
        between |= {(cells[0], other): kind for other, kind in zip(devices, kinds, strict=True) if other != cells[0]}
        rest = cells[1 + len(devices) :]
        # CPU affinity, then NUMA affinity; either may be empty, which a run of blanks does not tell: only whole rows are read.
        if len(rest) >= 2 and rest[1].isdigit():
            numa[cells[0]] = int(rest[1])
    if not rows:
        raise InputError("nvidia-smi topo -m: there is a header and no row.")
    nics = {m[1]: m[2] for line in lines if (m := _LEGEND.fullmatch(line))}
    return Topology(tuple(rows), between, numa, nics)


def as_graph(topology: Topology) -> dict[str, Any]:
    """Nodes and links of the matrix: NVLinks with their number; the rest by what the path crosses. Rates are not in the text."""
    named = {n: topology.nics.get(n, _gpu(n)) for n in topology.names}
    nodes: list[dict[str, Any]] = []
    for n in topology.names:
        gpu = n.startswith("GPU")
        node: dict[str, Any] = {"name": named[n], "kind": "compute" if gpu else "nic"}
        if n in topology.numa:
            node["numa"] = topology.numa[n]
        nodes.append(node)
    links = []
    for i, a in enumerate(topology.names):
        for b in topology.names[i + 1 :]:
            kind = topology.between.get((a, b)) or topology.between.get((b, a))
            if kind is None or kind == "N/A":
                continue
            link: dict[str, Any] = {"name": f"{named[a]}-{named[b]}", "a": named[a], "b": named[b]}
            if kind.startswith("NV") and kind[2:].isdigit():
                link |= {"kind": "nvlink", "width": int(kind[2:])}
            else:
                link |= {"kind": "pcie", "crosses": kind}
            links.append(link | {"source": "nvidia-smi topo -m"})
    return {"nodes": nodes, "links": links}


def _gpu(name: str) -> str:
    return name.lower() if name.startswith("GPU") else name


def _cells(line: str) -> list[str]:
    if "\t" in line:
        return [c.strip() for c in line.split("\t") if c.strip()]
    return [c.strip() for c in re.split(r"\s{2,}|\s(?=(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS)\b)", line.strip()) if c.strip()]
