"""Open or closed loop: simulated clients and servers whose answer is known, and the cases in which nothing can be told."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoptrace.load_loop import LoadLoop, coupling, load_loop

Times = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
Random = np.random.Generator


def closed(rng: Random, n: int, slots: int, think: Callable[[], float], length: Callable[[], float]) -> Times:
    """A client of so many slots: each sends when its answer has come, after a pause."""
    ready = [(0.001 * i, i) for i in range(slots)]
    heapq.heapify(ready)
    arrival, finish = [], []
    while len(arrival) < n:
        at, slot = heapq.heappop(ready)
        end = at + length()
        arrival.append(at)
        finish.append(end)
        heapq.heappush(ready, (end + think(), slot))
    return np.array(arrival), np.array(finish)


def queue(arrival: npt.NDArray[np.float64], length: Callable[[], float], slots: int) -> Times:
    """First come first served by so many slots."""
    free = [0.0] * slots
    finish = []
    for at in arrival:
        end = max(at, heapq.heappop(free)) + length()
        heapq.heappush(free, end)
        finish.append(end)
    return arrival, np.array(finish)


def poisson(rng: Random, n: int) -> npt.NDArray[np.float64]:
    return np.cumsum(rng.exponential(1, n))


OPEN: dict[str, Callable[[Random], Times]] = {
    "as many servers as one likes": lambda r: (a := poisson(r, 500), a + r.lognormal(1, 0.5, 500)),
    "a busy queue": lambda r: queue(poisson(r, 600), lambda: r.exponential(3.6), 4),
    "one server, nearly full": lambda r: queue(poisson(r, 600), lambda: r.exponential(0.8), 1),
    "overload": lambda r: queue(poisson(r, 500), lambda: r.exponential(1.5), 1),
    "a regular schedule": lambda r: queue(np.arange(600.0), lambda: r.exponential(3.0), 4),
    "a server that answers in batches": lambda r: (a := poisson(r, 600), np.floor(a / 10) * 10 + 15),
    "load that drifts": lambda r: (a := np.sort(r.uniform(0, 500, 1000)), a + r.lognormal(0, 0.5, 1000) * (1 + np.sin(a / 50))),
}
CLOSED: dict[str, Callable[[Random], Times]] = {
    "one slot": lambda r: closed(r, 60, 1, lambda: 0.003, lambda: float(r.lognormal(0, 0.3))),
    "eight slots": lambda r: closed(r, 200, 8, lambda: 0.003, lambda: float(r.lognormal(0, 0.5))),
    "many slots, high rate": lambda r: closed(r, 600, 64, lambda: 0.01, lambda: float(r.lognormal(0, 0.3))),
    "nearly even answers": lambda r: closed(r, 100, 4, lambda: 0.002, lambda: float(r.lognormal(0, 0.05))),
}


def kinds(make: Callable[[Random], Times], runs: int = 8) -> list[str]:
    out = []
    for seed in range(runs):
        arrival, finish = make(np.random.default_rng(seed))
        out.append(coupling("arrival", *((x * 1e9).astype(np.int64) for x in (arrival, finish))).kind)
    return out


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_loop_is_seen(name: str) -> None:
    assert kinds(CLOSED[name]) == ["closed"] * 8


@pytest.mark.parametrize("name", OPEN)
def test_an_open_loop_is_never_called_closed(name: str) -> None:
    found = kinds(OPEN[name])
    assert "closed" not in found and "partly closed" not in found
    assert found.count("open") >= 5


def test_conversations_are_partly_closed() -> None:
    def turns(rng: Random) -> Times:
        arrival, finish, start = [], [], 0.0
        for _ in range(200):
            start += rng.exponential(2)
            at = start
            for _ in range(5):
                end = at + rng.lognormal(0, 0.5)
                arrival.append(at)
                finish.append(end)
                at = end + rng.exponential(0.3)
        return np.array(arrival), np.array(finish)

    assert set(kinds(turns, 3)) == {"partly closed"}


@pytest.mark.parametrize("finish", [np.arange(1000.0) + 9.5, np.arange(1000.0) + 0.5])
def test_where_nothing_varies_nothing_is_told(finish: npt.NDArray[np.float64]) -> None:
    """A regular schedule on a regular server looks the same as a closed loop of equal answers."""
    t = coupling("arrival", (np.arange(1000.0) * 1e9).astype(np.int64), (finish * 1e9).astype(np.int64))
    assert t.kind == "unknown" and t.p is None


def test_a_closed_loop_of_equal_answers_is_not_called_open() -> None:
    arrival, finish = closed(np.random.default_rng(0), 300, 8, lambda: 0.003, lambda: 1.0)
    assert coupling("arrival", (arrival * 1e9).astype(np.int64), (finish * 1e9).astype(np.int64)).kind == "unknown"


def test_false_alarms_are_as_rare_as_the_test_says() -> None:
    below = 0
    for seed in range(100):
        rng = np.random.default_rng(1000 + seed)
        a = np.cumsum(rng.exponential(1, 80))
        t = coupling("arrival", (a * 1e6).astype(np.int64), ((a + rng.exponential(5, 80)) * 1e6).astype(np.int64))
        below += t.p is not None and t.p <= 0.05
    assert below <= 11  # 5 expected; more than 11 has a chance of 0.4 %


def test_the_cap_is_told() -> None:
    arrival, finish = (x * 1e9 for x in CLOSED["eight slots"](np.random.default_rng(1)))
    t = coupling("arrival", arrival.astype(np.int64), finish.astype(np.int64))
    assert t.most_in_flight == 8 and t.as_dict()["kind"] == "closed" and t.p == 0.001


def told(arrival: list[float], finish: list[float], sent: list[float] | None = None, **more: int) -> LoadLoop:
    n = len(arrival)
    given_ = {"requests": n, "slots": 0, "in_slots": 0, "turns": 0, **more}
    as_ints = [None if x is None else (np.array(x) * 1e9).astype(np.int64) for x in (arrival, sent, finish)]
    return load_loop(as_ints[0], as_ints[1], as_ints[2], **given_)  # type: ignore[arg-type]


def test_what_the_client_declares_is_taken() -> None:
    found = told([0, 1, 2], [1, 2, 3], slots=1, in_slots=3)
    assert (found.kind, found.sure, found.slots) == ("closed", "declared", 1) and "1 slot, each" in found.said


def test_few_requests_tell_nothing() -> None:
    found = told([0, 1, 2], [1, 2, 3])
    assert (found.kind, found.sure) == ("unknown", None) and "only" in found.said


def test_without_ends_nothing_is_told() -> None:
    assert "too many requests have no known arrival or end" in told([], [], requests=5).said
    assert told([], []).kind == "unknown"


def test_a_cap_in_the_client_is_told_apart_from_its_intent() -> None:
    """A72: intended on a schedule, sent when one of four places was free."""
    rng = np.random.default_rng(3)
    meant = np.cumsum(rng.exponential(0.2, 300))
    free, sent, finish = [0.0] * 4, [], []
    for at in meant:
        begin = max(at, heapq.heappop(free)) + 0.001
        end = begin + rng.lognormal(0, 0.4)
        heapq.heappush(free, end)
        sent.append(begin)
        finish.append(end)
    found = told(list(meant), finish, sent)
    assert found.kind != "closed" and found.tests[1].kind == "closed" and found.tests[1].most_in_flight == 4
    assert "the client held requests back" in found.said


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)), max_size=40))
def test_hostile_times_do_no_harm(rows: list[tuple[int, int]]) -> None:
    a, f = np.array([r[0] for r in rows], dtype=np.int64), np.array([r[1] for r in rows], dtype=np.int64)
    t = coupling("arrival", a, f)
    assert t.kind in ("open", "closed", "partly closed", "unknown") and 0 <= t.arrivals <= len(rows)


def test_the_result_does_not_depend_on_the_order_of_rows() -> None:
    arrival, finish = (x * 1e9 for x in OPEN["a busy queue"](np.random.default_rng(5)))
    again = np.random.default_rng(0).permutation(len(arrival))
    one = coupling("arrival", arrival.astype(np.int64), finish.astype(np.int64))
    assert one == coupling("arrival", arrival[again].astype(np.int64), finish[again].astype(np.int64))
