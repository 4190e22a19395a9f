"""The Prometheus page of any engine as counters: tables of names, restarts, what vanishes, what is hostile."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.pages import ENGINES, Pages, asked, context
from support.toy_server import Toy, serve

import hoptrace
from hoptrace.collectors.base import ServerAway
from hoptrace.collectors.engines import (
    metrics_source,
    names_dynamo,
    names_llamacpp,
    names_sglang,
    names_tgi,
    names_trtllm,
    names_vllm,
)  # fmt: skip
from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.metrics_source import MetricsSource
from hoptrace.collectors.engines.names import COMMON
from hoptrace.collectors.engines.prometheus import Kind, Reading, read
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

VLLM = (ENGINES / "vllm" / "metrics.prom").read_text()
OLD = (ENGINES / "vllm" / "metrics_0.4.prom").read_text()
TABLES = {
    "vllm/metrics.prom": names_vllm, "vllm/metrics_0.17_idle.prom": names_vllm, "vllm/metrics_0.4.prom": names_vllm,
    "sglang/metrics_0.5.10.prom": names_sglang, "sglang/metrics_0.4.prom": names_sglang, "tgi/metrics.prom": names_tgi,
    "dynamo/frontend.prom": names_dynamo, "trtllm/worker.prom": names_trtllm,
}  # fmt: skip


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded")) as writer:
        yield writer


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause between two questions."""
    monkeypatch.setattr(metrics_source, "_SMALL_BYTES", 1 << 30)


def rows(writer: TraceWriter, table: str = "counters") -> list[dict[str, Any]]:
    writer.flush()
    return hoptrace.open(writer.path).table(table).collect().to_dicts()


def series(writer: TraceWriter, name: str) -> list[tuple[Any, str]]:
    found = [r for r in rows(writer) if r["name"] == name]
    found.sort(key=lambda r: r["time_ns"])
    return [(r["value_int"] if r["value_int"] is not None else r["value_float"], r["status"]) for r in found]


def events(writer: TraceWriter) -> list[tuple[str, str]]:
    return [(e["kind"], e["detail"]) for e in rows(writer, "events")]


def source(api: Api, writer: TraceWriter, known: Any = names_vllm) -> MetricsSource:
    return MetricsSource(context(api, writer), "vllm-metrics", known.KNOWN, renamed=known.RENAMED, off="is off: turn it on")


# -- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_know_every_metric_of_the_recorded_pages(name: str) -> None:
    page = read((ENGINES / name).read_text(), {**COMMON, **TABLES[name].KNOWN})
    assert page.bad == 0 and page.samples
    assert {s.base for s in page.samples if not s.known} == set()
    for s in page.samples:
        assert s.kind is not None
        if s.kind.whole and s.value is not None:
            assert s.value == int(s.value), s.name
        if s.name.split("{")[0].endswith(("_bucket", "_count", "_sum", "_total")):
            assert s.kind.semantics == "cumulative"


@pytest.mark.parametrize("known", [names_vllm, names_sglang, names_tgi, names_trtllm, names_dynamo, names_llamacpp])
def test_what_a_table_renames_it_knows(known: Any) -> None:
    assert set(known.RENAMED) <= {n.removesuffix("_bucket").removesuffix("_total") for n in known.KNOWN}
    for new in known.RENAMED.values():
        assert new in known.KNOWN or f"{new}_bucket" in known.KNOWN


@pytest.mark.parametrize("name", TABLES)
def test_a_page_reads_as_the_clients_own_parser_reads_it(name: str) -> None:
    text = (ENGINES / name).read_text()
    ours = {s.name: s.value for s in read(text, {}).samples}
    theirs = {}
    for family in text_string_to_metric_families(text):
        for s in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(s.labels.items()))
            theirs[f"{s.name}{{{labels}}}" if labels else s.name] = s.value
    # That parser puts _total behind any counter's name.
    theirs = {k: v for k, v in theirs.items() if not k.split("{")[0].endswith("_created")}
    assert {k: ours.get(k, ours.get(k.replace("_total", "", 1))) for k in theirs} == theirs
    assert len(ours) == len(theirs)


