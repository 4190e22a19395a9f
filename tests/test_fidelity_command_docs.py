"""docs/fidelity-command.md names what there is: every key of the JSON, every figure of the gate, every truth."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.runs import MS, record

from hoptrace.analysis.fidelity.rules import gate, parse
from hoptrace.analysis.fidelity.sources import Truth
from hoptrace.analysis.fidelity.study import FORMAT, Case, study
from hoptrace.cli.fidelity_run import SMALL_REQUESTS, SMALL_TOKENS
from hoptrace.comparison import METRICS, STATISTICS
from hoptrace.replay.truths import TRUTHS
from hoptrace.stepcost import fixed

DOC = (Path(__file__).parents[1] / "docs" / "fidelity-command.md").read_text(encoding="utf-8")


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {k for v in value.values() for k in keys(v)}
    return {k for v in value for k in keys(v)} if isinstance(value, list) else set()


def test_every_key_of_the_json_is_explained(tmp_path: Path) -> None:
    rows = [(i, 200 * i, 200 * i + 100, 200 * i + 350, 3) for i in range(12)]
    steps = [(200 * i, 200 * i + 100, {i: 8}) for i in range(12)]
    a, b, c = (record(tmp_path / f"{n}.trace", rows, steps, cached={0: 4}) for n in "abc")
    truths = (Truth(None, b), Truth("cache", None, "why.", ("cache",)))
    result = study(Case(a, b, at_speed=b, truths=truths), [Case(b, a)], [c], cost=fixed(step_ns=100 * MS))
    outcomes = gate([parse("e2e_p50>3%")], result)
    found = {**result.as_dict(), "rules": [o.as_dict() for o in outcomes]}
    section = DOC[DOC.index("## JSON") :]
    told = set(re.findall(r"`([a-z_0-9]+)`", section)) | set(re.findall(r'"([a-z]+)"', section))
    assert keys(found) - told - {"tpot", "queue"} == set()  # metrics of per_request_pct
    assert FORMAT in section


def test_every_figure_of_the_gate_can_be_judged() -> None:
    names = [f"{m}_{s}" for m in METRICS for s in STATISTICS] + ["output_tokens_per_s", "requests_per_s"]
    for metric in METRICS:
        assert f"{metric}_ " in DOC or f"{metric}_`" in DOC
    for name in names:
        assert parse(f"raw_{name}>1%") and parse(f"own.at_speed_{name}>1%")
    told = DOC[DOC.index("## Gate") : DOC.index("## JSON")]
    for rule in re.findall(r"--fail-on '([^']+)'", DOC) + re.findall(r"`([a-z_.0-9]+[<>]\d+%?)`", told):
        assert parse(rule)
    shares = ("equal_steps", "alike_steps", "equal_cached_tokens", "first_token_order", "finish_order")
    for name in ("steps", "cached_tokens", "preemptions", *shares):
        assert f"`{name}`" in told and parse(f"{name}>1%")


def test_every_truth_is_explained_and_the_limits_are_those_of_the_code() -> None:
    for truth in TRUTHS:
        assert f"*{truth}*" in DOC
    assert f"{SMALL_REQUESTS:,} requests and {SMALL_TOKENS:,} output tokens" in DOC


@pytest.mark.parametrize("page", ["fidelity.md", "diff.md"])
def test_links_lead_somewhere(page: str) -> None:
    assert f"]({page})" in DOC and (Path(__file__).parents[1] / "docs" / page).exists()
