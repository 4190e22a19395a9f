"""What a platform file may say: devices, hosts, adapters and CXL memory, with their links and the costs of their access paths.

A file is TOML. ``base`` takes a platform of the catalogue and the file changes parts of it. What is unknown stays out: a figure
that nobody has measured is asked for where it is needed, never guessed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from hoptrace.errors import InputError

__all__ = ["COMPANIONS", "CONSTANTS", "KINDS", "LINKS", "checked", "merged"]

KINDS = ("device", "host", "nic", "cxl")

CONSTANTS: MappingProxyType[str, str] = MappingProxyType({
    "load_ns": "a core's load of one cache line from local DRAM",
    "remote_load_ns": "the same from the other socket's DRAM",
    "memcpy_bytes_per_s": "one core's copy within the host's DRAM",
    "uncached_read_ns": "a core's read of an uncacheable device window, one round trip",
    "uncached_read_bytes": "bytes of one such read",
    "uncached_write_bytes_per_s": "a core's posted stores into an uncacheable device window, in a stream",
    "posted_write_ns": "a core's cost of issuing one posted write (a doorbell, a line of write-combining stores)",
    "device_read_ns": "a device's read of one line of host memory",
    "interrupt_ns": "interrupt and wake-up instead of a poll",
    "wait_ns": "a core's wait for finished work of a device (stream synchronisation)",
    "copy_ns": "one small copy by the device's copy engine, call to completion",
    "launch_ns": "launch of one kernel",
    "peer_copy_ns": "one small copy to a peer device over the scale-up link",
    "peer_load_ns": "a load or store of one line of a peer device's memory over the scale-up link",
    "c2c_load_ns": "a load or store of one line over the chip-to-chip link",
    "window_write_bytes_per_s": "a core's write-combining stores into the device's window, in a stream",
    "window_read_ns": "a core's smallest read of the device's window",
    "window_read_bytes_per_s": "a core's reads of the device's window, in a stream",
    "flag_round_trip_ns": "a core writes a flag, the device polls it and answers, the core polls the answer",
    "rdma_write_ns": "a one-sided write of a few bytes, host to host, one switch",
    "rdma_read_ns": "a one-sided read of a few bytes, round trip, one switch",
    "rdma_hop_ns": "each further switch, one way",
    "rdma_gpu_ns": "more for a device's memory instead of the host's",
    "rdma_request_ns": "each request after the first that is posted with it",
    "rdma_sync_ns": "synchronisation of device, core and adapter around one transfer that a core drives",
    "scatter_entries": "pieces that one request can name",
    "socket_message_ns": "a small message by sockets, one way, to another host",
    "socket_bytes_per_s": "a stream of messages to another host, of one adapter",
    "loopback_message_ns": "a small message by sockets, one way, within the host",
    "loopback_bytes_per_s": "a stream of messages within the host",
    "cxl_load_ns": "a core's load of one line of CXL memory",
    "nt_store_line_ns": "a line written by non-temporal stores, after the first access",
    "flush_write_line_ns": "a line written and flushed, after the first access",
    "flush_read_line_ns": "a line flushed and read, after the first access",
    "pool_uncached_read_line_ns": "a line read from CXL memory that is mapped uncacheable",
    "pool_uncached_write_line_ns": "a line written to CXL memory that is mapped uncacheable",
    "dsa_write_ns": "one copy into CXL memory by the CPU's copy engine (DSA), without its bytes",
    "dsa_read_ns": "one copy out of CXL memory by the CPU's copy engine (DSA), without its bytes",
    "cache_hit_rate": "share of coherent accesses that the local cache answers, 0 to 1",
    "cache_hit_ns": "a coherent access that the local cache answers",
    "cache_miss_ns": "a coherent access that crosses the link",
    "cache_invalidations_per_line": "invalidations of the other side's copy that an access causes, on average",
    "cache_invalidate_ns": "one invalidation, until it is confirmed",
    "nvme_read_ns": "one small read of the drive",
    "nvme_write_ns": "one small write to the drive",
    "nvme_command_ns": "each command after the first that is queued with it",
})  # fmt: skip
"""The constants of the access paths: name (with its unit) and meaning."""

LINKS: MappingProxyType[str, tuple[str, ...]] = MappingProxyType({
    "pcie": ("bytes_per_s", "attained_bytes_per_s", "both_bytes_per_s", "both_kernel_bytes_per_s", "peer_bytes_per_s"),
    "peer": ("bytes_per_s", "attained_bytes_per_s", "peer_bytes_per_s"),
    "c2c": ("bytes_per_s", "attained_bytes_per_s"),
    "nic": ("bytes_per_s", "attained_bytes_per_s", "together_bytes_per_s"),
    "cxl": ("bytes_per_s", "read_bytes_per_s", "write_bytes_per_s", "gpu_bytes_per_s", "pool_bytes_per_s"),
    "nvme": ("bytes_per_s", "read_bytes_per_s", "write_bytes_per_s"),
})  # fmt: skip
"""The links of a platform and the rates that each may have, of one direction (``both_``: of both at once, by DMA engines;
``both_kernel_``: by a copy kernel)."""

COMPANIONS = ("host", "nic", "expander", "pool")
_NUMBERS = ("flops_per_s", "memory_bytes_per_s", "memory_bytes", "step_overhead_ns")
_KEYS = ("name", "kind", "base", "description", *_NUMBERS, *COMPANIONS, "links", "constants", "allreduce", "sources")


def checked(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The content of a platform file, if all of it is known and of its type.

    Raises:
        InputError: names the file, the key and what may stand there.
    """
    _known(data, _KEYS, where, "")
    if (kind := data.get("kind", "device")) not in KINDS:
        raise InputError(f"{where}: kind {kind!r} is unknown.", hint=f"There are: {', '.join(KINDS)}.")
    for key in ("name", "base", "description", *COMPANIONS):
        if key in data and not isinstance(data[key], str):
            raise InputError(f"{where}: {key} must be text, not {data[key]!r}.")
    for key in _NUMBERS:
        if key in data:
            _number(data[key], where, key, least=0)
            _in_units(data[key], where, key, key)
    links = _table(data, "links", where)
    _known(links, LINKS, where, "links.")
    for name, link in links.items():
        if not isinstance(link, Mapping):
            raise InputError(f"{where}: links.{name} must be a table, as [links.{name}] with bytes_per_s = …")
        _known(link, (*LINKS[name], "source"), where, f"links.{name}.")
        for key in LINKS[name]:
            if key in link:
                _number(link[key], where, f"links.{name}.{key}", above=0)
                _in_units(link[key], where, f"links.{name}.{key}", "link")
        _below_peak(link, where, name)
    constants = _table(data, "constants", where)
    _known(constants, CONSTANTS, where, "constants.")
    for name, value in constants.items():
        _constant(value, where, name)
    _allreduce(data.get("allreduce", []), where)
    _table(data, "sources", where)
    return dict(data)


def merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with what ``own`` says instead: links and constants one by one, `allreduce` as a whole."""
    found = {**base, **{k: v for k, v in own.items() if k != "base"}}
    for table in ("constants", "sources"):
        found[table] = {**base.get(table, {}), **own.get(table, {})}
    links = {k: dict(v) for k, v in base.get("links", {}).items()}
    for name, link in own.get("links", {}).items():
        # Rates of the base must not stand beside a rate of the file that they would overrule.
        links[name] = dict(link) if "bytes_per_s" in link else {**links.get(name, {}), **link}
    found["links"] = links
    return found


def _known(found: Iterable[str], allowed: Iterable[str], where: str, prefix: str) -> None:
    allowed = list(allowed)
    for key in found:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"Did you mean {prefix}{near[0]}? " if near else ""
            raise InputError(f"{where}: there is no key {prefix}{key}.", hint=f"{hint}There are: {', '.join(allowed)}.")


_LEAST = {"flops_per_s": 1e9, "memory_bytes_per_s": 1e9, "memory_bytes": 1e6, "link": 1e3}
"""Less is a figure in another unit (TFLOP/s, GB/s, GB): nothing that serves a model is so slow or small."""
_MOST_RATE, _MOST_NS = 1e18, 1e12


def _in_units(value: float, where: str, key: str, kind: str) -> None:
    """InputError for what is out of all proportion, and would leave the engine's 64 bits."""
    least, unit = _LEAST.get(kind, 0.0), "bytes" if "bytes" in key else "FLOP"
    if kind == "step_overhead_ns" and value > _MOST_NS:
        raise InputError(f"{where}: {key} is in ns, at most {_MOST_NS:g}, not {value:g}.")
    if kind == "memory_bytes" and value and not least <= value <= _MOST_RATE:
        raise InputError(
            f"{where}: {key} is in bytes, {value:g} is no size of a memory.", hint="80 GB is 80e9, 80 GiB 85_899_345_920."
        )
    if kind != "memory_bytes" and least and value and not least <= value <= _MOST_RATE:
        hint = "1 TFLOP/s is 1e12." if unit == "FLOP" else "1 GB/s is 1e9."
        raise InputError(f"{where}: {key} is in {unit} a second, {value:g} is out of proportion.", hint=hint)


