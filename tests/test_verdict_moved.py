"""Costs that were moved elsewhere rather than removed, told apart; and what a flat total hides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arms import MS, Times, arm

from hoptrace.analysis.compare.diff import Diff, diff
from hoptrace.analysis.compare.diff_change import Change
from hoptrace.analysis.compare.verdict_moved import Balance, balance


def change(name: str, a: float, b: float, **more: Any) -> Change:
    """A figure in ns whose change is beyond noise, unless said otherwise."""
    c = b - a
    return Change(name, "ns", a, b, **({"low": c - 1, "high": c + 1} | more))


def of(key: str, d: Diff) -> Balance:
    return next(b for b in d.verdict.balances if b.key == key)


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_a_cost_that_fell_while_another_rose_is_moved() -> None:
    """The brief's example: queue −100 ms, prefill interference +95 ms."""
    b = balance(
        "t", "time", [change("queue_slots.mean", 120 * MS, 20 * MS), change("prefill_interference.mean", 5 * MS, 100 * MS)]
    )
    [shift] = b.shifts
    assert b.outcome == "moved" and shift.is_moved and shift.share == pytest.approx(0.95)
    assert b.sentences == [
        "Queue, no slot fell by 100 ms (120 ms → 20 ms) while prefill, shared rose by 95 ms (5.00 ms → 100 ms): 95% of what it "
        "fell by stands elsewhere."
    ]
    assert b.as_dict()["shifts"][0]["class"] == "capacity" and b.as_dict()["shifts"][0]["rose"][0]["class"] == "sharing"


def test_a_cost_that_fell_alone_is_removed() -> None:
    b = balance("t", "time", [change("queue_slots.mean", 120, 20), change("decode.mean", 300, 300, low=-1, high=1)])
    assert b.outcome == "removed" and b.moved_share == 0 and not b.shifts and not b.sentences


def test_the_other_way_round_it_is_added() -> None:
    b = balance("t", "time", [change("queue_slots.mean", 20, 120), change("decode.mean", 300, 300, low=-1, high=1)])
    assert b.outcome == "added" and b.moved_share is None and not b.sentences


@pytest.mark.parametrize(("rise", "moved", "outcome"), [(49, False, "partly moved"), (50, True, "moved"), (9, False, "removed")])
def test_from_half_on_it_is_moved(rise: float, moved: bool, outcome: str) -> None:
    b = balance("t", "time", [change("queue_slots.mean", 200, 100), change("decode.mean", 100, 100 + rise)])
    assert b.shifts[0].is_moved is moved and b.outcome == outcome and b.moved_share == rise / 100


def test_what_went_out_of_sight_is_not_moved() -> None:
    """Decode −200 ms while 224 ms became unexplained: B may have done the very same, and one does not see it."""
    seen = [change("decode.mean", 400 * MS, 200 * MS), change("queue_slots.mean", 5 * MS, 105 * MS)]
    b = balance("t", "time", [*seen, change("unexplained.mean", 0, 224 * MS)])
    assert b.outcome == "cannot be told" and b.moved_share is None and [c.name for c in b.unexplained] == ["unexplained.mean"]
    [shift] = b.shifts
    assert [c.name for c, _ in shift.rose] == ["queue_slots.mean"] and shift.share == 0.5
    assert "Of time, what fell and what rose cannot all be told: unexplained 0 → 224 ms." in b.sentences
    # Alone it is no removal, nor is what comes into sight an addition.
    assert balance("t", "time", [seen[0], change("queue_unknown.mean", 0, 30 * MS)]).outcome == "cannot be told"
    assert balance("t", "time", [change("decode.mean", 0, 100), change("unexplained.mean", 100, 0)]).outcome == "cannot be told"
    # A little of it takes nothing away.
    assert balance("t", "time", [seen[0], change("unexplained.mean", 0, 19 * MS)]).outcome == "removed"


def test_a_rise_within_noise_is_none() -> None:
    b = balance("t", "time", [change("queue_slots.mean", 200, 100), change("decode.mean", 100, 195, low=-10, high=200)])
    assert b.outcome == "removed" and [c.name for c in b.rises] == []


def test_a_rise_within_what_repeats_differ_by_is_none() -> None:
    queue = change("queue_slots.mean", 200, 100, noise=20, repeats=True)
    b = balance("t", "time", [queue, change("decode.mean", 100, 195, noise=120, repeats=True)])
    assert [c.name for c in b.falls] == ["queue_slots.mean"] and not b.rises


