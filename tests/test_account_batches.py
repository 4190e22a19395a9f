"""An accounting in batches of requests, over windows of the stored steps, is that of all requests over all steps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.memory import SERVER, MemoryTrace
from support.synthetic import synthetic_trace

import hoptrace
from hoptrace import parts
from hoptrace.analysis.latency import scope
from hoptrace.analysis.latency.accounting import Accounting, account
from hoptrace.analysis.latency.composition import compositions, tail_of
from hoptrace.errors import InputError
from hoptrace.manifest import Manifest, Server
from hoptrace.reader import Trace
from hoptrace.reconstruct import Steps, steps_of
from hoptrace.samples import samples
from hoptrace.step_windows import step_windows
from hoptrace.stepcost import StepCost, fixed
from hoptrace.writer import TraceWriter

DATA = Path(__file__).parent / "data" / "vllm_traces"
RECORDED = [*sorted(DATA.glob("*.trace")), *samples()]


def whole(trace: Trace, cost: StepCost | None = None) -> Accounting:
    return account(trace, cost=cost, batch=1 << 40)


def same(a: Accounting, b: Accounting) -> None:
    assert a.parts.equals(b.parts)
    assert a.ttft_parts.equals(b.ttft_parts)
    assert a.spans.equals(b.spans)
    for x, y in zip(a.interference_se.get_columns(), b.interference_se.get_columns(), strict=True):
        assert x.is_null().equals(y.is_null())
        assert x.drop_nulls().to_list() == pytest.approx(y.drop_nulls().to_list(), rel=1e-6, abs=1.0)
    assert a.unseen == b.unseen
    assert [n for n in a.notes if "standard error" not in n] == [n for n in b.notes if "standard error" not in n]
    assert (a.finished, a.failed, a.unfinished, a.impossible) == (b.finished, b.failed, b.unfinished, b.impossible)
    for x, y in ((a.compositions, b.compositions), (a.ttft_compositions, b.ttft_compositions)):
        assert x.keys() == y.keys()
        for name in x:
            assert (x[name].requests, x[name].e2e_ns) == (y[name].requests, y[name].e2e_ns)
            assert x[name].parts == y[name].parts
    assert (a.tail is None) == (b.tail is None)
    if a.tail and b.tail:
        assert a.tail.more == b.tail.more


@pytest.mark.parametrize("parts_of", [3, 11])
@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.name)
def test_recorded_traces(path: Path, parts_of: int) -> None:
    trace = hoptrace.open(path)
    same(account(trace, batch=1 + trace.rows("requests") // parts_of, held=3), whole(trace))


def test_windows_of_a_real_engine_are_narrow() -> None:
    trace = hoptrace.open(DATA / "steady.trace")
    windows = step_windows(trace)
    assert windows is not None
    rows = windows.rows
    read = []
    original = type(windows).read

    def watched(self: Any, *args: Any) -> pl.DataFrame:
        frame = original(self, *args)
        read.append(frame.height)
        return frame

    with mock.patch.object(type(windows), "read", watched):
        account(trace, batch=5)
    assert read and min(read) < rows / 2


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 40), st.sampled_from([0, 1]), st.sampled_from([1, 3]),
    st.sampled_from([0.0, 0.2]), st.booleans(),
)  # fmt: skip
def test_stored_steps_of_a_synthetic_engine(
    seed: int, batch: int, group: int, fit: int, slots: int, noise: float, counters: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(parts, "_ROW_GROUP", group), mock.patch("os.fsync"):
        path = Path(folder) / "t.trace"
        made = synthetic_trace(
            path, requests=14, seed=seed, slots=slots, rate_per_s=2.0, output=(1, 12), noise=noise, store_steps=True
        )  # fmt: skip
        trace = made.trace
        cost = None if fit else fixed(step_ns=4e6, prefill_token_ns=6e6, decode_request_ns=10e6)
        assert step_windows(trace) is not None
        same(account(trace, cost=cost, batch=batch), whole(trace, cost))


# -- hostile

T = st.integers(0, 60)
MAYBE = st.one_of(st.none(), T)
_STAMPS = (
    "intended_ns", "sent_ns", "received_ns", "queued_ns", "scheduled_ns", "first_token_ns", "last_token_ns",
)  # fmt: skip
REQUEST = st.fixed_dictionaries(
    dict.fromkeys(_STAMPS, MAYBE)
    | {"finish_ns": st.one_of(T, T, st.none()), "arrival_ns": T, "error": st.sampled_from([None, None, None, "x"]),
       "output_tokens": st.sampled_from([None, 1, 3, 9]), "prompt_tokens": st.sampled_from([None, 2, 8])}
)  # fmt: skip
STAGE = st.fixed_dictionaries(
    {"server": st.sampled_from(["s", "s", "p", None]), "dp_rank": st.sampled_from([None, 0, 1]), "enqueued_ns": MAYBE,
     "scheduled_ns": MAYBE, "end_ns": MAYBE, "role": st.sampled_from([None, "both", "prefill", "decode", "route"]),
     "end_reason": st.sampled_from([None, "done", "handed over", "cancelled", "refused", "preempted"])}
)  # fmt: skip
WAIT = st.fixed_dictionaries(
    {"start_ns": T, "end_ns": T, "kind": st.sampled_from(["queue", "capacity", "transfer", "message", "recompute", "batch"]),
     "on": st.sampled_from([None, "kv", "slot"])}
)  # fmt: skip
RUN = st.fixed_dictionaries(
    {"server": st.sampled_from(["s", "s", "p"]), "dp_rank": st.sampled_from([None, 0]), "first_step": st.integers(0, 14),
     "length": st.integers(0, 6), "phase": st.sampled_from(["chunk", "decode", "decode", "skipped", "preempted"]),
     "tokens_per_step": st.sampled_from([None, 1, 4]), "context_at_start": st.sampled_from([None, 0, 3])}
)  # fmt: skip
STEP = st.fixed_dictionaries(
    {"server": st.sampled_from(["s", "s", "p"]), "gap": st.integers(0, 5), "length": st.integers(0, 6),
     "jump": st.sampled_from([1, 1, 1, 3]), "prefill_tokens": st.sampled_from([None, 0, 4, 8]),
     "decode_requests": st.sampled_from([None, 0, 2]), "prefill_context_tokens": st.sampled_from([0, 0, 5]),
     "decode_context_tokens": st.sampled_from([0, 9]), "kv_used_tokens": st.sampled_from([None, 3, 98]),
     "kv_capacity_tokens": st.sampled_from([None, 100])}
)  # fmt: skip
COUNTER = st.fixed_dictionaries(
    {"time_ns": T, "uncertainty_ns": st.sampled_from([None, 0, 2]), "value_int": st.integers(0, 3),
     "name": st.sampled_from(["vllm:num_requests_running", "vllm:num_requests_waiting", "llamacpp:requests_deferred"])}
)  # fmt: skip


@st.composite
def hostile(draw: st.DrawFn) -> dict[str, list[dict[str, Any]]]:
    """Rows of any values; steps ascend, so that they have windows."""
    requests = draw(st.lists(REQUEST, min_size=1, max_size=8))
    rows: dict[str, list[dict[str, Any]]] = {t: [] for t in ("requests", "stages", "residency", "waits", "steps", "counters")}
    for i, r in enumerate(requests):
        rows["requests"].append({"request": i, **r})
        rows["stages"] += [{"request": i, "stage": k, **s} for k, s in enumerate(draw(st.lists(STAGE, max_size=2)))]
        rows["waits"] += [{"request": i, **w} for w in draw(st.lists(WAIT, max_size=2))]
        for run in draw(st.lists(RUN, max_size=3)):
            length = run.pop("length")
            rows["residency"].append({"request": i, **run, "last_step": run["first_step"] + length})
    number, start, end = {"s": 0, "p": 0}, {"s": 0, "p": 0}, {"s": 0, "p": 0}
    for s in draw(st.lists(STEP, max_size=14)):
        name = s["server"]
        number[name] += s.pop("jump")
        # One step may begin before the last one has ended.
        start[name] = max(start[name], end[name] - 2) + s.pop("gap")
        end[name] = max(end[name], start[name] + s.pop("length"))
        rows["steps"].append(
            {**s, "step": number[name], "start_ns": start[name], "end_ns": end[name], "dp_rank": 0, "origin": "observed"}
        )
    rows["counters"] = [
        {**c, "entity": "server:s", "semantics": "gauge", "status": "ok"} for c in draw(st.lists(COUNTER, max_size=8))
    ]
    return rows


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(hostile(), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_hostile_traces(rows: dict[str, list[dict[str, Any]]], batch: int, group: int, one_server: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(parts, "_ROW_GROUP", group), mock.patch("os.fsync"):
        path = Path(folder) / "t.trace"
        servers = [SERVER] if one_server else [SERVER, Server(name="p", max_sequences=1, max_batched_tokens=8)]
        with TraceWriter(path, Manifest(origin="recorded", servers=servers), background=False) as w:
            for name, own in rows.items():
                w.append(name, [{"source": "t", **r} for r in own])
        trace = hoptrace.open(path)
        cost = fixed(step_ns=1, prefill_token_ns=1, decode_request_ns=1)
        with mock.patch.object(scope, "step_windows", lambda t: None):
            expected = account(trace, cost=cost, batch=1 << 40)
            same(account(trace, cost=cost, batch=batch), expected)
        same(account(trace, cost=cost, batch=batch), expected)


def test_steps_that_were_made_are_held(tmp_path: Path) -> None:
    trace = synthetic_trace(tmp_path / "t.trace", requests=12).trace
    steps: Steps = steps_of(trace)
    same(account(trace, steps=steps, batch=5), account(trace, steps=steps))
    assert step_windows(trace) is None


def test_compositions_of_pieces_are_those_of_the_frame() -> None:
    a = account(hoptrace.open(DATA / "preempted.trace"), batch=6)
    held = compositions(a.parts, errors=a.interference_se)
    assert {k: (c.requests, c.parts) for k, c in a.compositions.items()} == {k: (c.requests, c.parts) for k, c in held.items()}
    tail = tail_of(a.parts)
    assert a.tail and tail and a.tail.more == tail.more


def test_rows_of_requests_without_a_number_are_damage_in_a_sentence() -> None:
    trace = MemoryTrace({"requests": [{"request": 1, "arrival_ns": 0, "finish_ns": 5}]})
    trace._frames["requests"] = trace._frames["requests"].with_columns(pl.lit(None, dtype=pl.Int64).alias("request"))
    with pytest.raises(InputError, match="have no `request` number"):
        account(trace)
