"""The roofline of a step against figures computed by hand and published ones."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from support.engine_steps import LLAMA70

from hoptrace.errors import InputError
from hoptrace.manifest import Manifest, Server
from hoptrace.model_catalogue import models
from hoptrace.platform import load_platform, platforms
from hoptrace.roofline import active_parameters, platform_of, rank_count, roofline_of
from hoptrace.schema import table
from hoptrace.stepcost import roofline

A100, H100 = load_platform("a100-sxm-80gb"), load_platform("h100-sxm-80gb")
# Small round numbers: 1 FLOP a second is 1 ns per nano-FLOP.
SMALL = Server(name="s", parameters=1000, weight_bytes=2000, layers=1, heads=1, kv_heads=1, head_size=1, kv_dtype="f16")
UNIT = {"name": "unit", "flops_per_s": 1e9, "memory_bytes_per_s": 1e9}  # 1 FLOP or byte a ns


def times(server: Server, platform: dict[str, Any], **step: Any) -> tuple[float | None, float | None]:
    """Arithmetic and memory time of one step in ns."""
    empty = pl.from_arrow(table("steps").arrow.empty_table())
    assert isinstance(empty, pl.DataFrame)
    row = {"prefill_tokens": 0, "prefill_context_tokens": 0, "decode_requests": 0, "decode_context_tokens": 0} | step
    frame = pl.concat([empty, pl.DataFrame([row])], how="diagonal_relaxed")
    arithmetic, memory = roofline_of(server, platform).sides()
    found = frame.select(arithmetic.alias("a"), memory.alias("m")).row(0)
    return found[0], found[1]


def test_llama_70b_on_eight_a100_is_bounded_by_its_weights_at_8_46_ms() -> None:
    arithmetic, memory = times(LLAMA70, A100, decode_requests=1, decode_tokens=1, decode_context_tokens=512)
    assert arithmetic is not None and memory is not None
    # 138 GB over 8 × 2039 GB/s, and 513 tokens of 327,680 bytes.
    assert memory == pytest.approx((138e9 + 513 * 327_680) / (8 * 2039), rel=1e-9)
    assert memory / 1e6 == pytest.approx(8.47, abs=0.01)
    assert arithmetic == pytest.approx((2 * 69e9 + 4 * 80 * 64 * 128 * 512) / (8 * 312e3), rel=1e-9)


def test_a_prompt_is_bounded_by_arithmetic() -> None:
    arithmetic, memory = times(LLAMA70, A100, prefill_requests=1, prefill_tokens=512)
    assert arithmetic is not None and memory is not None
    assert arithmetic == pytest.approx((2 * 69e9 * 512 + 4 * 80 * 64 * 128 * 512 * 256) / (8 * 312e3), rel=1e-9)
    assert arithmetic > memory


def test_the_same_figures_as_the_cost_of_a_replay() -> None:
    cost = roofline(LLAMA70, H100)
    for step in (
        {"decode_requests": 7, "decode_context_tokens": 9000},
        {"prefill_requests": 1, "prefill_tokens": 2048, "prefill_context_tokens": 512},
    ):
        both = times(LLAMA70, H100, **step)
        assert cost.cost_ns(**step) == pytest.approx(max(x for x in both if x is not None), rel=1e-3)


def test_parts_of_a_step_by_hand() -> None:
    # KV of a token: 2 × 1 × 1 × 1 × 2 bytes = 4. A pair: 4 FLOP.
    assert times(SMALL, UNIT, decode_requests=2, decode_tokens=2, decode_context_tokens=100) == (
        2 * 2000 + 100 * 4,
        2000 + 102 * 4,
    )
    # Two prompts of 10 after a context of 30 each: every token sees 30 + 5 positions on average.
    assert times(SMALL, UNIT, prefill_requests=2, prefill_tokens=20, prefill_context_tokens=60) == (
        20 * 2000 + 20 * 35 * 4, 2000 + 80 * 4,
    )  # fmt: skip
    assert times(SMALL, UNIT) == (0, 0)


def test_each_drafted_token_is_computed() -> None:
    assert times(SMALL, UNIT, decode_requests=1, decode_tokens=4, decode_context_tokens=100) == (
        4 * 2000 + 4 * 100 * 4,
        2000 + 104 * 4,
    )


def test_a_large_step_reads_the_weights_once_a_pass() -> None:
    server = SMALL.model_copy(update={"config": {"n_ubatch": 512}})
    assert times(server, UNIT, prefill_requests=1, prefill_tokens=513)[1] == 2 * 2000 + 513 * 4


def test_sliding_attention_reads_a_window_at_most() -> None:
    server = SMALL.model_copy(update={"config": {"window_tokens": 50}})
    assert times(server, UNIT, decode_requests=2, decode_tokens=2, decode_context_tokens=1000) == (
        2 * 2000 + 100 * 4, 2000 + 102 * 4,
    )  # fmt: skip
    assert times(server, UNIT, decode_requests=2, decode_tokens=2, decode_context_tokens=None)[1] is None


def test_what_a_step_recorded_goes_before() -> None:
    assert times(SMALL, UNIT, decode_requests=1, decode_context_tokens=10, weight_bytes=500, kv_read_bytes=7)[1] == 507


@pytest.mark.parametrize("column", ["prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens"])
@pytest.mark.parametrize("value", [None, -1])
def test_an_unknown_composition_has_no_roofline(column: str, value: int | None) -> None:
    step = {"decode_requests": 1, "decode_context_tokens": 10, column: value}
    found = times(SMALL, UNIT, **step)
    assert None in found


def test_tensor_parallel_ranks_share_a_step() -> None:
    assert rank_count(LLAMA70) == 8
    assert roofline_of(LLAMA70, H100).memory_bytes_per_s == 8 * 3350e9
    assert rank_count(LLAMA70.model_copy(update={"config": {"pipeline_parallel_size": 4}})) == 1
    for odd in (None, 0, -2, "8", 1.5, True):
        assert rank_count(LLAMA70.model_copy(update={"config": {"tensor_parallel_size": odd}})) == 1


def test_embeddings_are_looked_up() -> None:
    server = SMALL.model_copy(update={"hidden_size": 10, "config": {"vocabulary": 30}})
    assert active_parameters(server) == (700, None)
    # A vocabulary that is larger than the model is no vocabulary of it.
    assert active_parameters(server.model_copy(update={"hidden_size": 100})) == (1000, None)


def test_a_mixture_of_experts_needs_what_a_token_passes() -> None:
    server = SMALL.model_copy(update={"config": {"experts": 8}})
    with pytest.raises(InputError, match="mixture of 8 experts"):
        roofline_of(server, UNIT)
    told = roofline_of(server.model_copy(update={"config": {"experts": 8, "active_parameters": 250}}), UNIT)
    assert (told.token_flop, told.weight_bytes) == (500, 500)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(InputError, match="parameters, weight_bytes, kv_dtype, flops_per_s"):
        roofline_of(
            SMALL.model_copy(update={"parameters": None, "weight_bytes": None, "kv_dtype": None}), {"memory_bytes_per_s": 1.0}
        )
    for bad in (0, -1, float("inf"), float("nan"), True, "1", None):
        with pytest.raises(InputError, match="memory_bytes_per_s"):
            roofline_of(SMALL, {"flops_per_s": 1e9, "memory_bytes_per_s": bad})


def test_the_platform_of_a_manifest() -> None:
    def node(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "flops_per_s": 2.0, "memory_bytes_per_s": 3.0, **more}

    def of(*nodes: dict[str, Any], server: Server = SMALL) -> dict[str, Any] | None:
        return platform_of(Manifest(origin="recorded", platform={"nodes": list(nodes)}), server)

    only = {"name": "gpu", "flops_per_s": 2.0, "memory_bytes_per_s": 3.0}
    assert of(node("gpu")) == only
    assert of({"name": "client"}) is None
    assert of(node("a"), node("b")) is None  # which of the two?
    assert of(node("gpu", server="s"), node("b", server="t")) == only
    assert of(node("gpu", host="h"), node("b"), server=SMALL.model_copy(update={"host": "h"})) == only
    # Unequal devices of one server: the slowest.
    assert of(node("gpu", server="s"), {**node("b", server="s"), "flops_per_s": 1.0}) == only | {"flops_per_s": 1.0}


def test_every_platform_of_the_catalogue_has_rates_and_their_sources() -> None:
    found = platforms()
    assert {"a100-sxm-80gb", "a100-pcie-80gb", "h100-sxm-80gb", "h200-sxm", "b200-sxm", "gb200", "l40s", "mi300x"} <= set(found)
    for name, p in found.items():
        roofline_of(SMALL, p)
        for rate in ("flops_per_s", "memory_bytes_per_s", "memory_bytes"):
            assert p["sources"][rate], name


def test_latent_attention_has_two_prices() -> None:
    """DeepSeek-V3, a prompt of 4,096 tokens: pairs × 2 × 61 × 128 × (128 + 64 + 128) FLOP beside 2 × active parameters; a decoder
    pays 2 × 61 × 128 × (576 + 512) a position. The sides of a recorded step and the cost of a replay are of one mind."""
    server = models()["deepseek-v3"].shape.server("s", "deepseek-v3")
    machine = {"name": "m", "flops_per_s": 1e12, "memory_bytes_per_s": 1e30}
    r = roofline_of(server, machine)
    assert r.pair_flop == 2 * 61 * 128 * 320 and r.decode_pair_flop == 2 * 61 * 128 * 1088
    frame = pl.DataFrame({"prefill_requests": [1, 0], "prefill_tokens": [4096, 0], "prefill_context_tokens": [0, 0],
                          "decode_requests": [0, 2], "decode_tokens": [0, 2], "decode_context_tokens": [0, 2000],
                          "weight_bytes": [None, None], "kv_read_bytes": [None, None]},
                         schema_overrides={"weight_bytes": pl.Int64, "kv_read_bytes": pl.Int64})  # fmt: skip
    arithmetic = frame.select(r.sides()[0].alias("ns"))["ns"].to_list()
    cost = roofline(server, machine)
    assert arithmetic[0] == pytest.approx(cost.cost_ns(prefill_requests=1, prefill_tokens=4096), rel=1e-3)
    assert arithmetic[1] == pytest.approx(cost.cost_ns(decode_requests=2, decode_context_tokens=2000), rel=1e-3)
    by_hand = 2 * (36_625_618_432 - 129_280 * 7168) * 4096 + 4096 * 4096 / 2 * 2 * 61 * 128 * 320
    assert arithmetic[0] == pytest.approx(by_hand / 1e12 * 1e9, rel=1e-3)
    assert any("fewer than 16 bits" in n for n in r.notes) and any("fewer than 16 bits" in n for n in cost.notes)


def test_only_layers_that_keep_kv_attend() -> None:
    """Qwen3-Next keeps KV in 12 of 48 layers."""
    server = models()["qwen3-8b"].shape.server("s", "m")
    hybrid = server.model_copy(update={"config": {**server.config, "kv_layers": 9}})
    machine = {"name": "m", "flops_per_s": 1e12, "memory_bytes_per_s": 1e12}
    assert roofline_of(hybrid, machine).pair_flop == 4 * 9 * 32 * 128 == roofline_of(server, machine).pair_flop / 4
    assert not any("16 bits" in n for n in roofline_of(server, machine).notes)
