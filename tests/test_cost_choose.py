"""Which step cost a replay gets, what it says it assumed, and published checks of rooflines (X4, X8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from hoptrace.breakeven import break_even_bytes_per_s
from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Manifest, Server
from hoptrace.model_catalogue import load_model
from hoptrace.platform import load_platform
from hoptrace.replay.cost import Chosen, choose, choose_cost
from hoptrace.replay.costs.table import read_table
from hoptrace.stepcost import StepCost, fit, fixed, roofline
from hoptrace.stepcost_kernel import step_ns
from hoptrace.stepcost_pack import pack

H100 = load_platform("h100-sxm-80gb")


def of_model(name: str, **config: int) -> Server:
    return load_model(name).on(Server(name="s", config=config))


def steps(cost: StepCost, **more: Any) -> pl.DataFrame:
    """240 steps of either kind and both that take what ``cost`` says."""
    held = [
        (0, 0, 0, 1 + i % 8, (1 + i % 8) * (50 + 13 * i)) if i % 3 else (1, 64 + 7 * i, 0, i % 2, 100 * (i % 2))
        for i in range(240)
    ]
    names = ["prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens"]
    frame = pl.DataFrame(held, schema=names, orient="row")
    ns = cost.cost_ns_array(frame)
    return frame.with_columns(start_ns=pl.lit(0), end_ns=pl.Series(ns), **{k: pl.lit(v) for k, v in more.items()})


MACHINE = fixed(step_ns=4e6, prefill_token_ns=2e5, decode_request_ns=1e6, decode_context_token_ns=1e3)


def machine(name: str, flops: float, rate: float) -> dict[str, Any]:
    return {"nodes": [{"name": name, "kind": "compute", "flops_per_s": flops, "memory_bytes_per_s": rate}]}


# What is chosen


def test_a_trace_with_steps_is_fitted_and_one_without_is_assumed_a_machine() -> None:
    got = choose(None, steps(MACHINE), None)
    assert got.how == {"kind": "fitted"} and got.cost.origin == "fitted" and got.notes == ()
    got = choose(None, None, None)
    assert got.cost.origin == "roofline" and got.server.layers == 32 and got.how["model"] == "meta-llama/Llama-3.1-8B"
    assert "No model was named and the trace tells none: meta-llama/Llama-3.1-8B is assumed" in got.notes[0]
    assert "No platform was named and the trace tells none: one h100-sxm-80gb is assumed" in got.notes[1]
    assert "No step tells its host time" in got.notes[2]
    assert got.cost.notes[: len(got.notes)] == got.notes  # a replay prints them
    # (0.92 × 80 GiB − 16.06 GB) ÷ 131,072 bytes
    assert got.server.kv_capacity_tokens == (int(0.92 * 85_899_345_920) - 16_060_522_496) // 131_072 == 480_399
    assert "KV space of 480,399 tokens is assumed: 92 % of the memory of h100-sxm-80gb" in str(got.room)
    few = steps(MACHINE)[:10]
    assert choose(None, few, None).cost.origin == "roofline"


def test_what_the_trace_tells_is_not_assumed() -> None:
    named = choose("roofline", None, Server(name="s", model="Qwen/Qwen3-8B"), platform="h200-sxm")
    assert named.server.layers == 36 and "names the model Qwen/Qwen3-8B but not its sizes" in named.notes[0]
    own = of_model("llama-3.1-8b")
    manifest = Manifest(origin="imported", servers=[own], platform=machine("gpu", 1e15, 3e12))
    got = choose("roofline", None, own, manifest=manifest)
    assert got.how["platform"]["name"] == "gpu" and not any("assumed" in n for n in got.notes)
    with pytest.raises(InputError, match="names the model acme/tiny, but neither it nor the catalogue"):
        choose("roofline", None, Server(name="s", model="acme/tiny"))


def test_kv_space_that_somebody_tells_is_kept() -> None:
    known = of_model("llama-3.1-8b").model_copy(update={"kv_capacity_tokens": 1000})
    assert choose("roofline", None, known, platform="h100-sxm-80gb").server.kv_capacity_tokens == 1000
    named = Server(name="s", model="Qwen/Qwen3-8B", kv_capacity_tokens=1000)
    assert choose("roofline", None, named, platform="h100-sxm-80gb").server.kv_capacity_tokens == 1000
    other = choose("roofline", None, known, model="qwen3-8b", platform="h100-sxm-80gb").server
    assert other.kv_capacity_tokens == (int(0.92 * 85_899_345_920) - 16_381_470_720) // 147_456
    blocks = known.model_copy(update={"kv_capacity_tokens": None, "block_size_tokens": 16})
    assert choose("roofline", None, blocks, platform="h100-sxm-80gb").server.kv_capacity_tokens == 480_384


def test_models_and_platforms_that_are_named() -> None:
    got = choose("roofline", steps(MACHINE), Server(name="s", config={"tensor_parallel_size": 8}),
                 model="llama-3.1-70b", platform="h100-sxm-80gb")  # fmt: skip
    assert got.server.layers == 80 and got.how["platform"]["name"] == "h100-sxm-80gb"
    assert choose(None, steps(MACHINE), None, model="smollm2-135m").cost.origin == "roofline"
    with pytest.raises(UsageError, match="no model 'gpt-9'"):
        choose("roofline", None, None, model="gpt-9")
    with pytest.raises(UsageError, match="no platform 'h900'"):
        choose("roofline", None, None, platform="h900")


def test_weights_that_do_not_fit_are_refused_with_the_ranks_that_hold_them() -> None:
    with pytest.raises(InputError, match=r"141 GB of weights do not fit into 1 h100-sxm-80gb of 86 GB.*tensor_parallel=2"):
        choose("roofline", None, None, model="llama-3.1-70b", platform="h100-sxm-80gb")
    assert choose("roofline", None, Server(name="s", config={"tensor_parallel_size": 2}), model="llama-3.1-70b").cost.kind == 1


def test_the_host_time_that_steps_tell_is_added_to_the_roofline() -> None:
    recorded = steps(MACHINE, schedule_ns=300_000, launch_ns=None, update_ns=200_000)
    got = choose("roofline", recorded, None, model="llama-3.1-8b", platform="h100-sxm-80gb")
    without = roofline(got.server, H100)
    held: dict[str, Any] = {"decode_requests": 4, "decode_context_tokens": 4000}
    assert got.cost.cost_ns(**held) - without.cost_ns(**held) == 500_000 and got.how["host_ns"] == 500_000
    assert any("0.500 ms, is the mean of 240 recorded steps" in n for n in got.notes)
    # Beside the device under asynchronous scheduling: nothing to add.
    asynchronous = Server(name="s", config={"async_scheduling": True})
    assert choose("roofline", recorded, asynchronous, model="llama-3.1-8b").how["host_ns"] is None


def test_the_scatter_can_be_left_out() -> None:
    noisy = steps(MACHINE).with_columns(end_ns=pl.col("end_ns") * (90 + pl.int_range(pl.len()) % 21) // 100)
    assert choose("fitted", noisy, None).cost.residuals["decode"]
    got = choose("fitted:mean", noisy, None)
    assert got.cost.residuals == {} and got.how["scatter"] is False


@pytest.mark.parametrize(
    "text, error, message",
    [
        ("magic", UsageError, "no cost model 'magic'"), ("fitted:fast", UsageError, "no cost model"),
        ("table", UsageError, "no cost model"), ("table:nothing.csv", UsageError, "no table"),
        ("roofline:x", UsageError, "no cost model"), ("fixed", UsageError, "not a fixed cost"),
        ("fixed:1", UsageError, "not a fixed cost"), ("fixed:0,0", UsageError, "not a fixed cost"),
        ("fixed:-1,5", UsageError, "not a fixed cost"), ("fixed:nan,5", UsageError, "not a fixed cost"),
        ("fitted", InputError, "no steps to fit"),
    ],
)  # fmt: skip
def test_what_is_no_cost_is_refused(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose(text, None, None)


def test_fixed() -> None:
    cost, how = choose_cost("fixed:50,12", None, None)
    assert how == {"kind": "fixed"}
    assert [cost.cost_ns(prefill_tokens=9), cost.cost_ns(prefill_tokens=9, decode_requests=2)] == [50_000_000, 62_000_000]


# The fitted cost on another machine

B = {"name": "b", "flops_per_s": 4e15, "memory_bytes_per_s": 2e12}


def scaled(tmp_path: Path, frame: pl.DataFrame, **more: Any) -> Chosen:
    path = tmp_path / "b.toml"
    path.write_text('name = "b"\nflops_per_s = 4e15\nmemory_bytes_per_s = 2e12\n')
    own = Server(name="s", **more)
    return choose("fitted", frame, own, platform=str(path),
                  manifest=Manifest(origin="recorded", servers=[own], platform=machine("a", 1e15, 1e12)))  # fmt: skip


def test_host_time_is_kept_and_the_devices_scaled(tmp_path: Path) -> None:
    host = 3_000_000
    frame = steps(MACHINE).with_columns(device_ns=pl.col("end_ns") - pl.col("start_ns") - host)
    base = fit(frame)
    got = scaled(tmp_path, frame)
    # Of 4 ms a step 3 are the host's; memory is twice as fast, arithmetic four times.
    want = {"step": 3e9 + 0.5e9, "prefill_tokens": 2e8 / 4, "decode_requests": 1e9 / 2, "decode_context_tokens": 1e6 / 2}
    for name, ps in want.items():
        assert got.cost.coefficients_ps[name] == pytest.approx(ps, rel=0.02), name
    assert "memory bounds × 0.500, what arithmetic bounds × 0.250" in got.cost.notes[0]
    assert "told by 240 of 240 steps) is kept as recorded" in got.cost.notes[0] and "Not measured on b." in got.cost.notes[0]
    assert got.how["recorded_on"]["name"] == "a" and got.how["platform"]["name"] == "b"
    assert got.cost.residuals == base.residuals


def test_without_host_time_all_is_scaled_and_that_is_said(tmp_path: Path) -> None:
    got = scaled(tmp_path, steps(MACHINE))
    assert got.cost.coefficients_ps["step"] == pytest.approx(2e9, rel=0.02)
    assert "Host time is not told apart" in got.cost.notes[0]


def test_the_recorded_machine_must_be_known(tmp_path: Path) -> None:
    frame = steps(MACHINE)
    with pytest.raises(InputError, match=r"does not say what machine it was recorded on.*--recorded-on"):
        choose("fitted", frame, None, platform="h100-sxm-80gb")
    same = choose("fitted", frame, None, platform="h100-sxm-80gb", recorded_on="h100-sxm-80gb")
    assert same.cost == fit(frame) and same.how == {"kind": "fitted"}
    other = choose("fitted", frame, None, platform="h200-sxm", recorded_on="h100-sxm-80gb")
    assert other.cost.coefficients_ps["decode_context_tokens"] == pytest.approx(1e6 * 3350 / 4800, rel=0.01)
    assert choose("fitted", frame, None, platform="from-trace").cost == fit(frame)
    with pytest.raises(UsageError, match="of the model that was recorded"):
        choose("fitted", frame, None, model="llama-3.1-8b")


# Rooflines


def test_experts_that_a_batch_touches() -> None:
    """Mixtral: 2 of 8 experts a token; n tokens touch 8 × (1 − 0.75^n) of them on average."""
    server = of_model("mixtral-8x7b", tensor_parallel_size=2)
    cost = roofline(server, {**H100, "allreduce": None})
    assert server.weight_bytes is not None
    routed = server.config["routed_bytes"]
    assert routed == 32 * 8 * 3 * 4096 * 14336 * 2
    for n in (1, 2, 4, 8, 64):
        read = server.weight_bytes - routed * 0.75**n
        want = (read + n * 131_072) / 6700e9 * 1e9  # one new token of KV each
        assert cost.cost_ns(decode_requests=n) == pytest.approx(want, rel=0.01), n
    assert cost.cost_ns(decode_requests=256) < roofline(
        server.model_copy(update={"config": {"tensor_parallel_size": 1}}), H100
    ).cost_ns(decode_requests=256)
    # Eight data-parallel ranks that share the experts read an eighth of them each, of eight times the tokens.
    spread = roofline(of_model("mixtral-8x7b", expert_parallel_size=8), H100)
    want = (server.weight_bytes - routed + routed / 8 * (1 - 0.75**64) + 8 * 131_072) / 3350e9 * 1e9
    assert spread.cost_ns(decode_requests=8) == pytest.approx(want, rel=0.01)


def test_windows_are_read_no_further() -> None:
    """gpt-oss-20b: 12 of 24 layers see 128 tokens, 2,048 bytes a layer and token."""
    slow = {"flops_per_s": 1e20, "memory_bytes_per_s": 1e12}
    cost = roofline(of_model("gpt-oss-20b"), slow)
    alone = cost.cost_ns(decode_requests=4)
    for context in (64, 128, 1000, 100_000):
        got = cost.cost_ns(decode_requests=4, decode_context_tokens=4 * context) - alone
        assert got == pytest.approx(4 * 12 * 2048 * (context + min(context, 128)) / 1e3, rel=0.001), context
    # Arithmetic of a prompt: each of 12 layers Σ min(i, 128) pairs, the others all of them.
    busy = {"flops_per_s": 1e12, "memory_bytes_per_s": 1e20}
    cost = roofline(of_model("gpt-oss-20b"), busy)
    pair, token = 4 * 12 * 64 * 64, 2 * (3_608_307_264 - 201_088 * 2880)  # no logits of a prompt's tokens
    for tokens, seen in ((64, 64**2 / 2), (128, 128**2 / 2), (1000, 128**2 / 2 + 872 * 128)):
        want = tokens * token + pair * (tokens**2 / 2 + seen)
        assert cost.cost_ns(prefill_tokens=tokens) == pytest.approx(want / 1e3, rel=0.0005), tokens
    assert cost.cost_ns(prefill_tokens=100, prefill_context_tokens=5000) == pytest.approx(
        (100 * token + pair * (100 * 5050 + 100 * 128)) / 1e3, rel=0.0005
    )


def test_latent_attention() -> None:
    """DeepSeek-V3: 576 values a layer and token, whole on every rank; a prompt's pairs cost 2 × 128 × (192 + 128) a layer."""
    cost = roofline(of_model("deepseek-v3", tensor_parallel_size=16), {"flops_per_s": 1e20, "memory_bytes_per_s": 1e12})
    per = cost.cost_ns(decode_requests=1, decode_context_tokens=10**6) - cost.cost_ns(decode_requests=1)
    assert per == pytest.approx(10**6 * 16 * 70_272 / 16e12 * 1e9, rel=0.001)
    cost = roofline(of_model("deepseek-v3"), {"flops_per_s": 1e15, "memory_bytes_per_s": 1e30})
    pairs = cost.cost_ns(prefill_tokens=1, prefill_context_tokens=10**6) - cost.cost_ns(prefill_tokens=1)
    assert pairs == pytest.approx(10**6 * 61 * 2 * 128 * 320 / 1e15 * 1e9, rel=0.001)
    decode = cost.cost_ns(decode_requests=1, decode_context_tokens=10**6) - cost.cost_ns(decode_requests=1)
    assert decode == pytest.approx(10**6 * 61 * 2 * 128 * (576 + 512) / 1e15 * 1e9, rel=0.001)