def _below_peak(link: Mapping[str, Any], where: str, name: str) -> None:
    """InputError where a link carries more than its peak (both directions: twice that; a pool is not one link)."""
    peak = float(link.get("bytes_per_s", float("inf")))
    for key in LINKS[name]:
        most = 2 * peak if key.startswith("both_") else peak
        if key != "pool_bytes_per_s" and link.get(key, 0) > most:
            raise InputError(
                f"{where}: links.{name}.{key} = {link[key]:g} is above the peak that bytes_per_s = {peak:g} sets.",
                hint="bytes_per_s is the peak of one direction.",
            )


def _table(data: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {key} must be a table, as [{key}].")
    return value


def _number(value: Any, where: str, key: str, *, least: float | None = None, above: float | None = None) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) < 1e30
    if not good or (least is not None and value < least) or (above is not None and value <= above):
        raise InputError(f"{where}: {key} must be a {'positive number' if above == 0 else 'number of 0 or more'}, not {value!r}.")
    return float(value)


def _constant(value: Any, where: str, name: str) -> None:
    key = f"constants.{name}"
    positive = name.endswith("_per_s") or name in ("scatter_entries", "uncached_read_bytes")
    bounds: dict[str, float] = {"above": 0} if positive else {"least": 0}
    if isinstance(value, Mapping):
        _known(value, ("value", "low", "high", "source"), where, f"{key}.")
        if "value" not in value:
            raise InputError(
                f"{where}: {key} has no value.", hint=f"Write {name} = 100, or {name} = {{value = 100, source = '…'}}."
            )
        numbers = {k: _number(v, where, f"{key}.{k}", **bounds) for k, v in value.items() if k != "source"}
        if not numbers.get("low", numbers["value"]) <= numbers["value"] <= numbers.get("high", numbers["value"]):
            raise InputError(f"{where}: {key}: low, value and high must rise.")
        number = numbers["value"]
    else:
        number = _number(value, where, key, **bounds)
    if name.endswith("_ns") and number > _MOST_NS:
        raise InputError(f"{where}: {key} is in ns, at most {_MOST_NS:g}, not {number:g}.")
    if name.endswith("_per_s"):
        _in_units(number, where, key, "link")
    if name in ("scatter_entries", "uncached_read_bytes", "cache_invalidations_per_line") and number > 1e6:
        raise InputError(f"{where}: {key} = {number:g} is out of proportion.")
    if name == "cache_hit_rate" and number > 1:
        raise InputError(f"{where}: {key} is a share, at most 1, not {number:g}.")
    if name in ("scatter_entries", "uncached_read_bytes") and number != int(number):
        raise InputError(f"{where}: {key} is a whole number, not {number:g}.")


def _allreduce(rows: Any, where: str) -> None:
    if not isinstance(rows, list):
        raise InputError(f"{where}: allreduce must be tables, as [[allreduce]] with ranks, bytes, ns.")
    seen: set[int] = set()
    for row in rows:
        if not isinstance(row, Mapping):
            raise InputError(f"{where}: allreduce must be tables, as [[allreduce]] with ranks, bytes, ns.")
        _known(row, ("ranks", "bytes", "ns", "source"), where, "allreduce.")
        ranks, sizes, times = row.get("ranks"), row.get("bytes"), row.get("ns")
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 2 or ranks in seen:
            raise InputError(f"{where}: allreduce.ranks must be a number of 2 or more that stands once, not {ranks!r}.")
        seen.add(ranks)
        if not isinstance(sizes, list) or not isinstance(times, list) or len(sizes) != len(times) or len(sizes) < 2:
            raise InputError(f"{where}: allreduce of {ranks} ranks needs `bytes` and `ns`, two or more of each, equally many.")
        for key, values in (("bytes", sizes), ("ns", times)):
            numbers = [_number(v, where, f"allreduce.{key}", above=0) for v in values]
            if key == "ns" and max(numbers) > _MOST_NS:
                raise InputError(f"{where}: allreduce.ns of {ranks} ranks is in ns, at most {_MOST_NS:g}.")
            if key == "bytes" and any(b <= a for a, b in pairwise(numbers)):
                raise InputError(f"{where}: allreduce.{key} of {ranks} ranks must rise.")
