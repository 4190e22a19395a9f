"""The trace clock: a step of the wall clock moves no row."""

from __future__ import annotations

import time

import pytest

from hoptrace.clock import TraceClock


class Clocks:
    """Both clocks of a machine, in ns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monotonic = 5_000
        self.wall = 1_700_000_000_000_000_000
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.monotonic)
        monkeypatch.setattr(time, "time_ns", lambda: self.wall)

    def pass_ns(self, ns: int) -> None:
        self.monotonic += ns
        self.wall += ns


@pytest.mark.parametrize("step_ns", [3_600_000_000_000, -3_600_000_000_000, 1])
def test_wall_clock_step_moves_no_row_and_is_seen(monkeypatch: pytest.MonkeyPatch, step_ns: int) -> None:
    clocks = Clocks(monkeypatch)
    clock = TraceClock.start()
    assert clock.now_ns() == clocks.wall
    clocks.pass_ns(100)
    before = clock.now_ns()
    clocks.wall += step_ns
    assert clock.now_ns() == before
    assert clock.wall_step_ns() == step_ns
    clocks.pass_ns(50)
    assert clock.now_ns() - before == 50


def test_offset_is_the_middle_of_the_bracket(monkeypatch: pytest.MonkeyPatch) -> None:
    monotonic = iter([1_000, 1_400])
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(monotonic))
    monkeypatch.setattr(time, "time_ns", lambda: 10_000)
    assert TraceClock.start().utc_offset_ns == 10_000 - 1_200


def test_monotonic_stamps_are_converted_exactly() -> None:
    clock = TraceClock(1_796_028_289_107_138_469)
    assert clock.from_monotonic_ns(1) == 1_796_028_289_107_138_470
