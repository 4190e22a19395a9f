"""Field metrics: by hand, against plain Python, against their SQL, and on real captures."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import MemoryTrace

import hoptrace
from hoptrace.chunk_gaps import chunk_gaps, request_itl
from hoptrace.field_metrics import FIELD_METRICS, TIMES, FieldMetrics, field_metrics
from hoptrace.field_metrics_sql import goodput_sql
from hoptrace.metrics import METRICS, itl_ns, summary
from hoptrace.reader import Trace
from hoptrace.samples import sample
from hoptrace.slo import parse_slo

DATA = Path(__file__).parent / "data" / "vllm_traces"
REAL = [DATA / "steady.trace", DATA / "preempted.trace", Path(sample("llamacpp-four-slots"))]
MS = 1_000_000


def request(number: int, **more: Any) -> dict[str, Any]:
    return {"request": number, "arrival_ns": 0, "finish_ns": 100, **more}


def emissions(number: int, *rows: tuple[int, int | None, bool]) -> list[dict[str, Any]]:
    """Rows (time, count, coalesced)."""
    index, out = 0, []
    for time, count, joined in rows:
        out.append({"request": number, "index": index, "time_ns": time, "count": count, "coalesced": joined, "vantage": "proxy"})
        index += count or 1
    return out


# -- ITL per chunk --------------------------------------------------------------------------------------------------------


def test_chunks_of_several_tokens_b22() -> None:
    """llmperf #99: chunks of 1, 4, 2 and 5 tokens. Per token the gaps are shared out, per chunk there are three."""
    rows = {"requests": [request(0)], "tokens": emissions(0, (10, 1, False), (50, 4, False), (60, 2, False), (85, 5, False))}
    trace = MemoryTrace(rows)
    assert chunk_gaps(trace).as_dict() == {"n": 3, "mean_ns": 25, "p50_ns": 25, "p95_ns": 39, "p99_ns": 40}
    per_token = itl_ns(trace)["itl_ns"]
    assert per_token.len() == 11 and per_token.sum() == 75 == 3 * 25


def test_what_came_in_one_read_is_one_chunk() -> None:
    rows = {"requests": [request(0)], "tokens": emissions(0, (10, 1, False), (50, 1, False), (52, 1, True), (80, 1, False))}
    assert chunk_gaps(MemoryTrace(rows)).as_dict()["mean_ns"] == 35  # 52 − 10, 80 − 52


def test_doubted_counts_have_gaps_per_chunk_all_the_same() -> None:
    rows = {"requests": [request(0, output_tokens=9)], "tokens": emissions(0, (10, 1, False), (50, 1, False))}
    trace = MemoryTrace(rows)
    assert chunk_gaps(trace).n == 1 and summary(trace)["itl"].n == 0
    assert request_itl(trace).rows() == [(0, None, None, None, None, None)]


