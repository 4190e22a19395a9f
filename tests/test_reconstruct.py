"""Steps from token times: exact without jitter, within stated bounds with it, and honest about what cannot be seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.synthetic import COST, START_NS, Synthetic, synthetic_trace

import hoptrace
from hoptrace import metrics, reconstruct_cluster
from hoptrace.manifest import Manifest, Server
from hoptrace.reader import Trace
from hoptrace.reconstruct import reconstruct, steps_of, store_steps
from hoptrace.reconstruct_cluster import cluster
from hoptrace.stepcost import fit
from hoptrace.writer import TraceWriter

COMPOSITION = [
    "step", "prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_tokens",
    "decode_context_tokens",
]  # fmt: skip
ALL = [*COMPOSITION, "start_ns", "end_ns", "running", "waiting"]


def exact(made: Synthetic, columns: list[str] = ALL) -> None:
    got = steps_of(made.trace)
    assert got.origin == "reconstructed" and got.note and got.note.startswith("Steps were reconstructed")
    assert got.steps.select(columns).equals(made.steps.select(columns))
    assert got.residency.select(made.residency.columns).equals(made.residency)


@pytest.mark.parametrize(
    "settings",
    [
        {"rate_per_s": 0.2}, {"rate_per_s": 2.0}, {"slots": 1}, {"slots": 8, "seed": 5, "rate_per_s": 4.0}, {"cached": 20},
        {"output": (1, 1)}, {"noise": 0.3},
    ],
    ids=str,
)  # fmt: skip
def test_true_steps_are_recovered_exactly_without_jitter(tmp_path: Path, settings: dict[str, Any]) -> None:
    exact(synthetic_trace(tmp_path / "t.trace", **settings))


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6), slots=st.integers(1, 6), rate=st.sampled_from([0.1, 0.5, 3.0]), cached=st.sampled_from([0, 3]),
    noise=st.sampled_from([0.0, 0.2]),
)  # fmt: skip
def test_any_engine_is_recovered(
    seed: int, slots: int, rate: float, cached: int, noise: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    exact(
        synthetic_trace(
            tmp_path_factory.mktemp("t") / "t.trace",
            requests=15,
            slots=slots,
            seed=seed,
            rate_per_s=rate,
            cached=cached,
            noise=noise,
        )
    )


def test_long_prompts_are_split_by_the_batch(tmp_path: Path) -> None:
    made = synthetic_trace(tmp_path / "t.trace", batch=64, slots=1, rate_per_s=0.2)
    got = steps_of(made.trace)
    assert got.steps.select(COMPOSITION).equals(made.steps.select(COMPOSITION))
    assert (made.steps["prefill_tokens"] == 64).sum() > 20
    assert "inferred from prompts longer than the batch" in (got.note or "")


@pytest.mark.parametrize("seed", range(3))
def test_prompts_that_share_a_small_batch_are_told_apart(tmp_path: Path, seed: int) -> None:
    made = synthetic_trace(tmp_path / "t.trace", batch=64, seed=seed)
    got = steps_of(made.trace)
    assert got.steps.select(COMPOSITION).equals(made.steps.select(COMPOSITION))


def test_without_the_servers_timings_the_pick_up_is_inferred(tmp_path: Path) -> None:
    made = synthetic_trace(tmp_path / "t.trace", timings=False, rate_per_s=0.3)
    got = steps_of(made.trace)
    assert got.steps.select(COMPOSITION).equals(made.steps.select(COMPOSITION))
    assert "did not tell when it began" in (got.note or "")


@pytest.mark.parametrize("jitter_ms", [0.3, 1.0])
def test_jitter_moves_times_not_the_composition(tmp_path: Path, jitter_ms: float) -> None:
    made = synthetic_trace(tmp_path / "t.trace", requests=80, jitter_ns=jitter_ms * 1e6, seed=2)
    got = steps_of(made.trace).steps
    truth = made.steps
    assert got.select(COMPOSITION).equals(truth.select(COMPOSITION))
    late = (got["end_ns"] - truth["end_ns"]).to_numpy()
    length = (truth["end_ns"] - truth["start_ns"]).to_numpy()
    assert (late >= -np.maximum(2e6, 0.05 * length)).all() and (late >= 0).mean() > 0.95
    assert np.median(late) < jitter_ms * 1e6


def test_jitter_of_a_fifth_of_a_step_adds_at_most_one_step_in_a_hundred(tmp_path: Path) -> None:
    made = synthetic_trace(tmp_path / "t.trace", requests=80, jitter_ns=3e6, seed=2)
    got = steps_of(made.trace).steps
    assert abs(got.height - made.steps.height) <= 0.01 * made.steps.height
    for column in ("prefill_tokens", "decode_tokens", "decode_context_tokens"):
        assert got[column].sum() == made.steps[column].sum()


def test_an_engine_that_prefills_apart_is_not_reconstructed(tmp_path: Path) -> None:
    """Prompts in iterations of their own, decoders pausing: the law of one token per iteration does not hold, so no steps are
    told."""
    ms = 1_000_000
    now = START_NS
    times: dict[int, list[int]] = {}
    for _ in range(200):
        if len(times) < 20 and len(times) * 8 <= sum(len(t) for t in times.values()):
            now += 150 * ms
            times[len(times)] = [now]
        now += 20 * ms
        for t in times.values():
            if len(t) < 30 and t[-1] < now:
                t.append(now)
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False) as w:
        for r, stamps in times.items():
            w.append("requests", [{"request": r, "arrival_ns": START_NS, "prompt_tokens": 100, "source": "t"}])
            w.append(
                "tokens", [{"request": r, "index": i, "time_ns": t, "count": 1, "source": "t"} for i, t in enumerate(stamps)]
            )
    got = steps_of(hoptrace.open(tmp_path / "t.trace"))
    assert got.steps.is_empty() and "iterations of their own" in (got.note or "")


def test_tokens_held_back_hide_steps_and_are_spread(tmp_path: Path) -> None:
    made = synthetic_trace(tmp_path / "t.trace", chunk=3, slots=1, rate_per_s=0.2)
    got = steps_of(made.trace)
    assert got.steps.select(COMPOSITION).equals(made.steps.select(COMPOSITION))
    assert "their time is an even share" in (got.note or "")
    error = (got.steps["end_ns"] - made.steps["end_ns"]).abs()
    assert error.max() < 100_000  # the steps differ by their context alone


def test_accepted_drafts_are_one_step(tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    ms = 1_000_000
    with TraceWriter(path, Manifest(origin="recorded", servers=[Server.model_validate({"name": "s"})]), background=False) as w:
        w.append("requests", [{"request": 0, "arrival_ns": START_NS, "prompt_tokens": 5, "source": "t"}])
        w.append(
            "stages", [{"request": 0, "stage": 0, "server": "s", "scheduled_ns": START_NS, "cached_tokens": 0, "source": "t"}]
        )
        index = 0
        for i, n in enumerate([1, 1, 3, 1, 4, 1, 2]):
            w.append(
                "tokens", [{"request": 0, "index": index, "time_ns": START_NS + (i + 1) * 20 * ms, "count": n, "source": "t"}]
            )
            index += n
    got = steps_of(hoptrace.open(path)).steps
    assert got["decode_tokens"].to_list() == [0, 1, 3, 1, 4, 1, 2]
    assert got["decode_requests"].to_list() == [0, 1, 1, 1, 1, 1, 1]
    assert got["decode_context_tokens"].to_list() == [0, 5, 6, 9, 10, 14, 15]


def test_an_unknown_prompt_leaves_its_steps_unknown(tmp_path: Path) -> None:
    made = synthetic_trace(tmp_path / "a.trace", requests=3, slots=1)
    path = tmp_path / "b.trace"
    with TraceWriter(path, made.trace.manifest.model_copy(update={"tables": {}}), background=False) as w:
        for name in ("stages", "tokens"):
            w.append_arrow(name, made.trace.table(name).collect().to_arrow())
        unknown = pl.when(pl.col("request") == 1).then(None).otherwise(pl.col("prompt_tokens")).alias("prompt_tokens")
        w.append_arrow("requests", made.trace.table("requests").with_columns(unknown).collect().to_arrow())
    got = steps_of(hoptrace.open(path))
    assert got.steps.height == made.steps.height
    assert got.steps["prefill_tokens"].null_count() == 1
    decoded = made.residency.filter((pl.col("request") == 1) & (pl.col("phase") == "decode"))
    assert got.steps["decode_context_tokens"].null_count() == int((decoded["last_step"] - decoded["first_step"] + 1).sum())
    assert "prompt's length is unknown" in (got.note or "")


def test_stored_steps_are_given_as_they_are(tmp_path: Path) -> None:
    made = synthetic_trace(tmp_path / "t.trace", requests=5, store_steps=True)
    got = steps_of(made.trace)
    assert got.origin == "observed" and got.note is None
    assert got.steps.select(ALL).equals(made.steps.select(ALL))


def test_what_is_stored_is_read_back(tmp_path: Path) -> None:
    made = synthetic_trace(tmp_path / "a.trace", requests=8)
    steps = reconstruct(made.trace)
    path = tmp_path / "b.trace"
    with TraceWriter(path, Manifest(origin="recorded"), background=False) as w:
        store_steps(w, steps)
    back = steps_of(hoptrace.open(path))
    assert back.steps.equals(steps.steps) and back.residency.equals(steps.residency)
    assert (back.origin, back.note) == ("reconstructed", steps.note)
    covered = hoptrace.open(path).table("coverage").collect()
    assert covered["table"].to_list() == ["steps", "residency"]
    assert covered["from_ns"].unique().to_list() == [steps.steps["start_ns"].min()]


def test_no_tokens_give_no_steps_and_a_reason(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False) as w:
        w.append("requests", [{"request": 0, "arrival_ns": 5, "source": "t"}])
    got = steps_of(hoptrace.open(tmp_path / "t.trace"))
    assert got.steps.is_empty() and got.residency.is_empty() and got.origin == "" and "No token times" in (got.note or "")


def test_laws_hold_on_hostile_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False) as w:
        for r in range(60):
            n = int(rng.integers(1, 30))
            times = START_NS + np.sort(rng.integers(0, 10**9, n))
            w.append(
                "requests", [{"request": r, "arrival_ns": START_NS, "prompt_tokens": int(rng.integers(0, 9000)), "source": "t"}]
            )
            w.append("stages", [{"request": r, "stage": 0, "server": f"s{r % 2}",
                                 "scheduled_ns": int(rng.integers(START_NS, START_NS + 10**9)),
                                 "source": "t"}])  # fmt: skip
            w.append("tokens", [{"request": r, "index": i, "time_ns": int(t), "count": 1, "coalesced": bool(rng.random() < 0.1),
                                 "source": "t"} for i, t in enumerate(times)])  # fmt: skip
    laws(hoptrace.open(tmp_path / "t.trace"))


def laws(trace: Trace) -> None:
    got = steps_of(trace)
    for _, s in got.steps.group_by("server", maintain_order=True):
        assert s["step"].to_list() == list(range(s.height))
        assert (s["end_ns"] >= s["start_ns"]).all()
        assert (s["start_ns"][1:] >= s["end_ns"][:-1]).all()
        assert (s["running"] >= 1).all() and (s["waiting"] >= 0).all()
    prompts = trace.table("requests").join(trace.table("stages").select("request", "cached_tokens"), on="request").collect()
    computed = (prompts["prompt_tokens"] - prompts["cached_tokens"].fill_null(0)).clip(lower_bound=1).sum()
    assert got.steps["prefill_tokens"].sum() == computed
    made = got.residency.filter(pl.col("phase") == "decode")
    assert ((made["last_step"] - made["first_step"] + 1) * made["tokens_per_step"]).sum() == got.steps["decode_tokens"].sum()
    # What was not decoded came with the first token: one at least, and no more than the first read held.
    seen = metrics.reads(trace.table("tokens"), trace.table("requests")).collect()
    of = seen.group_by("request", maintain_order=True).agg(pl.col("count").first().alias("first"), pl.col("count").sum())
    spans = made.group_by("request").agg(
        ((pl.col("last_step") - pl.col("first_step") + 1) * pl.col("tokens_per_step")).sum().alias("n")
    )
    rest = of.join(spans, on="request", how="left").select(pl.col("count") - pl.col("n").fill_null(0), "first")
    assert (rest["count"] >= 1).all() and (rest["count"] <= rest["first"]).all()


def test_laws_hold_on_jittered_and_chunked_traces(tmp_path: Path) -> None:
    laws(synthetic_trace(tmp_path / "a.trace", jitter_ns=8e6, seed=4).trace)
    laws(synthetic_trace(tmp_path / "b.trace", batch=64, jitter_ns=2e6, rate_per_s=5, seed=4).trace)


def test_numba_and_python_number_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    time = np.sort(rng.integers(0, 10**9, 3000))
    unit, count = rng.integers(0, 9, 3000), rng.integers(1, 4, 3000)
    for hidden in (False, True):
        python = cluster(unit, time, count, 9, hidden=hidden, step_ns=5_000_000)
        monkeypatch.setattr(reconstruct_cluster, "_COMPILE_FROM", 0)
        compiled = cluster(unit, time, count, 9, hidden=hidden, step_ns=5_000_000)
        monkeypatch.undo()
        for a, b in zip(python, compiled, strict=True):
            assert np.array_equal(a, b)


def test_four_slots_tell_what_one_slot_costs(tmp_path: Path) -> None:
    """The demo's question: a capture with four slots predicts the steps of one slot."""
    four = synthetic_trace(tmp_path / "four.trace", requests=120, slots=4, rate_per_s=0.7, noise=0.15, jitter_ns=3e5, seed=11)
    one = synthetic_trace(tmp_path / "one.trace", requests=30, slots=1, rate_per_s=0.7, seed=12)
    cost = fit(steps_of(four.trace).steps)
    predicted = cost.cost_ns_array(one.steps)
    true = (one.steps["end_ns"] - one.steps["start_ns"]).to_numpy()
    assert predicted.sum() / true.sum() == pytest.approx(1, abs=0.05)
    decode = (one.steps["prefill_tokens"] == 0).to_numpy()
    assert predicted[decode].sum() / true[decode].sum() == pytest.approx(1, abs=0.06)
    assert COST.coefficients_ps["prefill_tokens"] == pytest.approx(cost.coefficients_ps["prefill_tokens"], rel=0.08)


