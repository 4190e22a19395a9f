"""Metrics: literal values, what is left out, and SQL equal to Polars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.synthetic import synthetic_trace

import hoptrace
from hoptrace.manifest import Manifest
from hoptrace.metrics import METRICS, Stat, emissions, itl_ns, request_metrics, stat, summary
from hoptrace.reader import Trace
from hoptrace.writer import TraceWriter


def write(path: Path, **tables: list[dict[str, Any]]) -> Trace:
    with TraceWriter(path, Manifest(origin="recorded"), background=False) as writer:
        for name, rows in tables.items():
            writer.append(name, [{"source": "test", **row} for row in rows])
    return hoptrace.open(path)


def request(number: int, **columns: Any) -> dict[str, Any]:
    return {"request": number, "arrival_ns": 1000, "finish_ns": 9000, **columns}


def tokens(number: int, *rows: tuple[int, int | None], start: int = 0, **columns: Any) -> list[dict[str, Any]]:
    """Rows (time, count); the index counts on (an unknown count as one)."""
    out, index = [], start
    for time, count in rows:
        out.append(
            {"request": number, "sequence": 0, "index": index, "time_ns": time, "count": count, "vantage": "proxy", **columns}
        )
        index += count or 1
    return out


def test_chunks_share_their_gap_and_add_up_to_the_decode_time(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.trace", requests=[request(1)], tokens=tokens(1, (2000, 1), (2402, 4), (2501, 2), (3007, 5)))
    itl = itl_ns(trace)
    assert itl["itl_ns"].to_list() == [100, 101, 100, 101, 49, 50, 101, 101, 101, 101, 102]
    assert itl["index"].to_list() == list(range(1, 12))
    assert itl["itl_ns"].sum() == 3007 - 2000


def test_emissions_of_one_read_are_one_and_flagged(tmp_path: Path) -> None:
    rows = tokens(1, (2000, 1), (2300, 1), (2301, 1), (2600, 1))
    rows[2]["coalesced"] = True
    trace = write(tmp_path / "t.trace", requests=[request(1)], tokens=rows)
    assert emissions(trace).select("index", "count", "gap_ns", "coalesced").rows() == [
        (0, 1, None, False),
        (1, 2, 301, True),
        (3, 1, 299, False),
    ]
    assert itl_ns(trace).select("itl_ns", "coalesced").rows() == [(150, True), (151, True), (299, False)]


def test_an_unknown_count_is_told_by_the_next_index_or_gives_no_itl(tmp_path: Path) -> None:
    rows = tokens(1, (2000, 1), (2300, None), (2600, None))
    rows[2]["index"] = 4  # so the second emission held three
    trace = write(tmp_path / "t.trace", requests=[request(1)], tokens=rows)
    assert itl_ns(trace)["itl_ns"].to_list() == [100, 100, 100]


def test_counts_that_are_not_the_servers_total_give_no_itl(tmp_path: Path) -> None:
    # The proxy took each chunk as one token; the server counted 5 in request 1, so one of its three chunks held several.
    trace = write(
        tmp_path / "t.trace",
        requests=[request(1, output_tokens=5), request(2, output_tokens=3), request(3), request(4, output_tokens=9)],
        tokens=tokens(1, (2000, 1), (2300, 1), (2900, 1))
        + tokens(2, (2000, 1), (2100, 1), (2200, 1))
        + tokens(3, (2000, 1), (2050, 1))  # no total is known: nothing to hold them against
        + tokens(4, (2000, 1)),  # a total that is not reached, but no gap either
    )
    assert itl_ns(trace).select("request", "itl_ns").rows() == [(2, 100), (2, 100), (3, 50)]
    assert emissions(trace).filter(pl.col("doubted")).select("request", "count").rows() == [(1, None)] * 3 + [(4, None)]
    s = summary(trace)
    assert s.itl_left_out == 1 and s.as_dict()["itl_left_out"] == 1
    same(trace)


def test_the_counts_of_all_sequences_make_the_total(tmp_path: Path) -> None:
    rows = tokens(1, (2000, 1), (2300, 2)) + tokens(1, (2000, 1), (2400, 1), sequence=1)
    trace = write(tmp_path / "t.trace", requests=[request(1, output_tokens=5)], tokens=rows)
    assert itl_ns(trace)["itl_ns"].to_list() == [150, 150, 400]


def test_two_vantages_are_counted_once(tmp_path: Path) -> None:
    seen = tokens(1, (2000, 1), (2300, 1))
    twice = seen + [{**r, "vantage": "engine", "time_ns": r["time_ns"] - 50} for r in seen]
    trace = write(tmp_path / "t.trace", requests=[request(1)], tokens=twice)
    assert itl_ns(trace)["itl_ns"].to_list() == [300]
    assert trace.sql(METRICS["itl"].sql)["n"].item() == 1


def test_request_metrics_are_the_formulas(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "t.trace",
        requests=[
            request(1, received_ns=1000, first_token_ns=2000, first_visible_ns=2600, last_token_ns=5000, output_tokens=4,
                    prompt_tokens=7),
            request(2, arrival_ns=500, received_ns=600, queued_ns=700, scheduled_ns=900, first_token_ns=1500, last_token_ns=1500,
                    output_tokens=1),
            request(3),
        ],
        stages=[{"request": 1, "stage": 0, "scheduled_ns": 1400, "cached_tokens": 3}],
    )  # fmt: skip
    columns = [
        "request",
        "ttft_ns",
        "visible_ttft_ns",
        "e2e_ns",
        "tpot_ns",
        "queue_ns",
        "prompt_tokens",
        "output_tokens",
        "cached_tokens",
    ]
    assert request_metrics(trace).select(columns).rows() == [
        (1, 1000, 1600, 8000, 1000, 400, 7, 4, 3),
        (2, 1000, None, 8500, None, 200, None, 1, None),
        (3, None, None, 8000, None, None, None, None, None),
    ]


def test_failed_and_unfinished_requests_are_counted_and_not_averaged_in(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "t.trace",
        requests=[
            request(1, first_token_ns=2000, output_tokens=2),
            request(2, first_token_ns=9_000_000, finish_ns=9_900_000, error="The server closed the stream.", output_tokens=5),
            request(3, first_token_ns=7_000_000, finish_ns=None, output_tokens=5),
        ],
        tokens=tokens(1, (2000, 1), (2100, 1))
        + tokens(2, (9_000_000, 1), (9_800_000, 1))
        + tokens(3, (7_000_000, 1), (7_900_000, 1)),
    )
    s = summary(trace)
    assert (s.requests, s.finished, s.failed, s.unfinished) == (3, 1, 1, 1)
    assert s["ttft"] == Stat(1, 1000, 1000, 1000, 1000)
    assert s["itl"] == Stat(1, 100, 100, 100, 100)
    assert (s.duration_ns, s.output_tokens) == (8000, 2)
    assert s.output_tokens_per_s == pytest.approx(2 / 8000 * 1e9)


def test_an_unknown_output_length_leaves_the_throughput_unknown(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.trace", requests=[request(1, output_tokens=3), request(2)])
    s = summary(trace)
    assert s.output_tokens is None and s.output_tokens_per_s is None
    assert s.requests_per_s == pytest.approx(2 / 8000 * 1e9)
    assert trace.sql(METRICS["output_tokens_per_s"].sql)["value"].item() is None


def test_percentiles_interpolate_linearly() -> None:
    assert stat(pl.Series([10, 20, 30, 40])) == Stat(4, 25, 25, 39, 40)  # 38.5 and 39.7, halves up
    assert stat(pl.Series([], dtype=pl.Int64)) == Stat(0, None, None, None, None)
    assert stat(pl.Series([None, 7])) == Stat(1, 7, 7, 7, 7)


def test_an_empty_trace_has_a_summary(tmp_path: Path) -> None:
    s = summary(write(tmp_path / "t.trace"))
    assert s.requests == 0 and s.duration_ns is None and s["itl"].n == 0


def same(trace: Trace) -> None:
    s = summary(trace)
    for name in ("ttft", "visible_ttft", "itl", "tpot", "e2e", "queue"):
        assert trace.sql(METRICS[name].sql).row(0) == tuple(s[name].as_dict().values()), name
    for name in ("failed", "unfinished", "itl_left_out"):
        assert trace.sql(METRICS[name].sql)["value"].item() == getattr(s, name)
    for name in ("output_tokens_per_s", "requests_per_s"):
        assert trace.sql(METRICS[name].sql)["value"].item() == pytest.approx(getattr(s, name)), name


def test_sql_gives_the_same_figures(tmp_path: Path) -> None:
    same(synthetic_trace(tmp_path / "t.trace", requests=30, jitter_ns=2e6, chunk=3, seed=3).trace)


@settings(max_examples=25)  # each writes a trace
@given(
    data=st.lists(
        st.tuples(
            st.lists(
                st.tuples(st.integers(0, 10**7), st.one_of(st.none(), st.integers(1, 5)), st.booleans()), min_size=1, max_size=6
            ),
            st.sampled_from(["ok", "failed", "unfinished"]),
            st.sampled_from([0, 0, 1]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_sql_gives_the_same_figures_on_hostile_traces(data: list, tmp_path_factory: pytest.TempPathFactory) -> None:
    requests, rows = [], []
    for i, (reads, state, more) in enumerate(data):
        now, index = 10_000 + i, 0
        for gap, count, coalesced in reads:
            now += gap
            rows.append(
                {"request": i, "index": index, "time_ns": now, "count": count, "coalesced": coalesced, "vantage": "proxy"}
            )
            index += count or 2
        requests.append(
            request(
                i, arrival_ns=1000 * i, first_token_ns=rows[-len(reads)]["time_ns"], last_token_ns=now,
                output_tokens=index + more, finish_ns=None if state == "unfinished" else now + 5,
                error="broke" if state == "failed" else None,
            )
        )  # fmt: skip
    trace = write(tmp_path_factory.mktemp("h") / "t.trace", requests=requests, tokens=rows)
    s = summary(trace)
    assert trace.sql(METRICS["itl"].sql).row(0) == tuple(s["itl"].as_dict().values())
    assert trace.sql(METRICS["itl_left_out"].sql)["value"].item() == s.itl_left_out
    assert trace.sql(METRICS["ttft"].sql).row(0) == tuple(s["ttft"].as_dict().values())
    assert s.finished + s.failed + s.unfinished == len(data)


def test_every_metric_is_explained() -> None:
    for name, m in METRICS.items():
        assert (
            m.name == name
            and m.title
            and m.unit
            and m.formula
            and m.doc.endswith(".")
            and m.sql.lstrip()[:6] in ("SELECT", "WITH s")
        )
