"""Links: how full they were, and what their counters say against the recorded moves.

Counter values are shaped on recorded ones: an InfiniBand port's PortXmitData (perfquery: 37,108,676,853,855 words of 4 bytes),
PCIe fields of DCGM that fall (dcgm-exporter issue 87), an absent NVLink field (issue 316), a socket that reports -1 (pcm issue
921).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import MemoryTrace

from hoptrace.analysis.moves.ledger import ledger
from hoptrace.analysis.moves.ledger_links import LinkUse, LinkWay, link_uses
from hoptrace.manifest import Manifest

S = 1_000_000_000
PORT = 37_108_676_853_855 * 4  # where a real port stood


def graph(*links: dict[str, Any]) -> Manifest:
    nodes = sorted({n for k in links for n in (k.get("a"), k.get("b")) if n})
    return Manifest(origin="recorded", platform={"nodes": [{"name": n} for n in nodes], "links": list(links)}, closed=True)


IB = {"name": "ib0", "a": "p", "b": "d", "kind": "nvlink", "bytes_per_s": 1000, "entity": "port:0"}


def move(begin: float, end: float, size: int | None, **more: Any) -> dict[str, Any]:
    return {
        "start_ns": round(begin * S), "end_ns": round(end * S), "object": "kv", "src": "p", "dst": "d", "path": ["ib0"],
        "bytes": size, "transfers": 1, "mechanism": "rdma", "basis": "counted", **more,
    }  # fmt: skip


def samples(values: list[int | None], *, every: float = 1, **more: Any) -> list[dict[str, Any]]:
    row = {
        "entity": "port:0",
        "name": "port_xmit_data",
        "direction": "tx",
        "unit": "bytes",
        "semantics": "cumulative",
        "width_bits": 64,
    }
    return [
        row | {"time_ns": round(i * every * S), "value_int": v, "status": "ok" if v is not None else "absent", **more}
        for i, v in enumerate(values)
    ]


def covered(begin: float, end: float) -> list[dict[str, Any]]:
    return [{"table": "moves", "from_ns": round(begin * S), "to_ns": round(end * S)}]


def way(moves: list[dict[str, Any]], counters: list[dict[str, Any]], *, link: dict[str, Any] = IB, cover: Any = None) -> LinkWay:
    rows = {"moves": moves, "counters": counters, "coverage": cover or []}
    (use,), _ = link_uses(MemoryTrace(rows, graph(link)))
    assert use.link == link["name"]
    return use.ways[0]


def test_all_that_the_wire_carried_is_explained() -> None:
    # 500 bytes a second for 10 s of a link that carries 1,000.
    w = way([move(0, 10, 5000)], samples([PORT + 500 * i for i in range(11)]), cover=covered(0, 10))
    assert w.way == "p → d" and w.counter is not None and w.counter.bytes == 5000 and not w.counter.partial
    assert (w.explained_bytes, w.protocol_bytes, w.unexplained_bytes) == (5000, None, 0)
    assert w.mean == pytest.approx(0.5) and w.peak == pytest.approx(0.5, rel=1e-6) and w.busy_ns == 0
    assert w.told_by == "counter" and "what packets add is unknown" in w.says


def test_only_the_time_that_both_cover_is_compared() -> None:
    # Moves were recorded from 4 s on: the counter's first four seconds are in no comparison.
    w = way([move(4, 10, 600)], samples([PORT + 900 * i for i in range(11)]), cover=covered(4, 10))
    assert w.counter is not None
    assert (w.counter.bytes, w.counter.covered_ns, w.explained_bytes, w.unexplained_bytes) == (5400, 6 * S, 600, 4800)
    # The counter stops at 2 s: of a move of 10 s only a fifth lies in what it saw.
    early = way([move(0, 10, 5000)], samples([PORT, PORT + 500, PORT + 1000]), cover=covered(0, 10))
    assert (early.explained_bytes, early.unexplained_bytes) == (1000, 0)
    # Nothing in common: unknown, not 0.
    none = way([move(50, 60, 5000)], samples([PORT, PORT + 500]), cover=covered(50, 60))
    assert (
        none.counter is not None and none.counter.bytes is None and none.unexplained_bytes is None and "lie within" in none.says
    )


def test_packets_add_what_their_kind_says() -> None:
    # PCIe: 24 bytes for each 256 of payload (pcie-bench). One transfer of 2,560 bytes is ten packets.
    pcie = IB | {"kind": "pcie"}
    w = way([move(0, 1, 2560)], samples([0, 2560 + 240]), link=pcie, cover=covered(0, 1))
    assert (w.explained_bytes, w.protocol_bytes, w.unexplained_bytes) == (2560, 240, 0)
    # TCP over Ethernet: 66 bytes for each 1,448; two messages of 100 bytes are two packets.
    tcp = IB | {"kind": "ethernet"}
    w = way([move(0, 1, 200, transfers=2)], samples([0, 400]), link=tcp, cover=covered(0, 1))
    assert (w.protocol_bytes, w.unexplained_bytes) == (132, 68)
    # What comes back are acknowledgements: one for two full packets, 66 bytes each; 14,480 bytes are ten packets.
    back = samples([0, 5 * 66], direction="rx", name="rx_bytes")
    rows = {"moves": [move(0, 1, 14_480)], "counters": samples([0, 14_480 + 660]) + back, "coverage": covered(0, 1)}
    (use,), _ = link_uses(MemoryTrace(rows, graph(tcp)))
    assert [(x.way, x.protocol_bytes, x.unexplained_bytes) for x in use.ways] == [("p → d", 660, 0), ("d → p", 330, 0)]


def test_wraps_and_restarts() -> None:
    # A 32-bit counter passes 2^32 between samples; the link could carry that much.
    top = 1 << 32
    w = way([move(0, 2, 1500)], samples([top - 1000, top - 500, 500], width_bits=32), cover=covered(0, 2))
    assert w.counter is not None and w.counter.bytes == 1500 and w.counter.falls == 0 and w.unexplained_bytes == 0
    # A driver was loaded anew: what was counted between the two lives is unknown; the rest is compared.
    lives = samples([9000, 9500]) + [x | {"incarnation": "2", "time_ns": x["time_ns"] + 2 * S} for x in samples([0, 300, 600])]
    w = way([move(0, 1, 500), move(2, 4, 600)], lives, cover=covered(0, 4))
    assert w.counter is not None and w.counter.restarts == 1 and w.counter.partial
    assert (w.counter.bytes, w.explained_bytes, w.unexplained_bytes) == (1100, 1100, 0)


def test_b39_a_counter_that_falls_is_none() -> None:
    w = way([move(0, 2, 500)], samples([1_200_000_000, 900_000_000, 1_300_000_000]), cover=covered(0, 2))
    assert w.counter is not None and w.counter.bytes is None and w.unexplained_bytes is None
    assert "reads like a gauge" in w.says and w.told_by == "moves"
    gauge = way([move(0, 2, 500)], samples([12, 9, 13], semantics="gauge"), cover=covered(0, 2))
    assert gauge.counter is not None and gauge.counter.bytes is None and "gauge" in gauge.says
    # One fall in many is a reset that nobody told: only that step is left out.
    values = [1000 + 100 * i for i in range(20)] + [100 * i for i in range(20)]
    once = way([], samples(values), cover=covered(0, 40))
    assert once.counter is not None and once.counter.falls == 1 and once.counter.bytes == 3800 and once.counter.partial


def test_b41_absent_is_null_and_b43_minus_one_is_unknown() -> None:
    w = way([move(0, 2, 500)], samples([None, None, None]), cover=covered(0, 2))
    assert w.counter is not None and w.counter.bytes is None and "absent" in w.says and w.unexplained_bytes is None
    w = way([move(0, 4, 400)], samples([0, 100, -1, 300, 400]), cover=covered(0, 4))
    assert w.counter is not None and w.counter.unknown_samples == 1 and w.counter.partial
    assert (w.counter.bytes, w.unexplained_bytes) == (400, 0), "a running total goes on behind a sample without a value"
    # Of a delta what the lost sample held is unknown, and that second is not compared.
    deltas = samples([0, 100, -1, 100, 100], semantics="delta")
    w = way([move(0, 4, 400)], deltas, cover=covered(0, 4))
    assert w.counter is not None and w.counter.bytes is not None and w.counter.unknown_samples == 1
    silent = way([move(0, 4, 400)], [], cover=covered(0, 4))
    assert silent.counter is None and silent.explained_bytes is None and silent.mean == pytest.approx(0.1)


def test_a_rate_counts_over_its_window_only() -> None:
    # NVML reads PCIe over 20 ms; read once a second it says nothing of the other 980.
    rates = samples([500, 500, 500, 500], unit="bytes/s", semantics="rate", window_ns=20_000_000)
    w = way([move(0, 3, 1500)], rates, cover=covered(0, 3))
    assert w.counter is not None and w.counter.covered_ns == 60_000_000
    assert (w.counter.bytes, w.explained_bytes) == (30, 30)
    assert w.mean == pytest.approx(0.5)


def test_a3_which_wire_did_my_kv_take() -> None:
    links = (
        IB | {"name": "nvlink0", "kind": "nvlink", "entity": "nvlink:0", "bytes_per_s": 49_000_000_000},
        IB | {"name": "eth0", "kind": "nvlink", "entity": "eth0", "bytes_per_s": 1_000_000_000},
    )
    moves = [move(0, 10, 5_000_000_000, path=["nvlink0"])]
    counters = samples([0, 20_000_000], every=10, entity="nvlink:0") + samples([0, 5_060_000_000], every=10, entity="eth0")
    book = ledger(MemoryTrace({"moves": moves, "counters": counters, "coverage": covered(0, 10)}, graph(*links)))
    assert book.elsewhere == [
        "Moves name link nvlink0 for 4.66 GiB, its counter saw 19.1 MiB; eth0 carried 4.71 GiB that no move explains: the data "
        "took that way."
    ]
    assert book.elsewhere[0] in book.notes
    found = {u.link: u.ways[0] for u in book.link_uses}
    assert found["nvlink0"].unexplained_bytes == -4_980_000_000 and "took another way" in found["nvlink0"].says
    assert found["eth0"].unexplained_bytes == 5_060_000_000


def test_a71_the_wire_and_the_memory_disagree() -> None:
    links = (
        {"name": "rdma0", "a": "far", "b": "nic", "kind": "roce", "bytes_per_s": 50_000_000_000, "entity": "mlx5_0"},
        {"name": "dram0", "a": "nic", "b": "memory", "kind": "dram", "bytes_per_s": 200_000_000_000, "entity": "imc"},
    )
    moves = [move(0, 1, 44_000_000_000, src="far", dst="memory", path=["rdma0", "dram0"], transfers=44)]
    wire = 44_000_000_000 + 44 * (-(-1_000_000_000 // 4096) * 58 + 16)
    counters = samples([0, wire], entity="mlx5_0") + samples([0, 800_000_000], entity="imc", direction="write", name="cas_write")
    (rdma, dram), elsewhere = link_uses(
        MemoryTrace({"moves": moves, "counters": counters, "coverage": covered(0, 1)}, graph(*links))
    )
    assert rdma.ways[0].unexplained_bytes == 0 and rdma.ways[0].peak == pytest.approx(wire / 50_000_000_000, rel=1e-6)
    assert dram.ways[0].unexplained_bytes == -43_200_000_000 and "last-level cache" in dram.ways[0].says
    assert elsewhere == [], "no other wire: it stayed in a cache"


def test_how_full_and_when() -> None:
    # Full for 2 of 12 seconds, 45 % of the rest.
    moves = [move(0, 5, 2250), move(5, 7, 2000), move(7, 12, 2250)]
    w = way(moves, [])
    assert w.told_by == "moves" and w.mean == pytest.approx(6500 / 12_000, rel=1e-6) and w.peak == pytest.approx(1.0, rel=1e-3)
    assert w.busy_ns == pytest.approx(2 * S, rel=0.05) and len(w.busy) == 1
    (a, z) = w.busy[0]
    assert a == pytest.approx(5 * S, abs=w.bin_ns) and z == pytest.approx(7 * S, abs=w.bin_ns)
    unknown = way(moves, [], link={k: v for k, v in IB.items() if k != "bytes_per_s"})
    assert unknown.peak is None and unknown.mean is None and unknown.busy_ns is None


def test_directions_follow_the_path() -> None:
    links = (
        {"name": "x", "a": "a", "b": "b", "bytes_per_s": 1000},
        {"name": "y", "a": "c", "b": "b", "bytes_per_s": 1000},
        {"name": "z", "a": "c", "b": "d", "bytes_per_s": 1000},
    )
    forth = move(0, 1, 10, src="a", dst="d", path=["x", "y", "z"])
    back = move(0, 1, 7, src="d", dst="a", path=["z", "y", "x"])
    found, _ = link_uses(MemoryTrace({"moves": [forth, back]}, graph(*links)))
    assert {(u.link, w.way): w.moved_bytes["counted"] for u in found for w in u.ways} == {
        ("x", "a → b"): 10, ("x", "b → a"): 7, ("y", "b → c"): 10, ("y", "c → b"): 7, ("z", "c → d"): 10, ("z", "d → c"): 7,
    }  # fmt: skip
    # A counter without a direction is held against both.
    both = samples([0, 20], direction=None, entity="x")
    links2 = (links[0] | {"entity": "x"}, *links[1:])
    found, _ = link_uses(MemoryTrace({"moves": [forth, back], "counters": both, "coverage": covered(0, 1)}, graph(*links2)))
    (w,) = found[0].ways
    assert (w.way, w.explained_bytes, w.unexplained_bytes) == ("both", 17, 3)


def test_bases_stay_apart() -> None:
    w = way([move(0, 1, 100), move(0, 1, 40, basis="derived"), move(0, 1, 7, basis="assumed"), move(0, 1, None)], [])
    assert w.moved_bytes == {"assumed": 7, "counted": 100, "derived": 40} and w.bytes_unknown == 1


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 10_000)), max_size=12),
    st.lists(st.integers(1, 6), min_size=2, max_size=10),
    st.integers(0, 30),
)
@settings(max_examples=15, deadline=None)
def test_explained_is_the_overlap(drawn: list[tuple[int, int, int]], gaps: list[int], cut: int) -> None:
    """Held against the overlap of each move with each span, one by one."""
    times, t = [], 0
    for g in gaps:
        times.append(t)
        t += g
    moves = [move(a, a + n, size) for a, n, size in drawn]
    counters = [x | {"time_ns": at * S} for x, at in zip(samples([1000 * i for i in range(len(times))]), times, strict=True)]
    w = way(moves, counters, cover=covered(cut, 1000))
    spans = [(a, z) for a, z in pairwise(times) if a >= cut]
    if not spans:
        assert w.counter is not None and w.counter.bytes is None
        return
    expected = 0.0
    for a, z in spans:
        for begin, n, size in drawn:
            inside = max(0, min(z, begin + n) - max(a, begin)) / n if n else float(a <= begin < z)
            expected += size * inside
    assert w.counter is not None and w.counter.bytes == 1000 * len(spans)
    assert w.explained_bytes == pytest.approx(expected, abs=1)
    assert w.unexplained_bytes == w.counter.bytes - w.explained_bytes


def test_hostile_rows() -> None:
    big = (1 << 63) - 1
    moves = [
        move(0, 1, big), move(0, 1, big), move(5, 1, 3), move(0, 1, -7), move(0, 1, 5, path=[]), move(0, 1, 5, path=None),
        move(0, 1, 5, path=["nowhere"]), move(0, 1, 5, end_ns=None), move(0, 1, 5, transfers=-3, src="x", dst="x"),
    ]  # fmt: skip
    counters = samples([0, big], value_float=None) + samples([big, 0], width_bits=-5, name="odd", direction=None)
    found, _ = link_uses(MemoryTrace({"moves": moves, "counters": counters}, graph(IB, {"name": "lonely"}, {"name": "ib0"})))
    assert isinstance(found[0], LinkUse) and ledger(MemoryTrace({"moves": moves, "counters": counters}, graph(IB))).as_dict()
    assert link_uses(MemoryTrace({}, graph(IB))) == ([], [])


def test_what_nobody_could_record_is_not_unexplained() -> None:
    """A capture that lost sight of the server from 2 s to 8 s: its moves of that time are missing, the port counts on."""
    seen = [move(0, 2, 1000), move(8, 10, 1000)]
    cover = [*covered(0, 2), *covered(8, 10)]
    w = way(seen, samples([500 * i for i in range(11)]), cover=cover)
    assert w.counter is not None and (w.counter.bytes, w.counter.covered_ns) == (2000, 4 * S)
    assert (w.explained_bytes, w.unexplained_bytes, w.at_least) == (2000, 0, False)
    # Two who record: where one of them is blind, its moves are missing.
    other = [{**c, "source": "plug-in"} for c in covered(0, 1)]
    w = way(seen, samples([500 * i for i in range(11)]), cover=[*covered(0, 10), *other])
    assert w.counter is not None and w.counter.bytes == 500


def test_moves_that_are_missing_or_unsized_make_the_rest_an_upper_bound() -> None:
    counters = samples([500 * i for i in range(11)])
    lossy = [{**covered(0, 10)[0], "fraction": 0.5}]
    for moves, cover in (([move(0, 10, 2500)], lossy), ([move(0, 10, 2500), move(0, 10, None)], covered(0, 10))):
        w = way(moves, counters, cover=cover)
        assert w.at_least and w.unexplained_bytes == 2500 and "at most 2.44 KiB (50%) is unexplained" in w.says
    assert "at most" not in way([move(0, 10, 2500)], counters, cover=covered(0, 10)).says


def test_windows_of_a_rate_that_overlap_count_once() -> None:
    """A rate over the last second, told ten times a second: 100 bytes a second are 1,000 in 10 s, not 10,000."""
    rate: dict[str, Any] = {"semantics": "rate", "unit": "bytes/s", "width_bits": None, "window_ns": S}
    told = [{**c, "time_ns": c["time_ns"] + S} for c in samples([100] * 91, every=0.1, **rate)]
    w = way([move(0, 10, 1000)], told, cover=covered(0, 10))
    assert w.counter is not None and (w.counter.bytes, w.counter.covered_ns) == (1000, 10 * S)
    assert (w.explained_bytes, w.unexplained_bytes) == (1000, 0) and w.mean == pytest.approx(0.1) and w.busy_ns == 0


def test_a_link_without_counters_is_idle_where_moves_were_recorded_and_none_was_there() -> None:
    w = way([move(0, 1, 1000)], [], cover=[*covered(0, 4), *covered(6, 12)])
    assert (w.told_by, w.mean) == ("moves", pytest.approx(0.1)), "1,000 of the 10 × 1,000 bytes that it could have carried"
