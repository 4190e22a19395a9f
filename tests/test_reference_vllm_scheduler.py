"""Both engines against vLLM 0.32's own scheduler, step by step: who computes how many tokens, who is driven out, what is held."""

from __future__ import annotations

import pytest
from support.vllm_reference import ENGINES, first_difference, names, ours, plan_of, scenario, theirs, work_of

FOLDER = "vllm_scheduler"


def test_the_scenarios_are_all_there() -> None:
    said = [scenario(FOLDER, n) for n in names(FOLDER)]
    assert len(said) >= 22
    assert sum(len(s["preempted"]) for one in said for s in one["steps"]) > 300


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", names(FOLDER))
def test_every_step_is_vllms(name: str, engine: str) -> None:
    said = scenario(FOLDER, name)
    work = work_of(said["requests"], said["settings"]["block"])
    (steps,), columns, _ = ours(ENGINES[engine], work, plan_of(said))
    assert not first_difference(steps, theirs(said))
    hits = [0] * work.n
    for step in said["steps"]:
        for request, cached in step["admitted"]:
            hits[request] += cached
    assert [a + b for a, b in zip(columns["cached_tokens"], columns["resumed_tokens"], strict=True)] == hits
    assert columns["preemptions"] == [sum(r in s["preempted"] for s in said["steps"]) for r in range(work.n)]
    assert columns["generated_tokens"] == work.output_tokens.tolist()