_LABEL = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=12)


@given(
    st.lists(st.tuples(_LABEL, st.floats(allow_nan=False, allow_infinity=False)), max_size=6, unique_by=lambda x: x[0]),
    st.lists(st.floats(0, 100), max_size=20),
)
def test_whatever_a_client_writes_is_read(gauges: list[tuple[str, float]], observed: list[float]) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("g", "help \\ with\nlines", ["a", "b"], registry=registry)
    for label, value in gauges:
        gauge.labels(a=label, b="x").set(value)
    histogram = Histogram("h_seconds", "help", registry=registry, buckets=(1, 10))
    for value in observed:
        histogram.observe(value)
    Counter("c", "help", registry=registry).inc(len(observed))
    page = Reading({})
    for _ in range(2):  # the second time from what is remembered
        found = page.page(generate_latest(registry).decode())
        assert found.bad == 0
        by = {s.name: s for s in found.samples}
        assert sorted(s.value for s in found.samples if s.base == "g") == sorted(v for _, v in gauges)
        assert by["h_seconds_count"].value == len(observed) == by["c_total"].value
        assert by['h_seconds_bucket{le="1.0"}'].value == sum(v <= 1 for v in observed)
        assert by["h_seconds_count"].kind == Kind("1", "cumulative") and by["c_total"].kind == Kind("1", "cumulative")
        assert "c_created" in found.created and not any("_created" in n for n in by)


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    page = read(text, names_vllm.KNOWN)
    assert page.bad <= text.count("\n") + 1


def test_stamps_exemplars_and_order_of_labels() -> None:
    page = read(
        'a{z="1",b="2"} 3 1700000000000\nh_bucket{le="1"} 4 # {trace_id="x"} 0.5 1.7e9\nn NaN\ni +Inf\nbad line here x\n{} 1\n',
        {},
    )
    assert [(s.name, s.value) for s in page.samples] == [
        ('a{b="2",z="1"}', 3.0), ('h_bucket{le="1"}', 4.0), ("n", None), ("i", math.inf),
    ]  # fmt: skip
    assert page.bad == 2


def test_a_series_with_a_stamp_keeps_its_place() -> None:
    reading = Reading({}, limit=1)
    for value in (1, 2, 3):
        page = reading.page(f'a{{b="c"}} {value} 170000000000{value}\n')
        assert [s.value for s in page.samples] == [float(value)] and reading.cut == 0


# -- the collector ----------------------------------------------------------------------------------------------------


async def test_vllm_as_counters(writer: TraceWriter) -> None:
    async with asked(Pages({"/metrics": VLLM})) as api:
        c = source(api, writer)
        assert (await c.probe()).available
        n = await c.sample()
    found = {r["name"]: r for r in rows(writer)}
    assert n == len(found) == len(read(VLLM, {}).samples)
    label = '{engine="0",model_name="toy"}'
    generated = found["vllm:generation_tokens_total" + label]
    assert (generated["value_int"], generated["unit"], generated["semantics"]) == (300, "tokens", "cumulative")
    assert (generated["entity"], generated["incarnation"], generated["status"]) == ("server:s", "s#1", "ok")
    usage = found["vllm:kv_cache_usage_perc" + label]
    assert (usage["unit"], usage["semantics"], usage["value_float"]) == ("ratio", "gauge", 0.0)
    steps = found["vllm:iteration_tokens_total_count" + label]
    assert steps["semantics"] == "cumulative" and steps["value_int"] == 122, "122 iterations are in the log too"
    assert found["process_resident_memory_bytes"]["unit"] == "bytes"


