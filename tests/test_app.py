"""The dashboard without a browser: every page on full and on poor traces, chart builders, hostile text, sizes of what is sent."""

from __future__ import annotations

import json
import random
import re
import socket
import sys
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as hs
from streamlit.testing.v1 import AppTest

import hoptrace
from hoptrace.analysis.latency.accounting import account
from hoptrace.analysis.latency.parts import CLASSES, PARTS
from hoptrace.analysis.request_detail import detail, request_table, thinned
from hoptrace.analysis.timeline import BINS, counter_bins, counter_series, extent, timeline
from hoptrace.app import charts_overview, charts_requests, charts_time, launch, theme, traces, words
from hoptrace.app.charts import MAX_ROWS, axis_unit
from hoptrace.cli.app import command
from hoptrace.errors import EnvironmentProblem, InputError, UsageError
from hoptrace.manifest import Manifest, ReplayInfo, Server
from hoptrace.samples import samples
from hoptrace.writer import TraceWriter

MS = 1_000_000
MAIN = str(files("hoptrace.app") / "main.py")
PAGES = ("page_overview.py", "page_time.py", "page_requests.py", "page_compare.py")
HOSTILE = "<script>alert(1)</script> [x](http://evil) :red[no] **b** $a$ `c` \n# h <img src=x onerror=y>"


def _write(path: Path, manifest: Manifest, **tables: list[dict[str, Any]]) -> Path:
    with TraceWriter(path, manifest) as w:
        for name, rows in tables.items():
            w.append(name, [{**r, "source": "test"} for r in rows])
    return path


def _manifest(origin: Any = "recorded", **more: Any) -> Manifest:
    server = Server(name="s", engine="llama.cpp", model="m", max_sequences=2, weight_bytes=1000)
    return Manifest(origin=origin, servers=[server], **more)


