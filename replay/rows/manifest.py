"""The manifest of a replay: its servers, its links as part of the platform graph, what ended how, and what moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hoptrace.manifest import Manifest, Server
from hoptrace.replay.outcome import (
    DONE,
    MOVE,
    MOVE_DEMOTE,
    MOVE_HANDOVER,
    MOVE_READ,
    MOVE_STREAM,
    MOVE_WRITE,
    REFUSED,
    UNFINISHED,
)  # fmt: skip
from hoptrace.replay.plan import Plan
from hoptrace.replay.rows.steps import way_of
from hoptrace.replay.setting import Ints, Setting

__all__ = ["Traffic", "counts", "manifest_of"]

_M = {name: i for i, name in enumerate(MOVE)}
_KINDS = {
    MOVE_HANDOVER: "handed over", MOVE_STREAM: "handed over", MOVE_READ: "read from", MOVE_WRITE: "written to",
    MOVE_DEMOTE: "demoted to",
}  # fmt: skip


class Traffic:
    """Sums over the moves of KV: by kind and tier, how many, bytes, and the time that they took together."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sums: dict[tuple[str, str | None], list[int]] = {}

    def take(self, rows: Ints) -> None:
        """A block of moves (``outcome.MOVE``)."""
        kind, tier = rows[:, _M["kind"]], rows[:, _M["tier"]]
        for k, t in np.unique(np.stack([kind, tier], axis=1), axis=0):
            mine = rows[(kind == k) & (tier == t)]
            name = self._plan.tiers[t].name if 0 <= t < len(self._plan.tiers) else None
            sums = self._sums.setdefault((_KINDS[int(k)], name), [0, 0, 0])
            sums[0] += len(mine)
            sums[1] += int(mine[:, _M["bytes"]].sum())
            sums[2] += int((mine[:, _M["end_ns"]] - mine[:, _M["start_ns"]]).sum())

    def as_list(self) -> list[dict[str, Any]]:
        """Plain values, for the manifest and the screen."""
        return [
            {"what": what, "tier": tier, "moves": n, "bytes": size, "time_ns": time}
            for (what, tier), (n, size, time) in sorted(self._sums.items(), key=lambda x: (x[0][0], x[0][1] or ""))
        ]


def counts(s: Setting, late: int) -> dict[str, int]:
    """How the requests of the work ended. ``late``: those that had not arrived by the horizon (they are unfinished too)."""
    status = s.column("status", np.arange(s.work.n))
    return {
        "done": int((status == DONE).sum()),
        "refused": int((status == REFUSED).sum()),
        "unfinished": int((status == UNFINISHED).sum()) - late,
        "not_arrived": late,
    }


def manifest_of(parent: Manifest, plan: Plan, servers: Sequence[Server], left_out: dict[str, int]) -> Manifest:
    """The manifest of a replay, but for what is known only when it has run."""
    named = list({s.name: s.model_copy(update={"pid": None}, deep=True) for s in servers}.values())
    return Manifest(
        origin="replayed",
        utc_offset_ns=parent.utc_offset_ns,
        servers=named,
        platform=_graph(parent.platform, plan),
        imported_from=parent.imported_from,
        rows_dropped={f"requests: {why}": n for why, n in left_out.items()},
    )


def _graph(platform: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The parent's platform graph with the plan's links. Each of those carries one direction: it leads from the place that the
    moves on it leave (or from the link before) to the one that they reach (or to the link behind)."""
    if not plan.links:
        return platform
    ends: dict[str, list[str | None]] = {link.name: [None, None] for link in plan.links}
    nodes: dict[str, dict[str, Any]] = {}
    for way in plan.ways:
        path = [name for name in way_of(plan, way) if name in ends]
        for place in (way.src, way.dst):
            if place:
                nodes.setdefault(place, {"name": place, **_place(place)})
        for i, name in enumerate(path):
            a = way.src if i == 0 else f"{path[i - 1]} > {name}"
            b = way.dst if i == len(path) - 1 else f"{name} > {path[i + 1]}"
            ends[name] = [ends[name][0] or a, ends[name][1] or b]
    rates = {link.name: link.bytes_per_s for link in plan.links}
    links = [
        {"name": name, "a": a, "b": b, "bytes_per_s": rates[name]} if a and b else {"name": name, "bytes_per_s": rates[name]}
        for name, (a, b) in ends.items()
    ]

    def merged(key: str, more: list[dict[str, Any]]) -> list[Any]:
        had, names = platform.get(key), {m["name"] for m in more}
        kept = had if isinstance(had, list) else []
        return [*(x for x in kept if not isinstance(x, dict) or x.get("name") not in names), *more]

    return {**platform, "nodes": merged("nodes", list(nodes.values())), "links": merged("links", links)}


def _place(name: str) -> dict[str, Any]:
    """What the name of a place says of it: ``memory:SERVER``, or a tier's ``KIND:TIER`` (``@SERVER``)."""
    kind, _, rest = name.partition(":")
    server = rest.partition("@")[2] or (rest if kind == "memory" else "")
    found: dict[str, Any] = {"kind": kind}
    if server:
        found["server"] = server
    return found