def test_without_any_noise_known_small_changes_are_none() -> None:
    known = {"low": None, "high": None}
    b = balance("t", "bytes", [change("x", 1000, 960, **known), change("y", 1000, 1100, **known)])
    assert not b.falls and [c.name for c in b.rises] == ["y"]


def test_a_rise_stands_against_one_fall_only() -> None:
    """Falls of 1000 and 100, a rise of 95: against the smaller one, and hardly against all that fell."""
    b = balance(
        "t", "time", [change("queue_slots.mean", 1500, 500), change("client.mean", 120, 20), change("decode.mean", 5, 100)]
    )
    assert [(s.fell.name, s.is_moved) for s in b.shifts] == [("client.mean", True)]
    assert b.outcome == "removed" and b.moved_share == pytest.approx(95 / 1100)
    assert "95% of what it fell by, and 8.6% of all that fell, stands elsewhere." in b.sentences[0]


def test_what_one_side_cannot_show_is_named() -> None:
    b = balance("t", "time", [change("queue_slots.mean", 200, 100), Change("host_gap.mean", "ns", 50, None)])
    assert b.unknown == ("host_gap.mean",)


changes_ = st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)), min_size=1, max_size=8).map(
    lambda v: [change(f"n{i}.mean", a, b) for i, (a, b) in enumerate(v)]
)


@given(changes_)
@settings(max_examples=200)
def test_nothing_is_counted_twice(given_: list[Change]) -> None:
    b = balance("t", "time", given_)
    for s in b.shifts:
        assert 0 < s.explained <= s.fell_by * (1 + 1e-9) and 0 <= s.share <= 1
    for rise in b.rises:
        taken = sum(x for s in b.shifts for c, x in s.rose if c.name == rise.name)
        assert taken <= (rise.change or 0) * (1 + 1e-9)
    # All that can stand against something does.
    assert sum(s.explained for s in b.shifts) == pytest.approx(min(b.fell_by, b.rose_by))


@given(changes_, st.sampled_from([1e-3, 7.0, 1e6]))
@settings(max_examples=100)
def test_units_change_nothing_and_sides_can_be_swapped(given_: list[Change], unit: float) -> None:
    b = balance("t", "time", given_)
    scaled = balance(
        "t",
        "time",
        [change(c.name, (c.a or 0) * unit, (c.b or 0) * unit, low=None, high=None, noise=0.0, repeats=True) for c in given_],
    )
    exact = balance(
        "t", "time", [change(c.name, c.a or 0, c.b or 0, low=None, high=None, noise=0.0, repeats=True) for c in given_]
    )
    assert [c.name for c in scaled.falls] == [c.name for c in exact.falls] and scaled.outcome == exact.outcome
    back = balance("t", "time", [change(c.name, c.b or 0, c.a or 0) for c in given_])
    assert {c.name for c in back.falls} == {c.name for c in b.rises} and {c.name for c in back.rises} == {c.name for c in b.falls}


# -- from traces ------------------------------------------------------------------------------------------------------


def test_a_wait_of_the_client_that_becomes_a_queue_of_the_server() -> None:
    a = arm(20, lambda i: Times(client=100 + i), name="a")
    b = arm(20, lambda i: Times(queue=95 + i), name="b")
    d = diff(a, b)
    [shift] = of("time.mean", d).shifts
    assert shift.fell.name == "client.mean" and [c.name for c, _ in shift.rose] == ["queue_room.mean"]
    # 109.5 ms against 104.5 ms.
    assert shift.share == pytest.approx(104.5 / 109.5) and shift.fell_by == 109.5 * MS
    # And back: the queue of the server becomes a wait of the client.
    [shift] = of("time.mean", diff(b, a)).shifts
    assert shift.fell.name == "queue_room.mean" and [c.name for c, _ in shift.rose] == ["client.mean"] and shift.share == 1


def test_a_wait_that_is_gone_is_removed() -> None:
    a, b = arm(20, lambda i: Times(client=100 + i), name="a"), arm(20, lambda _: Times(), name="b")
    found = of("time.mean", diff(a, b))
    assert found.outcome == "removed" and not found.sentences
    assert diff(a, b).changes["e2e.mean"].change == -109.5 * MS
    assert of("time.mean", diff(b, a)).outcome == "added"


