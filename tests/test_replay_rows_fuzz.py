"""Rows of replays of random small works under random policies: whole, nothing twice, nothing unexplained, nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.workloads import MS, server, store

from hoptrace.analysis.latency.accounting import account
from hoptrace.errors import InputError, UsageError
from hoptrace.replay.policy import parse_policy
from hoptrace.replay.run import run
from hoptrace.stepcost import fixed
from hoptrace.validate import validate

COST = fixed(step_ns=5 * MS, prefill_token_ns=90_000, decode_request_ns=700_000, decode_context_token_ns=900)
LINK = '[links.wire]\ngbytes_per_s = 0.00{rate}\nlatency_us = {late}\nmechanism = "rdma"\n'


@st.composite
def policies(draw: st.DrawFn) -> str:
    """TOML; not every one of them makes sense."""
    text = f"[batching]\nmax_sequences = {draw(st.integers(1, 4))}\nmax_batched_tokens = {draw(st.sampled_from([24, 40, 300]))}\n"
    if draw(st.integers(0, 4)) == 0:
        text += f'mode = "{draw(st.sampled_from(["prefill_first", "static"]))}"\n'
    capacity, block = draw(st.sampled_from([96, 160, 4096])), draw(st.sampled_from([1, 4, 16]))
    text += f"[kv]\ncapacity_tokens = {capacity}\nblock_size_tokens = {block}\n"
    kind = draw(st.sampled_from(["one", "servers", "split", "split", "tier", "tier"]))
    cached = kind == "tier" or draw(st.booleans())
    text += f'[prefix_cache]\nenabled = {str(cached).lower()}\nkind = "pool"\n'
    link = LINK.format(rate=draw(st.sampled_from(["1", "01", "9"])), late=draw(st.sampled_from([0, 500, 20_000])))
    if kind == "servers":
        text += f"[servers]\ncount = {draw(st.integers(2, 3))}\n[routing]\n"
        text += f'kind = "{draw(st.sampled_from(["round_robin", "random", "least_load", "power_of_two", "kv_use"]))}"\n'
    if kind == "split":
        text += f'[split]\nprefill = {draw(st.integers(1, 2))}\ndecode = {draw(st.integers(1, 2))}\nlink = "wire"\n'
        text += f'start = "{draw(st.sampled_from(["pull", "push"]))}"\narrange_ms = {draw(st.sampled_from([0, 3]))}\n'
        text += f'first_token = "{draw(st.sampled_from(["handover", "recompute"]))}"\n'
        if 'start = "push"' in text and draw(st.booleans()):
            text += 'transfer = "per_layer"\n'
        if draw(st.booleans()):
            text += "local_below_tokens = 30\n"
        text += link
    if kind == "tier":
        text += f'[[tiers]]\nkind = "dram"\ncapacity_tokens = {draw(st.sampled_from([64, 100_000]))}\nlink = "wire"\n'
        text += f'write = "{draw(st.sampled_from(["through", "back"]))}"\n' + link
    if kind == "one" and draw(st.booleans()):
        text += "[speculation]\ntokens = 3\nacceptance = 0.6\n"
    return text


requests = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 70), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=10
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(requests, policies(), st.sampled_from([None, "closed:2"]), st.sampled_from([None, "150ms"]))
def test_rows_hold_together(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[int, ...]], policy: str, arrivals: str | None, until: str | None
) -> None:
    folder: Path = tmp_path_factory.mktemp("f")
    rows: list[dict[str, Any]] = []
    now = 10**15
    for i, (gap, prompt, output, family) in enumerate(asked):
        now += gap * MS
        rows.append({
            "request": i, "arrival_ns": now, "arrival_of": "received", "received_ns": now, "prompt_tokens": prompt,
            "output_tokens": output, "prefix_blocks": [100 * family + k for k in range(prompt // 16)], "hash_space": "h",
            "block_size": 16, "block_unit": "tokens", "source": "t",
        })  # fmt: skip
    frame = pl.DataFrame(rows, schema_overrides={"prefix_blocks": pl.List(pl.Int64)})
    parent = store(folder / "l.trace", {"requests": frame}, server(prefix_caching=True), origin="imported")
    try:
        r = run(parent, parse_policy(policy), cost=COST, out=folder / "o.trace", engine="plain", arrivals=arrivals, until=until)
    except (InputError, UsageError):
        return  # nonsense is refused in a sentence; which, is tested elsewhere
    t = r.trace
    assert [f.message for f in validate(t) if f.level == "error"] == []
    assert sum(r.requests.values()) == len(asked)
    q = t.table("requests").collect()
    assert q.height == len(asked) - r.requests["not_arrived"]
    done = q.filter(pl.col("finish_ns").is_not_null() & pl.col("error").is_null())
    assert done.height == r.requests["done"]
    # Law 1.
    a = account(t)
    parts = a.parts.select(pl.exclude("request", "arrival_ns", "finish_ns", "e2e_ns")).fill_null(0)
    assert (parts.sum_horizontal() == a.parts["e2e_ns"]).all()
    assert a.classes["unexplained_ns"].sum() == 0
    # No nanosecond is waited twice.
    w = t.table("waits").filter(pl.col("request").is_not_null()).collect().sort("request", "start_ns")
    assert (w["end_ns"] > w["start_ns"]).all()
    twice = w.with_columns(pl.col("end_ns").shift(1).over("request").alias("before")).filter(
        pl.col("before") > pl.col("start_ns")
    )
    assert twice.height == 0, twice
    # All tokens, each once.
    seen = t.table("tokens").group_by("request").agg(pl.col("count").sum()).collect()
    both = done.select("request", "output_tokens").join(seen, on="request", how="left")
    assert (both["count"] == both["output_tokens"]).all()
    # Law 2: what was handed over went over the links.
    if until is None and "[split]" in policy and "capacity_tokens = 4096" in policy:
        sent = t.table("stages").select(pl.col("cached_peer_tokens").sum()).collect().item() or 0
        moved = t.table("moves").select(pl.col("bytes").sum()).collect().item() or 0
        assert moved == sent * 128