@pytest.mark.parametrize(
    ("name", "iterations", "prompt_tokens", "slot_iterations"),
    # What llama.cpp's own counters said after the capture: n_decode_total, prompt_tokens_total, and n_busy_slots_per_decode
    # (2.66344 and
    # 1) × n_decode_total.
    [("llamacpp_four_slots", 517, 3306, 1377), ("llamacpp_one_slot", 1377, 3291, 1377)],
)
def test_a_real_capture_agrees_with_the_servers_own_counters(
    tmp_path: Path, name: str, iterations: int, prompt_tokens: int, slot_iterations: int
) -> None:
    """SmolLM2-135M on one core, 40 requests through the proxy on a busy machine: every iteration is found, none invented."""
    server = Server.model_validate({"name": "llama", "max_batched_tokens": 2048})
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded", servers=[server]), background=False) as w:
        for table in ("requests", "stages", "tokens"):
            w.append_arrow(table, pl.read_parquet(Path(__file__).parent / "data" / name / f"{table}.parquet").to_arrow())
    trace = hoptrace.open(tmp_path / "t.trace")
    got = steps_of(trace).steps
    assert got.height == iterations
    assert got["prefill_tokens"].sum() == prompt_tokens
    assert (got["decode_requests"] + got["prefill_requests"]).sum() == slot_iterations
    laws(trace)
    cost = fit(got)
    # Neighbours on the machine made the same step take 12 to 60 ms; the mean is right all the same.
    assert abs(cost.error["bias"]) < 0.03 and cost.error["p50"] < 0.35
    assert 8e6 < cost.cost_ns(decode_requests=1, decode_context_tokens=100) < 20e6