TOKENS = st.lists(
    st.tuples(
        st.integers(0, 4), st.integers(0, 1), st.lists(st.tuples(st.integers(0, 50), st.none() | st.integers(0, 5),
        st.booleans()), max_size=6)
    ),
    max_size=5,
    unique_by=lambda x: (x[0], x[1]),
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(TOKENS, st.sets(st.integers(0, 4)), st.integers(1, 4))
def test_chunks_and_request_itl_against_plain_python(given_: list, unfinished: set[int], batch: int) -> None:
    tokens, gaps = [], []
    for number, sequence, rows in given_:
        at, reads = 0, []
        for i, (step, count, joined) in enumerate(rows):
            at += step
            tokens.append(
                {"request": number, "sequence": sequence, "index": i, "time_ns": at, "count": count, "coalesced": joined}
            )
            if joined and reads:
                reads[-1].append(at)
            else:
                reads.append([at])
        stamps = [r[0] if not k else r[-1] for k, r in enumerate(reads)]
        if number not in unfinished:
            gaps += [b - a for a, b in pairwise(stamps)]
    requests = [request(i) | ({"finish_ns": None} if i in unfinished else {}) for i in range(5)]
    trace = MemoryTrace({"requests": requests, "tokens": tokens})
    s = chunk_gaps(trace, batch_rows=batch)
    assert s.n == len(gaps)
    if gaps:
        want = [math.floor(float(x) + 0.5) for x in (np.mean(gaps), *np.quantile(gaps, [0.5, 0.95, 0.99]))]
        assert [s.mean_ns, s.p50_ns, s.p95_ns, s.p99_ns] == want
    assert trace.sql(FIELD_METRICS["itl_chunk"].sql).row(0) == tuple(s.as_dict().values())
    each = itl_ns(trace)
    found = {r["request"]: r for r in request_itl(trace, batch_rows=batch).to_dicts()}
    for number in range(5):
        values = each.filter(each["request"] == number)["itl_ns"].to_list()
        mine = found.get(number)
        if mine is None or mine["itl_max"] is None:
            continue  # of some chunk the tokens are not known
        want = [np.mean(values), *np.quantile(values, [0.5, 0.95, 0.99]), max(values)]
        assert [mine[k] for k in ("itl_mean", "itl_p50", "itl_p95", "itl_p99", "itl_max")] == [math.floor(x + 0.5) for x in want]


def test_a_trace_too_long_to_hold_gives_the_same() -> None:
    trace = hoptrace.open(DATA / "steady.trace")
    assert chunk_gaps(trace, few=0, batch_rows=100) == chunk_gaps(trace)


# -- SQL ------------------------------------------------------------------------------------------------------------------


def same(trace: Trace, f: FieldMetrics) -> None:
    """Each query gives what Python gives."""
    got = {name: trace.sql(m.sql).row(0, named=True) for name, m in FIELD_METRICS.items()}
    for name in TIMES:
        assert got[name] == f.times[name].as_dict(), name
    assert got["itl_chunk"] == f.itl_chunk.as_dict()
    assert got["total_tokens_per_s"]["value"] == pytest.approx(f.total_tokens_per_s)
    assert (got["preempted_requests"]["value"], got["preemptions"]["value"]) == (f.preemption.requests, f.preemption.preemptions)
    assert got["draft_acceptance"]["value"] == f.drafts.acceptance


@pytest.mark.parametrize("path", REAL, ids=lambda p: p.stem)
def test_sql_on_real_traces(path: Path) -> None:
    trace = hoptrace.open(path)
    same(trace, field_metrics(trace))


@pytest.mark.parametrize("path", REAL, ids=lambda p: p.stem)
@pytest.mark.parametrize("limits", ["ttft=500ms,tpot=50ms", "e2e=900ms,queue=10ms,visible_ttft=1s"])
def test_goodput_by_sql(path: Path, limits: str) -> None:
    trace, slo = hoptrace.open(path), parse_slo(limits)
    g = field_metrics(trace, slo=slo).goodput
    assert g is not None
    row = trace.sql(goodput_sql(slo)).row(0, named=True)
    assert (row["met"], row["arrived"]) == (g.met, g.arrived)
    assert row["share_at_least"] == pytest.approx(g.share_at_least) and row["per_s_at_least"] == pytest.approx(g.per_s_at_least)
    if limits.startswith("ttft=500ms"):
        assert row == trace.sql(FIELD_METRICS["goodput"].sql).row(0, named=True)


def test_a_limit_on_itl() -> None:
    trace = hoptrace.open(sample("llamacpp-four-slots"))
    loose, tight = (field_metrics(trace, slo=parse_slo(f"itl_max={x}")).goodput for x in ("100s", "1us"))
    assert loose is not None and tight is not None and (loose.share, tight.share) == (1.0, 0.0)
    limit = "itl_p95=90ms"
    each = itl_ns(trace)
    want = sum(
        float(np.quantile(each.filter(each["request"] == r)["itl_ns"].to_list(), 0.95)) + 0.5 < 90 * MS + 1
        for r in each["request"].unique()
    )
    g = field_metrics(trace, slo=parse_slo(limit)).goodput
    assert g is not None and g.met == want == g.arrived - g.broke["itl_p95"]


def test_a_workload_that_nobody_ran_has_no_goodput() -> None:
    trace = hoptrace.open(sample("azure-2023-conv"))
    f = field_metrics(trace, slo=parse_slo("ttft=1s"))
    assert f.goodput is None and any("goodput is unknown" in u for u in f.unseen)
    assert trace.sql(goodput_sql(parse_slo("ttft=1s")))["share_at_least"].item() is None


# -- by hand --------------------------------------------------------------------------------------------------------------


def test_who_saw_what_when() -> None:
    row = request(
        0, arrival_ns=100, intended_ns=100, sent_ns=130, received_ns=150, queued_ns=160, engine_first_token_ns=400,
        first_token_ns=450, last_token_ns=450, finish_ns=500, prompt_tokens=30, output_tokens=1,
    )  # fmt: skip
    f = field_metrics(MemoryTrace({"requests": [row]}))
    want = {
        "client_ttft": 320, "server_ttft": 300, "engine_ttft": 240, "client_lateness": 30, "way_in": 20, "first_token_way_out":
        50,
    }  # fmt: skip
    assert {k: s.mean_ns for k, s in f.times.items()} == want
    assert f.total_tokens_per_s == 31 * 1e9 / 400


def test_coordinated_omission_is_said_a72() -> None:
    """vLLM #54101: with a cap on requests in flight the clock started after the gate: 500 ms instead of 1,924."""
    rows = [
        request(i, arrival_ns=0, intended_ns=0, sent_ns=1424 * MS, received_ns=1424 * MS, first_token_ns=1924 * MS, finish_ns=2000
        * MS) for i in range(3)
    ]  # fmt: skip
    f = field_metrics(MemoryTrace({"requests": rows}))
    assert f.times["client_ttft"].p99_ns == 500 * MS and summary(MemoryTrace({"requests": rows}))["ttft"].p99_ns == 1924 * MS
    assert "1,424.0 ms at the median" in f.notes[0] and "1,424.0 ms less (coordinated omission)" in f.notes[0]
    assert not field_metrics(MemoryTrace({"requests": [r | {"sent_ns": 0} for r in rows]})).notes


def steps(*preempted: int | None, **more: Any) -> list[dict[str, Any]]:
    return [{"server": "s", "step": i, "start_ns": i, "end_ns": i + 1, "preempted": p, **more} for i, p in enumerate(preempted)]


def test_preemption_by_hand() -> None:
    run = {"server": "s", "first_step": 0, "last_step": 0, "phase": "preempted"}
    requests = [request(i) for i in range(4)]
    f = field_metrics(MemoryTrace({"requests": requests, "steps": steps(0, 2, 1), "residency": [run | {"request": 1}]}))
    assert (f.preemption.preemptions, f.preemption.requests, f.preemption.per_request) == (3, 1, 0.75)
    assert not f.preemption.at_least
    f = field_metrics(MemoryTrace({"requests": requests, "steps": steps(0, None, 0)}))
    assert (f.preemption.preemptions, f.preemption.requests, f.preemption.at_least) == (0, 0, True)
    f = field_metrics(MemoryTrace({"requests": requests, "steps": steps(0, 5)}))
    assert f.preemption.requests is None, "nobody says whose"
    f = field_metrics(MemoryTrace({"requests": requests, "steps": steps(None, None)}))
    assert f.preemption.preemptions is None and any("preemption is unknown" in u for u in f.unseen)
    f = field_metrics(MemoryTrace({"requests": requests, "stages": [{"request": 2, "stage": 0, "end_reason": "preempted"}]}))
    assert (f.preemption.preemptions, f.preemption.at_least, f.preemption.requests) == (1, True, 1)
    ranks = steps(1, 0) + [s | {"pp_rank": 1} for s in steps(1, 0)]
    assert field_metrics(MemoryTrace({"requests": requests, "steps": ranks})).preemption.preemptions == 1


def test_acceptance_by_hand() -> None:
    rows = [*steps(0, draft_proposed=5, draft_accepted=3), steps(0)[0] | {"step": 1, "draft_proposed": 7}]
    d = field_metrics(MemoryTrace({"steps": rows})).drafts
    assert (d.proposed, d.accepted, d.acceptance) == (5, 3, 0.6) and d.as_dict()["by_position"] is None


def test_the_real_preemptions_are_the_engines_own_count() -> None:
    """`vllm:num_preemptions_total` of the capture went from 0 to 2."""
    f = field_metrics(hoptrace.open(DATA / "preempted.trace"))
    assert (f.preemption.preemptions, f.preemption.requests, f.preemption.of) == (2, 2, 53)
    assert field_metrics(hoptrace.open(DATA / "steady.trace")).preemption.preemptions == 0


def test_the_load_of_the_samples() -> None:
    """Driven by the arrivals of a public log, whatever the server does."""
    loop = field_metrics(hoptrace.open(sample("llamacpp-four-slots"))).loop
    assert (loop.kind, loop.sure, len(loop.tests)) == ("open", "tested", 2)


# -- hostile --------------------------------------------------------------------------------------------------------------

EDGE = st.sampled_from([None, -(2**63), -1, 0, 1, 2**62, 2**63 - 1]) | st.integers(-(2**63), 2**63 - 1)
_TIMES = (
    "intended_ns",
    "sent_ns",
    "received_ns",
    "queued_ns",
    "engine_first_token_ns",
    "first_token_ns",
    "finish_ns",
    "last_token_ns",
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.fixed_dictionaries(dict.fromkeys((*_TIMES, "prompt_tokens", "output_tokens"), EDGE)), max_size=5))
def test_hostile_moments(rows: list[dict[str, Any]]) -> None:
    requests = [{"request": i, "arrival_ns": r["sent_ns"] or 0, **r} for i, r in enumerate(rows)]
    trace = MemoryTrace({"requests": requests})
    f = field_metrics(trace, slo=parse_slo("e2e=1s"))
    for name in ("client_ttft", "way_in", "first_token_way_out"):
        a, b = {"client_ttft": ("first_token_ns", "sent_ns"), "way_in": ("received_ns", "sent_ns")}.get(
            name, ("first_token_ns", "engine_first_token_ns")
        )
        done = [r for r in rows if r["finish_ns"] is not None]
        values = [r[a] - r[b] for r in done if r[a] is not None and r[b] is not None and -(2**63) <= r[a] - r[b] < 2**63]
        assert f.times[name].n == len(values)
        assert trace.sql(FIELD_METRICS[name].sql)["n"].item() == len(values)
    assert f.as_dict()["load"]["kind"] in ("open", "closed", "partly closed", "unknown")


