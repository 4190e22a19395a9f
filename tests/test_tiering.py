"""What the kernel moved between memory tiers, beside the moves.

Pages as in the CXL guest fixture: 11,776 demoted and 3,072 promoted between the samples of /proc/vmstat (HMAT tier), 2,883 and
369 at the CXL node.
"""

from __future__ import annotations

from typing import Any

from support.memory import MemoryTrace

from hoptrace.analysis.moves.ledger import ledger
from hoptrace.analysis.moves.tiering import switched_off, tier_pages, tier_says

S = 1_000_000_000


def pages(entity: str, name: str, *values: int, **more: Any) -> list[dict[str, Any]]:
    row = {"host": "h", "entity": entity, "name": name, "unit": "pages", "semantics": "cumulative", "incarnation": "boot"}
    return [row | {"time_ns": i * S, "value_int": v} | more for i, v in enumerate(values)]


def test_by_node_and_direction() -> None:
    counters = [
        *pages("node:0", "pgpromote_success", 100, 3172), *pages("node:0", "pgdemote_kswapd", 5, 5 + 11_776, 5 + 11_776),
        *pages("node:0", "pgdemote_direct", 0, 0), *pages("node:0", "pgmigrate_success", 0, 99),
        # The machine's totals tell of the same pages.
        *pages("vmstat", "pgpromote_success", 100, 3172), *pages("vmstat", "pgdemote_kswapd", 5, 5 + 11_776),
    ]  # fmt: skip
    found = tier_pages(MemoryTrace({"counters": counters}))
    assert [(t.node, t.direction, t.counter, t.pages, t.bytes) for t in found] == [
        ("node:0", "out", "pgdemote_direct", 0, 0), ("node:0", "out", "pgdemote_kswapd", 11_776, 46 << 20),
        ("node:0", "in", "pgpromote_success", 3072, 12 << 20),
    ]  # fmt: skip
    assert tier_says(found) == [
        "Between memory tiers the kernel moved, beside all moves (1 node, pages of 4.00 KiB (assumed)): node:0 received 12 MiB "
        "by promotion (pgpromote_success 3,072) and gave up 46 MiB by demotion (pgdemote_kswapd 11,776)."
    ]
    book = ledger(MemoryTrace({"counters": counters}))
    assert not book.rows.height, "they are no moves"
    assert [t["bytes"] for t in book.as_dict()["tier_pages"]] == [0, 46 << 20, 12 << 20]


def test_where_only_the_machine_tells() -> None:
    (t,) = tier_pages(MemoryTrace({"counters": pages("vmstat", "pgpromote_success", 0, 369)}))
    assert (t.node, t.pages) == ("vmstat", 369)


def test_nodes_that_stand_still_while_the_machine_tells() -> None:
    still = [*pages("node:0", "pgpromote_success", 5, 5), *pages("node:1", "pgpromote_success", 0, 0)]
    found = tier_pages(MemoryTrace({"counters": [*still, *pages("memory", "pgpromote_success", 4669, 23_469)]}))
    assert [(t.node, t.pages, t.nodes_pages) for t in found] == [("memory", 18_800, 0)]
    assert (
        tier_says(found)[1] == "The nodes' own counters contradict the machine's: they saw 0 of the 18,800 of pgpromote_success."
    )
    moved = pages("node:2", "pgpromote_success", 0, 18_700)  # read a moment earlier
    found = tier_pages(MemoryTrace({"counters": [*still, *moved, *pages("memory", "pgpromote_success", 4669, 23_469)]}))
    assert [(t.node, t.pages) for t in found] == [("node:0", 0), ("node:1", 0), ("node:2", 18_700)]


def test_restarts_page_size_and_silence() -> None:
    lives = pages("node:3", "pgdemote_kswapd", 9000, 9003) + [
        r | {"time_ns": r["time_ns"] + 9 * S} for r in pages("node:3", "pgdemote_kswapd", 7, 17, incarnation="another boot")
    ]
    size = [
        {"time_ns": 0, "entity": "node:3", "name": "page_size_bytes", "unit": "bytes", "semantics": "gauge", "value_int": 65_536}
    ]
    (t,) = tier_pages(MemoryTrace({"counters": lives + size}))
    assert (t.pages, t.bytes, t.page_basis) == (13, 13 * 65_536, "counted")
    still = tier_pages(MemoryTrace({"counters": pages("node:3", "pgdemote_kswapd", 7, 7)}))
    assert tier_says(still) == ["The kernel moved no page between memory tiers."]
    assert tier_pages(MemoryTrace({})) == [] and tier_says([]) == []
    denied = pages("node:3", "pgdemote_kswapd", 7, 9, status="denied")
    assert tier_pages(MemoryTrace({"counters": denied})) == []


def test_a_kernel_that_may_move_nothing() -> None:
    def switch(name: str, *values: int) -> list[dict[str, Any]]:
        return [r | {"unit": "1", "semantics": "gauge"} for r in pages("memory", name, *values)]

    still = pages("node:3", "pgdemote_kswapd", 7, 7)
    off = MemoryTrace({"counters": [*still, *switch("demotion_enabled", 0, 0), *switch("numa_balancing", 1)]})
    assert switched_off(off) == ("demotion", "promotion"), "balancing between nodes (1) is not promotion between tiers (2)"
    assert tier_says(tier_pages(off), switched_off(off)) == [
        "The kernel moved no page between memory tiers: demotion and promotion were switched off."
    ]
    half = MemoryTrace({"counters": [*still, *switch("demotion_enabled", 0, 1), *switch("numa_balancing", 0)]})
    assert tier_says(tier_pages(half), switched_off(half))[0].endswith("tiers: promotion was switched off.")
    assert switched_off(MemoryTrace({"counters": still})) == switched_off(MemoryTrace({})) == ()
    assert ledger(off).as_dict()["tiering_off"] == ["demotion", "promotion"]