def test_ranks_share_and_pay_their_all_reduces() -> None:
    one, two = of_model("llama-3.1-8b"), of_model("llama-3.1-8b", tensor_parallel_size=2)
    curve = [{"ranks": 2, "bytes": [8192, 16384], "ns": [4000, 5000]}]
    bare = {"flops_per_s": 1e15, "memory_bytes_per_s": 3e12, "name": "p"}
    with_curve = roofline(two, {**bare, "allreduce": curve})
    without = roofline(two, bare)
    held: dict[str, Any] = {"decode_requests": 1, "decode_context_tokens": 500}
    assert without.cost_ns(**held) * 2 == pytest.approx(roofline(one, bare).cost_ns(**held), abs=2)
    # One token of 4,096 values of 2 bytes: 8,192 bytes, 64 times a step.
    assert with_curve.cost_ns(**held) - without.cost_ns(**held) == 64 * 4000
    assert with_curve.cost_ns(decode_requests=2) - without.cost_ns(decode_requests=2) == 64 * 5000
    assert any("64 all-reduces a step over 2 ranks, measured on p" in n for n in with_curve.notes)
    assert any("all-reduces of 2 tensor-parallel ranks are not counted" in n for n in without.notes)
    four = of_model("llama-3.1-8b", tensor_parallel_size=4)
    assert any("not counted" in n for n in roofline(four, {**bare, "allreduce": curve}).notes)


