"""Links with several counters, with none that can be compared, with counters that may have wrapped unseen; hundreds of links.

Shaped on an 8-GPU host: 18 NVLinks a GPU with payload (`data_bytes`) and wire (`raw_bytes`), NVML fields 138 to 141, 25 GB/s a
link and direction; PCIe Gen5 ×16 with a 32-bit counter (fields 197, 198: 63 GB/s pass 2^32 bytes in 68 ms); DCGM's rates.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, Group
from support.memory import MemoryTrace

from hoptrace.analysis.moves.ledger_links import LinkUse, LinkWay, link_uses
from hoptrace.analysis.moves.ledger_links_text import busy_lines, links
from hoptrace.manifest import Manifest

S, MIB = 1_000_000_000, 1 << 20
NV = {"name": "nv0", "a": "gpu0", "b": "gpu1", "kind": "nvlink", "bytes_per_s": 25_000_000_000, "entity": "nvlink:G/0"}
PCIE = {"name": "pcie0", "a": "gpu0", "b": "dram0", "kind": "pcie", "bytes_per_s": 63_000_000_000, "entity": "pcie:0"}


def counter(entity: str, name: str, values: list[int | float], *, every: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    row = {"host": "h", "entity": entity, "name": name, "direction": "tx", "unit": "bytes", "semantics": "cumulative",
           "width_bits": 64, "source": "nvml"}  # fmt: skip
    key = {True: "value_int", False: "value_float"}
    return [row | {"time_ns": round(i * every * S), key[isinstance(v, int)]: v} | more for i, v in enumerate(values)]


def move(size: int, end: float = 10, **more: Any) -> dict[str, Any]:
    return {"start_ns": 0, "end_ns": round(end * S), "object": "kv", "src": "gpu0", "dst": "gpu1", "path": ["nv0"], "bytes": size,
            "transfers": 1, "mechanism": "dma", "basis": "counted", **more}  # fmt: skip


def uses(
    counters: list[dict[str, Any]], moves: list[dict[str, Any]] | None = None, *graph: dict[str, Any], **more: Any
) -> list[LinkUse]:
    manifest = Manifest(origin="recorded", platform={"links": list(graph or (NV,)), "nodes": more.get("nodes", [])}, closed=True)
    rows: dict[str, Any] = {"counters": counters, "moves": moves or []}
    if moves is not None and more.get("cover", True):
        rows["coverage"] = [{"table": "moves", "from_ns": 0, "to_ns": 10 * S}]
    return link_uses(MemoryTrace(rows, manifest))[0]


def way(*of: Any, **more: Any) -> LinkWay:
    return uses(*of, **more)[0].ways[0]


def test_protocol_is_counted_where_the_wire_is_counted_beside_payload() -> None:
    payload = counter("nvlink:G/0", "data_bytes", [i * 1000 for i in range(11)])
    wire = counter("nvlink:G/0", "raw_bytes", [i * 1100 for i in range(11)])
    w = way(payload + wire, [move(8000)])
    assert w.counter is not None and (w.counter.name, w.counter.what, w.counter.bytes) == ("data_bytes", "payload", 10_000)
    assert (w.explained_bytes, w.protocol_bytes, w.protocol_basis, w.wire_bytes) == (8000, 1000, "counted", 11_000)
    assert w.unexplained_bytes == 2000, "payload is held against payload"
    assert w.mean == pytest.approx(1100 / 25e9), "full is what the wire is"
    assert w.counter.others == ("raw_bytes (nvml): tells the protocol",)
    assert w.says == (
        "Its counter saw 9.77 KiB of payload; moves explain 7.81 KiB, packets add 1000 B (counted); 1.95 KiB (20%) is "
        "unexplained. Taken: data_bytes (nvml); not taken: raw_bytes (nvml): tells the protocol."
    )
    # Of the wire alone the overhead is assumed, and of payload alone there is none in it.
    only = way(wire, [move(8000)])
    assert only.counter is not None and (only.counter.what, only.protocol_basis, only.wire_bytes) == ("wire", None, None)
    only = way(payload, [move(8000)])
    assert (only.protocol_bytes, only.unexplained_bytes) == (None, 2000) and "what packets add" not in only.says
    # A wire counter that looked at half of the time tells no difference.
    half = way(payload + wire[:6], [move(8000)])
    assert (half.protocol_bytes, half.wire_bytes) == (None, None)
    assert half.counter is not None and half.counter.others == ("raw_bytes (nvml): covers less time",)


def test_two_sources_of_one_name_are_two_counters() -> None:
    """node_exporter's page and sysfs tell of one port, a moment apart: in turn they would seem to fall."""
    ours = counter("nvlink:G/0", "data_bytes", [10**12 + i * 1000 for i in range(11)], source="infiniband")
    page = counter("nvlink:G/0", "data_bytes", [10**12 + i * 1000 - 7 for i in range(11)], source="scraped")
    w = way([*ours, *({**r, "time_ns": r["time_ns"] + 1} for r in page[:-2])], [move(10_000)])
    assert w.counter is not None and (w.counter.bytes, w.counter.source, w.counter.falls) == (10_000, "infiniband", 0)
    assert w.counter.others == ("data_bytes (scraped): covers less time",)