def test_counts_that_are_not_the_servers_total_are_unknown(tmp_path: Path) -> None:
    trace = synthetic_trace(tmp_path / "a.trace", requests=6, seed=2).trace
    tables = {n: trace.table(n).collect() for n in ("requests", "stages", "tokens")}
    number = tables["requests"].filter(pl.col("output_tokens") > 3)["request"][0]
    more = pl.when(pl.col("request") == number).then(pl.col("output_tokens") + 2).otherwise("output_tokens")
    tables["requests"] = tables["requests"].with_columns(more.alias("output_tokens"))
    with TraceWriter(tmp_path / "b.trace", Manifest(origin="recorded", servers=trace.manifest.servers), background=False) as w:
        for name, rows in tables.items():
            w.append_arrow(name, rows.to_arrow())
    got = steps_of(hoptrace.open(tmp_path / "b.trace"))
    n = tables["tokens"].filter(pl.col("request") == number).height
    assert got.note is not None and f"{n} reads do not say how many tokens they hold; one for each of their chunks" in got.note
    assert "For 1 sequences that is because" in got.note
    assert "do not say" not in str(steps_of(trace).note)


def hide(
    made: Synthetic, path: Path, hidden: set[int], timings: bool = True, doubted: int | None = None, change: Any = None
) -> Trace:
    """The trace as if the requests of ``hidden`` had been answered in one piece: no token times. ``doubted``: the server's total
    of this one is not what its chunks add up to."""
    t = {n: made.trace.table(n).collect() for n in ("requests", "stages", "tokens")}
    gone = pl.col("request").is_in(hidden)
    first = pl.col("first_token_ns") if timings else pl.lit(None, pl.Int64)
    t["requests"] = t["requests"].with_columns(
        pl.when(gone).then(first).otherwise(None).alias("engine_first_token_ns"),
        *(
            pl.when(gone).then(None).otherwise(pl.col(c)).alias(c)
            for c in ("first_token_ns", "first_visible_ns", "last_token_ns")
        ),
        pl.when(pl.col("request").eq_missing(doubted))
        .then(pl.col("output_tokens") + 2)
        .otherwise("output_tokens")
        .alias("output_tokens"),
    )
    if not timings:
        t["stages"] = t["stages"].with_columns(pl.when(gone).then(None).otherwise("scheduled_ns").alias("scheduled_ns"))
    if change is not None:
        t["requests"] = t["requests"].with_columns(change)
    t["tokens"] = t["tokens"].filter(~gone)
    manifest = made.trace.manifest.model_copy(update={"tables": {}, "notes": []})
    with TraceWriter(path, manifest, background=False) as w:
        for name, rows in t.items():
            w.append_arrow(name, rows.to_arrow())
        w.flush()
        store_steps(w, reconstruct(hoptrace.open(path)))
    return hoptrace.open(path)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), rate=st.sampled_from([0.2, 1.0, 4.0]), timings=st.booleans(), hidden=st.integers(1, 6))
