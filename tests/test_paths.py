"""Access paths: what they add up to, what they refuse, and the laws that they keep on any machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoptrace.access import ACCESS
from hoptrace.errors import InputError, UsageError
from hoptrace.kv import KvGeometry
from hoptrace.paths import Layout, PathCost, collective, default_mechanism, system_of, way_of
from hoptrace.paths_hops import PLACES
from hoptrace.paths_mechanisms import MECHANISMS
from hoptrace.paths_system import System
from hoptrace.platform import catalogue, platforms
from hoptrace.platform_file import CONSTANTS, LINKS
from hoptrace.schema import MECHANISMS as MOVES

# Every constant and every link has a figure: what nobody has measured is given by hand here.
ODD = {"cache_hit_rate": 0.5, "scatter_entries": 30, "uncached_read_bytes": 32}
FULL: dict[str, Any] = {
    "name": "full",
    "constants": {n: ODD.get(n, 1000.0) for n in CONSTANTS},
    "links": {n: {"bytes_per_s": 1e9} for n in LINKS},
}
H100 = system_of("h100-sxm-80gb")
EVERY = [(m.name, a, b) for m in MECHANISMS.values() for a, b in m.ends]


def way(system: System, name: str, src: str, dst: str, **kw: int) -> PathCost:
    return way_of(system, name, src, dst, **{"block_bytes": 16384, **kw})


def test_a_copy_by_hand() -> None:
    # 64 pieces: 64 calls of 6.5 us, then 2 MiB at 55 GB/s: 38,130.04 ns, rounded up.
    w = way(H100, "copy_engine", "hbm", "dram", block_bytes=2 << 20, pieces=64)
    assert (w.base_ns, w.per_block_ns, w.bytes_per_s) == (0, 416_000, 55_000_000_000)
    assert w.time_ns() == 416_000 + 38_131 and w.range_ns() == (64 * 6000 + 38_131, 64 * 7000 + 38_131)
    assert w.time_ns(blocks=3) == 3 * 416_000 + 114_391 and w.time_ns(0, blocks=0) == 0
    assert [(k.name, k.bytes_per_s, k.end) for k in w.links] == [
        ("pcie.d2h", 55_000_000_000, "src"), ("pcie.both", 83_400_000_000, "src")
    ]  # fmt: skip
    # Queue, doorbell, fetch, completion, poll of every piece; the engine and the wire carry it.
    assert (w.control_ops, w.payload_hops, w.descriptors) == (5 * 64, 2 * 64, 64)
    two = way(H100, "copy_engine", "hbm", "dram", block_bytes=2 << 20, pieces=32, ranks=2)
    assert (two.per_block_ns, two.control_ops, two.descriptors) == (208_000, 320, 64), "two ranks copy side by side"
    assert two.links[0].bytes_per_s == 110_000_000_000


def test_rdma_by_hand() -> None:
    # One-sided write 1,210 ns, device memory at both ends 2 x 400; 128 pieces in lists of 30: 5 requests of 3.03 ns.
    w = way(H100, "rdma_write", "hbm", "remote_hbm", pieces=128)
    assert (w.base_ns, w.per_block_ns) == (2010, 16) and w.mechanism == "rdma"
    assert [k.name for k in w.links] == ["pcie.d2h", "pcie.both", "nic.tx", "nic.rx", "pcie.h2d", "pcie.both"]
    assert [k.end for k in w.links] == ["src", "src", "src", "dst", "dst", "dst"]
    # queue entry and fetch for each request, doorbell, completion and poll once; three payload hops a request
    assert (w.control_ops, w.payload_hops, w.descriptors) == (2 * 5 + 3, 3 * 5, 128)
    # A read crosses every further switch twice, a write once.
    assert way(H100, "rdma_read", "remote_dram", "dram", switches=3).base_ns == 2390 + 2 * 2 * 240
    assert way(H100, "rdma_write", "dram", "remote_dram", switches=3).base_ns == 1210 + 2 * 240
    # Several adapters together reach less each than one alone.
    assert way(H100, "rdma_write", "dram", "remote_dram").bytes_per_s == 44_000_000_000
    assert way(H100, "rdma_write", "dram", "remote_dram", nics=8).bytes_per_s == 190_000_000_000
    # Staged: 16 KiB out and in at 55 GB/s, whole, and two copies of 6.5 us.
    staged = way(H100, "rdma_write_staged", "hbm", "remote_hbm")
    assert staged.per_block_ns == 13_599 and staged.base_ns == 1210  # 13,000 + 595.8 + 3.03, rounded up
    assert [k.name for k in staged.links] == ["nic.tx", "nic.rx"]


def test_one_piece_has_the_hops_of_the_ledger() -> None:
    """A transfer of one piece takes the steps that the ledger assumes for its mechanism."""
    for name, access, src, dst in (
        ("rdma_write", "rdma", "dram", "remote_dram"), ("rdma_read", "rdma", "remote_dram", "dram"),
        ("copy_engine", "dma", "hbm", "dram"), ("dma", "dma", "dram", "hbm"), ("peer_copy", "dma", "hbm", "peer_hbm"),
        ("sockets", "message", "dram", "remote_dram"), ("loopback", "loopback", "dram", "dram"),
        ("nvme_read", "file", "nvme", "dram"), ("cpu_memcpy", "memcpy", "dram", "dram_pageable"),
    ):  # fmt: skip
        w = way(system_of(FULL), name, src, dst)
        assert (w.payload_hops, w.control_ops) == (ACCESS[access].payload_hops(), ACCESS[access].control_ops()), name
    # A word of a window: one request, one completion.
    word = way_of(H100, "mmio_read", "window", "core", block_bytes=8)
    assert (word.payload_hops, word.control_ops, word.time_ns()) == (1, 1, 741)


def test_uncached_reads_go_one_by_one() -> None:
    assert way(H100, "mmio_read", "window", "core", block_bytes=4096).time_ns() == 128 * 741  # 32 bytes at a time
    assert way(H100, "mmio_read", "window", "core", block_bytes=4096, pieces=1024).time_ns() == 1024 * 741  # words of 4 bytes
    assert way(H100, "dram_load_store", "dram", "core", block_bytes=4097).time_ns() == 65 * 78


def test_coherent_access_by_hand() -> None:
    with pytest.raises(InputError, match="cache_hit_rate"):
        way(H100, "cxl_cache", "cxl_pool", "core")
    own = {
        "cache_hit_rate": 0.75, "cache_hit_ns": 4, "cache_miss_ns": 300, "cache_invalidations_per_line": 0.5,
        "cache_invalidate_ns": 200,
    }  # fmt: skip
    w = way(system_of("h100-sxm-80gb", constants=own), "cxl_cache", "cxl_pool", "core", block_bytes=640)
    assert w.time_ns() == 10 * (3 + 75 + 100)  # 0.75 x 4 + 0.25 x 300 + 0.5 x 200 a line
    all_hits = system_of("h100-sxm-80gb", constants={**own, "cache_hit_rate": 1, "cache_invalidations_per_line": 0})
    assert way(all_hits, "cxl_cache", "cxl_pool", "core", block_bytes=640).time_ns() == 40


@pytest.mark.parametrize(("name", "src", "dst"), EVERY)
def test_every_path_can_be_priced(name: str, src: str, dst: str) -> None:
    full = system_of(FULL)
    w = way(full, name, src, dst, pieces=7, ranks=2)
    assert w.mechanism in MOVES and w.time_ns() > 0 and w.sources and w.hops
    assert all(h.who and h.kind and h.what for h in w.hops) and src in PLACES and dst in PLACES
    assert w.payload_hops == sum(h.times for h in w.hops if h.payload)
    assert w.payload_hops > 0 or name == "flag"
    # What the hops cost, and the machine adds, is the whole of the fixed time.
    once = sum((Fraction(h.fixed_ns) * h.charged for h in w.hops if h.once and h.fixed_ns is not None), Fraction())
    each = sum((Fraction(h.fixed_ns) * h.charged for h in w.hops if not h.once and h.fixed_ns is not None), Fraction())
    once += sum(Fraction(ns) * n for _, ns, n, at_once in w.extras if at_once)
    each += sum(Fraction(ns) * n for _, ns, n, at_once in w.extras if not at_once)
    own = [s.rate for s in MECHANISMS[name].steps if s.rate not in ("", "link")]
    assert w.base_ns == -(-once // 1)
    assert w.per_block_ns == -(-each // 1) if not own else w.per_block_ns > each


@pytest.mark.parametrize("platform", sorted(catalogue()))
def test_what_is_unknown_is_asked_for_by_name(platform: str) -> None:
    """On every machine of the catalogue each path has a price, or names the key of a platform file that it lacks."""
    system = system_of(platform)
    asked = set()
    for name, src, dst in EVERY:
        try:
            w = way(system, name, src, dst)
        except InputError as e:
            keys = re.findall(r"(\w+) = …", e.hint or "")
            assert keys and all(k in CONSTANTS or any(k in v for v in LINKS.values()) for k in keys), (name, str(e))
            asked |= set(keys)
        else:
            assert all("as given" not in s for s in w.sources), "every default has a source"
    # No sourced figure: these are asked for everywhere.
    assert asked >= {
        "interrupt_ns",
        "loopback_message_ns",
        "memcpy_bytes_per_s",
        "socket_message_ns",
        "peer_load_ns",
        "nvme_read_ns",
    }


def test_figures_that_were_never_read_have_no_default() -> None:
    never = {
        "interrupt_ns", "wait_ns", "socket_message_ns", "loopback_message_ns", "loopback_bytes_per_s", "memcpy_bytes_per_s",
        "peer_load_ns", "c2c_load_ns", "cache_hit_ns", "cache_miss_ns", "cache_invalidate_ns", "cache_hit_rate", "nvme_read_ns",
    }  # fmt: skip
    for name, data in catalogue().items():
        assert not never & set(data.get("constants", {})), name
        for constant, entry in data.get("constants", {}).items():
            assert isinstance(entry, Mapping) and len(entry["source"]) > 20, (name, constant)
        for link in data.get("links", {}).values():
            assert len(link["source"]) > 20, name


def test_usual_mechanisms() -> None:
    gh200 = system_of("gh200")
    assert default_mechanism(H100, "hbm", "dram") == default_mechanism(H100, "dram", "hbm") == "copy_engine"
    assert default_mechanism(gh200, "hbm", "dram") == "c2c" == default_mechanism(system_of("gb200"), "dram", "hbm")
    assert (
        default_mechanism(H100, "hbm", "remote_hbm") == "rdma_write"
        and default_mechanism(H100, "remote_dram", "hbm") == "rdma_read"
    )
    assert default_mechanism(H100, "hbm", "peer_hbm") == "peer_copy" and default_mechanism(H100, "dram", "cxl_pool") == "nt_store"
    with pytest.raises(UsageError, match="No mechanism joins nvme and remote_dram"):
        default_mechanism(H100, "nvme", "remote_dram")
    with pytest.raises(UsageError, match="no place 'hbn'") as e:
        default_mechanism(H100, "hbn", "dram")
    assert "Did you mean hbm?" in str(e.value.hint)


@pytest.mark.parametrize(
    ("args", "kw", "error", "says"),
    [
        (("rmda_write", "hbm", "remote_hbm"), {}, UsageError, "Did you mean rdma_write"),
        (("rdma_write", "remote_hbm", "hbm"), {}, UsageError, "It leads from hbm to remote_hbm"),
        (("copy_engine", "hbm", "dram"), {"pieces": 0}, InputError, "pieces must be at least 1"),
        (("copy_engine", "hbm", "dram"), {"block_bytes": 0}, InputError, "block_bytes must be at least 1"),
        (("rdma_write", "dram", "remote_dram"), {"nics": 0}, InputError, "nics must be at least 1"),
        (("c2c", "hbm", "dram"), {}, InputError, "it has no link c2c"),
    ],
)
def test_refusals(args: tuple[str, str, str], kw: dict[str, int], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as e:
        way(H100, *args, **kw)
    assert says in str(e.value)


def test_what_is_assumed_is_said() -> None:
    said = "Assumed with h100-sxm-80gb: nic-ndr400."
    assert said in way(H100, "rdma_write", "dram", "remote_dram").notes
    assert said not in way(H100, "copy_engine", "hbm", "dram").notes
    named = system_of("h100-sxm-80gb", nic="nic-ndr400")
    assert said not in way(named, "rdma_write", "dram", "remote_dram").notes
    assert "Assumed with h100-sxm-80gb: cxl-pool-switch." in way(H100, "copy_engine", "hbm", "cxl_pool").notes


def test_parts_of_a_machine() -> None:
    slow = system_of("h100-sxm-80gb", host="x86-2s-b", nic="nic-hdr200")
    assert way(slow, "dram_load_store", "dram", "core", block_bytes=64).time_ns() == 115
    assert way(slow, "rdma_write", "dram", "remote_dram").bytes_per_s == 25_000_000_000
    # The same place of a path, two kinds of memory behind it.
    expander, pool = (way(H100, "cxl_load_store", p, "core", block_bytes=64) for p in ("cxl_expander", "cxl_pool"))
    assert (expander.time_ns(), expander.range_ns(), pool.time_ns()) == (275, (140, 410), 750)
    with pytest.raises(UsageError, match="nic-hdr200 is of kind nic, not host"):
        system_of("h100-sxm-80gb", host="nic-hdr200")
    with pytest.raises(UsageError, match="no part 'disk'"):
        system_of("h100-sxm-80gb", disk="x")
    with pytest.raises(InputError, match=r"no key constants\.copy_us"):
        system_of("h100-sxm-80gb", constants={"copy_us": 6.5})


def test_layouts() -> None:
    llama = KvGeometry(layers=32, kv_heads=8, head_size=128, dtype="bf16")
    assert (Layout.of(llama, 16).pieces, Layout.of(llama, 16).piece_bytes) == (64, 32 << 10)
    assert (Layout.of(llama, 16, "layer").pieces, Layout.of(llama, 16, "block").piece_bytes) == (32, 2 << 20)
    deepseek = KvGeometry(layers=61, kv_heads=1, head_size=576, dtype="bf16", tp=8, latent_size=576)
    assert Layout.of(deepseek, 64).pieces == 61 and Layout.of(deepseek, 64).descriptors == 61 * 8
    with pytest.raises(InputError, match="contiguous 'tensor' is unknown"):
        Layout(1, 1, 1, "tensor")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="positive sizes"):
        Layout(0, 1)


@given(
    path=st.sampled_from(EVERY),
    constants=st.dictionaries(st.sampled_from([c for c in CONSTANTS if c.endswith("_ns")]), st.floats(0, 1e5), max_size=6),
    faster=st.floats(1, 100),
    nbytes=st.integers(1, 10**9),
    pieces=st.integers(1, 300),
    ranks=st.integers(1, 8),
)
def test_less_cost_or_a_faster_link_is_never_slower(
    path: tuple[str, str, str], constants: dict[str, float], faster: float, nbytes: int, pieces: int, ranks: int
) -> None:
    kw = {"block_bytes": nbytes, "pieces": pieces, "ranks": ranks}
    slow = way(system_of({**FULL, "constants": {**FULL["constants"], **constants}}), *path, **kw)
    half = {k: v / 2 for k, v in constants.items()}
    links = {n: {"bytes_per_s": 1e9 * faster} for n in LINKS}
    assert way(system_of({**FULL, "constants": {**FULL["constants"], **half}}), *path, **kw).time_ns() <= slow.time_ns()
    quick = way(system_of({**FULL, "links": links, "constants": {**FULL["constants"], **constants}}), *path, **kw)
    assert quick.time_ns() <= slow.time_ns() and quick.base_ns == slow.base_ns
    # Fewer bytes, fewer pieces: never slower; two transfers in one share the base.
    assert way(system_of(FULL), *path, **{**kw, "pieces": 1}).time_ns() <= way(system_of(FULL), *path, **kw).time_ns()
    assert slow.time_ns(blocks=2) <= 2 * slow.time_ns()
    assert slow.time_ns(blocks=2) >= slow.time_ns()


@pytest.mark.parametrize("platform", [n for n, p in platforms().items() if p.get("allreduce")])
def test_an_all_reduce_never_gets_quicker_with_its_bytes(platform: str) -> None:
    system = system_of(platform)
    for row in system.parts["device"]["allreduce"]:
        c = collective(system, row["ranks"])
        times = [c.time_ns(int(10 ** (i / 20))) for i in range(220)]
        assert times == sorted(times) and times[0] == c.latency_ns
        # A point as it was measured, but for the dips; beyond the last, its bandwidth.
        assert c.time_ns(c.sizes[-1]) == c.times_ns[-1] == max(row["ns"]) and c.time_ns(2 * c.sizes[-1]) == 2 * c.times_ns[-1]
    assert collective(system, 1).time_ns(10**9) == 0 == collective(system, 1).control_ops
    with pytest.raises(InputError, match=r"over 3 ranks is not known \(measured for: 2, 4"):
        collective(system, 3)


def test_hops_of_an_all_reduce() -> None:
    # A ring of 4: each rank sends 2 x 3 times; a send carries the payload in 3 hops and takes 3 control operations.
    c = collective(H100, 4)
    assert (c.payload_hops, c.control_ops) == (4 * 6 * 3, 4 * 6 * 3)
    with pytest.raises(InputError, match="measured for: none"):
        collective(system_of("mi300x"), 8)