def test_counts_go_before_rates_and_what_moves_before_what_stands_still() -> None:
    count = counter("nvlink:G/0", "raw_bytes", [i * MIB for i in range(11)])
    rate = counter(
        "nvlink:G/0", "data_bytes", [2.0 * MIB] * 11, source="scraped", semantics="rate", unit="bytes/s", width_bits=None,
        window_ns=S,
    )  # fmt: skip
    w = way(count + rate, [move(0)])
    assert w.counter is not None and (w.counter.name, w.counter.bytes) == ("raw_bytes", 10 * MIB)
    assert w.counter.others == ("data_bytes (scraped): a rate",)
    zeros = counter("nvlink:G/0", "data_bytes", [0] * 11, source="scraped")
    w = way(count + zeros, [move(0)])
    assert w.counter is not None and w.counter.name == "raw_bytes" and w.counter.others == ("data_bytes (scraped): stood still",)


def test_without_moves_the_counters_speak_for_themselves() -> None:
    w = way(counter("nvlink:G/0", "data_bytes", [0, 5 * MIB, 9 * MIB]))
    assert (
        w.counter is not None and w.counter.bytes is None and w.counter.counted_bytes == 9 * MIB and w.counter.counted_ns == 2 * S
    )
    assert (w.explained_bytes, w.unexplained_bytes, w.told_by) == (None, None, "counter")
    assert w.says == "Its counter saw 9.00 MiB in the 2.00 s that its samples cover; no one recorded moves here."
    assert w.mean == pytest.approx(9 * MIB / 2 / 25e9, rel=1e-6)
    # Recorded moves, of which none names the link: who moved it is not told.
    other = move(5, path=["elsewhere"])
    w = way(counter("nvlink:G/0", "data_bytes", [0, 5 * MIB, 9 * MIB]), [other])
    assert w.says == "Its counter saw 9.00 MiB of payload; no recorded move names this link: who moved it is not told."
    # A link of unknown capacity has its bytes, and no utilisation.
    w = way(counter("nvlink:G/0", "data_bytes", [0, 5 * MIB]), None, {k: v for k, v in NV.items() if k != "bytes_per_s"})
    assert w.counter is not None and w.counter.counted_bytes == 5 * MIB and w.mean is None


def test_a_narrow_counter_that_can_wrap_unseen_is_null_with_the_reason() -> None:
    """63 GB/s for 0.1 s are 6.3 GB: a 32-bit counter can have passed 2^32 once or not at all, whatever it shows."""
    narrow = counter("pcie:0", "raw_bytes", [10, 20, 4_000_000_000, 5, 5, 5], every=0.1, width_bits=32)
    w = way(narrow, [move(0, path=["pcie0"])], PCIE)
    assert w.counter is not None and (w.counter.ambiguous, w.counter.falls) == (3, 0) and w.counter.bytes == 0
    assert w.counter.covered_ns == 200_000_000, "where it stood still it did"
    assert "3 differences of it are not known: at the link's rate it can have wrapped more than once in between." in w.says
    all_moving = way(narrow[:4], [move(0, path=["pcie0"])], PCIE)
    assert all_moving.counter is not None and all_moving.counter.counted_bytes is None and all_moving.told_by != "counter"
    assert all_moving.says.startswith(
        "Its counter raw_bytes is of no use: it can have wrapped more than once between any two samples (100 ms apart), at the "
        "rate that its link may have."
    )
    # Read every 50 ms it cannot: 63 GB/s × 1.2 × 50 ms < 2^32.
    fast = way(counter("pcie:0", "raw_bytes", [4_294_967_000, 500], every=0.05, width_bits=32), [move(0, path=["pcie0"])], PCIE)
    assert fast.counter is not None and (fast.counter.bytes, fast.counter.ambiguous) == (796, 0)
    # Of a link of unknown rate nobody can say.
    bare = {k: v for k, v in PCIE.items() if k != "bytes_per_s"}
    unknown = way(counter("pcie:0", "raw_bytes", [7, 500], width_bits=32), [move(0, path=["pcie0"])], bare)
    assert unknown.counter is not None and unknown.counter.counted_bytes is None and unknown.counter.ambiguous == 1
    wide = way(counter("pcie:0", "raw_bytes", [7, 500]), [move(0, path=["pcie0"])], bare)
    assert wide.counter is not None and wide.counter.bytes == 493


