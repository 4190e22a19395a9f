"""Which links the bytes of a path cross, in which direction, whose they are, and how fast each is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hoptrace.paths_hops import Mechanism
from hoptrace.paths_system import System

__all__ = ["End", "PathLink", "links_of", "stage_rate"]

End = Literal["src", "dst", "shared"]
_DEVICE = ("hbm", "peer_hbm", "remote_hbm")
_ATTAINED = ("attained_bytes_per_s", "bytes_per_s")


@dataclass(frozen=True, slots=True)
class PathLink:
    """One direction of one link.

    Attributes:
        name: kind and direction (`pcie.d2h`, `nic.tx`, `peer.in`, `cxl.write`).
        bytes_per_s: of that direction, of all devices or adapters that share the work.
        end: whose it is: the server's at the source, that at the destination, or one for all (``shared``).
        source: whence the rate is. of: the part of the machine that has it. notes: what to know of it.
    """

    name: str
    bytes_per_s: int
    end: End
    source: str
    of: str = ""
    notes: tuple[str, ...] = ()


def links_of(system: System, m: Mechanism, src: str, dst: str, ranks: int, nics: int) -> tuple[PathLink, ...]:
    """The links of a way, in its order; empty where a core's own loads and stores set the pace.

    Raises:
        InputError: a rate that is not known, or a link that the machine lacks.
    """
    if not any(s.rate == "link" for s in m.steps):
        return ()
    ends = (src, dst)
    if m.name == "sockets":
        rate = system.constant("socket_bytes_per_s")
        return tuple(PathLink(n, int(rate.value * nics), e, rate.source, rate.of) for n, e in _pair("nic.tx", "nic.rx"))
    if m.moves == "rdma":
        keys = ("together_bytes_per_s", *_ATTAINED) if nics > 1 else _ATTAINED
        wires = [_link(system, "nic", n, e, nics, keys=keys) for n, e in _pair("nic.tx", "nic.rx")]
        if m.name.endswith("_staged") or not system.has_link("pcie"):
            return tuple(wires)
        before = _side(system, "pcie", "d2h", ranks) if src in _DEVICE else []
        after = _side(system, "pcie", "h2d", ranks) if dst in _DEVICE else []
        return (*before, *wires, *after)
    if m.name == "peer_pcie":
        keys = ("peer_bytes_per_s", *_ATTAINED)
        return tuple(_link(system, "pcie", n, e, ranks, keys=keys) for n, e in _pair("pcie.d2h", "pcie.h2d"))
    if "peer_hbm" in ends:
        keys = ("peer_bytes_per_s", *_ATTAINED)  # one peer's share, where the fabric is a mesh
        return tuple(_link(system, "peer", n, e, ranks, keys=keys) for n, e in _pair("peer.out", "peer.in"))
    if m.name == "c2c":
        return tuple(_side(system, "c2c", "d2h" if src == "hbm" else "h2d", ranks))
    found: list[PathLink] = []
    if "hbm" in ends or "window" in ends:
        found += _side(system, "pcie", "d2h" if src == "hbm" else "h2d", ranks, kernel=m.name == "kernel_copy")
    if "cxl_expander" in ends or "cxl_pool" in ends:
        found += _cxl(system, src, dst)
    if "nvme" in ends:
        way: tuple[str, End] = ("read", "src") if src == "nvme" else ("write", "dst")
        found.append(_link(system, "nvme", f"nvme.{way[0]}", way[1], 1, keys=(f"{way[0]}_bytes_per_s", "bytes_per_s")))
    return tuple(found)


def stage_rate(system: System) -> tuple[float, str]:
    """At what one device's bytes go into, or out of, host memory, and the source of that."""
    rate, _, source, _ = system.rate("pcie", _ATTAINED)
    return rate, source


def _pair(out: str, into: str) -> tuple[tuple[str, End], tuple[str, End]]:
    return (out, "src"), (into, "dst")


def _side(system: System, link: str, direction: str, ranks: int, *, kernel: bool = False) -> list[PathLink]:
    """A device's link to its host, in the direction of the data, and what it carries in both directions at once if that is less
    than twice as much; ``kernel``: by a copy kernel, not by DMA engines."""
    end: End = "src" if direction == "d2h" else "dst"
    found = [_link(system, link, f"{link}.{direction}", end, ranks)]
    if system.has_rate(link, "both_bytes_per_s"):
        keys = (*(("both_kernel_bytes_per_s",) if kernel else ()), "both_bytes_per_s")
        found.append(_link(system, link, f"{link}.both", end, ranks, keys=keys))
    return found


def _cxl(system: System, src: str, dst: str) -> list[PathLink]:
    """The host's adapter, in its direction, and the pool behind it. A device goes through the root complex, at its own rate."""
    ends = (src, dst)
    into = dst.startswith("cxl")
    direction: str = "write" if into else "read"
    end: End = "src" if into else "dst"
    keys: tuple[str, ...] = (f"{direction}_bytes_per_s", "bytes_per_s")
    name = f"cxl.{direction}"
    if "hbm" in ends:
        keys = ("gpu_bytes_per_s", *keys)
    found = [_link(system, "cxl", name, end, 1, keys=keys, places=ends)]
    if "cxl_pool" in ends and "pool_bytes_per_s" in system.parts.get("pool", {}).get("links", {}).get("cxl", {}):
        found.append(_link(system, "cxl", "pool", "shared", 1, keys=("pool_bytes_per_s",), places=ends))
    return found


def _link(
    system: System, link: str, name: str, end: End, count: int, *, keys: tuple[str, ...] = _ATTAINED, places: tuple[str, ...] = ()
) -> PathLink:
    rate, key, source, of = system.rate(link, keys, places)
    bound = key == "bytes_per_s" and link != "c2c"
    notes = (f"{name}: what it attains is not known; this is its peak.",) if bound or link == "c2c" else ()
    return PathLink(name, int(rate * count), end, source, of, notes)
