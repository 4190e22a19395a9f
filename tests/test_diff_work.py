"""What makes the work of two traces unequal, what does not, and how requests are matched."""

from __future__ import annotations

from typing import Any

import pytest
from support.memory import SERVER, MemoryTrace

from hoptrace.analysis.compare.diff import diff
from hoptrace.analysis.compare.diff_pairs import finished, pair
from hoptrace.analysis.compare.diff_settings import settings
from hoptrace.analysis.compare.diff_side import Side
from hoptrace.analysis.compare.diff_work import notes_on, unequal
from hoptrace.errors import InputError
from hoptrace.manifest import CollectorInfo, Manifest, ReplayInfo, Server

Rows = list[dict[str, Any]]


def requests(n: int = 40, **columns: Any) -> Rows:
    """``n`` finished requests; a column may be a function of the request's number."""
    rows = []
    for i in range(n):
        own = {k: v(i) if callable(v) else v for k, v in columns.items()}
        rows.append({
            "request": i, "arrival_ns": i * 1000, "arrival_of": "received", "finish_ns": i * 1000 + 500 + 37 * (i % 7),
            "prompt_tokens": 7 + i % 3, "output_tokens": 5, **own,
        })  # fmt: skip
    return rows


def trace(rows: Rows | None = None, *, name: str = "t", manifest: Manifest | None = None, **tables: Rows) -> MemoryTrace:
    return MemoryTrace({"requests": requests() if rows is None else rows, **tables}, manifest, name=name)


def manifest(server: Server = SERVER, **more: Any) -> Manifest:
    return Manifest(**({"origin": "recorded", "servers": [server], "closed": True} | more))


class Found:
    """Why two traces do not compare, what is said though they do, and which settings differ: all that is known before any
    figure."""

    def __init__(self, a: MemoryTrace, b: MemoryTrace) -> None:
        x, y = Side(a), Side(b)
        self.reasons = unequal(a, b, (x.work, y.work), (x.done, y.done), pair(x.done, y.done))
        self.notes = notes_on(a, b, x.work, y.work)
        self.settings = settings(a.manifest, b.manifest)


def refused(a: MemoryTrace, b: MemoryTrace) -> str:
    """Why."""
    with pytest.raises(InputError, match="did not do the same work") as e:
        diff(a, b)
    assert "--anyway" in (e.value.hint or "")
    assert all(r.text in e.value.message for r in Found(a, b).reasons)
    return e.value.message


def compared(a: MemoryTrace, b: MemoryTrace) -> Found:
    found = Found(a, b)
    assert not found.reasons
    return found


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_arms_that_emit_120_and_111_tokens_do_not_compare() -> None:
    """Field case A62 (kekzl/imp #1816): 63.9 against 72.5 tokens/s, and the sign flips with what is compared: the arm that emits
    fewer tokens ends sooner, though each of its tokens takes longer."""

    def arm(tokens: int, tokens_per_s: float, name: str) -> MemoryTrace:
        gap = round(1e9 / tokens_per_s)
        rows: Rows = []
        seen: Rows = []
        for i in range(8):
            at = i * 10**10
            rows.append({
                "request": i, "arrival_ns": at, "first_token_ns": at + gap, "last_token_ns": at + tokens * gap,
                "finish_ns": at + tokens * gap, "prompt_tokens": 50, "output_tokens": tokens,
            })  # fmt: skip
            seen += [
                {"request": i, "index": k, "time_ns": at + (k + 1) * gap, "count": 1, "vantage": "client"} for k in range(tokens)
            ]
        return trace(rows, name=name, tokens=seen)

    a, b = arm(120, 72.5, "fp8"), arm(111, 68.0, "nvfp4")
    assert "960 against 888 output tokens" in refused(a, b)
    d = diff(a, b, anyway=True)
    assert d.unequal == ["960 against 888 output tokens"] and d.as_dict()["unequal_work"][0]["code"] == "output_tokens"
    # Each token takes longer, and yet the whole takes less.
    assert d.changes["itl.mean"].verdict == "worse" and d.changes["e2e.mean"].verdict == "better"


def test_equal_totals_of_unequal_requests_do_not_compare() -> None:
    """120 and 111 one way in one trace, the other way in the other: the totals are equal, no request is."""
    a = trace(requests(2, output_tokens=lambda i: (120, 111)[i], request_id=lambda i: f"r{i}"), name="a")
    b = trace(requests(2, output_tokens=lambda i: (111, 120)[i], request_id=lambda i: f"r{i}"), name="b")
    assert "2 of 2 requests have another number of tokens, though the totals are equal" in refused(a, b)
    a = trace(requests(2, prompt_tokens=lambda i: (10, 30)[i]), name="a")
    b = trace(requests(2, prompt_tokens=lambda i: (20, 20)[i]), name="b")
    assert "the requests have other lengths" in refused(a, b)