def test_nothing_at_all() -> None:
    f = field_metrics(MemoryTrace({}), slo=parse_slo("ttft=1s"))
    assert f.goodput is None and f.itl_chunk.n == 0 and f.total_tokens_per_s is None and f.loop.kind == "unknown"


def test_every_metric_is_explained() -> None:
    assert not set(FIELD_METRICS) & set(METRICS)
    for name, m in FIELD_METRICS.items():
        assert (
            m.name == name and m.title and m.unit and m.formula and m.doc.endswith(".") and m.sql.lstrip()[:4] in ("SELE", "WITH")
        )


def test_client_and_server_side_by_side_are_of_the_same_requests() -> None:
    """The client did not say when it sent the third: its 900 ms are in one of the two means only."""
    rows = [
        {
            "request": i,
            "arrival_ns": 0,
            "sent_ns": sent,
            "received_ns": 2 * MS,
            "first_token_ns": first * MS,
            "finish_ns": 1_000 * MS,
        }
        for i, (sent, first) in enumerate([(0, 10), (0, 20), (None, 900)])
    ]
    found = field_metrics(MemoryTrace({"requests": rows}))
    said = "TTFT from sending is of 2 requests, from receiving of 3; of the 2 in both it is 15.0 and 13.0 ms at the mean."
    assert found.notes == [said]
    assert field_metrics(MemoryTrace({"requests": rows[:2]})).notes == []
