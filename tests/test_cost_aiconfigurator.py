"""Step costs out of aiconfigurator's silicon database: refused by name without the package; tabulated true to it with it."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

from hoptrace.errors import EnvironmentProblem, InputError
from hoptrace.manifest import Server
from hoptrace.replay.cost import choose
from hoptrace.stepcost import StepCost

INSTALLED = importlib.util.find_spec("aiconfigurator_core") is not None
needs_it = pytest.mark.skipif(
    not INSTALLED, reason="aiconfigurator-core is not installed (pip install 'hoptrace[aiconfigurator]')"
)


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    monkeypatch.delitem(sys.modules, "aiconfigurator_core.sdk.engine", raising=False)
    with pytest.raises(EnvironmentProblem, match=r"needs the package aiconfigurator-core.*hoptrace\[aiconfigurator\]"):
        choose("aiconfigurator", None, None, model="llama-3.1-8b", platform="h100-sxm-80gb")


@needs_it
def test_it_is_tabulated_true_to_its_own_answers() -> None:
    from aiconfigurator_core.sdk.engine import EngineHandle  # type: ignore[import-not-found,unused-ignore]

    got = choose("aiconfigurator", None, None, model="llama-3.1-8b", platform="h100-sxm-80gb")
    assert got.how["licence"] == "Apache-2.0" and got.how["tensor_parallel_size"] == 1 and got.how["version"]
    handle = EngineHandle.compile("meta-llama/Meta-Llama-3.1-8B", "h100_sxm", "vllm")
    for batch, context in ((1, 1024), (32, 1000), (96, 3000), (512, 32_768)):
        ours = got.cost.cost_ns(decode_requests=batch, decode_context_tokens=batch * context) / 1e6
        assert ours == pytest.approx(handle.predict_decode_latency(batch, context), rel=0.05)
    for tokens, prefix in ((512, 0), (3000, 0), (1000, 4096)):
        ours = got.cost.cost_ns(prefill_tokens=tokens, prefill_context_tokens=prefix) / 1e6
        assert ours == pytest.approx(handle.predict_prefill_latency(1, prefix + tokens, prefix), rel=0.05)
    for batch, tokens in ((8, 1024), (16, 1024), (64, 256)):  # prompts attend each to itself
        ours = got.cost.cost_ns(prefill_requests=batch, prefill_tokens=batch * tokens) / 1e6
        assert ours == pytest.approx(handle.predict_prefill_latency(batch, tokens, 0), rel=0.03)
    ours = got.cost.cost_ns(prefill_tokens=512, decode_requests=32, decode_context_tokens=32_000) / 1e6
    parts = handle.mixed_step_breakdown(512, 0, 512, 2)[2], handle.mixed_step_breakdown(1, 32, 1000, 2)[3]
    assert ours == pytest.approx(handle.mixed_step_breakdown(544, 0, 544, 2)[1] + sum(parts), rel=0.05)
    # A chunk attends to what was computed before it, with decoders beside it too: what a prompt step of it takes, and theirs.
    ours = got.cost.cost_ns(
        prefill_tokens=1024, prefill_context_tokens=16_384, decode_requests=8, decode_context_tokens=8000
    )  # fmt: skip
    beside = handle.mixed_step_breakdown(1, 8, 1000, 2)[3]
    assert ours / 1e6 == pytest.approx(handle.predict_prefill_latency(1, 17_408, 16_384) + beside, rel=0.05)
    assert StepCost.from_dict(got.cost.to_dict()) == got.cost


@needs_it
def test_what_it_does_not_hold_is_refused_without_asking_the_network() -> None:
    with pytest.raises(InputError, match="does not come with HuggingFaceTB/SmolLM2-135M"):
        choose("aiconfigurator", None, None, model="smollm2-135m", platform="h100-sxm-80gb")
    with pytest.raises(InputError, match="has no data of 'mi300x'"):
        choose("aiconfigurator", None, None, model="llama-3.1-8b", platform="mi300x")
    other: dict[str, Any] = {"tensor_parallel_size": 3}
    with pytest.raises(InputError, match="can't price"):
        choose("aiconfigurator", None, Server(name="s", config=other), model="llama-3.1-8b", platform="h100-sxm-80gb")
