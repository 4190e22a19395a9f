"""Platforms: the catalogue of devices that comes with hoptrace, and the graph of nodes and links that a manifest holds."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Manifest
from hoptrace.platform_file import checked, merged

__all__ = ["Graph", "Link", "Node", "catalogue", "component", "graph_of", "load_platform", "platform_text", "platforms"]


@dataclass(frozen=True, slots=True)
class Node:
    """A place of the platform graph: a device's memory, a compute device, a disk, a process. Null is unknown.

    ``kind``: compute, hbm, dram, cxl, nvme, client, proxy, server …; rates are of one direction, in bytes and FLOP a second.
    ``model``: as the driver or the kernel names it; ``uuid``: of a GPU; ``numa``: NUMA node (that a device hangs on, or that a
    memory is); ``bdf``: PCI address (0000:17:00.0); ``cores``: CPUs of a socket.
    """

    name: str
    kind: str | None = None
    host: str | None = None
    server: str | None = None
    capacity_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    flops_per_s: float | None = None
    model: str | None = None
    uuid: str | None = None
    numa: int | None = None
    bdf: str | None = None
    cores: int | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two nodes. ``bytes_per_s`` is what one direction carries at most; ``entity`` names the counters that count
    its bytes (`counters.entity`). ``read_bytes_per_s``, ``write_bytes_per_s``: out of the memory at end ``b`` and into it, where
    the two are told apart; ``generation``, ``width``: of PCIe; ``source``: who told the figures."""

    name: str
    a: str | None = None
    b: str | None = None
    kind: str | None = None
    bytes_per_s: float | None = None
    latency_ns: float | None = None
    entity: str | None = None
    generation: int | None = None
    width: int | None = None
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes and links by name, as far as the manifest tells them. ``coherent``: groups of nodes (by name) that see each other's
    memory through their caches."""

    nodes: dict[str, Node] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    coherent: tuple[tuple[str, ...], ...] = ()


_T = TypeVar("_T", Node, Link)


def graph_of(manifest: Manifest) -> Graph:
    """The platform graph of a manifest. What is no node or link, or a value of the wrong type, is read as unknown."""
    found = manifest.platform
    return Graph(
        {n.name: n for n in (_read(Node, x) for x in _entries(found, "nodes")) if n is not None},
        {k.name: k for k in (_read(Link, x) for x in _entries(found, "links")) if k is not None},
        tuple(g for g in (_group(x) for x in _entries(found, "coherent")) if len(g) > 1),
    )


def _entries(found: Mapping[str, Any], name: str) -> list[Any]:
    entries = found.get(name)
    return entries if isinstance(entries, list) else []


def _group(entry: Any) -> tuple[str, ...]:
    return tuple(x for x in entry if isinstance(x, str)) if isinstance(entry, list) else ()


def _read(kind: type[_T], entry: Any) -> _T | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        return None
    values: dict[str, Any] = {}
    for f in fields(kind):
        value = entry.get(f.name)
        if str(f.type).startswith("str"):
            values[f.name] = value if isinstance(value, str) else None
        elif isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
            values[f.name] = int(value) if str(f.type).startswith("int") else float(value)
    return kind(**values)


def catalogue() -> dict[str, dict[str, Any]]:
    """All that comes with hoptrace, by name: devices, hosts, network adapters, CXL memory (`kind`), as their files have it."""
    return {name: deepcopy(data) for name, (data, _) in _files().items()}


def platforms() -> dict[str, dict[str, Any]]:
    """The devices that come with hoptrace, by name: what has a roofline."""
    return {name: data for name, data in catalogue().items() if data.get("kind", "device") == "device"}


@cache
def _files() -> dict[str, tuple[dict[str, Any], str]]:
    found = {}
    for entry in sorted(files("hoptrace.platforms").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".toml"):
            text = entry.read_text(encoding="utf-8")
            data = checked(tomllib.loads(text), entry.name)
            found[str(data["name"])] = (data, text)
    return found


def platform_text(name_or_path: str) -> str:
    """An entry of the catalogue, or a platform file, as TOML, with the sources. Raises as :func:`component`."""
    component(name_or_path)
    known = _files().get(name_or_path)
    return known[1] if known else Path(name_or_path).read_text(encoding="utf-8")


def component(name_or_path: str) -> dict[str, Any]:
    """An entry of the catalogue by its name, or a TOML file, laid over its ``base`` if it has one.

    Raises:
        UsageError: neither. InputError: the file says what no platform file may say.
    """
    known = catalogue()
    if name_or_path in known:
        return known[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        near = [k for k in known if k.startswith(name_or_path.lower())] or difflib.get_close_matches(name_or_path, known, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"There is no platform {name_or_path!r}.", hint=f"{hint}There are: {', '.join(known)}; or a TOML file.")
    try:
        data = checked(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}.") from None
    except ValueError as e:  # TOMLDecodeError, UnicodeDecodeError; an integer of thousands of digits raises a plain one
        raise InputError(f"{path} is not TOML: {e}.") from None
    except RecursionError:
        raise InputError(f"{path} is not TOML that can be read: it is nested too deeply.") from None
    base = data.get("base")
    if base is not None:
        if base not in known:
            near = difflib.get_close_matches(base, known, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise InputError(f"{path}: there is no base {base!r}.", hint=f"{hint}There are: {', '.join(known)}.")
        own = {k: v for k, v in data.items() if k != "name"}
        data = {**merged(known[base], own), "name": str(data.get("name", path.stem)), "base": base}
        checked(data, str(path))  # what it changes has to go with what it keeps
    return {"name": path.stem, **data}


def load_platform(name_or_path: str) -> dict[str, Any]:
    """A device by its name, or from a TOML file with ``flops_per_s`` and ``memory_bytes_per_s`` (what it attains) or a ``base``.

    Raises:
        UsageError: neither, or no device. InputError: the file is no platform.
    """
    data = component(name_or_path)
    if (kind := data.get("kind", "device")) != "device":
        hint = f"Devices are: {', '.join(platforms())}; or a TOML file."
        raise UsageError(f"{name_or_path} is of kind {kind}: it computes nothing, so it has no roofline.", hint=hint)
    for key in ("flops_per_s", "memory_bytes_per_s"):
        value = data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise InputError(f"{name_or_path}: {key} must be a positive number, not {value!r}.")
    return data