async def test_a_value_is_written_when_it_changes_and_where_it_stood(
    writer: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_source, "_FEW", 0)
    page = "# TYPE x_total counter\nx_total {x}\n# TYPE y gauge\ny {y}\n"
    pages = Pages({})
    async with asked(pages) as api:
        c = source(api, writer)
        counts = []
        for x, y in ((1, 5), (1, 5), (1, 5), (4, 5), (4, 5)):
            pages.answers["/metrics"] = page.replace("{x}", str(x)).replace("{y}", str(y))
            counts.append(await c.sample())
        assert counts == [2, 0, 0, 2, 0], "x where it stood until the last sample, and where it is now"
        await c.close()
    assert series(writer, "x_total") == [(1, "ok"), (1, "ok"), (4, "ok"), (4, "ok")]
    assert series(writer, "y") == [(5, "ok"), (5, "ok")], "its last sight is kept at the end"


async def test_a_total_that_falls_is_one_restart(writer: TraceWriter) -> None:
    pages = Pages({"/metrics": VLLM})
    async with asked(pages) as api:
        c = source(api, writer)
        await c.sample()
        again = VLLM.replace('vllm:generation_tokens_total{engine="0",model_name="toy"} 300.0',
                             'vllm:generation_tokens_total{engine="0",model_name="toy"} 7.0')  # fmt: skip
        assert again != VLLM
        pages.answers["/metrics"] = again
        await c.sample()
        await c.sample()
    assert [k for k, _ in events(writer)] == ["restart"]
    fell = [r for r in rows(writer) if r["name"].startswith("vllm:generation_tokens_total")]
    assert {(r["value_int"], r["incarnation"]) for r in fell} == {(300, "s#1"), (7, "s#2")}


async def test_another_start_of_the_process_is_a_restart_though_nothing_fell(writer: TraceWriter) -> None:
    pages = Pages({"/metrics": "process_start_time_seconds 1000\nvllm:generation_tokens_total 0\n"})
    async with asked(pages) as api:
        c = source(api, writer)
        await c.sample()
        pages.answers["/metrics"] = "process_start_time_seconds 2000\nvllm:generation_tokens_total 5\n"
        await c.sample()
    assert events(writer) == [("restart", "the process's start is another")]


async def test_a_session_that_saw_the_restart_tells_once(writer: TraceWriter) -> None:
    pages = Pages({"/metrics": "vllm:generation_tokens_total 9\n"})
    async with asked(pages) as api:
        c = source(api, writer)
        await c.sample()
        c.restarted()
        pages.answers["/metrics"] = "vllm:generation_tokens_total 1\n"
        await c.sample()
    assert events(writer) == []
    assert {(r["value_int"], r["incarnation"]) for r in rows(writer)} == {(9, "s#1"), (1, "s#2")}


async def test_b39_a_counter_that_no_table_knows_and_that_falls_is_a_gauge(writer: TraceWriter) -> None:
    page = "# TYPE odd counter\nodd {0}\n# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total {1}\n"
    pages = Pages({})
    async with asked(pages) as api:
        c = source(api, writer)
        for odd, tokens in ((12, 1), (9, 2), (13, 3), (8, 4)):
            pages.answers["/metrics"] = page.replace("{0}", str(odd)).replace("{1}", str(tokens))
            await c.sample()
    assert [k for k, _ in events(writer)] == ["note"] and "odd" in events(writer)[0][1]
    assert {r["incarnation"] for r in rows(writer)} == {"s#1"}
    assert [r["semantics"] for r in sorted(rows(writer), key=lambda r: r["time_ns"]) if r["name"] == "odd"][1:] == ["gauge"] * 3


