"""The compiled engine, one server: against another simulator to the microsecond, arithmetic by hand, and its invariants."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
from hypothesis import given, settings
from support.served import Served, finishes_ms, first_tokens_ms, serve
from support.workloads import MS, make, policies, policy, workloads

from hoptrace.replay import jit, outcome
from hoptrace.replay.compiled import heap, store
from hoptrace.replay.plan import EngineSpec
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import fixed

REFERENCE = Path(__file__).parent / "data" / "reference"
COST = fixed(any_prefill_ns=50 * MS, any_decode_ns=12 * MS)
ODD = fixed(step_ns=1_234_567.891, prefill_token_ns=3_210.7, prefill_attention_ns=11.3, decode_request_ns=99_999.9,
            decode_context_token_ns=17.17)  # fmt: skip


def test_equal_to_another_simulator_on_its_reference() -> None:
    """AISimulate's latencies of 200 requests under the same rules; see tests/data/reference/README.md."""
    asked = pl.read_csv(REFERENCE / "r5_200.csv")
    said = pl.read_csv(REFERENCE / "fixed_cost_one_worker.csv")
    work = make(*((round(a * 1e9), p, o) for a, p, o in asked.iter_rows()))
    rules = policy(max_sequences=128, max_batched_tokens=2048, capacity_tokens=7000 * 64, block_size_tokens=64)
    served = serve(work, rules, COST)
    for ours, theirs in ((first_tokens_ms(served), "first_token_ms"), (finishes_ms(served), "finish_ms")):
        assert np.abs(np.array(ours) - said[theirs].to_numpy()).max() <= 0.001
    ttft = np.array(first_tokens_ms(served)) - said["arrival_ms"].to_numpy()
    assert round(float(ttft.mean()), 3) == 88.056


def test_one_request_by_hand() -> None:
    served = serve(make((7 * MS, 10, 3)), policy(max_batched_tokens=4), COST)
    # Chunks of 4, 4, 2 tokens: three steps of 50 ms; then two decode steps of 12.
    assert first_tokens_ms(served) == [157.0]
    assert finishes_ms(served) == [181.0]
    assert served.steps["prefill_tokens"].to_list() == [4, 4, 2, 0, 0]
    assert served.steps["prefill_context_tokens"].to_list() == [0, 4, 8, 0, 0]
    assert served.steps["decode_context_tokens"].to_list() == [0, 0, 0, 10, 11]
    assert served.runs.rows() == [(0, 0, 0, 1, 0, 4, 0, 0), (0, 0, 2, 2, 0, 2, 8, 1), (0, 0, 3, 4, 1, 1, 10, 1)]


def test_a_newcomer_joins_at_the_next_step_and_slows_the_decoder() -> None:
    served = serve(make((0, 4, 3), (55 * MS, 4, 1)), policy(), COST)
    # 0–50 prompt of the first; 50–62 its decode; 62–124 its decode with the prompt of the second.
    assert served.steps["end_ns"].to_list() == [50 * MS, 62 * MS, 124 * MS]
    assert first_tokens_ms(served) == [50.0, 124.0]
    assert served.of_request["first_seen_ns"].to_list() == [0, 62 * MS]


def test_one_slot_serves_one_after_another() -> None:
    served = serve(make((0, 4, 2), (1 * MS, 4, 2)), policy(max_sequences=1), COST)
    assert first_tokens_ms(served) == [50.0, 112.0]
    assert served.steps["blocked_by"].to_list() == [0, outcome.SLOTS, 0, 0]
    assert served.steps["waiting"].to_list() == [0, 1, 0, 0]


def test_prefill_first_holds_the_decoders_up() -> None:
    served = serve(make((0, 4, 3), (1 * MS, 4, 2)), policy(mode="prefill_first", chunked_prefill=False), COST)
    assert served.steps["end_ns"].to_list() == [50 * MS, 100 * MS, 112 * MS, 124 * MS]
    skipped = served.runs.filter(pl.col("phase") == 2)
    assert skipped.rows() == [(0, 0, 1, 1, 2, 0, 4, 0)]


def test_the_gap_between_steps_counts_only_while_the_engine_is_busy() -> None:
    served = serve(make((0, 4, 2), (500 * MS, 4, 1)), policy(), COST, gap_ns=3 * MS, before_ns=2 * MS)
    assert served.steps["start_ns"].to_list() == [2 * MS, 55 * MS, 502 * MS]


