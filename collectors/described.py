"""The manifest of a capture as it begins: who is recorded, from where, on which machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hoptrace.collectors.hardware.topology.discover import merged
from hoptrace.collectors.target import Target
from hoptrace.manifest import Manifest

__all__ = ["manifest_of"]


def manifest_of(
    targets: Sequence[Target], host: str, title: str | None, machine: Mapping[str, Any], *, proxy: bool, seen: bool
) -> Manifest:
    """``machine``: its platform graph. ``proxy``: requests pass through one of ours; ``seen``: they are seen from outside at
    all."""
    nodes, links = [{"name": "client"}], []
    if proxy:
        nodes.append({"name": "proxy"})
        links.append({"name": "client-proxy", "a": "client", "b": "proxy"})
    for target in targets:
        name = f"server:{target.name}"
        near = "proxy" if proxy else "client"
        nodes.append({"name": name})
        links.append({"name": f"{near}-{name}", "a": near, "b": name})
    return Manifest(
        origin="recorded",
        title=title,
        hosts=[{"name": host, "clock": "CLOCK_MONOTONIC", "lead": True}],
        servers=[t.server for t in targets],
        platform=merged({"nodes": nodes, "links": links} if seen else {}, machine),
        notes=[note for t in targets for note in t.notes],
    )