def test_a_flat_total_hides_faster_prefill_and_slower_decode() -> None:
    """Field case A58 (vLLM #42058): end to end 1.00 ×, prefill −5 % and decode +5.5 % in it."""
    n = 24
    a = arm(n, lambda i: Times(prefill=200 + i, gaps=[19 + i / 10] * 10), name="bf16")
    b = arm(n, lambda i: Times(prefill=0.95 * (200 + i), gaps=[1.055 * (19 + i / 10)] * 10), name="fp8")
    d = diff(a, b)
    found = of("time.mean", d)
    assert found.hidden and found.total is not None and abs(found.total.relative or 1) < 0.01
    assert d.changes["prefill.mean"].relative == pytest.approx(-0.05, abs=1e-6)
    assert d.changes["decode.mean"].relative == pytest.approx(0.055, abs=1e-6)
    assert found.sentences[0].startswith("End to end mean stays about the same")
    assert "prefill -5.0%" in found.sentences[0] and "decode +5.5%" in found.sentences[0]
    assert d.verdict.moved[0] == found.sentences[0]
    # The phases tell the same of users: the first token sooner, the others later.
    assert of("phases", d).hidden and of("phases", d).falls[0].name == "ttft.mean"


def test_a_flat_total_of_which_nothing_changed_hides_nothing() -> None:
    a = arm(10, lambda i: Times(prefill=200 + i), name="a")
    assert not of("time.mean", diff(a, a)).hidden


def moves(link: str, src: str, size: int, n: int) -> dict[str, list[dict[str, Any]]]:
    row = {"server": "s", "object": "kv", "dst": "memory:s", "mechanism": "rdma", "transfers": 1, "basis": "counted"}
    return {
        "moves": [
            row
            | {
                "request": i,
                "start_ns": i * 10_000 * MS,
                "end_ns": i * 10_000 * MS + 1,
                "src": src,
                "path": [link],
                "bytes": size,
            }
            for i in range(n)
        ]
    }


def test_bytes_that_left_one_link_for_another() -> None:
    a = arm(10, lambda _: Times(), name="a", extra=moves("pcie0", "memory:host", 1000, 10))
    b = arm(10, lambda _: Times(), name="b", extra=moves("nic0", "memory:pool", 900, 10))
    d = diff(a, b)
    links = of("links.counted", d)
    # 4 output tokens a request: 250 B a token on pcie0, then 225 B on nic0.
    assert [(c.name, c.a, c.b) for c in links.falls] == [("bytes_per_token[link pcie0 counted]", 250, 0)]
    assert [(c.name, c.a, c.b) for c in links.rises] == [("bytes_per_token[link nic0 counted]", 0, 225)]
    assert links.outcome == "moved" and links.moved_share == pytest.approx(0.9)
    nodes = of("nodes.counted", d)
    assert {c.name for c in nodes.falls} == {
        "bytes_per_token[node memory:host counted]",
        "bytes_per_token[node memory:s counted]",
    }
    fewer = arm(10, lambda _: Times(), name="c", extra=moves("pcie0", "memory:host", 100, 10))
    assert of("links.counted", diff(a, fewer)).outcome == "removed"


def test_a_queue_that_moved_to_another_server() -> None:
    def split(first: float, second: float, name: str) -> Any:
        stays = []
        for i in range(12):
            at = i * 10_000 * MS
            for k, (server, wait) in enumerate((("p", first), ("d", second))):
                begin = at + k * 5000 * MS
                stays.append({
                    "request": i, "stage": k, "server": server, "enqueued_ns": begin,
                    "scheduled_ns": begin + round((wait + i) * MS), "end_ns": begin + 400 * MS,
                })  # fmt: skip
        return arm(12, lambda _: Times(prefill=500), name=name, stays=False, extra={"stages": stays})

    found = of("queue_of", diff(split(100, 10, "a"), split(10, 95, "b")))
    assert [c.name for c in found.falls] == ["queue_of.p"] and [c.name for c in found.rises] == ["queue_of.d"]
    # 115.5 → 15.5... the mean of i is 5.5 ms: 105.5 → 15.5 and 15.5 → 100.5.
    assert (found.falls[0].a, found.falls[0].b) == (105.5 * MS, 15.5 * MS)
    assert found.moved_share == pytest.approx(85 / 90)
