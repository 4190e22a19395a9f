"""What the devices did beside the steps: GPUs, errors of links, interrupts, pressure; each only where counters have it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from hoptrace.manifest import Manifest
from hoptrace.reader import Trace

__all__ = ["BUT", "KINDS", "Devices", "Gpu", "Trouble", "Vector", "devices_of"]

KINDS = ("gpu", "pcie", "nvlink", "c2c", "xgmi", "rdma", "net", "irq", "softirq", "pressure")
"""Kinds of entities that are looked at."""
BUT = ("data_bytes", "raw_bytes")
"""Counters of theirs that stand in the ledger."""

_LINKS = ("pcie", "nvlink", "c2c", "xgmi", "rdma", "net", "gpu")
# What tells of trouble, by what drivers call it (nvml.h, the InfiniBand ABI file of the kernel, ethtool statistics).
_TROUBLE = re.compile(
    r"error|replay|recover|nak|crc|discard|drop|malformed|overrun|retrans|retry|retries|timeout|out_of_|bad_|downed|"
    r"_err(_|$)|xmit_wait|pause|l0_to_recovery|unsupported_requests"
)
_EVENTS = re.compile(r"xid|device|gpu", re.I)
_GROUPS = {
    "gpus": "GPU memory, clocks and errors", "links": "errors of links", "vectors": "interrupts by vector",
    "pressure": "pressure",
}  # fmt: skip
_MOST = 12
_VECTORS = 8
_SOURCES = {
    "gpus": ("nvml", "nvidia", "gpm", "amd", "dcgm"), "links": ("nvml", "nvidia", "infiniband", "ethtool", "aer", "pcie"),
    "vectors": ("interrupts",), "pressure": ("pressure",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory in use (mean and most), clocks (mean, MHz, by what is clocked), time at reduced clocks by reason, energy."""

    entity: str
    memory_mean_bytes: int | None
    memory_most_bytes: int | None
    memory_bytes: int | None
    clocks_mhz: dict[str, float]
    throttled_ns: dict[str, int]
    window_ns: int | None
    energy_mj: int | None

    def as_dict(self) -> dict[str, Any]:
        clocks = {k: round(v, 1) for k, v in self.clocks_mhz.items()}
        return {f: getattr(self, f) for f in self.__slots__} | {"clocks_mhz": clocks}


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error counter of a device or link that rose."""

    entity: str
    name: str
    direction: str | None
    total: int

    def as_dict(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__slots__}


@dataclass(frozen=True, slots=True)
class Vector:
    """Interrupts of one vector. ``owner``: the chip and device that it belongs to, where that was told."""

    entity: str
    owner: str | None
    name: str
    total: int
    per_s: float | None

    def as_dict(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__slots__} | {"per_s": None if self.per_s is None else round(self.per_s, 3)}


@dataclass(frozen=True)
class Devices:
    """``trouble``: the largest first. ``vectors``: the busiest. ``pressure``: share of the time in which something wanted a
    resource and had none, by entity and counter. ``events``: of devices, (time_ns, kind, detail). ``missing``: why a group is
    empty."""

    gpus: list[Gpu]
    trouble: list[Trouble]
    quiet_counters: int
    vectors: list[Vector]
    pressure: dict[str, float]
    events: list[tuple[int, str, str]]
    missing: dict[str, str] = field(default_factory=dict)

    def lacking(self) -> list[str]:
        """What cannot be shown, in sentences: groups that lack for the same reason together."""
        out = []
        for why in dict.fromkeys(self.missing.values()):
            groups = [_GROUPS[g] for g, w in self.missing.items() if w == why]
            text = f"{', '.join(groups)}: {why}."
            out.append(text[0].upper() + text[1:])
        return out

    def as_dict(self) -> dict[str, Any]:
        return {
            "gpus": [g.as_dict() for g in self.gpus],
            "trouble": [t.as_dict() for t in self.trouble],
            "error_counters_at_rest": self.quiet_counters,
            "vectors": [v.as_dict() for v in self.vectors],
            "pressure": {k: round(v, 6) for k, v in self.pressure.items()},
            "events": [{"time_ns": t, "kind": k, "detail": d} for t, k, d in self.events],
            "missing": self.missing,
        }


def devices_of(trace: Trace, totals: pl.DataFrame) -> Devices:
    """From :func:`hoptrace.analysis.counters.counter_totals` with the entities of :data:`KINDS`."""
    kind = pl.col("entity").str.split(":").list.first()
    told = totals.with_columns(kind.alias("kind"))
    gpus = [
        _gpu(str(entity), rows.to_dicts())
        for (_, entity), rows in told.filter(pl.col("kind") == "gpu").group_by("host", "entity", maintain_order=True)
    ]
    errors = [
        r for r in told.filter(pl.col("kind").is_in(list(_LINKS)) & (pl.col("semantics") == "cumulative")).to_dicts()
        if r["total"] is not None and r["unit"] not in ("bytes", "ns", "mJ") and _TROUBLE.search(r["name"])
    ]  # fmt: skip
    risen = sorted((r for r in errors if r["total"] > 0), key=lambda r: (-r["total"], r["entity"], r["name"]))
    vectors = [
        Vector(
            r["entity"],
            _owner(r["incarnation"]),
            r["name"],
            round(r["total"]),
            r["total"] * 1e9 / r["counted_ns"] if r["counted_ns"] else None,
        )
        for r in told.filter(pl.col("kind").is_in(["irq", "softirq"]) & (pl.col("total") > 0)).to_dicts()
    ]
    vectors.sort(key=lambda v: (-v.total, v.entity))
    pressure = {
        f"{r['entity'].removeprefix('pressure').removeprefix(':')} {r['name'].removesuffix('_ns')}".strip().replace("_", " "): r[
            "total"
        ]
        / r["counted_ns"]
        for r in told.filter((pl.col("kind") == "pressure") & (pl.col("counted_ns") > 0)).to_dicts()
        if r["total"] is not None and r["name"].endswith("_ns")
    }
    groups = {"gpus": gpus, "links": errors, "vectors": vectors, "pressure": list(pressure)}
    missing = {name: _why(name, trace.manifest) for name, found in groups.items() if not found}
    return Devices(
        gpus, [Trouble(r["entity"], r["name"], r["direction"] or None, round(r["total"])) for r in risen[:_MOST]],
        len(errors) - len(risen), vectors[:_VECTORS], pressure, _events(trace), missing,
    )  # fmt: skip


def _owner(incarnation: str | None) -> str | None:
    """What stands behind the boot in the incarnation of a vector."""
    return (incarnation or "").partition("/")[2] or None


def _gpu(entity: str, rows: Iterable[dict[str, Any]]) -> Gpu:
    by_name = {r["name"]: r for r in rows}

    def value(figure: str, *words: str) -> int | None:
        for name, r in by_name.items():
            if all(w in name for w in words) and r[figure] is not None:
                return round(r[figure])  # type: ignore[no-any-return]
        return None

    throttled = {
        n.removesuffix("_throttle_ns"): round(r["total"]) for n, r in by_name.items() if n.endswith("_throttle_ns") and r["total"]
    }
    windows = [r["counted_ns"] for n, r in by_name.items() if n.endswith("_throttle_ns") and r["counted_ns"]]
    clocks = {
        n.removesuffix("_mhz").removesuffix("_clock"): float(r["mean"])
        for n, r in by_name.items()
        if n.endswith("_mhz") and r["mean"] is not None and "max" not in n
    }
    return Gpu(
        entity, value("mean", "used", "bytes"), value("largest", "used", "bytes"), value("largest", "total", "bytes"), clocks,
        throttled, max(windows, default=None), value("total", "energy"),
    )  # fmt: skip


def _events(trace: Trace) -> list[tuple[int, str, str]]:
    """What devices told: XIDs, a device that was lost or came back."""
    rows = trace.table("events").select("time_ns", "kind", "detail").collect()
    found = [(int(t), str(k), str(d or "")) for t, k, d in rows.rows() if _EVENTS.search(str(k))]
    return sorted(found)[:100]


def _why(group: str, manifest: Manifest) -> str:
    """Why nothing of a group was recorded: what the collectors said that would have."""
    words = _SOURCES[group]
    asked = [c for c in manifest.collectors if any(w in c.name.lower() for w in words)]
    refused = [f"{c.name}: {c.reason}" for c in asked if not c.available and c.reason]
    return "; ".join(refused[:3]) if refused else "no collector recorded it"