def test_other_limits_do_not_compare() -> None:
    a, b = (trace(requests(max_tokens=m), name=f"m{m}") for m in (5, 64))
    assert "40 of 40 requests have another limit (max_tokens)" in refused(a, b)
    # One side that does not say is no difference.
    assert not compared(a, trace(requests(max_tokens=None))).reasons


def test_more_failures_are_other_work_and_a_few_are_said() -> None:
    failed = requests(46)
    for r in failed[40:]:
        r["error"] = "It broke."
    assert "0 against 6 requests that failed" in refused(trace(), trace(failed, name="many"))
    d = compared(trace(name="a"), trace(failed[:42], name="few"))
    assert any("0 requests of a and 2 of few failed or had not finished" in n for n in d.notes)


# -- model, precision, settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ({"model": "org/Qwen3-8B"}, {"model": "Qwen3-14B"}, "another model: org/Qwen3-8B against Qwen3-14B"),
        ({"layers": 36, "model": "m"}, {"layers": 40, "model": "m"}, "another model: layers 36 against 40"),
        (
            {"config": {"model_ftype": "Q4_1"}},
            {"config": {"model_ftype": "F16"}},
            "weights of another precision: model_ftype Q4_1 against F16",
        ),
        (
            {"weight_bytes": 16_000_000},
            {"weight_bytes": 8_000_000},
            "weights of another precision: 16,000,000 against 8,000,000 bytes",
        ),
    ],
)
def test_another_model_or_precision_is_other_work(one: dict[str, Any], other: dict[str, Any], why: str) -> None:
    a, b = (trace(manifest=manifest(Server(name="s", **s)), name=n) for s, n in ((one, "a"), (other, "b")))
    assert why in refused(a, b)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": "/models/Qwen3-8B"}, {"model": "Qwen/qwen3-8b"}),
        ({"model": "m"}, {"model": None}),
        ({"weight_bytes": 16, "config": {"dtype": "bf16"}}, {"weight_bytes": 8, "config": {"dtype": "bf16"}}),
    ],
)
def test_aliases_and_unknown_models_are_no_difference(one: dict[str, Any], other: dict[str, Any]) -> None:
    a, b = (trace(manifest=manifest(Server(name="s", **s))) for s in (one, other))
    assert not compared(a, b).reasons


def test_the_policy_under_test_is_listed_and_not_refused() -> None:
    one = Server(
        name="s", max_sequences=4, kv_dtype="f16", engine="vllm", engine_version="0.31", config={"chunked_prefill": True}
    )
    other = Server(
        name="s", max_sequences=1, kv_dtype="fp8", engine="vllm", engine_version="0.32", config={"chunked_prefill": False}
    )
    d = compared(trace(manifest=manifest(one)), trace(manifest=manifest(other)))
    assert {(s.name, s.a, s.b) for s in d.settings} == {
        ("chunked_prefill", "True", "False"), ("engine_version", "0.31", "0.32"), ("kv_dtype", "f16", "fp8"),
        ("max_sequences", "4", "1"),
    }  # fmt: skip


def test_settings_of_replays_and_numbers_of_servers() -> None:
    def replay(slots: int, servers: int) -> Manifest:
        info = ReplayInfo(parent="p", policy={"name": f"n{slots}", "batching": {"mode": "mixed", "order": slots}}, cost_model={})
        return manifest(origin="replayed", servers=[Server(name=f"s{i}") for i in range(servers)], replay=info)

    found = settings(replay(4, 1), replay(1, 2))
    assert [(s.name, s.a, s.b) for s in found] == [("servers", "s0", "s0, s1"), ("replay: batching.order", "4", "1")]
    assert settings(replay(4, 1), replay(4, 1)) == []
    assert settings(Manifest(origin="imported"), replay(4, 1)) == []


# -- the load and the vantage -----------------------------------------------------------------------------------------


def test_an_open_and_a_closed_loop_do_not_compare() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    at = np.cumsum(rng.exponential(1000, 60)).astype(int)
    length = rng.exponential(3000, 60).astype(int) + 1
    free = requests(60, arrival_ns=lambda i: int(at[i]), finish_ns=lambda i: int(at[i] + length[i]))
    slots = requests(60, client_slot=lambda i: i % 2)
    assert "closed loop of 2 clients" in refused(trace(free, name="open"), trace(slots, name="closed"))
    assert "2 against 3 clients of a closed loop" in refused(
        trace(slots), trace(requests(60, client_slot=lambda i: i % 3), name="x")
    )
    # One side of which nobody knows: said.
    d = compared(trace(slots[:20], name="closed"), trace(requests(20), name="short"))
    assert any("The load of closed was a closed loop; whether that of short was is not sure" in n for n in d.notes)


def test_other_rates_do_not_compare() -> None:
    slow, fast, close = (trace(requests(intended_ns=lambda i, s=s: i * s), name=f"r{s}") for s in (1_000_000, 500_000, 980_000))
    assert "arrivals at 1e+03 against 2e+03 requests/s" in refused(slow, fast)
    assert not compared(slow, close).reasons