async def test_b41_metrics_that_vanish_are_absent_once_and_never_zero(writer: TraceWriter) -> None:
    """vLLM 0.4 is upgraded to 0.32: names are gone, others are new."""
    pages = Pages({"/metrics": OLD})
    async with asked(pages) as api:
        c = source(api, writer)
        await c.sample()
        c.restarted()
        pages.answers["/metrics"] = VLLM
        for _ in range(3):
            await c.sample()
    gone = 'vllm:gpu_cache_usage_perc{model_name="facebook/opt-125m"}'
    assert series(writer, gone) == [(0.0, "ok"), (None, "absent")]
    ((kind, detail),) = events(writer)
    assert kind == "metrics vanished"
    assert "vllm:gpu_cache_usage_perc is vllm:kv_cache_usage_perc now" in detail
    assert "vllm:time_per_output_token_seconds is vllm:inter_token_latency_seconds now" in detail
    assert "vllm:num_requests_swapped" in detail and "vllm:prompt_tokens" not in detail.split("(")[0]


@pytest.mark.parametrize(("status", "word"), [(404, "absent"), (401, "denied"), (503, "error")])
async def test_a_page_that_is_there_no_more(writer: TraceWriter, status: int, word: str) -> None:
    pages = Pages({"/metrics": "vllm:generation_tokens_total 9\nvllm:num_requests_running 1\n"})
    async with asked(pages) as api:
        c = source(api, writer)
        await c.sample()
        pages.answers["/metrics"] = status
        assert [await c.sample() for _ in range(3)] == [2, 0, 0]
        pages.answers["/metrics"] = "vllm:generation_tokens_total 12\n"
        await c.sample()
    assert series(writer, "vllm:generation_tokens_total") == [(9, "ok"), (None, word), (12, "ok")]
    assert events(writer)[0][0] == "metrics vanished"


@pytest.mark.parametrize(
    ("status", "reason"),
    [(404, "/metrics is off: turn it on"), (401, "name the variable that holds it with --key-env"), (500, "HTTP 500")],
)
async def test_the_probe_says_what_would_help(writer: TraceWriter, status: int, reason: str) -> None:
    async with asked(Pages({"/metrics": status})) as api:
        found = await source(api, writer).probe()
    assert not found.available and reason in str(found.reason)


async def test_a_page_that_is_no_page_is_not_taken(writer: TraceWriter) -> None:
    async with asked(Pages({"/metrics": [{"iter": 1}]})) as api:
        found = await source(api, writer).probe()
    assert not found.available and "not in the Prometheus text format" in str(found.reason)


async def test_a_label_explosion_is_cut_and_counted(writer: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_source, "MAX_SERIES", 100)
    pages = Pages({"/metrics": "".join(f'a{{id="{i}"}} {i}\n' for i in range(1000))})
    async with asked(pages) as api:
        c = MetricsSource(context(api, writer), "metrics", {})
        assert [await c.sample() for _ in range(3)] == [100, 100, 100]
        assert writer.manifest.rows_dropped == {"metrics: series beyond the limit of 100": 900}
        # Other series in the place of these: room is made for them.
        pages.answers["/metrics"] = "".join(f'b{{id="{i}"}} {i}\n' for i in range(100))
        await c.sample()
    assert {r["name"].split("{")[0] for r in rows(writer) if r["status"] == "ok"} == {"a", "b"}
    assert [k for k, _ in events(writer)].count("gap") == 1


@pytest.mark.parametrize(
    "body", [b"\x00\xff\xfe" * 30000, b"[" * 100_000, b"<html>{{{", b"a" * 300_000, b'x{a="' * 20000, b"{" * 100_000],
    ids=["binary", "deep", "html", "one long line", "open quotes", "braces"],
)  # fmt: skip
async def test_hostile_pages(writer: TraceWriter, body: bytes) -> None:
    pages = Pages({"/metrics": "vllm:generation_tokens_total 9\n"})
    async with asked(pages) as api:
        c = source(api, writer)
        await c.sample()
        pages.answers["/metrics"] = body
        assert await c.sample() == 0
        pages.answers["/metrics"] = "vllm:generation_tokens_total 10\n"
        await c.sample()
    assert series(writer, "vllm:generation_tokens_total") == [(9, "ok"), (10, "ok")], "it said nothing of what was there"
    assert writer.manifest.rows_dropped == {"vllm-metrics: lines that are not in the text format": 1}