def test_a_fall_that_the_link_cannot_have_carried_is_a_reset() -> None:
    values = [4_294_000_000 + i for i in range(20)] + [100 + i for i in range(20)]
    slow, fast = (PCIE | {"bytes_per_s": n} for n in (100_000, 1_000_000))
    narrow = counter("pcie:0", "raw_bytes", list(values), width_bits=32)
    w = way(narrow, [move(0, path=["pcie0"])], slow, cover=False)
    assert w.counter is not None and (w.counter.falls, w.counter.counted_bytes, w.counter.ambiguous) == (1, 19 + 19, 0)
    # From 4,294,000,019 past 2^32 to 100 are 967,377 bytes: in a second a faster link carries that.
    w = way(narrow, [move(0, path=["pcie0"])], fast, cover=False)
    assert w.counter is not None and (w.counter.falls, w.counter.counted_bytes) == (0, 19 + 967_377 + 19)


@given(st.integers(1 << 53, (1 << 63) - 2), st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_values_beyond_53_bits_are_exact(base: int, more: int) -> None:
    high = min(base + more, (1 << 63) - 1)
    w = way(counter("nvlink:G/0", "data_bytes", [base, high]), [move(0)])
    assert w.counter is not None and w.counter.bytes == high - base


def test_counters_of_another_host_are_another_hosts() -> None:
    near = counter("nvlink:G/0", "data_bytes", [0, 100])
    far = counter("nvlink:G/0", "data_bytes", [0, 9 * MIB], host="other")
    w = way(near + far, [move(0)], nodes=[{"name": "gpu0", "host": "h"}])
    assert w.counter is not None and (w.counter.host, w.counter.bytes) == ("h", 100)


def test_a_counter_with_a_direction_goes_before_one_without() -> None:
    both = counter("nvlink:G/0", "bandwidth_bytes", [0, 9 * MIB], direction=None, source="scraped")
    sent, received = (counter("nvlink:G/0", "data_bytes", [0, n], direction=d) for n, d in ((100, "tx"), (7, "rx")))
    (u,) = uses(both + sent + received, [move(0)])
    assert [(w.way, w.counter.bytes) for w in u.ways if w.counter] == [("gpu0 → gpu1", 100), ("gpu1 → gpu0", 7)]


def machine(busy: int = 1) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """8 GPUs × 18 NVLinks, of which `busy` are full; eight PCIe links of which one carries what nobody recorded; a move."""
    graph, counters = [], []
    for gpu in range(8):
        for n in range(18):
            name = f"nv{gpu}.{n}"
            graph.append(NV | {"name": name, "a": f"gpu{gpu}", "b": "switch", "entity": f"nvlink:{gpu}/{n}"})
            step = 22_000_000_000 if gpu * 18 + n < busy else 10 * n
            for direction in ("tx", "rx"):
                values = [i * step for i in range(11)]
                counters += counter(f"nvlink:{gpu}/{n}", "data_bytes", list(values), direction=direction)
        graph.append(PCIE | {"name": f"pcie{gpu}", "a": f"gpu{gpu}", "entity": f"pcie:{gpu}"})
        counters += counter(f"pcie:{gpu}", "raw_bytes", [i * (500 * MIB if gpu == 3 else 100) for i in range(11)])
    graph.append({"name": "nvme0", "a": "dram0", "b": "nvme0n1", "kind": "nvme", "entity": "block:nvme0n1"})
    return graph, counters, [move(1000 * MIB, path=["pcie3"], src="gpu3", dst="dram0")]


def shown(found: list[LinkUse], width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(Group(*links(found)))
    return out.getvalue()


def test_hundreds_of_links_stay_readable() -> None:
    graph, counters, moves = machine()
    found = uses(counters, moves, *graph)
    assert sum(len(u.ways) for u in found) == 8 * 18 * 2 + 8
    text = shown(found)
    lines = text.splitlines()
    assert len(lines) <= 12
    assert lines[1].startswith("nv0.0  gpu0 → switch") or lines[1].startswith("nv0.0  switch → gpu0")
    assert (
        "nvlink: 286 more directions of 143 links carried 239 KiB together, at most 1.66 KiB each, 14 of them nothing; none over"
        in text
    )
    pcie = next(line for line in lines if line.startswith("pcie3 "))
    assert pcie.split()[:4] == ["pcie3", "gpu3", "→", "dram0"] and "1,000 MiB" in pcie and "4.88 GiB" in pcie
    assert "1 more link: no counter and no move (1 nvme)." in text
    assert busy_lines(found)[0].startswith("Link nv0.0, ") and len(busy_lines(found)) == 2
    many = uses(*machine(busy=30)[1:], *machine(busy=30)[0])
    said = busy_lines(many)
    assert len(said) == 4 and said[3] == "57 more directions of links over 80% full, for at most 10 s each (57 nvlink)."
    assert len(shown(many).splitlines()) <= 20


def test_counters_of_no_use_are_told_together() -> None:
    graph = [NV | {"name": f"nv{n}", "entity": f"nvlink:G/{n}"} for n in range(12)]
    rows = [
        r | {"status": "unsupported", "value_int": None}
        for n in range(12)
        for r in counter(f"nvlink:G/{n}", "data_bytes", [0, 0])
    ]
    text = shown(uses(rows, [move(0, path=["x"])], *graph))
    assert (
        "nvlink: 12 more directions of 12 links; 12 counters of no use (every sample is without a value (unsupported))." in text
    )