def test_times_from_another_moment_and_tokens_seen_elsewhere_do_not_compare() -> None:
    def seen(vantage: str) -> Rows:
        return [{"request": i, "index": 0, "time_ns": i * 1000 + 100, "count": 1, "vantage": vantage} for i in range(40)]

    meant = trace(requests(arrival_of="intended"), name="meant")
    assert "times run from another moment: received against intended" in refused(trace(), meant)
    a, b = trace(tokens=seen("client"), name="a"), trace(tokens=seen("engine"), name="b")
    assert "tokens were seen elsewhere: client against engine" in refused(a, b)
    # A side that recorded no tokens has no ITL, and that is all.
    assert not compared(a, trace()).reasons


def test_partial_captures_do_not_compare() -> None:
    def covered(fraction: float) -> dict[str, Rows]:
        return {"coverage": [{"table": "requests", "from_ns": 0, "to_ns": 10**6, "fraction": fraction}]}

    assert "of part only 50% was recorded" in refused(trace(), trace(name="part", **covered(0.5)))
    assert not compared(trace(), trace(**covered(1.0))).reasons
    broken = [*requests(), {"request": 99, "arrival_ns": 50_000}]
    assert "cut broke off, with 1 request not finished" in refused(
        trace(), trace(broken, name="cut", manifest=manifest(closed=False))
    )
    d = compared(trace(), trace(name="open", manifest=manifest(closed=False)))
    assert any("open was not closed cleanly" in n for n in d.notes)


def test_dropped_rows() -> None:
    from hoptrace.manifest import Part

    def dropped(n: int) -> Manifest:
        tables = {"requests": [Part(file="requests/0.parquet", rows=1000)]}
        return manifest(tables=tables, collectors=[CollectorInfo(name="proxy", available=True, dropped={"buffer full": n})])

    assert "9.1% of the rows of lossy were dropped" in refused(trace(), trace(name="lossy", manifest=dropped(100)))
    assert any(
        "0.5% of the rows of little were dropped" in n for n in compared(trace(), trace(name="little", manifest=dropped(5))).notes
    )


# -- pairs ------------------------------------------------------------------------------------------------------------


def how(a: Rows, b: Rows) -> tuple[str, list[int]] | None:
    """How two lists of requests are matched, and whom the requests of the first get."""
    found = pair(finished(trace(a)), finished(trace(b)))
    return None if found is None else (found.how, [y for _, y in sorted(zip(found.a.to_list(), found.b.to_list(), strict=True))])


def test_requests_are_matched_by_identifier_however_they_are_numbered() -> None:
    a = requests(4, request_id=lambda i: f"r{i}", prompt_tokens=9)
    b = requests(4, request_id=lambda i: f"r{3 - i}", prompt_tokens=9)
    assert how(a, b) == ("by request_id", [3, 2, 1, 0])


def test_an_identifier_of_two_prompts_is_none() -> None:
    a = requests(3, request_id=lambda i: f"r{i}", prompt_tokens=lambda i: (5, 6, 7)[i])
    b = requests(3, request_id=lambda i: f"r{i}", prompt_tokens=lambda i: (7, 6, 5)[i])
    assert how(a, b) is None


def test_requests_are_matched_by_their_prompts() -> None:
    def keyed(order: list[int], space: str = "k") -> Rows:
        return requests(
            4, request_id=lambda i: f"{space}{order}{i}", prefix_blocks=lambda i: [7, order[i] // 2], hash_space=space,
            block_size=16, block_unit="tokens", prompt_tokens=lambda i: 32 + order[i] // 2,
        )  # fmt: skip

    # 0 and 1 bear one prompt, 2 and 3 another: equal ones in the order of arrival.
    assert how(keyed([0, 1, 2, 3]), keyed([2, 0, 3, 1])) == ("by the hash of the prompt and equal lengths", [1, 3, 0, 2])
    # Keyed otherwise, hashes say nothing; the order of the lengths differs too.
    assert how(keyed([0, 1, 2, 3]), keyed([2, 0, 3, 1], "other")) is None
    assert how(keyed([0, 1, 2, 3]), keyed([0, 1, 2, 3], "other")) == (
        "by order of arrival, with prompts and answers of equal length", [0, 1, 2, 3],
    )  # fmt: skip


def test_requests_of_which_the_numbers_differ_are_not_matched() -> None:
    assert how(requests(3), requests(4)) is None
    assert how([], []) is None
    assert how(requests(2, prompt_tokens=None), requests(2, prompt_tokens=None)) is None


def test_answers_of_other_lengths_are_still_the_same_requests() -> None:
    a, b = requests(4, output_tokens=lambda i: i + 1), requests(4, output_tokens=9)
    assert how(a, b) == ("by order of arrival, with prompts of equal length", [0, 1, 2, 3])
