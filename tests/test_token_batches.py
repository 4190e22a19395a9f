"""Tokens in batches of whole requests are the table's rows, and the ITL made of them is that of the whole table."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.memory import MemoryTrace

import hoptrace
from hoptrace import parts
from hoptrace.errors import InputError
from hoptrace.itl import itl
from hoptrace.manifest import Manifest
from hoptrace.metrics import emissions, itl_ns, stat
from hoptrace.reader import Trace
from hoptrace.samples import sample
from hoptrace.token_batches import TokenSource, each_batch
from hoptrace.writer import TraceWriter

COLUMNS = ["request", "sequence", "index", "time_ns", "count", "coalesced"]


def whole(trace: Trace) -> pl.DataFrame:
    return (
        trace.table("tokens")
        .with_columns(pl.col("sequence").fill_null(0), pl.col("coalesced").fill_null(False))
        .sort("request", "sequence", "index", maintain_order=True)
        .select(COLUMNS)
        .collect()
    )


def batched(trace: Trace, rows: int, threads: int = 1) -> pl.DataFrame:
    source = TokenSource(trace)
    batches = list(each_batch(source, lambda b: b, ranges=source.ranges(rows), threads=threads))
    seen: set[int] = set()
    frames = []
    for b in batches:
        own = set(b.request.tolist())
        assert not seen & own, "a request is in one batch"
        seen |= own
        frames.append(
            pl.DataFrame(
                {
                    "request": b.request, "sequence": b.sequence, "index": b.index, "time_ns": b.time_ns,
                    "count": pl.Series(b.count).set(~pl.Series(b.counted), None), "coalesced": b.coalesced,
                }
            )
        )  # fmt: skip
    empty = pl.DataFrame(schema={**dict.fromkeys(COLUMNS, pl.Int64), "coalesced": pl.Boolean})
    return pl.concat([empty, *frames])


def reference(trace: Trace) -> tuple[Any, int]:
    seen = emissions(trace)
    left_out = seen.filter(pl.col("doubted") & pl.col("gap_ns").is_not_null())["request"].n_unique()
    return stat(itl_ns(trace)["itl_ns"]).as_dict(), left_out


def ours(trace: Trace, **sizes: int) -> tuple[Any, int]:
    x = itl(trace, **sizes)
    return {"n": x.n, "mean_ns": x.mean_ns, "p50_ns": x.p50_ns, "p95_ns": x.p95_ns, "p99_ns": x.p99_ns}, x.left_out


TIMES = st.integers(0, 10**10)
TOKEN = st.fixed_dictionaries(
    {
        "sequence": st.sampled_from([None, 0, 0, 0, 1]),
        "time_ns": TIMES,
        "count": st.sampled_from([None, 1, 1, 1, 2, 7, 0, -3]),
        "coalesced": st.sampled_from([None, False, False, True]),
        "vantage": st.sampled_from(["proxy", "proxy", "client", None]),
    }
)
REQUEST = st.fixed_dictionaries(
    {
        "finish_ns": st.one_of(st.just(1), st.just(1), st.none()),
        "error": st.sampled_from([None, None, None, "x"]),
        "output_tokens": st.sampled_from([None, 0, 1, 2, 3, 5, 9]),
        "tokens": st.lists(TOKEN, max_size=9),
        "gap": st.integers(1, 3),
    }
)
REQUESTS = st.lists(REQUEST, max_size=7)


def rows_of(requests: list[dict[str, Any]], one_vantage: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    heads, tokens = [], []
    for i, r in enumerate(requests):
        number = 3 * i + (0 if i % 3 else -5)
        if i % 4 != 3:  # else its row was lost
            heads.append({"request": number, "arrival_ns": 0, **{c: r[c] for c in ("finish_ns", "error", "output_tokens")}})
        at: dict[int, int] = {}
        for t in r["tokens"]:
            s = t["sequence"] or 0
            at[s] = at.get(s, -1) + r["gap"]
            vantage = "proxy" if one_vantage else t["vantage"]
            tokens.append({"request": number, "index": at[s], **t, "vantage": vantage})
    return heads, tokens


@settings(max_examples=80, deadline=None)
@given(REQUESTS, st.randoms(use_true_random=False), st.integers(1, 20), st.integers(0, 40), st.integers(4, 500))
def test_itl_in_batches_is_that_of_the_table(
    requests: list[dict[str, Any]], random: Any, batch: int, held: int, cells: int
) -> None:
    heads, tokens = rows_of(requests, one_vantage=False)
    random.shuffle(tokens)
    trace = MemoryTrace({"requests": heads, "tokens": tokens})
    assert ours(trace, few=0, batch_rows=batch, held=held, cells=cells) == reference(trace)
    assert ours(trace) == reference(trace)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(REQUESTS, st.booleans(), st.randoms(use_true_random=False), st.integers(1, 12), st.integers(1, 6), st.booleans())
def test_batches_of_stored_parts_are_the_table(
    requests: list[dict[str, Any]], one_vantage: bool, random: Any, batch: int, part: int, mixed: bool
) -> None:
    heads, tokens = rows_of(requests, one_vantage)
    if mixed:  # parts of a live capture overlap in any way
        random.shuffle(tokens)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(parts, "_ROW_GROUP", 2), mock.patch("os.fsync"):
        path = Path(folder) / "t.trace"
        with TraceWriter(path, Manifest(origin="recorded"), background=False, part_rows=part) as w:
            w.append("requests", [{"source": "t", **h} for h in heads])
            for i in range(0, len(tokens), part):
                w.append("tokens", [{"source": "t", **t} for t in tokens[i : i + part]])
        trace = hoptrace.open(path)
        assert batched(trace, batch).equals(whole(trace))
        assert ours(trace, few=0, batch_rows=batch, held=5, cells=64) == reference(trace)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(REQUESTS, st.booleans(), st.randoms(use_true_random=False), st.integers(1, 12), st.integers(4, 9), st.booleans())
def test_one_token_a_row_takes_the_short_way_and_gives_the_same(
    requests: list[dict[str, Any]], joined: bool, random: Any, batch: int, part: int, mixed: bool
) -> None:
    heads, tokens = rows_of(requests, one_vantage=True)
    at: dict[int, int] = {}
    for t in tokens:
        at[t["request"]] = at.get(t["request"], -1) + 1
        coalesced = bool(t["coalesced"]) if joined else False
        t |= {"sequence": 0, "index": at[t["request"]], "count": 1, "coalesced": coalesced}
    if mixed:
        random.shuffle(tokens)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(parts, "_ROW_GROUP", 2), mock.patch("os.fsync"):
        path = Path(folder) / "t.trace"
        with TraceWriter(path, Manifest(origin="recorded"), background=False, part_rows=part) as w:
            w.append("requests", [{"source": "t", **h} for h in heads])
            for i in range(0, len(tokens), part):
                w.append("tokens", [{"source": "t", **t} for t in tokens[i : i + part]])
        trace = hoptrace.open(path)
        source = TokenSource(trace)
        if tokens and not mixed:
            assert any(source.plain(low, high) is not None for low, high in source.ranges(batch))
        assert ours(trace, few=0, batch_rows=batch, held=5, cells=64) == reference(trace)


def test_journals_and_parts_of_a_live_capture(tmp_path: Path) -> None:
    w = TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"))
    rows = [
        {"request": r, "sequence": 0, "index": i, "time_ns": 1000 * i + r, "count": 1, "vantage": "proxy", "source": "t"}
        for i in range(20) for r in range(9)
    ]  # fmt: skip
    w.append("tokens", rows[:90])
    w.flush()
    assert batched(hoptrace.open(tmp_path / "t.trace"), 17).height == 90
    w.append("tokens", rows[90:])
    w.close()
    trace = hoptrace.open(tmp_path / "t.trace")
    assert batched(trace, 17, threads=2).equals(whole(trace))


def test_ranges_hold_every_request_once_and_are_about_as_large_as_asked(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False, part_rows=5000) as w:
        request = np.sort(rng.integers(-50, 700, 40_000))
        w.append_arrow(
            "tokens",
            pl.DataFrame(
                {"request": request, "index": np.arange(40_000), "time_ns": np.arange(40_000), "source": ["t"] * 40_000}
            ).to_arrow(),
        )
    trace = hoptrace.open(tmp_path / "t.trace")
    source = TokenSource(trace)
    ranges = source.ranges(4000)
    assert ranges[0][0] <= -50 and ranges[-1][1] >= 700
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert max(len(source.read(*r).request) for r in ranges) < 6000
    assert batched(trace, 4000).equals(whole(trace))


def test_a_damaged_page_is_an_input_error_that_names_the_file(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False) as w:
        w.append("tokens", [{"request": 1, "index": i, "time_ns": i * i * 977, "source": "t"} for i in range(5000)])
        w.append("requests", [{"request": 1, "arrival_ns": 0, "finish_ns": 9, "source": "t"}])
    file = next((tmp_path / "t.trace" / "tokens").glob("*.parquet"))
    data = bytearray(file.read_bytes())
    at = len(data) // 8  # in a page of the first columns
    data[at : at + 8] = b"\xff" * 8
    file.write_bytes(bytes(data))
    with pytest.raises(InputError, match=r"tokens/\d+\.parquet is damaged"):
        itl(hoptrace.open(tmp_path / "t.trace"))


@pytest.mark.parametrize("name", ["llamacpp-four-slots", "azure-2023-conv"])
def test_recorded_traces(name: str) -> None:
    trace = hoptrace.open(sample(name))
    assert ours(trace) == reference(trace)
    assert ours(trace, few=0, batch_rows=100, held=50, cells=1000) == reference(trace)
    if trace.has("tokens"):
        assert batched(trace, 333, threads=2).equals(whole(trace))
