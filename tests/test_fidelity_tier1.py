"""The real vLLM scheduler with steps of stated length, recorded (tests/data/fidelity), against its replay."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

import hoptrace
from hoptrace.analysis.fidelity.own_terms import OwnTerms, own_terms
from hoptrace.comparison import Comparison, compare
from hoptrace.reader import Trace
from hoptrace.replay.against import against
from hoptrace.replay.played import played
from hoptrace.replay.truths import replayed_with

_DATA = Path(__file__).parent / "data" / "fidelity"
_RUNS = ("base", "tight-kv", "priority")
# What each is predicted from. Requests wait for seconds in tight-kv: a thousandth in a step's length is a hundredth there, and
# two runs differ by that much, so it is held against its own steps.
_FROM = {"base": "base", "tight-kv": "tight-kv", "priority": "base"}
_FORCED = frozenset({"arrival", "step_time"})


@cache
def _run(name: str) -> Trace:
    return hoptrace.open(_DATA / f"{name}.trace")


@cache
def _predicted(name: str) -> list[Comparison]:
    """What another run (or the run itself) says that this one is, by four seeds: where in a step a request comes is luck."""
    once = against(_run(_FROM[name]), _run(name))
    found = []
    for seed in range(4):
        plan = replace(once.planned.plan, seed=seed)
        found.append(compare(_run(name), played(replace(once, planned=replace(once.planned, plan=plan)), tokens=False)))
    return found


def _error_pct(name: str, metric: str, statistic: str) -> float:
    errors = [c.get(metric, statistic).error_pct for c in _predicted(name)]
    return fmean(e for e in errors if e is not None)


@cache
def _forced(name: str, policy: str) -> OwnTerms:
    """The run's work under a policy, each request at the engine and each step at the time that was recorded."""
    made = replayed_with(against(_run(name), _run(policy), work="a"), _run(name), _FORCED, tokens=False)
    return own_terms(_run(name), made)


@pytest.mark.parametrize("name", _RUNS)
@pytest.mark.parametrize(
    ("metric", "statistic"), [("e2e", "mean"), ("e2e", "p50"), ("e2e", "p95"), ("tpot", "mean"), ("tpot", "p50")]
)
def test_latency_is_within_one_percent(name: str, metric: str, statistic: str) -> None:
    assert abs(_error_pct(name, metric, statistic)) <= 1.0


@pytest.mark.parametrize("name", _RUNS)
def test_throughput_is_within_one_percent(name: str) -> None:
    assert abs(_error_pct(name, "throughput", "output tokens")) <= 1.0


@pytest.mark.parametrize("name", _RUNS)
def test_steps_hold_who_they_held(name: str) -> None:
    found = _forced(name, name)
    assert found.steps.count.observed == found.steps.count.predicted
    assert found.steps.equal_share is not None and found.steps.equal_share >= 0.99
    assert found.cached_equal == found.cached_requests == 1000
    assert found.preemptions.observed == found.preemptions.predicted


def test_there_is_something_to_get_wrong() -> None:
    """Evictions, preemptions and priorities are in the runs: under another's policy the steps are not those recorded."""
    assert (_forced("tight-kv", "tight-kv").preemptions.observed or 0) > 50
    assert (_forced("tight-kv", "base").steps.equal_share or 0) < 0.9
    assert (_forced("priority", "base").steps.equal_share or 0) < 0.99
