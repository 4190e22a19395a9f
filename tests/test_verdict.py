"""The three questions: answers from figures, and 'cannot be told' where figures are missing."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.arms import MS, Times, arm
from support.memory import MemoryTrace

import hoptrace
from hoptrace.analysis.compare.diff import Diff, diff, verdict
from hoptrace.analysis.compare.diff_change import Change
from hoptrace.analysis.compare.verdict import QUESTIONS, UNTOLD, Answer, judge
from hoptrace.analysis.compare.verdict_text import blocks
from hoptrace.manifest import Manifest, Server

DATA = Path(__file__).parent / "data" / "vllm_traces"
SAMPLES = Path(__file__).parent.parent / "sample_traces"


def figure(name: str, a: float | None, b: float | None, **more: Any) -> Change:
    """A figure whose change is beyond noise, unless said otherwise; its basis is the end of its name, if that is one."""
    tail = name.rpartition(".")[2]
    basis = tail if tail in ("counted", "derived", "assumed") else more.pop("basis", None)
    bounds = {} if a is None or b is None else {"low": b - a - 1e-9, "high": b - a + 1e-9}
    return Change(name, more.pop("unit", "1"), a, b, basis=basis, **(bounds | more))


def answer(key: str, *changes: Change) -> Answer:
    return judge({c.name: c for c in changes}).answers[key]


# -- the path ---------------------------------------------------------------------------------------------------------

HOPS, OPS = "payload_hops_per_token", "control_ops_per_token"


@pytest.mark.parametrize(
    ("hops", "ops", "expected"),
    [
        ((4, 2), (3, 3), "shorter"),
        ((2, 4), (3, 3), "dearer"),
        ((2, 4), (3, 6), "dearer"),
        ((4, 2), (3, 6), "exchanged"),
        ((4, 4), (3, 3), "the same"),
        ((4, 3.9), (3, 3), "the same"),  # under 5 % decides nothing
    ],
)
def test_the_path(hops: tuple[float, float], ops: tuple[float, float], expected: str) -> None:
    found = answer("path", figure(f"{HOPS}.counted", *hops), figure(f"{OPS}.counted", *ops))
    assert found.answer == expected and not found.missing and found.question == QUESTIONS["path"]


def test_what_is_assumed_never_decides_alone() -> None:
    found = answer("path", figure(f"{HOPS}.assumed", 4, 1), figure(f"{OPS}.assumed", 9, 1))
    assert found.answer == UNTOLD and not found.decided_by
    assert "payload hops are only assumed" in found.sentence
    # Beside a counted figure it is shown and still does not decide.
    found = answer("path", figure(f"{HOPS}.assumed", 4, 1), figure(f"{OPS}.counted", 3, 3))
    assert found.answer == "the same" and f"{HOPS}.assumed" in {c.name for c in found.figures}


def test_counted_against_assumed_does_not_compare() -> None:
    found = answer("path", figure(f"{HOPS}.counted", 2, None), figure(f"{HOPS}.assumed", None, 2))
    assert found.answer == UNTOLD and "payload hops do not compare: A's are counted and B's are assumed" in found.sentence


def test_a_change_within_noise_decides_nothing() -> None:
    assert answer("path", figure(f"{HOPS}.counted", 4, 2, low=-5, high=1)).answer == "the same"
    assert answer("path", figure(f"{HOPS}.counted", 4, 2, noise=3, repeats=True)).answer == "the same"


def test_nothing_known_of_the_path() -> None:
    found = answer("path")
    assert found.answer == UNTOLD and found.missing == ("payload hops are not known", "control operations are not known")


# -- sharing ----------------------------------------------------------------------------------------------------------


def sharing(cached: tuple[float, float], weights: tuple[float, float], between: tuple[float, float]) -> Answer:
    return answer(
        "sharing",
        figure("cached_share", *cached, unit="share", basis="counted"),
        figure("weight_bytes_per_token.derived", *weights, unit="bytes"),
        figure("prefill_interference.mean", 0, 0, unit="ns"),
        figure("decode_interference.mean", *between, unit="ns"),
    )


@pytest.mark.parametrize(
    ("cached", "weights", "between", "expected"),
    [
        ((0.1, 0.5), (100, 100), (50, 50), "more meaning"),
        ((0.1, 0.1), (100, 50), (50, 50), "more meaning"),
        ((0.1, 0.1), (100, 50), (50, 90), "more of both"),
        ((0.1, 0.1), (100, 100), (50, 90), "only hardware"),
        ((0.5, 0.1), (100, 100), (50, 90), "hardware instead of meaning"),
        ((0.5, 0.1), (100, 100), (50, 10), "less"),
        ((0.1, 0.5), (100, 200), (50, 50), "exchanged"),
        ((0.1, 0.1), (100, 100), (90, 50), "less interference"),
        ((0.1, 0.1), (100, 100), (50, 50), "the same"),
    ],
)
def test_sharing(cached: tuple[float, float], weights: tuple[float, float], between: tuple[float, float], expected: str) -> None:
    assert sharing(cached, weights, between).answer == expected


def test_what_the_machine_counts_decides_only_with_repeats() -> None:
    base = [
        figure("cached_share", 0.1, 0.1, unit="share", basis="counted"),
        figure("decode_interference.mean", 50, 50, unit="ns"),
    ]
    late = Change("run_delay_ns_per_token", "ns", 100, 200, basis="counted")
    assert answer("sharing", *base, late).answer == "the same"
    late = Change("run_delay_ns_per_token", "ns", 100, 200, noise=20.0, repeats=True, basis="counted")
    assert answer("sharing", *base, late).answer == "only hardware"


def test_sharing_cannot_be_told_without_interference() -> None:
    found = answer("sharing", figure("cached_share", 0.1, 0.5, unit="share"))
    assert found.answer == UNTOLD and "interference is not known on both sides" in found.sentence


# -- repetition -------------------------------------------------------------------------------------------------------

COMPUTED, KV = "computed_prompt_tokens_per_token", "kv_moved_bytes_per_token.counted"


@pytest.mark.parametrize(
    ("again", "spent", "expected"),
    [
        ((10, 4), (0, 0), "removes"),
        ((10, 4), (0, 5000), "removes and pays"),
        ((10, 10), (0, 5000), "only manages"),
        ((4, 10), (0, 0), "repeats more"),
        ((4, 10), (0, 5000), "repeats more and pays"),
        ((10, 10), (5000, 5000), "the same"),
    ],
)
def test_repetition(again: tuple[float, float], spent: tuple[float, float], expected: str) -> None:
    found = answer("repetition", figure(COMPUTED, *again, basis="counted"), figure(KV, *spent, unit="bytes"))
    assert found.answer == expected


def test_repetition_cannot_be_told_without_what_is_computed() -> None:
    found = answer("repetition", figure(KV, 0, 5000, unit="bytes"))
    assert found.answer == UNTOLD and "how many prompt tokens were computed is not known" in found.sentence


# -- all of it --------------------------------------------------------------------------------------------------------

_NAMES = [f"{HOPS}.counted", f"{HOPS}.assumed", f"{OPS}.derived", "cached_share", "weight_bytes_per_token.derived", COMPUTED, KV,
          "decode_interference.mean", "recompute.mean", "transfer.mean", "ttft.p50", "itl.p99", "e2e.mean"]  # fmt: skip
values = st.none() | st.floats(0, 1e12) | st.just(0.0)


@given(st.dictionaries(st.sampled_from(_NAMES), st.tuples(values, values, st.booleans(), st.booleans())))
@settings(max_examples=200)
def test_an_answer_rests_on_known_figures_that_are_not_assumed(drawn: dict[str, tuple[Any, Any, bool, bool]]) -> None:
    changes = {}
    for name, (a, b, interval, repeats) in drawn.items():
        c = figure(name, a, b)
        changes[name] = Change(
            name, "1", a, b, c.low if interval else None, c.high if interval else None, basis=c.basis, repeats=repeats,
            noise=1.0 if repeats else None,
        )  # fmt: skip
    v = judge(changes)
    for key, found in v.answers.items():
        assert found.sentence.endswith(".") and found.question == QUESTIONS[key]
        assert (found.answer == UNTOLD) == (not found.decided_by)
        for name in found.decided_by:
            assert changes[name].change is not None and changes[name].basis != "assumed"
    assert Console(file=None, quiet=True).print(*blocks(v, full=True)) is None
    # Nothing is known of nothing.
    assert {a.answer for a in judge({}).answers.values()} == {UNTOLD}


def test_first_tokens_later_and_the_others_evenly() -> None:
    """Published check P7 (2 regular → 1P1D, 2048/512): TTFT p50 310 → 1112 ms, ITL mean 25.74 → 17.06, p99 294.89 → 19.72."""
    n = 40
    stalls = [294.89 if k % 33 == 16 else 17.9 for k in range(100)]
    a = arm(n, lambda i: Times(prefill=310 + i - n / 2, gaps=stalls), name="regular")
    b = arm(
        n, lambda i: Times(prefill=1112 + i - n / 2, gaps=[17.06 + (2.66 if k == 50 else 0) for k in range(100)]), name="split"
    )
    d = diff(a, b)
    assert d.changes["itl.p99"].verdict == "better" and d.changes["ttft.p50"].verdict == "worse"
    assert (d.changes["itl.p99"].a, d.changes["ttft.p50"].b) == (294_890_000, pytest.approx(1_111_500_000))
    [trade] = d.verdict.trades
    assert trade.startswith("ITL p99 fell -9") and "while TTFT" in trade and "rose +2" in trade


def split(n: int = 12) -> tuple[MemoryTrace, MemoryTrace]:
    """Field cases A7, A13: one server that mixes, against a split in two that is worse in every metric: the prompts are short,
    and the KV of each has to be carried."""
    one = {"moves": [_move(i, "tokens", "server:s", "client", 4 * 300, 4, 2) for i in range(n)]}
    a = arm(n, lambda i: Times(prefill=50 + i, gaps=[10] * 3), name="mixed", extra=one)
    stays, more = [], list(one["moves"])
    for i in range(n):
        at = i * 10_000 * MS
        handed = at + round((50 + i) * MS)
        stays += [
            {"request": i, "stage": 0, "server": "p", "role": "prefill", "enqueued_ns": at, "scheduled_ns": at, "end_ns": handed,
             "end_reason": "handed over", "cached_tokens": 0},
            {"request": i, "stage": 1, "server": "d", "role": "decode", "enqueued_ns": handed, "scheduled_ns": handed + 25 * MS,
             "end_ns": handed + 70 * MS, "cached_tokens": 20 + i, "cached_peer_tokens": 20 + i},
        ]  # fmt: skip
        more.append(_move(i, "kv", "memory:p", "memory:d", 1_000_000, 16, 3) | {"start_ns": handed, "end_ns": handed + 20 * MS})
    b = arm(
        n, lambda i: Times(queue=0, prefill=75 + i, gaps=[15] * 3), name="split", stays=False,
        extra={"stages": stays, "moves": more},
        manifest=Manifest(origin="recorded", closed=True, servers=[Server(name=x, model="toy") for x in "pd"]),
    )  # fmt: skip
    return a, b


def _move(i: int, object_: str, src: str, dst: str, size: int, transfers: int, ops: int) -> dict[str, Any]:
    at = i * 10_000 * MS
    return {
        "request": i, "server": "s", "start_ns": at, "end_ns": at + MS, "object": object_, "src": src, "dst": dst, "bytes": size,
        "transfers": transfers, "payload_hops": 2, "control_ops": ops, "mechanism": "rdma", "basis": "counted",
    }  # fmt: skip


def test_a_split_that_is_worse_in_every_metric() -> None:
    d = diff(*split())
    assert {d.changes[f"{m}.mean"].verdict for m in ("ttft", "itl", "tpot", "e2e")} == {"worse"}
    path = d.verdict.answers["path"]
    # 4 tokens a request: 4 messages × 2 hops, then 16 transfers × 2 hops more.
    assert (d.changes[f"{HOPS}.counted"].a, d.changes[f"{HOPS}.counted"].b) == (2, 10)
    assert (d.changes[f"{OPS}.counted"].a, d.changes[f"{OPS}.counted"].b) == (2, 2 + 16 * 3 / 4)
    assert (d.changes["stays_per_answer"].a, d.changes["stays_per_answer"].b) == (1, 2)
    assert path.answer == "dearer" and f"{HOPS}.counted" in path.decided_by and "stays_per_answer" in path.decided_by
    # What a decoder was handed over is no cache hit, and no prompt token is computed less: the KV that is carried manages.
    assert d.changes["cached_share"].b == 0 and d.changes[COMPUTED].change == 0
    assert (d.changes[KV].a, d.changes[KV].b) == (0, 250_000)
    repetition = d.verdict.answers["repetition"]
    assert repetition.answer == "only manages" and KV in repetition.decided_by
    back = diff(*reversed(split())).verdict
    assert back.answers["path"].answer == "shorter" and back.answers["repetition"].answer == "the same"


@cache
def four_one() -> Diff:
    return diff(*(hoptrace.open(SAMPLES / f"llamacpp-{n}.trace") for n in ("four-slots", "one-slot")))


def test_four_slots_against_one() -> None:
    """Real captures of one load, against the raw tables: each of 469 and 736 steps reads the weights once, for 736 tokens."""
    d = four_one()
    raw = [pl.read_parquet(SAMPLES / f"llamacpp-{n}.trace" / "steps" / "*.parquet") for n in ("four-slots", "one-slot")]
    decoding = [r.filter(pl.col("decode_tokens") > 0) for r in raw]
    assert [r.height for r in raw] == [469, 736]
    c = d.changes["decode_tokens_per_step"]
    assert (c.a, c.b) == tuple(r["decode_tokens"].sum() / r.height for r in decoding)
    w = d.changes["weight_bytes_per_token.derived"]
    sizes = [hoptrace.open(SAMPLES / f"llamacpp-{n}.trace").manifest.servers[0].weight_bytes for n in ("four-slots", "one-slot")]
    assert sizes[0] and sizes[1] and (w.a, w.b) == (469 * sizes[0] / 736, 736 * sizes[1] / 736)
    sharing = d.verdict.answers["sharing"]
    # Fewer tokens share a reading of the weights, and none is in another's way.
    assert sharing.answer == "less" and "decode_interference.mean" in sharing.decided_by
    assert d.changes["decode_interference.mean"].b == 0
    assert d.verdict.answers["path"].answer == "the same"
    assert d.verdict.answers["repetition"].answer == "the same" and d.changes[COMPUTED].change == 0
    waits = next(b for b in d.verdict.balances if b.key == "time.mean")
    assert [x.name for x in waits.rises] == ["queue_slots.mean"] and waits.outcome == "partly moved"
    assert d.verdict.trades and "while TTFT mean rose" in d.verdict.trades[0]


def test_a_real_capture_against_itself() -> None:
    trace = hoptrace.open(DATA / "preempted.trace")
    v = verdict(trace, trace)
    assert {k: a.answer for k, a in v.answers.items()} == dict.fromkeys(QUESTIONS, "the same")
    assert not v.moved and not v.trades and {b.outcome for b in v.balances} == {"unchanged"}


def test_two_traces_of_nothing_tell_nothing() -> None:
    a, b = MemoryTrace({}, name="a"), MemoryTrace({}, name="b")
    v = verdict(a, b)
    assert {x.answer for x in v.answers.values()} == {UNTOLD} and not v.moved and not v.trades
    only = [{"request": i, "arrival_ns": i, "finish_ns": i + 10, "prompt_tokens": 7, "output_tokens": 5} for i in range(3)]
    v = verdict(MemoryTrace({"requests": only}), MemoryTrace({"requests": only}))
    assert {x.answer for x in v.answers.values()} == {UNTOLD}


def test_the_json_of_the_verdict() -> None:
    found = four_one().as_dict()["verdict"]
    assert set(found) == {"answers", "balances", "moved", "trades"} and set(found["answers"]) == set(QUESTIONS)
    path = found["answers"]["path"]
    assert set(path) == {"question", "answer", "sentence", "decided_by", "figures", "missing"}
    assert {f["certainty"] for f in path["figures"]} <= {"beyond noise", "within noise", "no interval", "equal", "unknown"}


def test_a_preempted_request_visits_no_second_server() -> None:
    """It loses its place and comes back to the same server: a stay of its own, and no longer path."""
    kept = {"request": 0, "stage": 0, "server": "s", "enqueued_ns": 0, "scheduled_ns": 0, "end_ns": 9 * MS}
    lost = [kept | {"end_ns": 4 * MS, "end_reason": "preempted"}, kept | {"stage": 1, "scheduled_ns": 5 * MS}]
    a = arm(2, lambda i: Times(), name="a", stays=False, extra={"stages": [kept]})
    b = arm(2, lambda i: Times(), name="b", stays=False, extra={"stages": lost})
    d = diff(a, b)
    assert (d.changes["stays_per_answer"].a, d.changes["stays_per_answer"].b) == (1, 1)
    assert d.verdict.answers["path"].answer == "the same"
