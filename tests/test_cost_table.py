"""Tables of measured step times: hoptrace's form, Splitwise's published one (its README values and X11), Vidur's profiles."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Server
from hoptrace.model_catalogue import load_model
from hoptrace.platform import load_platform
from hoptrace.replay.costs.table import read_table
from hoptrace.stepcost import StepCost, fit, roofline
from hoptrace.stepcost_kernel import step_ns
from hoptrace.stepcost_pack import pack

DATA = Path(__file__).parent / "data" / "costs"
SPLITWISE = str(DATA / "splitwise_perf_model.csv")
VIDUR = str(DATA / "vidur_llama3_8b")
LLAMA = load_model("llama-3.1-8b").shape.server("e", "meta-llama/Llama-3.1-8B")
LLAMA2_70B = Server.model_validate(
    {"name": "s", "parameters": 68_976_648_192, "weight_bytes": 137_953_296_384, "layers": 80, "heads": 64, "kv_heads": 8,
     "head_size": 128, "hidden_size": 8192, "kv_dtype": "f16", "config": {"tensor_parallel_size": 8}}
)  # fmt: skip


def ms(cost: StepCost, *held: int) -> float:
    """Of prefill requests, tokens, context, decode requests, context; as the engines price it."""
    return float(step_ns(pack([cost])[0], 0, -1, *held, 0)) / 1e6


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# hoptrace's own form

GRID = """prefill_tokens,decode_requests,decode_context_tokens,time_ms
100,0,0,10
300,0,0,20
300,0,0,22
300,0,0,90
0,1,1000,5
0,1,2000,6
0,8,8000,8
0,8,16000,16
"""


def test_hoptraces_form(tmp_path: Path) -> None:
    cost = read_table(written(tmp_path / "t.csv", GRID), None)
    assert ms(cost, 1, 100, 0, 0, 0) == 10 and ms(cost, 1, 300, 0, 0, 0) == 22  # the median of repeats
    assert ms(cost, 1, 200, 0, 0, 0) == 16 and ms(cost, 2, 400, 0, 0, 0) == 28
    assert ms(cost, 0, 0, 0, 1, 1500) == 5.5 and ms(cost, 0, 0, 0, 8, 12000) == 12
    assert ms(cost, 0, 0, 0, 4, 6000) == pytest.approx(5.5 + (12 - 5.5) * 3 / 7)  # at 1500 tokens for each
    assert ms(cost, 1, 200, 0, 1, 1500) == 16 + 5.5  # no mixed step was measured: the sum
    assert "sum of its phases" in cost.notes[0]
    assert cost.origin == "table" and StepCost.from_dict(cost.to_dict()) == cost


def test_mixed_rows_give_the_factor(tmp_path: Path) -> None:
    more = GRID + "100,1,1000,12\n300,8,8000,24\n100,8,16000,0.1\n"
    cost = read_table(written(tmp_path / "t.csv", more), None)
    # 12 of 10 + 5, 24 of 22 + 8: both 0.8; the third an outlier that a median passes over.
    assert ms(cost, 1, 100, 0, 1, 1000) == 12 and ms(cost, 1, 300, 0, 8, 8000) == 24
    assert "0.800 times the sum" in cost.notes[0]


def test_a_table_of_contexts_that_never_repeat_goes_by_the_batch(tmp_path: Path) -> None:
    text = "prefill_tokens,decode_requests,decode_context_tokens,time_us\n10,0,0,1000\n0,1,70,2000\n0,2,900,3000\n"
    cost = read_table(written(tmp_path / "t.csv", text), None)
    assert ms(cost, 0, 0, 0, 2, 5) == 3 and ms(cost, 0, 0, 0, 1, 10**6) == 2
    assert ms(cost, 1, 10, 0, 0, 0) == 1


def test_parquet_and_contexts_of_prompts(tmp_path: Path) -> None:
    rows = [(64, c, 0, 1.0 + c / 1000) for c in (0, 1000)] + [(128, c, 0, 2.0 + c / 1000) for c in (0, 1000)] + [(0, 0, 1, 0.5)]
    frame = pl.DataFrame(rows, schema=["prefill_tokens", "prefill_context_tokens", "decode_requests", "time_s"], orient="row")
    frame.write_parquet(tmp_path / "t.parquet")
    cost = read_table(str(tmp_path / "t.parquet"), None)
    assert ms(cost, 1, 96, 500, 0, 0) == 2000 and ms(cost, 1, 128, 2000, 0, 0) == 4000
    assert ms(cost, 0, 0, 0, 3, 90) == 500


def test_noise_at_an_end_does_not_rule_what_lies_beyond(tmp_path: Path) -> None:
    text = "prefill_tokens,decode_requests,time_ms\n100,0,30\n200,0,20\n300,0,50\n400,0,40\n0,64,10\n0,128,30\n"
    cost = read_table(written(tmp_path / "t.csv", text), None)
    assert [ms(cost, 1, n, 0, 0, 0) for n in (1, 100, 150, 400, 4000)] == [30, 30, 25, 40, 40]
    # The line of the last two would be below 0 at one decoder; through the origin is the most that fewer can save.
    assert ms(cost, 0, 0, 0, 32, 1) == 5 and ms(cost, 0, 0, 0, 192, 1) == 50


@pytest.mark.parametrize(
    "text, message",
    [
        ("a,b\n1,2\n", "no table of step times: it has the columns a, b"),
        ("prefill_tokens,decode_requests,time_ms\n5,0,1\n", "no row of decode alone"),
        ("prefill_tokens,decode_requests,time_ms\n0,1,1\n", "no row of prompt alone"),
        ("prefill_tokens,decode_requests,time_ms\n5,0,1\n0,1,-2\n", "row 2: time_ms must be a time above 0"),
        ("prefill_tokens,decode_requests,time_ms\n5,0,nan\n0,1,2\n", "row 1: time_ms"),
        ("prefill_tokens,decode_requests,time_ms\n5.5,0,1\n0,1,2\n", "row 1: prefill_tokens must be a whole number"),
        ("prefill_tokens,decode_requests,time_ms\n-5,0,1\n0,1,2\n", "row 1: prefill_tokens"),
        ("prefill_tokens,decode_requests,time_ms\nfive,0,1\n0,1,2\n", "row 1: prefill_tokens must be a whole number"),
        ("prefill_tokens,decode_requests,time_s\n5,0,1e9\n0,1,2\n", "up to 1000 s"),
        ("", "can't be read as a table"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_table(written(tmp_path / "t.csv", text), None)


@pytest.mark.parametrize("text", ["", "no/such/file.csv", "model=x"])
def test_a_table_that_is_not_there(text: str) -> None:
    with pytest.raises(UsageError):
        read_table(text, None)


def test_a_key_that_chooses_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no 'model' to choose rows by"):
        read_table(written(tmp_path / "t.csv", GRID) + ",model=llama", None)


# Splitwise's perf_model.csv


def splitwise(hardware: str, more: str = "", model: str = "llama2-70b") -> StepCost:
    return read_table(f"{SPLITWISE},model={model},hardware={hardware},tensor_parallel=8{more}", None)


def test_splitwises_table_as_the_reference_states_it() -> None:
    cost = splitwise("h100-80gb")
    assert ms(cost, 1, 1155, 0, 0, 0) == pytest.approx(84.94, abs=0.005)
    assert ms(cost, 0, 0, 0, 32, 40_000) == pytest.approx(29.87, abs=0.005)
    # A step of both phases, as splitwise-sim has it: 1.1 times the prompt time of all its tokens.
    assert ms(cost, 1, 1123, 0, 32, 40_000) == pytest.approx(1.1 * 84.94, abs=0.01)
    # Its own way beyond the ends: scipy's interp1d(fill_value="extrapolate"), by which 32 decoders take longer than 128.
    assert ms(splitwise("h100-80gb", ",beyond=line"), 0, 0, 0, 32, 1) == pytest.approx(31.0772, abs=1e-4)


# X11: what was measured; llama2-70b TP8, (prompt, batch) → ms of the prompt, ms per token, the medians of each setting.
X11 = {
    "a100-80gb": {(512, 1): (93.0, 45.0), (2048, 1): (274.2, 45.4), (512, 8): (767.6, 46.5), (512, 32): (3524, 53.0),
                  (512, 64): (7554, 71.6)},
    "h100-80gb": {(512, 1): (53.9, 30.6), (2048, 1): (136.8, 31.1), (512, 8): (371.6, 32.5), (512, 32): (1551.7, 38.6),
                  (512, 64): (2936, 50.2)},
}  # fmt: skip


@pytest.mark.parametrize("hardware", X11)
def test_x11_phase_times(hardware: str) -> None:
    cost = splitwise(hardware)
    for (prompt, batch), (first, each) in X11[hardware].items():
        # Splitwise's table goes by tokens of the batch, so it takes the median of all settings of as many tokens.
        assert ms(cost, batch, prompt * batch, 0, 0, 0) == pytest.approx(first, rel=0.08)
        assert ms(cost, 0, 0, 0, prompt * batch, 1) == pytest.approx(each, rel=0.04)


@pytest.mark.parametrize("hardware", X11)
def test_x11_exactly_by_setting(tmp_path: Path, hardware: str) -> None:
    raw = pl.read_csv(SPLITWISE).filter(
        (pl.col("model") == "llama2-70b") & (pl.col("hardware") == hardware) & (pl.col("tensor_parallel") == 8)
    )
    size, batch = pl.col("prompt_size"), pl.col("batch_size")
    none = size * 0
    prompts = raw.select(
        prefill_tokens=size * batch, decode_requests=none, decode_context_tokens=none, setting=size, time_ms="prompt_time"
    )
    decode = raw.select(
        prefill_tokens=none, decode_requests=batch, decode_context_tokens=size * batch, setting=size, time_ms="token_time"
    )
    for prompt, n in X11[hardware]:
        first, each = X11[hardware][prompt, n]
        some = pl.concat([prompts.filter(pl.col("setting") == prompt), decode]).drop("setting")
        some.write_csv(tmp_path / "t.csv")
        cost = read_table(str(tmp_path / "t.csv"), None)
        assert ms(cost, n, prompt * n, 0, 0, 0) == pytest.approx(first, rel=0.002)
        assert ms(cost, 0, 0, 0, n, prompt * n) == pytest.approx(each, rel=0.002)


def test_x11_lesson_a_roofline_is_out_by_five_times_and_a_fit_is_not() -> None:
    """45 ms per token where the bandwidth bound is 8.5: 138 GB over 8 × 2039 GB/s."""
    a100 = {"flops_per_s": 312e12, "memory_bytes_per_s": 2039e9, "name": "a100"}
    bound = ms(roofline(LLAMA2_70B, a100), 0, 0, 0, 1, 512)
    assert bound == pytest.approx(8.5, abs=0.1)
    measured = ms(splitwise("a100-80gb"), 0, 0, 0, 512, 1)
    assert measured / bound == pytest.approx(5.3, abs=0.1)
    # Steps that took what was measured, in one row as an engine has them: the fit finds them again.
    sizes = [(0, 0, 512 * b, b) for b in (1, 2, 4, 8) for _ in range(20)] + [
        (512, 1, 0, 0),
        (1024, 1, 0, 0),
        (2048, 1, 0, 0),
    ] * 10
    took = [round(1e6 * (45.0 if d else {512: 93.0, 1024: 149.6, 2048: 274.2}[p])) for p, _, _, d in sizes]
    steps = pl.DataFrame(
        {
            "prefill_tokens": [p for p, *_ in sizes], "prefill_requests": [r for _, r, *_ in sizes],
            "prefill_context_tokens": [0] * len(sizes), "decode_requests": [d for *_, d in sizes],
            "decode_context_tokens": [c for _, _, c, _ in sizes], "start_ns": [0] * len(sizes), "end_ns": took,
        }
    )  # fmt: skip
    assert ms(fit(steps), 0, 0, 0, 1, 512) == pytest.approx(45.0, rel=0.02)
    # The platform of the catalogue, with its measured all-reduces, comes no nearer to what host and collectives take.
    with_collectives = ms(roofline(LLAMA2_70B, load_platform("a100-sxm-80gb")), 0, 0, 0, 1, 512)
    assert bound <= with_collectives < 12


def test_splitwises_rows_have_to_be_chosen() -> None:
    with pytest.raises(UsageError, match="several of model: bloom-176b, llama2-70b"):
        read_table(SPLITWISE, None)
    with pytest.raises(UsageError, match="has no hardware=h200"):
        splitwise("h200")
    with pytest.raises(UsageError, match="beyond=flat"):
        splitwise("h100-80gb", ",beyond=flat")
    with pytest.raises(UsageError, match="no 'batch' to choose"):
        splitwise("h100-80gb", ",batch=1")
    # bloom was measured with 8 ranks only: nothing to choose.
    assert ms(read_table(f"{SPLITWISE},model=bloom-176b,hardware=h100-80gb", None), 1, 512, 0, 0, 0) == pytest.approx(
        76.1, abs=0.5
    )


# Vidur's profiles


def test_vidurs_operators_times_layers() -> None:
    cost = read_table(VIDUR, LLAMA)
    # By hand, medians of the rows: a layer's operators of 64 tokens 0.351 ms (pre_proj 0.036, post_proj 0.027, rope 0.004,
    # norms 0.004 + 0.005, up 0.173, act 0.011, down 0.088, add 0.003), KV write 0.019, attention of 64 new tokens 0.011.
    assert ms(cost, 1, 64, 0, 0, 0) == pytest.approx(32 * (0.351 + 0.019 + 0.011), abs=1e-4)
    assert ms(cost, 1, 64, 64, 0, 0) == pytest.approx(32 * (0.351 + 0.019 + 0.014), abs=1e-4)
    # 64 decoders over 2,944 tokens each: 0.496 ms of attention.
    assert ms(cost, 0, 0, 0, 64, 64 * 2944) == pytest.approx(32 * (0.351 + 0.019 + 0.496), abs=1e-4)
    assert any("no host time" in n for n in cost.notes)
    assert ms(read_table(f"{VIDUR},layers=16", None), 1, 64, 0, 0, 0) == pytest.approx(16 * (0.351 + 0.019 + 0.011), abs=1e-4)


def test_vidurs_all_reduce_counts_twice_a_layer(tmp_path: Path) -> None:
    folder = Path(VIDUR)
    for name in ("mlp", "attention"):
        text = (folder / f"{name}.csv").read_text()
        head, rows = text.split("\n", 1)
        tp1 = [r for r in rows.splitlines() if (r.endswith(",1") if name == "mlp" else True)]
        swapped = [r[:-2] + ",2" if name == "mlp" else r.replace(",8,16,1,16384,", ",8,16,2,16384,") for r in tp1]
        (tmp_path / f"{name}.csv").write_text("\n".join([head, *swapped]))
    files = f"{tmp_path / 'mlp.csv'},{tmp_path / 'attention.csv'}"
    with pytest.raises(InputError, match="2 ranks need all_reduce"):
        read_table(f"{files},tensor_parallel=2", LLAMA)
    cost = read_table(f"{files},{folder / 'all_reduce.csv'},tensor_parallel=2", LLAMA)
    # 1,048,576 bytes are 128 tokens of 4,096 × 2 bytes: 0.07 ms, twice a layer.
    alone = read_table(VIDUR, LLAMA)
    assert ms(cost, 1, 128, 0, 0, 0) - ms(alone, 1, 128, 0, 0, 0) == pytest.approx(32 * 2 * 0.07, abs=1e-3)


def test_what_vidurs_profile_lacks_is_said() -> None:
    with pytest.raises(UsageError, match="does not say how many layers"):
        read_table(VIDUR, None)
    with pytest.raises(InputError, match=r"lacks attention\.csv"):
        read_table(f"{VIDUR}/mlp.csv", LLAMA)
    with pytest.raises(UsageError, match="has no num_tensor_parallel_workers=4"):
        read_table(f"{VIDUR},tensor_parallel=4", LLAMA)
    with pytest.raises(UsageError, match="no 'tp' to choose rows by"):
        read_table(f"{VIDUR},tp=4", LLAMA)
    other = load_model("qwen3-8b").shape.server("e", "q")
    with pytest.raises(UsageError, match="has no n_embd=8192"):
        read_table(VIDUR, load_model("llama-3.1-70b").shape.server("e", "l"))
    assert other.hidden_size == 4096  # the same width and heads as Llama-3-8B: Vidur itself tells them by the feed-forward size
    with pytest.raises(UsageError, match="n_expanded_embd"):
        read_table(VIDUR, other)


@pytest.mark.parametrize("column", ["prefill_tokens", "time_ms"])
def test_lists_and_structs_are_no_numbers(tmp_path: Path, column: str) -> None:
    rows = {"prefill_tokens": [128, 0], "decode_requests": [0, 1], "time_ms": [10.0, 5.0]}
    for odd in ([[1], [2]], [{"a": 1}, {"a": 2}]):
        file = tmp_path / "odd.parquet"
        pl.DataFrame(rows | {column: odd}).write_parquet(file)
        with pytest.raises(InputError, match=f"the column {column} holds"):
            read_table(str(file), None)


def test_two_columns_of_time_are_not_chosen_from(tmp_path: Path) -> None:
    text = "prefill_tokens,decode_requests,time_ms,time_s\n128,0,10,0.5\n0,1,5,0.1\n"
    with pytest.raises(InputError, match="has time_s and time_ms: which"):
        read_table(written(tmp_path / "t.csv", text), None)