async def test_a_huge_page_is_left(writer: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_source, "PAGE_BYTES", 1000)
    async with asked(Pages({"/metrics": "a 1\n" * 1000})) as api:
        assert await source(api, writer).sample() == 0
    assert writer.manifest.rows_dropped == {"vllm-metrics: page of more than 8 MiB": 1}


async def test_what_it_costs_the_server_is_bounded(writer: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_source, "_SMALL_BYTES", 10_000)
    pages = Pages({"/metrics": VLLM})
    async with asked(pages) as api:
        c = source(api, writer)
        for _ in range(20):
            await c.sample()
    assert pages.seen == ["/metrics"], "37 KB: the next question is more than half a second away"


async def test_slow_answers_are_no_deaths(writer: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    from hoptrace.collectors.engines import polled

    monkeypatch.setattr(polled, "_ANSWER_S", 0.1)
    hold = asyncio.Event()

    async def slow(request: web.BaseRequest) -> web.StreamResponse:
        await asyncio.wait_for(hold.wait(), 5) if not hold.is_set() else None
        return web.Response(text="vllm:generation_tokens_total 9\n")

    toy = Toy()
    toy.handle = slow  # type: ignore[method-assign]
    async with serve(toy):
        api = Api(toy.url)
        c = source(api, writer)
        assert await c.sample() == 0
        hold.set()
        assert await c.sample() == 1
        await api.close()
    with pytest.raises(ServerAway):
        await source(Api("http://127.0.0.1:9"), writer).sample()
    assert events(writer) == []


async def test_b45_a_histogram_with_everything_in_its_first_bucket(writer: TraceWriter) -> None:
    def page(first: int, all_of: int) -> str:
        return (
            "# TYPE vllm:request_queue_time_seconds histogram\n"
            f'vllm:request_queue_time_seconds_bucket{{le="0.001"}} {first}\n'
            f'vllm:request_queue_time_seconds_bucket{{le="1.0"}} {all_of}\n'
            f'vllm:request_queue_time_seconds_bucket{{le="+Inf"}} {all_of}\n'
            f"vllm:request_queue_time_seconds_count {all_of}\nvllm:request_queue_time_seconds_sum 0.0\n"
            "# TYPE vllm:request_params_n histogram\n"
            f'vllm:request_params_n_bucket{{le="1.0"}} {all_of}\nvllm:request_params_n_bucket{{le="+Inf"}} {all_of}\n'
            f"vllm:request_params_n_sum {all_of}\nvllm:request_params_n_count {all_of}\n"
        )

    pages = Pages({"/metrics": page(3, 3)})
    async with asked(pages) as api:
        c = source(api, writer)
        await c.sample()
        assert events(writer) == [], "three requests say nothing"
        for n in (100, 200):
            pages.answers["/metrics"] = page(n, n)
            await c.sample()
    ((kind, detail),) = events(writer)
    assert kind == "note" and detail.startswith("vllm:request_queue_time_seconds: all of 100 are in the first bucket (le=0.001)")


async def test_several_processes_behind_one_port(writer: TraceWriter) -> None:
    """Each answer is of another worker: totals go up and down, and no increase can be told."""
    pages = Pages({})
    async with asked(pages) as api:
        c = source(api, writer)
        for value in (100, 7, 101, 8, 102, 9, 103, 10):
            pages.answers["/metrics"] = f"vllm:generation_tokens_total {value}\n"
            await c.sample()
    kinds = [k for k, _ in events(writer)]
    assert kinds == ["restart", "restart", "gap"] and "several processes answer behind one port" in events(writer)[-1][1]
    assert [s for _, s in series(writer, "vllm:generation_tokens_total")][-2:] == ["error", "error"]