def test_the_kernel_prices_a_roofline_alike() -> None:
    for name, tp in (("gpt-oss-120b", 1), ("deepseek-v3", 8), ("qwen3-30b-a3b", 2)):
        cost = roofline(of_model(name, tensor_parallel_size=tp), H100)
        costs, _ = pack([cost])
        for c in ((1, 700, 0, 0, 0), (0, 0, 0, 33, 40_000), (2, 512, 3000, 17, 9000), (3, 77, 10, 1, 5)):
            row = pl.DataFrame([dict(zip(
                ("prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens"), c,
                strict=True,
            ))])  # fmt: skip
            assert step_ns(costs, 0, -1, *c, 0) == int(cost.cost_ns_array(row)[0])


# X4: reuse or recompute


@pytest.mark.parametrize("flops, published", [(312e12, 6.0), (989e12, 19.0)])
def test_x4_bandwidth_at_which_loading_a_prefix_wins(flops: float, published: float) -> None:
    """Mooncake equation 2: LLaMA3-70B, 8,192 tokens, on 8 × A800 and 8 × H800."""
    prefix, layers, d, gqa, size = 8192, 80, 8192, 8, 2
    kv = 2 * prefix * layers * (d // gqa) * size
    work = layers * (4 * prefix**2 * d + 22 * prefix * d**2)
    assert kv == 2_684_354_560 and work == pytest.approx(1.14e15, rel=0.005)
    assert kv / (work / (8 * flops)) / 1e9 == pytest.approx(published, rel=0.03)  # 5.9 and 18.6
    # Our roofline counts the model's own feed-forward size, 28 % more arithmetic per token, and half the pairs (causal).
    server = of_model("llama-3.1-70b", tensor_parallel_size=8)
    ours = roofline(server, {"flops_per_s": flops, "memory_bytes_per_s": 2e12})
    assert break_even_bytes_per_s(ours, 327_680, prefix) / 1e9 == pytest.approx(published, rel=0.12)
    assert break_even_bytes_per_s(fixed(step_ns=5e6), 327_680, prefix) == float("inf")
    # Longer prefixes are dearer to compute for each token, so a slower link is enough.
    assert break_even_bytes_per_s(ours, 327_680, 65_536) < break_even_bytes_per_s(ours, 327_680, prefix)


# X8: decode against context, Llama-3.1-8B, one H100, batch 1, vLLM 0.19.1: ITL in ms = a + b × context

X8 = {"bf16": (6.44, 4.37e-5, 131_072), "fp8": (6.58, 2.37e-5, 65_536)}


@pytest.mark.parametrize("dtype, share", [("bf16", 0.895), ("fp8", 0.826)])
def test_x8_the_slope_is_kv_bytes_over_the_memorys_rate(dtype: str, share: float) -> None:
    server = of_model("llama-3.1-8b").model_copy(update={"kv_dtype": "bf16" if dtype == "bf16" else "fp8"})
    cost = roofline(server, H100)
    a, b, kv = X8[dtype]
    at = [cost.cost_ns(decode_requests=1, decode_context_tokens=n) / 1e6 for n in (0, 10**5)]
    slope = (at[1] - at[0]) / 10**5
    assert slope == pytest.approx(kv / 3350e9 * 1e3, rel=1e-4)
    assert slope / b == pytest.approx(share, abs=0.005)  # decode attention reaches 0.90 and 0.83 of the peak
    assert at[0] / a == pytest.approx(0.74, abs=0.02)  # a whole decode step: 0.74
    assert at[0] < a and at[1] < a + b * 10**5  # a lower bound


def test_x8_break_even_of_fp8_from_measured_times(tmp_path: Path) -> None:
    costs = {}
    for dtype, (a, b, _) in X8.items():
        rows = "".join(f"0,1,{n},{a + b * n}\n" for n in (0, 4096, 32_768, 131_072))
        path = tmp_path / f"{dtype}.csv"
        path.write_text("prefill_tokens,decode_requests,decode_context_tokens,time_ms\n1000,0,0,20\n" + rows)
        costs[dtype] = read_table(str(path), None)

    def faster(context: int) -> bool:
        fp8, bf16 = (costs[d].cost_ns(decode_requests=1, decode_context_tokens=context) for d in ("fp8", "bf16"))
        return fp8 < bf16

    low, high = 0, 131_072
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if faster(middle) else (middle, high)
    assert high == pytest.approx(7010, abs=15)  # published: FP8 pays above 7010 tokens
