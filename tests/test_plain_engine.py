"""The plain engine of the replay: laws over random works and plans, and another simulator's output."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.plans import cases
from support.replay_laws import check_laws, first_difference, said_by
from support.workloads import MS, make

from hoptrace.replay import plain
from hoptrace.replay.plain import build as build_of_plain
from hoptrace.replay.plain import loop, stepping
from hoptrace.replay.plain.engine import Engine
from hoptrace.replay.plain.world import World
from hoptrace.replay.plan import EngineSpec, Plan
from hoptrace.stepcost import StepCost, fixed

REFERENCE = Path(__file__).parent / "data" / "reference"


def _conserved(e: Engine) -> None:
    """Each token of an engine's KV is free, private to a request, or in a cached block; blocks are held as often as said."""
    kv = e.kv
    assert kv.free >= 0 <= kv.evictable <= kv.resident
    assert kv.free + kv.resident + sum(room.private for room in kv.rooms.values()) == kv.capacity
    assert all(room.private >= 0 for room in kv.rooms.values())
    holders = Counter(block for room in kv.rooms.values() for block in room.held.values())
    assert {b: n for b, n in kv._holders.items() if n} == holders


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_token_of_room_is_lost_or_made(data: st.DataObject) -> None:
    work, plan = data.draw(cases())
    worlds: list[World] = []

    def build(*given: Any) -> Any:
        made = build_of_plain.build(*given)
        worlds.append(made[0])
        return made

    def end_step(w: World, e: Engine, now: int) -> None:
        stepping.end_step(w, e, now)
        for each in w.engines:
            _conserved(each)

    with mock.patch.object(loop, "build", build), mock.patch.object(loop, "end_step", end_step):
        said_by(plain.simulate, work, plan)
    (world,) = worlds
    if plan.horizon_ns is None:
        for e in world.engines:
            _conserved(e)
            assert not (e.kv.rooms or e.running or e.queue or e.front or e.arrived or e.loading or e.held or e.reading)
            assert e.kv.free + e.kv.evictable == e.kv.capacity
            assert e.waiting == [0, 0, 0, 0]
    if world.tiers is not None:
        for level in world.tiers._of:
            for tier in level:
                assert tier.used == sum(tier.there.values()) <= tier.capacity
                assert plan.horizon_ns is not None or not tier.held


@given(st.data())
@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_nothing_is_lost_and_no_limit_is_broken(data: st.DataObject) -> None:
    work, plan = data.draw(cases())
    said = said_by(plain.simulate, work, plan)
    check_laws(said, work, plan)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_the_same_again(data: st.DataObject) -> None:
    work, plan = data.draw(cases())
    assert first_difference(said_by(plain.simulate, work, plan), said_by(plain.simulate, work, plan)) is None


def test_equal_to_another_simulator_on_its_reference() -> None:
    """AISimulate's latencies of 200 requests under the same rules; see tests/data/reference/README.md."""
    asked = pl.read_csv(REFERENCE / "r5_200.csv")
    said = pl.read_csv(REFERENCE / "fixed_cost_one_worker.csv")
    work = make(*((round(a * 1e9), p, o) for a, p, o in asked.iter_rows()))
    engine = EngineSpec("one", max_sequences=128, max_batched_tokens=2048, capacity_tokens=7000 * 64, block_size_tokens=64)
    ours = said_by(plain.simulate, work, Plan((engine,), (fixed(any_prefill_ns=50 * MS, any_decode_ns=12 * MS),))).requests
    for mine, theirs in (("first_token_ns", "first_token_ms"), ("last_token_ns", "finish_ms")):
        assert np.abs(ours[mine].to_numpy() / MS - said[theirs].to_numpy()).max() <= 0.001


def test_seed_nought_takes_the_residuals_in_the_order_of_the_recording() -> None:
    cost = StepCost({"step": 1_000_000}, "fitted", residuals={"decode": (0, 100_000, 200_000), "prefill": (500_000, 0)})
    work = make((0, 8, 6), (100_000, 4, 1))
    steps = said_by(plain.simulate, work, Plan((EngineSpec("one"),), (cost,))).steps
    # A prompt, five decode steps (the table begins again behind its end), the other prompt.
    assert (steps["end_ns"] - steps["start_ns"]).to_list() == [1500, 1000, 1100, 1200, 1000, 1100, 1000]