def test_beside_a_request_without_token_times_nothing_wrong_is_told(
    seed: int, rate: float, timings: bool, hidden: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("t")
    made = synthetic_trace(folder / "a.trace", requests=14, seed=seed, rate_per_s=rate)
    got = steps_of(hide(made, folder / "b.trace", set(range(0, 2 * hidden, 2)), timings))
    key = ["start_ns", "end_ns"]
    truth = made.steps.select(*key, *COMPOSITION[1:], "running", "waiting")
    for column in truth.columns[2:]:
        told = got.steps.select(*key, column).drop_nulls().join(truth, on=key, how="left", suffix="_true")
        assert told.filter(pl.col(column).ne_missing(pl.col(f"{column}_true"))).is_empty(), column
    unknown = got.steps["decode_requests"].is_null()
    for column in ("running", "decode_tokens", "decode_context_tokens"):
        assert got.steps[column].is_null().equals(unknown), column
    for column in ("weight_bytes", "kv_read_bytes", "kv_write_bytes"):
        assert (got.steps[column].is_null() == (unknown | got.steps["prefill_tokens"].is_null())).all(), column


def test_steps_beside_a_hidden_request_are_left_out_and_counted(tmp_path: Path) -> None:
    made = synthetic_trace(tmp_path / "a.trace", requests=30, rate_per_s=1.0, seed=3)
    gone = {4, 9}
    trace = hide(made, tmp_path / "b.trace", gone)
    got = steps_of(trace)
    unknown = int(got.steps["decode_requests"].null_count())
    assert 0 < got.steps["prefill_tokens"].null_count() < unknown < got.steps.height / 2
    whole = got.steps.drop_nulls(COMPOSITION)
    # By hand: the tokens that came out of the steps where nobody is hidden, of all the tokens made.
    run = made.residency.filter(pl.col("request").is_in(gone))
    theirs = {s for a, b in run.select("first_step", "last_step").iter_rows() for s in range(a, b + 1)}
    # The end of an answer is seen 0.1 ms late, so a step that began at once is left out too.
    late = made.steps.filter(pl.col("step").is_in(theirs) & ~(pl.col("step") + 1).is_in(theirs))["end_ns"]
    theirs |= {s for t in late for s in made.steps.filter(pl.col("start_ns").is_between(t, t + 99_999))["step"]}
    clear = made.steps.filter(~pl.col("step").is_in(theirs))
    ends = set(clear["end_ns"].to_list())
    tokens = made.trace.table("tokens").collect()
    share = tokens.filter(pl.col("time_ns").is_in(ends)).height / tokens.height
    assert whole.height == clear.height
    coverage = trace.table("coverage").filter(pl.col("table") == "steps").collect()
    assert coverage["fraction"].to_list() == [pytest.approx(share)] and got.known == {"engine": pytest.approx(share)}
    assert f"Beside {got.steps.height - whole.height} of {got.steps.height} steps ran 2 requests" in str(got.note)
    assert fit(got.steps).error["n"] == whole.height, "the fit leaves them out"
    assert fit(got.steps).cost_ns(decode_requests=1) == pytest.approx(COST.cost_ns(decode_requests=1), rel=0.1)


def test_all_is_known_where_all_are_seen_and_nothing_where_a_total_is_not_told(tmp_path: Path) -> None:
    made = synthetic_trace(tmp_path / "a.trace", requests=12)
    clean = steps_of(hide(made, tmp_path / "b.trace", set()))
    assert clean.known == {"engine": 1.0} and clean.steps["decode_requests"].null_count() == 0 and "Beside" not in str(clean.note)
    untold = pl.when(pl.col("request") == 3).then(None).otherwise("output_tokens").alias("output_tokens")
    assert steps_of(hide(made, tmp_path / "c.trace", {3}, change=untold)).known == {"engine": None}


def test_a_request_that_has_not_ended_may_be_in_every_step_from_then_on(tmp_path: Path) -> None:
    made = synthetic_trace(tmp_path / "a.trace", requests=12, seed=6)
    path = tmp_path / "b.trace"
    t = {n: made.trace.table(n).collect() for n in ("requests", "stages", "tokens")}
    six = pl.col("request") == 6
    t["tokens"] = t["tokens"].filter(~six)
    t["requests"] = t["requests"].with_columns(
        *(pl.when(six).then(None).otherwise(pl.col(c)).alias(c) for c in ("finish_ns", "first_token_ns", "last_token_ns"))
    )
    t["stages"] = t["stages"].filter(~six)
    with TraceWriter(path, made.trace.manifest.model_copy(update={"tables": {}}), background=False) as w:
        for name, rows in t.items():
            w.append_arrow(name, rows.to_arrow())
    steps = steps_of(hoptrace.open(path)).steps
    arrival = t["requests"].filter(six)["arrival_ns"][0]
    assert (steps["decode_requests"].is_null() == (steps["end_ns"] > arrival)).all()
    assert (steps["prefill_tokens"].is_null() == (steps["end_ns"] > arrival)).all()
    assert 0 < steps["running"].null_count() < steps.height


def test_doubted_counts_leave_the_decoding_beside_them_unknown(tmp_path: Path) -> None:
    made = synthetic_trace(tmp_path / "a.trace", requests=20, seed=2)
    number = made.trace.table("requests").filter(pl.col("output_tokens") > 10).collect()["request"][2]
    got = steps_of(hide(made, tmp_path / "b.trace", set(), doubted=number))
    run = made.residency.filter((pl.col("request") == number) & (pl.col("phase") == "decode"))
    mine = pl.col("step").is_between(run["first_step"].min(), run["last_step"].max())
    inside, outside = got.steps.filter(mine), got.steps.filter(~mine)
    for column in ("decode_requests", "decode_tokens", "decode_context_tokens", "running", "weight_bytes"):
        assert inside[column].null_count() == inside.height and outside[column].null_count() == 0
    assert got.steps.select(COMPOSITION[:4]).equals(made.steps.select(COMPOSITION[:4])), "prompts are known"
    theirs = got.residency.filter((pl.col("request") == number) & (pl.col("phase") == "decode"))
    assert theirs.height and theirs["tokens_per_step"].null_count() == theirs["context_at_start"].null_count() == theirs.height
    assert got.residency.filter(pl.col("request") != number)["tokens_per_step"].null_count() == 0
    assert got.known["engine"] is not None and got.known["engine"] < 1


def test_a_burst_that_begins_together_does_not_look_like_prompts_apart(tmp_path: Path) -> None:
    """Four requests begin in one iteration, and two join those who generate (a real llama.cpp server with four slots)."""
    ms = 1_000_000
    times = {
        0: [0, 295, 469, 647, 872, 988], 1: [9, 297, 470, 661, 874, 997, 1975, 2524, 2671, 3054],
        2: [9, 297, 470, 647, 874, 995, 1975, 2523, 2670], 3: [3, 295, 470, 647, 873, 994, 1975],
        4: [1973, 2521, 2669, 3023, 3329, 3605, 3885, 4119], 5: [2523, 2670, 3054, 3329, 3613, 3885, 4141],
    }  # fmt: skip
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False) as w:
        for r, stamps in times.items():
            w.append("requests", [{"request": r, "arrival_ns": START_NS - 600 * ms, "prompt_tokens": 40, "source": "t"}])
            w.append(
                "tokens",
                [
                    {"request": r, "index": i, "time_ns": START_NS + t * ms, "count": 1, "source": "t"}
                    for i, t in enumerate(stamps)
                ],
            )
    got = steps_of(hoptrace.open(tmp_path / "t.trace"))
    assert "iterations of their own" not in (got.note or "")
    seen = got.steps.filter(pl.col("end_ns") >= START_NS)
    assert seen["decode_tokens"].to_list()[:6] == [0, 4, 4, 4, 4, 4]