def _full(path: Path, n: int = 40, manifest: Manifest | None = None, text: str | None = None, seed: int = 1) -> Path:
    """A trace with every table that the pages read. The last request is unfinished, the one before failed."""
    chance = random.Random(seed)
    requests, stages, tokens, moves, waits = [], [], [], [], []
    free = [0, 0]
    at = 0
    for i in range(n):
        at += chance.randint(1, 120) * MS
        slot = free.index(min(free))
        start = max(at + 2 * MS, free[slot])
        prompt, output = chance.randint(10, 300), chance.randint(2, 20)
        first = start + prompt * MS
        times = [first + k * 12 * MS for k in range(output)]
        end = times[-1] + MS
        free[slot] = end
        requests.append({
            "request": i, "request_id": text or f"r{i}", "model": text or "m", "arrival_ns": at, "arrival_of": "received",
            "received_ns": at, "first_token_ns": times[0], "last_token_ns": times[-1], "finish_ns": end, "prompt_tokens": prompt,
            "output_tokens": output, "finish_reason": text or "stop",
        })  # fmt: skip
        stages.append({"request": i, "stage": 0, "server": "s", "role": "both", "enqueued_ns": at + MS, "scheduled_ns": start,
                       "end_ns": end, "end_reason": "done", "cached_tokens": 1})  # fmt: skip
        tokens += [
            {"request": i, "sequence": 0, "index": k, "time_ns": t, "count": 1, "vantage": "proxy"} for k, t in enumerate(times)
        ]
        moves.append({"start_ns": at, "end_ns": at + MS, "request": i, "object": "prompt", "src": "client", "dst": "server:s",
                      "bytes": prompt * 4, "transfers": 1, "mechanism": "message", "basis": "counted"})  # fmt: skip
        waits.append(
            {"start_ns": at, "end_ns": at + MS, "request": i, "kind": "message", "on": "proxy", "count": 1, "basis": "counted"}
        )
    requests[-1] |= {"finish_ns": None}
    requests[-2] |= {"error": text or "It broke."}
    steps = [
        {"server": "s", "dp_rank": 0, "step": k, "start_ns": k * 25 * MS, "end_ns": k * 25 * MS + 20 * MS, "origin": "observed",
         "prefill_requests": k % 2, "prefill_tokens": 16 * (k % 2), "prefill_context_tokens": 0, "kv_used_tokens": 100,
         "decode_requests": 1 + k % 2, "decode_tokens": 1 + k % 2, "decode_context_tokens": 50}
        for k in range(max(free) // (25 * MS))
    ]  # fmt: skip
    counters = [
        {"time_ns": k * 100 * MS, "entity": text or "process:1", "name": "cpu_ns", "value_int": k * 60 * MS, "unit": "ns",
         "semantics": "cumulative", "status": "ok"}
        for k in range(max(free) // (100 * MS))
    ]  # fmt: skip
    return _write(path, manifest or _manifest(), requests=requests, stages=stages, tokens=tokens, moves=moves, waits=waits,
                  steps=steps, counters=counters)  # fmt: skip


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _full(tmp_path_factory.mktemp("full") / "full.trace")


def _poor(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.trace"
    log = [{"request": i, "arrival_ns": i * 10 * MS, "prompt_tokens": 10 + i, "output_tokens": 5} for i in range(20)]
    timed = [{**r, "finish_ns": r["arrival_ns"] + 70 * MS, "first_token_ns": r["arrival_ns"] + 30 * MS} for r in log]
    if kind == "nothing at all":
        return _write(path, _manifest())
    if kind == "counters only":
        rows = [
            {"time_ns": k * MS, "entity": "process:1", "name": "rss", "value_int": k, "unit": "bytes", "semantics": "gauge"}
            for k in range(5)
        ]
        return _write(path, _manifest(), counters=rows)
    if kind == "request log":
        return _write(path, _manifest("imported", imported_from=[{"source": "somewhere", "licence": "CC-BY"}]), requests=log)
    if kind == "no steps":
        return _write(path, _manifest(), requests=timed)
    if kind == "no servers":
        return _write(path, Manifest(origin="recorded"), requests=timed)
    if kind == "all failed":
        return _write(path, _manifest(), requests=[{**r, "error": "refused"} for r in log])
    if kind == "one request":
        return _write(path, _manifest(), requests=timed[:1])
    if kind == "zero length":
        return _write(path, _manifest(), requests=[{"request": 0, "arrival_ns": 5, "finish_ns": 5, "first_token_ns": 5}])
    if kind == "replay":
        info = ReplayInfo(parent="run", policy={"name": "one-slot"}, cost_model={}, error={"ttft": {"p50": 0.031, "p99": -0.12}})
        return _write(path, _manifest("replayed", replay=info), requests=timed)
    if kind == "drops":
        dropped = _manifest(rows_dropped={"buffer full": 12}, values_dropped={"requests.prompt_tokens": 3}, notes=["a note"])
        return _write(path, dropped, requests=timed)
    raise AssertionError(kind)


POOR = (
    "nothing at all", "counters only", "request log", "no steps", "no servers", "all failed", "one request", "zero length",
    "replay", "drops",
)  # fmt: skip


def _run(monkeypatch: pytest.MonkeyPatch, page: str, *paths: Path) -> AppTest:
    monkeypatch.setattr(sys, "argv", ["main.py", *map(str, paths)])
    at = AppTest.from_file(MAIN, default_timeout=60)
    at.run()
    if page != PAGES[0]:
        at.switch_page(page).run()
    return at


def _text(at: AppTest) -> str:
    kinds = (at.title, at.subheader, at.markdown, at.caption, at.info, at.warning, at.error)
    return "\n".join(str(e.value) for kind in kinds for e in kind) + "\n".join(f"{m.label} {m.value}" for m in at.metric)


def _sound(at: AppTest) -> None:
    assert [e.value for e in at.exception] == []
    assert [e.value for e in at.error] == []


# -- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_pages_on_a_full_trace(monkeypatch: pytest.MonkeyPatch, full: Path, page: str) -> None:
    at = _run(monkeypatch, page, full)
    _sound(at)
    assert len(at.get("arrow_vega_lite_chart") or at.get("vega_lite_chart")) + len(at.dataframe) > 0 or page == PAGES[3]


@pytest.mark.parametrize("kind", POOR)
@pytest.mark.parametrize("page", PAGES[:3])
def test_pages_on_poor_traces_explain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str, kind: str) -> None:
    at = _run(monkeypatch, page, _poor(tmp_path, kind))
    _sound(at)
    assert at.title


@pytest.mark.parametrize("page", PAGES)
def test_pages_on_samples(monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    at = _run(monkeypatch, page)
    assert at.selectbox(key="trace").options == [p.name.removesuffix(".trace") for p in samples()]
    _sound(at)


def test_overview_says_what_the_trace_is(monkeypatch: pytest.MonkeyPatch, full: Path, tmp_path: Path) -> None:
    said = _text(_run(monkeypatch, PAGES[0], full))
    assert "Coordination share" in said and "Moved per output token" in said
    assert re.search(r"1 requests? failed", said) and re.search(r"1 requests? had not finished", said)
    said = _text(_run(monkeypatch, PAGES[0], _poor(tmp_path, "replay"))).replace("\\", "")
    assert "+3.1%" in said and "-12.0%" in said and "predicted, not measured" in said
    said = _text(_run(monkeypatch, PAGES[0], _poor(tmp_path, "drops"))).replace("\\", "")
    assert "12 dropped" in said and "buffer full" in said and "a note" in said


def test_poor_traces_say_why_nothing_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = _poor(tmp_path, "request log")
    assert "none that finished" in _text(_run(monkeypatch, PAGES[0], log))
    assert "a request log has no more" in _text(_run(monkeypatch, PAGES[1], log))
    empty = _poor(tmp_path, "nothing at all")
    assert "nothing to lay on a time axis" in _text(_run(monkeypatch, PAGES[1], empty))
    assert "holds no requests" in _text(_run(monkeypatch, PAGES[2], empty))


def test_compare_needs_two(monkeypatch: pytest.MonkeyPatch, full: Path) -> None:
    assert "takes two traces" in _text(_run(monkeypatch, PAGES[3], full))


def test_compare_says_when_the_work_is_unequal(monkeypatch: pytest.MonkeyPatch, full: Path, tmp_path: Path) -> None:
    less = _full(tmp_path / "less.trace", 20)
    at = _run(monkeypatch, PAGES[3], full, less)
    _sound(at)
    assert "The work is not the same" in at.warning[0].value and "38 against 18 finished requests" in at.warning[0].value
    same = _full(tmp_path / "same.trace")
    at = _run(monkeypatch, PAGES[3], full, same)
    _sound(at)
    assert not at.warning
    figures = at.dataframe[0].value.set_index("figure")
    assert set(figures["change"]) == {"+0.0%"} and set(figures["verdict"]) == {"same"}


def test_compare_reads_a_prediction_as_error_or_effect(monkeypatch: pytest.MonkeyPatch, full: Path, tmp_path: Path) -> None:
    def replay(name: str, parent: str, changes: dict[str, Any]) -> Path:
        info = ReplayInfo(parent=parent, policy={"name": "p", "changes": changes}, cost_model={})
        return _full(tmp_path / f"{name}.trace", manifest=_manifest("replayed", replay=info))

    # Of another trace, so what was observed is taken for what it was to predict: the observed one comes first.
    at = _run(monkeypatch, PAGES[3], replay("of-other", "other", {"batching": {}}), full)
    _sound(at)
    assert list(at.dataframe[0].value.columns[:4]) == ["figure", "full (recorded)", "of-other (replayed)", "error"]
    # Of this trace under its own policy: an error as well.
    at = _run(monkeypatch, PAGES[3], replay("own", "full", {}), full)
    assert "error" in at.dataframe[0].value.columns
    # Of this trace under another policy: the effect that is predicted, until the reader says otherwise.
    at = _run(monkeypatch, PAGES[3], full, replay("what-if", "full", {"batching": {"max_sequences": 1}}))
    assert "change" in at.dataframe[0].value.columns and "verdict" in at.dataframe[0].value.columns
    at.get("button_group")[0].set_value("error of the prediction").run()
    assert "error" in at.dataframe[0].value.columns and "verdict" not in at.dataframe[0].value.columns
    _sound(at)


@pytest.mark.parametrize("kind", POOR)
def test_compare_bears_poor_traces_on_either_side(monkeypatch: pytest.MonkeyPatch, full: Path, tmp_path: Path, kind: str) -> None:
    poor = _poor(tmp_path, kind)
    _sound(_run(monkeypatch, PAGES[3], full, poor))
    _sound(_run(monkeypatch, PAGES[3], poor, full))


def test_a_damaged_trace_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = _poor(tmp_path, "no steps")
    next((path / "requests").glob("*.parquet")).write_bytes(b"PAR1 no more")
    at = _run(monkeypatch, PAGES[0], path)
    assert not at.exception
    assert len(at.error) == 1 and "damaged" in at.error[0].value


def test_a_changed_trace_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "grows.trace"
    rows = [{"request": i, "arrival_ns": 0, "finish_ns": MS, "source": "test"} for i in range(3)]
    w = TraceWriter(path, _manifest())
    w.append("requests", rows[:1])
    w.flush()
    at = _run(monkeypatch, PAGES[0], path)
    before = next(m.value for m in at.metric if m.label == "Requests finished")
    w.append("requests", rows[1:])
    w.close()
    at.run()
    after = next(m.value for m in at.metric if m.label == "Requests finished")
    assert (before, after) == ("1 of 1", "3 of 3")


def test_filters_and_sorting(monkeypatch: pytest.MonkeyPatch, full: Path) -> None:
    at = _run(monkeypatch, PAGES[2], full)
    assert at.dataframe[0].value.shape[0] == 40
    at.multiselect[0].set_value(["failed"]).run()
    assert list(at.dataframe[0].value["request"]) == [38]
    at.multiselect[0].set_value(["finished"]).run()
    at.number_input[0].set_value(300.0).run()
    assert (at.dataframe[0].value["TTFT"] >= 300).all()
    sort = next(s for s in at.selectbox if s.label == "Sort by")
    sort.set_value("prefill").run()
    values = at.dataframe[0].value["prefill"].to_list()
    assert values == sorted(values, reverse=True) and len(values) > 1
    at.text_input[0].set_value("no such request").run()
    assert "No request passes" in _text(at)
    _sound(at)


def test_many_requests_send_little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        {"request": i, "request_id": f"request-{i}", "arrival_ns": i * MS, "first_token_ns": i * MS + 40 * MS,
         "last_token_ns": i * MS + 80 * MS, "finish_ns": i * MS + 90 * MS, "prompt_tokens": i % 900, "output_tokens": 9}
        for i in range(15_000)
    ]  # fmt: skip
    path = _write(tmp_path / "many.trace", _manifest(), requests=rows)
    for page in PAGES[:3]:
        at = _run(monkeypatch, page, path)
        _sound(at)
        sizes = [(e.proto.ByteSize(), e.type) for e in at.main if getattr(e, "proto", None) is not None]
        assert 1_000 < sum(size for size, _ in sizes) < 1_000_000, sorted(sizes)[-5:]
    assert at.dataframe[0].value.shape[0] == 500


@pytest.mark.parametrize("page", PAGES)
def test_hostile_text_is_shown_as_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str) -> None:
    manifest = _manifest(notes=[HOSTILE], rows_dropped={HOSTILE: 1})
    manifest.servers[0].model = HOSTILE
    path = _full(tmp_path / "hostile.trace", 6, manifest, HOSTILE)
    at = _run(monkeypatch, page, path)
    _sound(at)
    for e in [*at.markdown, *at.caption]:
        body = str(e.value)
        assert not re.search(r"(?<!\\)<(script|img)|(?<!\\)]\(http|:red\[|(?<!\\)\$a", body), body
        assert not e.proto.allow_html


# -- figures ----------------------------------------------------------------------------------------------------------


def test_timeline_adds_up(full: Path) -> None:
    trace = hoptrace.open(full)
    whole = extent(trace)
    assert whole is not None
    line = timeline(trace, *whole)
    seconds = (pl.col("to_ns") - pl.col("from_ns")) / 1e9
    assert line.tokens.select((pl.col("tokens_per_s") * seconds).sum()).item() == pytest.approx(trace.rows("tokens"))
    assert line.arrivals.select((pl.col("requests_per_s") * seconds).sum()).item() == pytest.approx(40)
    stays = trace.table("requests").join(trace.table("stages").select("request", "scheduled_ns"), on="request").collect()
    waited = sum(r["scheduled_ns_right"] - r["arrival_ns"] for r in stays.to_dicts())
    area = line.occupancy.group_by("state").agg((pl.col("requests") * (pl.col("to_ns") - pl.col("from_ns"))).sum())
    assert dict(area.rows())["waiting"] == pytest.approx(waited)
    spent = (pl.col("prefill_tokens") * pl.col("step_ns")).sum()
    counters = counter_bins(trace, counter_series(trace), *whole)
    assert counters.height > 0 and counters["value"].to_list() == pytest.approx([6e8] * counters.height)
    assert line.steps.select(spent).item() > 0


def _chunked(path: Path, told: tuple[int | None, ...]) -> Path:
    """Request i gives 4 chunks, one a second from i·10 s on, each counted as one token; the server tells ``told[i]`` tokens."""
    at = [i * 10_000 * MS for i in range(len(told))]
    requests = [
        {"request": i, "arrival_ns": t, "first_token_ns": t, "last_token_ns": t + 3000 * MS, "finish_ns": t + 4000 * MS,
         "prompt_tokens": 1, "output_tokens": n}
        for i, (t, n) in enumerate(zip(at, told, strict=True))
    ]  # fmt: skip
    tokens = [
        {"request": i, "sequence": 0, "index": k, "time_ns": t + k * 1000 * MS, "count": 1, "vantage": "proxy"}
        for i, t in enumerate(at)
        for k in range(4)
    ]
    return _write(path, _manifest(), requests=requests, tokens=tokens)


def test_token_rate_leaves_out_counts_that_do_not_add_up(tmp_path: Path) -> None:
    trace = hoptrace.open(_chunked(tmp_path / "c.trace", (4, 9, None)))
    whole = timeline(trace, 0, 30_000 * MS, bins=3)
    assert whole.tokens["tokens_per_s"].to_list() == [0.4, None, 0.4]
    assert (whole.emitting, whole.unsized) == (3, 1)
    # One bin for all: a lower bound, said to be one. 8 tokens of the two requests that are known, in 30 s.
    assert timeline(trace, 0, 30_000 * MS, bins=1).tokens["tokens_per_s"].to_list() == pytest.approx([8 / 30])
    # A window that holds a part of a request doubts it just the same; a window without it does not.
    part = timeline(trace, 10_000 * MS, 11_500 * MS, bins=1)
    assert (part.tokens["tokens_per_s"].to_list(), part.emitting, part.unsized) == ([None], 1, 1)
    rest = timeline(trace, 20_000 * MS, 30_000 * MS, bins=1)
    assert (rest.tokens["tokens_per_s"].to_list(), rest.emitting, rest.unsized) == ([0.4], 1, 0)
    none = timeline(trace, 4000 * MS, 10_000 * MS, bins=1)
    assert (none.tokens["tokens_per_s"].to_list(), none.emitting, none.unsized) == ([0.0], 0, 0)


def test_token_rate_bears_sizes_that_nobody_told(tmp_path: Path) -> None:
    """Sizes come from the next index; the last of a request has none, and only that one is left out."""
    tokens = [
        {"request": 0, "sequence": 0, "index": k, "time_ns": t * MS, "vantage": "proxy", "coalesced": c}
        for k, t, c in ((0, 0, False), (3, 999, False), (4, 1000, True), (6, 2000, False))
    ]
    requests = [{"request": 0, "arrival_ns": 0, "finish_ns": 3000 * MS}]
    line = timeline(hoptrace.open(_write(tmp_path / "u.trace", _manifest(), requests=requests, tokens=tokens)), 0, 3000 * MS, 3)
    # Index 3 came in one read with index 4: three tokens at 1 s, none at 999 ms.
    assert line.tokens["tokens_per_s"].to_list() == [3.0, 3.0, None] and line.unsized == 1


def test_detail_doubts_counts_that_do_not_add_up(tmp_path: Path) -> None:
    trace = hoptrace.open(_chunked(tmp_path / "c.trace", (4, 9)))
    accounting = account(trace)
    table = request_table(trace, accounting)
    assert detail(trace, accounting, table, 0).tokens.select("index", "count", "doubted").rows() == [
        (k, 1, False) for k in range(4)
    ]
    assert detail(trace, accounting, table, 1).tokens.select("index", "count", "doubted").rows() == [(None, None, True)] * 4
    assert detail(trace, accounting, table, 1).tokens["time_ns"].to_list() == [(10 + k) * 1000 * MS for k in range(4)]


def test_pages_say_which_counts_they_leave_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    some = _chunked(tmp_path / "some.trace", (4, 9, None))
    at = _run(monkeypatch, PAGES[0], some)
    _sound(at)
    assert any(c.value.startswith("ITL leaves out 1 of 3 finished requests") for c in at.caption)
    at = _run(monkeypatch, PAGES[1], some)
    _sound(at)
    assert any(c.value.startswith("Left out: chunks of 1 of 3 requests") for c in at.caption)
    at = _run(monkeypatch, PAGES[2], _chunked(tmp_path / "all.trace", (9,)))
    _sound(at)
    assert any("are not the server's total of 9" in c.value for c in at.caption)
    at = _run(monkeypatch, PAGES[1], tmp_path / "all.trace")
    _sound(at)
    assert any(c.value.startswith("Left out: chunks of 1 of 1 request ") and c.value.endswith("no rate.") for c in at.caption)
    assert not any("Output tokens per second" in m.value and "over the range" in m.value for m in at.markdown)
    for page in PAGES[:3]:
        assert "eft out: chunks" not in (said := _text(_run(monkeypatch, page, _chunked(tmp_path / f"{page}.trace", (4, 4)))))
        assert "leaves out" not in said and "the server's total of" not in said


def test_overview_shows_what_the_capture_took(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def total(entity: str, name: str, ms: int) -> list[dict[str, Any]]:
        return [
            {
                "time_ns": t,
                "entity": entity,
                "name": name,
                "value_int": v,
                "unit": "ns",
                "semantics": "cumulative",
                "status": "ok",
            }
            for t, v in ((0, 0), (4000 * MS, ms * MS))
        ]

    def trace(name: str, *more: dict[str, Any]) -> Path:
        counters = [*total("process:1", "on_cpu_ns", 300), *total("cpu", "user_ns", 1000), *more]
        requests = [{"request": 0, "arrival_ns": 0, "finish_ns": 4000 * MS, "output_tokens": 10}]
        return _write(tmp_path / f"{name}.trace", _manifest(), requests=requests, counters=counters)

    at = _run(monkeypatch, PAGES[0], trace("with", *total("hoptrace:2", "on_cpu_ns", 50)))
    _sound(at)
    shown = {m.label: (m.value, m.help) for m in at.metric}
    assert shown["Capture's CPU per output token"][0] == "5.00 ms" and shown["Capture's CPU share"][0] == "5.0%"
    assert shown["Others' CPU share"][0] == "65%" and "servers'" in shown["Others' CPU share"][1]
    assert "hoptrace" in shown["Others' CPU share"][1]
    at = _run(monkeypatch, PAGES[0], trace("without"))
    _sound(at)
    shown = {m.label: (m.value, m.help) for m in at.metric}
    assert not any("Capture" in label for label in shown)
    # Nobody counted it, so nobody can say that it is not among the others.
    assert shown["Others' CPU share"][0] == "70%" and "hoptrace" not in shown["Others' CPU share"][1]


def test_timeline_shows_each_step_when_there_are_few(full: Path) -> None:
    trace = hoptrace.open(full)
    line = timeline(trace, 100 * MS, 400 * MS)
    assert line.exact and line.steps.height == 12
    assert line.steps["step_ns"].unique().to_list() == [20.0 * MS]
    assert not timeline(trace, *(extent(trace) or (0, 1)), bins=20).exact


@settings(max_examples=30, deadline=None)
@given(hs.integers(0, 4000), hs.integers(1, 4000), hs.integers(1, 300))
def test_timeline_is_bounded_in_every_window(full: Path, start: int, length: int, bins: int) -> None:
    line = timeline(hoptrace.open(full), start * MS, (start + length) * MS, bins)
    for frame in (line.steps, line.tokens, line.arrivals):
        assert frame.height <= bins
    assert line.occupancy.height <= 2 * bins
    grid = line.arrivals
    assert grid["from_ns"][0] == start * MS and grid["to_ns"][-1] == (start + length) * MS
    assert (grid["to_ns"] > grid["from_ns"]).all()
    # Two slots: never more than two run (the failed and the unfinished one included).
    running = line.occupancy.filter(pl.col("state") == "running")["requests"]
    assert running.is_empty() or running.max() <= 2 + 1e-9  # type: ignore[operator]


def test_timeline_counters_survive_wraps_and_restarts(tmp_path: Path) -> None:
    def sample(t: int, v: int, life: str, width: int | None = None) -> dict[str, Any]:
        return {"time_ns": t * 1000 * MS, "entity": "e", "name": "n", "value_int": v, "semantics": "cumulative",
                "incarnation": life, "unit": "1", "status": "ok", "width_bits": width}  # fmt: skip

    rows = [sample(0, 250, "a", 8), sample(1, 4, "a", 8), sample(2, 1000, "b"), sample(3, 1010, "b"), sample(4, 5, "b")]
    trace = hoptrace.open(_write(tmp_path / "c.trace", _manifest(), counters=rows))
    frame = counter_bins(trace, [("e", "n", "")], 0, 4000 * MS, bins=4)
    assert frame.select("from_ns", "value").rows() == [(0, 10.0), (2000 * MS, 10.0)]


def test_timeline_gauges_hold_until_the_next_sample(tmp_path: Path) -> None:
    gauge = {"entity": "e", "name": "g", "semantics": "gauge", "unit": "1"}
    rows = [
        {**gauge, "time_ns": 0, "value_int": 4, "status": "ok"},
        {**gauge, "time_ns": 1500 * MS, "value_int": 8, "status": "ok"},
        {**gauge, "time_ns": 3000 * MS, "status": "lost"},
        {**gauge, "time_ns": 5000 * MS, "value_int": 1, "status": "ok"},
    ]
    trace = hoptrace.open(_write(tmp_path / "g.trace", _manifest(), counters=rows))
    frame = counter_bins(trace, counter_series(trace), 0, 5000 * MS, bins=5)
    assert frame.select("from_ns", "value").rows() == [(0, 4.0), (1000 * MS, 6.0), (2000 * MS, 8.0)]
    assert not frame["per_second"].any()


def test_empty_window_is_refused(full: Path) -> None:
    with pytest.raises(UsageError):
        timeline(hoptrace.open(full), 5, 5)


def test_detail_is_the_request(full: Path) -> None:
    trace = hoptrace.open(full)
    accounting = account(trace)
    table = request_table(trace, accounting)
    assert table["status"].value_counts().sort("status").rows() == [("failed", 1), ("finished", 38), ("unfinished", 1)]
    d = detail(trace, accounting, table, 7)
    assert (
        sum(v or 0 for v in d.parts.values())
        == d.row["e2e_ns"]
        == d.spans.select((pl.col("end_ns") - pl.col("start_ns")).sum()).item()
    )
    assert sum(v or 0 for v in d.shares.values()) == pytest.approx(1)
    assert d.tokens.height == d.row["output_tokens"] and d.tokens_left_out == 0
    assert set(d.spans["class"]) <= set(CLASSES)
    beside = d.neighbours
    assert 7 not in set(beside["request"])
    assert (beside["start_ns"] >= d.row["arrival_ns"]).all() and (beside["end_ns"] <= d.row["finish_ns"]).all()
    biggest = max(PARTS, key=lambda p: d.parts[p.name] or 0)
    assert (d.row["largest_part"], d.row["largest_class"]) == (biggest.label, biggest.klass)
    assert detail(trace, accounting, table, 39).parts == {}
    with pytest.raises(InputError):
        detail(trace, accounting, table, 1000)


@given(hs.integers(0, 400), hs.integers(2, 50))
def test_thinned_keeps_the_slowest(n: int, most: int) -> None:
    table = pl.DataFrame(
        {"request": range(n), "x": [(i * 37) % 101 for i in range(n)]}, schema={"request": pl.Int64, "x": pl.Int64}
    )
    kept = thinned(table, "x", most)
    assert kept.height <= max(most, 0) or n <= most
    assert kept["request"].is_unique().all()
    if n:
        assert kept["x"].max() == table["x"].max()


# -- charts -----------------------------------------------------------------------------------------------------------


def _spec(chart: Any) -> dict[str, Any]:
    with alt.data_transformers.enable("default", max_rows=MAX_ROWS):
        spec: dict[str, Any] = chart.to_dict()
    assert len(json.dumps(spec)) < 1_500_000
    return spec


def _rows(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for rows in spec["datasets"].values() for row in rows]


def test_charts_of_time(full: Path) -> None:
    trace = hoptrace.open(full)
    whole = extent(trace)
    assert whole is not None
    line = timeline(trace, *whole)
    window = (0.0, (whole[1] - whole[0]) / 1e9)
    strip = _spec(charts_time.strip(line.tokens, "tokens_per_s", "tokens/s", whole[0], window))
    assert [p["name"] for p in strip["params"]] == [charts_time.BRUSH]
    assert len(_rows(strip)) == line.tokens.height <= BINS
    stacked = _rows(_spec(charts_time.occupancy(line.occupancy, whole[0], window)))
    assert all(r["top"] - r["bottom"] == pytest.approx(r["value"]) for r in stacked)
    assert _rows(_spec(charts_time.batch(line.steps, whole[0], window)))
    assert _rows(_spec(charts_time.step_time(line.steps, whole[0], window)))
    counters = counter_bins(trace, counter_series(trace), *whole)
    assert _rows(_spec(charts_time.counter(counters, "s per s", 1e-9, whole[0], window)))[0]["value"] == pytest.approx(0.6)


def test_accounting_chart_adds_up() -> None:
    rows = [
        {"row": "p50", "part": p.label, "class": p.klass, "ns": float(i * MS), "share": 0.1, "doc": p.doc}
        for i, p in enumerate(PARTS)
    ]
    spec = _spec(charts_overview.accounting(pl.DataFrame(rows), ["p50"]))
    data = sorted(_rows(spec), key=lambda r: r["start"])
    assert data[0]["start"] == 0 and data[-1]["end"] == pytest.approx(sum(range(len(PARTS))))
    assert all(a["end"] == pytest.approx(b["start"]) for a, b in pairwise(data))
    kinds = [r["class"] for r in data]
    assert [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k] == [c for c in CLASSES if c in kinds]


def test_a_part_bears_its_name_only_where_it_fits() -> None:
    shares = {"prefill": 0.10, "queue, no KV space": 0.10, "decode": 0.80}
    kind = {p.label: p.klass for p in PARTS}
    rows = [
        {"row": "p50", "part": label, "class": kind[label], "ns": share * 1e9, "share": share, "doc": ""}
        for label, share in shares.items()
    ]
    data = _rows(_spec(charts_overview.accounting(pl.DataFrame(rows), ["p50"])))
    assert {r["part"]: r["wide"] for r in data} == {"prefill": True, "queue, no KV space": False, "decode": True}


def test_request_charts(full: Path) -> None:
    trace = hoptrace.open(full)
    accounting = account(trace)
    table = request_table(trace, accounting)
    spec = _spec(charts_requests.scatter(table))
    assert len(_rows(spec)) == 38 and spec["params"][0]["name"] == charts_requests.PICK
    d = detail(trace, accounting, table, 7)
    bars = [r for r in _rows(_spec(charts_requests.waterfall(d.spans, d.tokens, d.row["arrival_ns"]))) if "length" in r]
    unit = {"s": 1e9, "ms": 1e6}[axis_unit(d.row["e2e_ns"])[0]]
    assert sum(r["length"] for r in bars) == pytest.approx(d.row["e2e_ns"] / unit)
    spec = _spec(charts_requests.neighbours(d.neighbours.drop("server"), 7, d.spans.drop("server"), d.row["arrival_ns"]))
    assert {r["row"] for r in _rows(spec)} >= {"request 7"}


def test_every_class_has_its_own_colour() -> None:
    assert set(theme.CLASS_COLOURS) == set(CLASSES)
    assert len(set(theme.colours())) == len(CLASSES) == len(theme.inks())
    assert sorted(theme.order()) == sorted(p.label for p in PARTS)


@given(hs.text(max_size=500))
def test_plain_text_has_no_markup(text: str) -> None:
    shown = words.plain(text)
    assert "\n" not in shown
    bare = shown.replace("\\\\", "")
    for sign in "<>[]*_`$#:|~":
        assert all(i > 0 and bare[i - 1] == "\\" for i, c in enumerate(bare) if c == sign)


# -- start ------------------------------------------------------------------------------------------------------------


def test_folders_expand_and_names_stay_apart(tmp_path: Path) -> None:
    for where in ("a", "b"):
        (tmp_path / where).mkdir()
        _poor(tmp_path / where, "no steps")
    one = tmp_path / "a" / "no steps.trace"
    assert traces.resolve([one, tmp_path / "a"]) == [one]
    both = traces.resolve([tmp_path / "a", tmp_path / "b"])
    assert list(traces.labels(both).values()) == ["a/no steps", "b/no steps"]
    assert traces.resolve([]) == samples()
    with pytest.raises(InputError):
        traces.checked([tmp_path / "missing.trace"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError):
        traces.checked([tmp_path / "empty"])


def test_a_taken_port_is_said_before_anything_starts(full: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"Port {port} is taken"):
            launch.start([full], port, open_browser=False)


def test_the_command_checks_traces_first(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(tmp_path / "none.trace"), "--no-browser"])
    assert isinstance(result.exception, InputError)
    assert CliRunner().invoke(command, ["--port", "70000"]).exit_code == 2
    assert "Examples" in CliRunner().invoke(command, ["--help"]).output


def test_no_name_in_app_hides_a_library() -> None:
    """Streamlit puts app/ first on the import path."""
    names = {Path(str(f)).stem for f in files("hoptrace.app").iterdir() if str(f).endswith(".py")}
    assert not names & (
        set(sys.stdlib_module_names) | {"altair", "polars", "streamlit", "duckdb", "pandas", "numpy", "click", "rich"}
    )
    assert not (files("hoptrace.app") / "pages").is_dir()
