"""KV space that no trace tells: of the policy's ranks and platform, or refused where the weights leave none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hoptrace.errors import InputError
from hoptrace.reader import open_trace
from hoptrace.replay.planning import Planned
from hoptrace.replay.policy import parse_policy
from hoptrace.replay.prepare import prepare

LOG = Path(__file__).parent.parent / "sample_traces" / "azure-2023-conv.trace"
H100, A100 = 85_899_345_920, 85_899_345_920
QWEN_32B = (65_524_246_528, 262_144)  # bytes of weights, of a token's KV


def planned(policy: str, trace: Path = LOG, **more: Any) -> Planned:
    asked = {"cost": None, "platform": "h100-sxm-80gb", "model": "llama-3.1-8b", "recorded_on": None} | more
    found = prepare(
        open_trace(trace), parse_policy(policy), seed=0, rate=1, arrivals=None, until="1s", say=lambda _: None, **asked
    )  # fmt: skip
    return found.planned


def room(memory_bytes: int, devices: int, weight_bytes: int, token_bytes: int) -> int:
    return int(memory_bytes * 0.92 * devices - weight_bytes) // token_bytes


def test_more_ranks_have_more_room() -> None:
    found = planned("[servers]\ntensor_parallel = 2\n")
    assert found.plan.engines[0].capacity_tokens == room(H100, 2, 16_060_522_496, 131_072) == 1_083_330
    said = [n for n in (*found.notes, *found.plan.costs[0].notes) if "KV space" in n]
    assert len(said) == 1 and "KV space of 1,083,330 tokens is assumed" in said[0]


def test_a_model_that_needs_several_ranks_has_a_limited_room_on_them() -> None:
    found = planned("[servers]\ntensor_parallel = 4\n", model="llama-3.1-70b")
    assert found.plan.engines[0].capacity_tokens == room(H100, 4, 141_107_412_992, 327_680)
    assert found.servers[0].kv_capacity_tokens == found.plan.engines[0].capacity_tokens


def test_each_side_of_a_split_has_the_room_of_its_own_platform_and_ranks() -> None:
    text = '[split]\nprefill = 1\ndecode = 1\ndecode_server = {platform = "a100-pcie-80gb", tensor_parallel = 2}\n'
    found = planned(text, model="qwen3-32b")
    assert [e.capacity_tokens for e in found.plan.engines] == [room(H100, 1, *QWEN_32B), room(A100, 2, *QWEN_32B)]


def test_weights_that_leave_no_room_are_refused_unless_the_space_is_given() -> None:
    # 93.4 GB of 96 GB: more than the 92 % that an engine takes.
    with pytest.raises(InputError, match=r"Mixtral-8x7B-v0\.1 leave no room for KV on gh200.*tensor_parallel"):
        planned("", model="mixtral-8x7b", platform="gh200")
    given = planned("[kv]\ncapacity_tokens = 1000\n", model="mixtral-8x7b", platform="gh200")
    assert given.plan.engines[0].capacity_tokens == 1000
    assert planned('[ceilings]\nkv = "infinite"\n').plan.engines[0].capacity_tokens is None


def test_ranks_share_the_heads_out_evenly() -> None:
    with pytest.raises(InputError, match=r"tensor_parallel = 3: the model's 32 attention heads.*1, 2, 4, 8, 16, 32\."):
        planned("[servers]\ntensor_parallel = 3\n")


def test_the_machine_of_a_trace_that_tells_none_is_not_assumed_where_it_is_asked_for() -> None:
    with pytest.raises(InputError, match=r"--platform from-trace: the trace does not say what machine"):
        planned("", platform="from-trace")
    with pytest.raises(InputError, match=r"\[split\] names no link, and no platform is given"):
        planned("[split]\nprefill = 1\ndecode = 1\n", platform="from-trace", cost="fixed:5,5")


def test_kv_space_of_another_machine_is_said_to_be_the_traces() -> None:
    trace = Path(__file__).parent / "data" / "vllm_traces" / "steady.trace"
    found = planned("", trace=trace, model=None, cost="roofline", platform="b200-sxm")
    assert found.plan.engines[0].capacity_tokens == 87_328
    assert "KV space is the trace's server's, not that of b200-sxm: set kv.capacity_tokens if it differs." in found.notes
    found = planned('[servers]\nplatform = "b200-sxm"', trace=trace, model=None, cost="roofline", platform=None)
    assert any("KV space of 87,328 tokens is the trace's server's, not that of b200-sxm" in n for n in found.notes)
    given = planned("[kv]\ncapacity_tokens = 6400", trace=trace, model=None, cost="roofline", platform="b200-sxm")
    assert not any("KV space" in n for n in given.notes)
