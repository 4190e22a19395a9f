"""Counters that contradict each other, and those that only seem to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory import MemoryTrace

from hoptrace.analysis.contradicted import contradictions_of
from hoptrace.contradictions import LEAST_BYTES, Seen, contradictions, thing_of

S = 1_000_000_000
MIB = 1 << 20
GPU = "pcie:0000:17:00.0"


def seen(entity: str = GPU, name: str = "data_bytes", source: str = "nvml", size: float = 0, **more: Any) -> Seen:
    plain = {"host": "h", "direction": "tx", "covered_ns": 10 * S, "common_ns": 10 * S}
    return Seen(**{**plain, "entity": entity, "name": name, "source": source, "bytes": size, **more})


def rows(values: list[int], *, every: float = 1.0, begin: float = 0, **more: Any) -> list[dict[str, Any]]:
    plain = {"host": "h", "entity": GPU, "name": "data_bytes", "direction": "tx", "unit": "bytes", "semantics": "cumulative"}
    return [plain | {"time_ns": round((begin + i * every) * S), "value_int": v, **more} for i, v in enumerate(values)]


def test_zeros_beside_traffic_are_told_with_both_totals_and_the_reason() -> None:
    # dcgm-exporter issue 721: an L40S whose PCIe fields are zeros.
    (c,) = contradictions([seen(size=5 * MIB), seen(source="scraped", name="raw_bytes")])
    assert (c.still.source, c.moved.source, c.moved.bytes) == ("scraped", "nvml", 5 * MIB)
    assert c.says == (
        "raw_bytes of pcie:0000:17:00.0 (scraped) saw nothing sent over 10 s in which data_bytes of pcie:0000:17:00.0 (nvml) saw "
        "5 MiB: one of the two is wrong. Likely the silent one is not counted on this card or by this driver or exporter, and "
        "prints 0 for unknown."
    )
    assert c.as_dict()["moved"] == {"entity": GPU, "name": "data_bytes", "source": "nvml", "bytes": 5 * MIB}


@pytest.mark.parametrize(
    "pair",
    [
        [seen(size=5 * MIB), seen(source="x", direction="rx")],  # the other direction
        [seen(size=5 * MIB), seen("pcie:0000:18:00.0", source="x")],  # another device
        [seen(size=5 * MIB), seen(name="replay_bytes", source="x")],  # another thing
        [seen(size=LEAST_BYTES - 1), seen(source="x")],  # an idle machine
        [seen(size=5 * MIB), seen(source="x", covered_ns=S)],  # looked at a tenth of the time
        [seen(size=5 * MIB, common_ns=S // 2, covered_ns=S // 2), seen(source="x", common_ns=S // 2, covered_ns=S // 2)],
        [seen(size=5 * MIB), seen(source="x", host="other")],
        [seen(size=5 * MIB), seen(name="raw_bytes", size=6 * MIB)],
    ],
)
def test_no_false_alarm(pair: list[Seen]) -> None:
    assert contradictions(pair) == []


def test_a_multipath_head_and_its_paths_are_one_disk() -> None:
    assert thing_of("block:nvme0c1n1", "data_bytes") == thing_of("block:nvme0n1", "data_bytes") == "traffic of block:nvme0n1"
    path, idle = seen("block:nvme0c0n1", source="block", size=9 * MIB), seen("block:nvme0c1n1", source="block")
    assert contradictions([path, idle, seen("block:nvme0n1", source="block", size=9 * MIB)]) == [], "one path of two idles"
    (c,) = contradictions([path, idle, seen("block:nvme0n1", source="block")])
    assert c.still.entity == "block:nvme0n1" and c.moved.bytes == 9 * MIB and "multipath head" in c.says


@given(st.lists(st.floats(0, 1e12), min_size=2, max_size=5))
def test_what_is_told_is_true(sizes: list[float]) -> None:
    found = contradictions([seen(source=str(i), size=n) for i, n in enumerate(sizes)])
    assert all(c.still.bytes < 0.001 * c.moved.bytes and c.moved.bytes >= LEAST_BYTES for c in found)
    assert {c.still.source for c in found} == {
        str(i) for i, n in enumerate(sizes) if max(sizes) >= LEAST_BYTES and n < max(sizes) / 1000
    }


def test_in_a_trace() -> None:
    moving = rows([i * MIB for i in range(31)], source="nvml")
    zeros = rows([0] * 4, every=10, source="scraped")
    (c,) = contradictions_of(MemoryTrace({"counters": moving + zeros}))
    # The page is ten seconds apart: what moved in the last ten it may tell yet.
    assert (c.still.source, c.moved.bytes, c.moved.common_ns) == ("scraped", 20 * MIB, 20 * S)
    assert contradictions_of(MemoryTrace({})) == []
    # A burst in those last ten seconds alone is no contradiction.
    late = rows([0] * 25 + [i * MIB for i in range(6)], source="nvml")
    assert contradictions_of(MemoryTrace({"counters": late + zeros})) == []
    # Nor two that saw different times.
    assert contradictions_of(MemoryTrace({"counters": moving + rows([7] * 4, every=10, begin=40, source="scraped")})) == []
    # Nor a gauge, nor what was denied.
    gauge = [r | {"semantics": "gauge"} for r in zeros]
    assert contradictions_of(MemoryTrace({"counters": moving + gauge})) == []
    denied = [r | {"status": "denied", "value_int": None} for r in zeros]
    assert contradictions_of(MemoryTrace({"counters": moving + denied})) == []


def test_a_rate_that_looks_at_a_fiftieth_of_the_time_proves_nothing() -> None:
    rate = rows([0] * 31, source="nvml throughput", semantics="rate", unit="bytes/s", window_ns=20_000_000)
    moving = rows([i * MIB for i in range(31)], source="nvml")
    assert contradictions_of(MemoryTrace({"counters": moving + rate})) == []
    whole = [r | {"window_ns": S} for r in rate]
    (c,) = contradictions_of(MemoryTrace({"counters": moving + whole}))
    assert c.still.source == "nvml throughput"