def test_no_room_preempts_the_one_admitted_last_and_computes_it_anew() -> None:
    # Two prompts of 4 fill 8 of 9 tokens; the first decode takes the ninth, the second finds none.
    served = serve(make((0, 4, 4), (0, 4, 2)), policy(capacity_tokens=9), COST)
    assert served.of_request["preemptions"].to_list() == [0, 1]
    assert served.of_request["recomputed_tokens"].to_list() == [0, 4]
    assert served.steps["preempted"].to_list() == [0, 1, 0, 0, 0]
    phases = served.runs.filter(pl.col("request") == 1).sort("first_step")
    assert phases["phase"].to_list() == [0, 3, 0]
    # It comes back with its prompt and its one token, and that step yields the second.
    assert phases.row(2) == (1, 0, 4, 4, 0, 5, 0, 1)
    assert finishes_ms(served) == [86.0, 136.0]


def test_the_cache_finds_what_a_request_before_has_computed() -> None:
    work = make((0, 12, 1, [0, 1, 2]), (60 * MS, 12, 1, [0, 1, 3]), (120 * MS, 12, 1, [0, 1, 2]))
    served = serve(work, policy(cache="pool"), COST)
    # The third prompt is there in whole: its last block is computed again.
    assert served.of_request["cached_tokens"].to_list() == [0, 8, 8]
    assert served.steps["prefill_tokens"].to_list() == [12, 4, 4]
    assert serve(work, policy(), COST).of_request["cached_tokens"].to_list() == [0, 0, 0]


def test_a_hit_counts_only_while_the_prefix_is_unbroken() -> None:
    work = make((0, 12, 1, [0, 1, 2]), (60 * MS, 13, 1, [9, 1, 2]))
    assert serve(work, policy(cache="pool"), COST).of_request["cached_tokens"].to_list() == [0, 0]


def test_the_cache_gives_way_to_running_requests_oldest_tail_first() -> None:
    # 12 tokens of KV. The second request needs 8: it evicts blocks 2 and 1 (tails first); block 0 stays for the third.
    work = make((0, 12, 1, [0, 1, 2]), (60 * MS, 8, 1, [5, 6]), (120 * MS, 12, 1, [0, 1, 2]))
    served = serve(work, policy(cache="pool", capacity_tokens=12), COST)
    assert served.of_request["cached_tokens"].to_list() == [0, 0, 4]
    bounded = serve(work, policy(cache="pool", cache_capacity_tokens=8), COST)
    assert bounded.of_request["cached_tokens"].to_list() == [0, 0, 0]


def test_slots_keep_their_last_prompt() -> None:
    # One slot: the second request has nothing of the first, and so the third finds nothing either.
    rows = ((0, 12, 1, [0, 1, 2]), (60 * MS, 12, 1, [5, 6, 7]), (120 * MS, 12, 1, [0, 1, 2]))
    one = serve(make(*rows), policy(cache="slot", max_sequences=1), COST)
    assert one.of_request["cached_tokens"].to_list() == [0, 0, 0]
    # Two slots: the second goes to the other one, and the third comes back to the first. One token is computed all the same.
    two = serve(make(*rows), policy(cache="slot", max_sequences=2), COST)
    assert two.of_request["cached_tokens"].to_list() == [0, 0, 11]


def _digest(served: Served) -> str:
    h = hashlib.sha256()
    for frame in (served.steps, served.runs, served.of_request):
        h.update(frame.to_numpy().tobytes())
    h.update(served.token_step.tobytes())
    return h.hexdigest()


@given(workloads(), policies())
@settings(max_examples=150)
def test_going_through_every_decoder_in_every_step_gives_the_same_rows(work: Workload, rules: EngineSpec) -> None:
    assert _digest(serve(work, rules, ODD)) == _digest(serve(work, rules, ODD, separate=True))


_SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from test_kernel import ODD, _digest, chosen
from support.served import serve
print(*(_digest(serve(w, p, ODD)) for w, p in chosen()))
"""


def chosen() -> list[tuple[Workload, EngineSpec]]:
    """A few busy workloads, each with a policy that uses another part of the kernel."""
    rng = np.random.default_rng(7)
    rows = []
    for i in range(40):
        n = int(rng.integers(1, 30))
        rows.append((i * 20 * MS, n, int(rng.integers(1, 15)), [int(b) for b in np.arange(n // 4) + 100 * (i % 3)]))
    work = make(*rows)
    return [
        (work, policy(max_sequences=3, max_batched_tokens=8)),
        (work, policy(capacity_tokens=64, block_size_tokens=4, cache="pool")),
        (work, policy(mode="prefill_first", chunked_prefill=False, max_batched_tokens=40, capacity_tokens=60)),
        (work, policy(max_sequences=2, cache="slot")),
    ]


def test_the_whole_kernel_without_numba_is_equal() -> None:
    env = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    out = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(Path(__file__).parent)], env=env, capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == [_digest(serve(w, p, ODD)) for w, p in chosen()]


@given(workloads(), policies())
@settings(max_examples=150)
def test_nothing_is_lost_and_no_limit_is_broken(work: Workload, rules: EngineSpec) -> None:
    served = serve(work, rules, COST)
    w, steps, runs, of = served.work, served.steps, served.runs, served.of_request
    assert w.n + served.refused.height == work.n
    if not w.n:
        return
    assert len(served.token_step) == w.output_tokens.sum()
    # Work: what stands in the KV at the end was computed once, unless it was found in a cache or lost to a preemption.
    computed = int((steps["prefill_tokens"] + steps["decode_requests"]).sum())
    needed = w.prompt_tokens + w.output_tokens - 1 - of["cached_tokens"].to_numpy() + of["recomputed_tokens"].to_numpy()
    assert computed == needed.sum()
    if rules.max_sequences is not None:
        assert steps["running"].max() <= rules.max_sequences  # type: ignore[operator]
    if rules.max_batched_tokens is not None and rules.chunked_prefill:
        assert (steps["prefill_tokens"] + steps["decode_requests"]).max() <= rules.max_batched_tokens  # type: ignore[operator]
    if rules.capacity_tokens is not None:
        assert steps["kv_used_tokens"].max() <= rules.capacity_tokens  # type: ignore[operator]
    assert (steps["start_ns"].diff().drop_nulls() > 0).all()
    assert (of["scheduled_ns"] >= pl.Series(served.ready_ns)).all()
    assert (of["first_seen_ns"] >= pl.Series(served.ready_ns)).all()
    # Runs: one after another without a hole, and together exactly what the steps hold.
    tokens = {0: np.zeros(steps.height, dtype=int), 1: np.zeros(steps.height, dtype=int)}
    for (r,), mine in runs.sort("request", "first_step").group_by("request", maintain_order=True):
        assert mine["first_step"].to_list()[1:] == [s + 1 for s in mine["last_step"].to_list()[:-1]]
        ends = served.token_step[served.token_ptr[r] : served.token_ptr[r + 1]]
        assert (np.diff(ends) > 0).all()
        assert mine["last_step"].to_list()[-1] == ends[-1]
        for _, _, first, last, phase, share, _, _ in mine.iter_rows():
            if phase in tokens:
                tokens[phase][first : last + 1] += share
    assert tokens[0].tolist() == steps["prefill_tokens"].to_list()
    assert tokens[1].tolist() == steps["decode_requests"].to_list()


@given(workloads())
@settings(max_examples=40)
def test_a_request_alone_is_not_touched_by_the_policy(work: Workload) -> None:
    one = work.take(np.array([0]))
    base = serve(one, policy(), COST)
    for rules in (policy(max_sequences=1), policy(mode="prefill_first", chunked_prefill=False), policy(cache="pool")):
        assert finishes_ms(serve(one, rules, COST)) == finishes_ms(base)


def test_what_can_never_fit_is_refused_and_the_rest_goes_on() -> None:
    """B33: KV smaller than one request; it ends, says so once, and serves the others."""
    work = make((0, 600, 10), (0, 8, 2), (0, 8, 600), (1 * MS, 8, 2))
    served = serve(work, policy(capacity_tokens=512, block_size_tokens=16), COST)
    assert served.refused["request"].to_list() == [0, 2]
    assert served.refused["error"][0] == "cannot ever fit: 609 tokens of KV, there is room for 512"
    assert served.work.request.tolist() == [1, 3]
    assert len(first_tokens_ms(served)) == 2
    context = serve(work, policy(context_tokens=100), COST)
    assert context.refused["error"][0] == "cannot ever fit: 610 tokens, the context holds 100"
    whole = serve(work, policy(max_batched_tokens=64, chunked_prefill=False), COST)
    assert whole.refused["error"].to_list() == ["cannot ever fit: a prompt of 600 tokens in a step of 64, without chunks"]


def test_overload_with_little_kv_ends() -> None:
    """B33: 200 requests of 512 + 256 at 2000 a second into under 1000 blocks."""
    work = make(*((i * 500_000, 512, 256) for i in range(200)))
    served = serve(work, policy(capacity_tokens=900 * 16, block_size_tokens=16, max_sequences=256, max_batched_tokens=2048), COST)
    assert served.work.n == 200
    assert served.of_request["preemptions"].sum() > 0
    assert len(served.token_step) == 200 * 256


def test_nothing_to_do() -> None:
    served = serve(make((0, 600, 10)), policy(context_tokens=5), COST)
    assert served.steps.height == 0
    assert served.refused.height == 1


def test_compiled_code_is_dropped_when_a_file_it_was_made_from_changes() -> None:
    def f(x: int) -> int:
        return x

    a, b = jit.compiled(heap)(f), jit.compiled(store)(f)
    assert a._cache._cache_file._source_stamp != b._cache._cache_file._source_stamp
