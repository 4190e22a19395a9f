"""The report as one HTML file: valid, alone, with the figures of the JSON; in real Chromium without network and without
scripts."""

from __future__ import annotations

import re
import shutil
import sys
import xml.etree.ElementTree as ET
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import pytest
from click.testing import CliRunner
from support.memory import MemoryTrace
from support.small import small_trace

import hoptrace
from hoptrace.analysis.report import SECTIONS, report
from hoptrace.analysis.text import bytes_text, duration_text, percent
from hoptrace.app.static_charts import svg
from hoptrace.app.static_report import page
from hoptrace.cli.report import command
from hoptrace.errors import EnvironmentProblem
from hoptrace.manifest import Manifest, Server
from hoptrace.samples import sample

DATA = Path(__file__).parent / "data" / "vllm_traces"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "<img src=x onerror=alert(1)></title></svg><script>alert(2)</script>\"'&[red]"
VOID = {"meta", "br", "img", "hr", "input", "link"}


class Checker(HTMLParser):
    """Tags in their order closed, and what is in the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(k, v or "") for k, v in attrs]
        self.ids += [v or "" for k, v in attrs if k == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(text: str) -> Checker:
    c = Checker()
    c.feed(text)
    c.close()
    assert c.open == []
    return c


@pytest.fixture(scope="module")
def real() -> tuple[str, dict[str, Any]]:
    trace = hoptrace.open(DATA / "preempted.trace")
    found = report(trace)
    return page(found, trace), found.as_dict()


def hostile() -> MemoryTrace:
    base = small_trace()
    rows = {
        t: base.table(t).collect().to_dicts() for t in ("requests", "tokens", "stages", "moves", "steps", "residency", "waits")
    }
    for table in ("stages", "steps", "residency", "moves", "waits"):
        for row in rows[table]:
            row["server"] = HOSTILE
    for row in rows["moves"]:
        row.update(src=f"server:{HOSTILE}", dst=HOSTILE, path=[HOSTILE])
    for row in rows["waits"]:
        row["on"] = HOSTILE
    servers = [Server(name=HOSTILE, engine=HOSTILE, model=HOSTILE, max_sequences=2)]
    manifest = Manifest(origin="recorded", servers=servers, notes=[HOSTILE], closed=False, rows_dropped={HOSTILE: 3})
    return MemoryTrace(rows, manifest, name=HOSTILE.replace("/", "|"))


def test_it_is_whole_and_stands_alone(real: tuple[str, dict[str, Any]]) -> None:
    text, _ = real
    c = checked(text)
    assert not c.tags & {"script", "link", "iframe", "object", "embed", "img", "form"}
    assert not [k for k, _ in c.attributes if k.startswith("on")]
    links = [v for k, v in c.attributes if k in ("href", "src", "xlink:href", "action")]
    assert links and all(v.startswith("#") for v in links)
    assert not re.findall(r"url\((?!#)", text)
    # The names of XML's own namespaces are no addresses that anybody asks.
    assert set(re.findall(r"https?://[^\"'<> )]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert len(c.ids) == len(set(c.ids)) and set(SECTIONS) <= set(c.ids)
    assert len(text) < 3_000_000
    assert "default-src 'none'" in text


def test_its_figures_are_those_of_the_json(real: tuple[str, dict[str, Any]]) -> None:
    text, d = real
    said = unescape("\n".join(checked(text).text))
    assert d["headline"] in said
    for line in (*d["warnings"], *d["unseen"]):
        assert line in said
    for name in ("ttft", "itl", "tpot", "e2e", "queue"):
        for stat in ("mean_ns", "p50_ns", "p95_ns", "p99_ns"):
            assert f">{duration_text(d['metrics'][name][stat])}</td>" in text
    whole = d["accounting"]["compositions"]["all"]
    for part, ns in whole["parts_ns"].items():
        assert not ns or f">{duration_text(ns)}</td>" in text, part
    for row in d["ledger"]["rows"]:
        assert f">{bytes_text(row['bytes'])}</td>" in text
        assert f"{row['src']} → {row['dst']}" in said
    # The charts' shapes tell their figures.
    titles = [unescape(t) for t in re.findall(r"<title>(.*?)</title>", text)]
    for klass, share in whole["class_shares"].items():
        if share:
            told = [t for t in titles if f"class: {klass};" in t and "share: " in t]
            assert any(abs(float(re.search(r"share: ([\d.]+)%", t)[1]) / 100 - share) < 6e-5 for t in told), klass  # type: ignore[index]
    assert percent(d["coordination"]["share"]["all"]) in said


def test_what_stands_in_a_trace_is_text() -> None:
    trace = hostile()
    text = page(report(trace), trace)
    c = checked(text)
    assert not c.tags & {"script", "img"} and not [k for k, _ in c.attributes if k.startswith("on")]
    assert HOSTILE in unescape("".join(c.text))


def test_the_same_trace_gives_the_same_page() -> None:
    trace = small_trace()
    assert page(report(trace), trace) == page(report(trace), trace)


@pytest.mark.parametrize("name", ["azure-2023-conv", "llamacpp-four-slots"])
def test_the_samples(name: str) -> None:
    trace = hoptrace.open(sample(name))
    checked(page(report(trace), trace))


def test_nothing_at_all() -> None:
    trace = MemoryTrace({})
    assert "No request was recorded" in page(report(trace), trace)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoptrace, "open", lambda _: small_trace())
    target = tmp_path / "r.html"
    done = CliRunner().invoke(command, ["x", "--html", str(target)])
    assert done.exit_code == 0 and done.stdout == "" and "Wrote" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
    checked(target.read_text(encoding="utf-8"))
    quiet = CliRunner().invoke(command, ["x", "-q", "--html", str(target)])
    assert quiet.stdout.startswith("Of the 11 finished requests' time") and quiet.stderr == ""


def test_without_the_package_that_draws_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(EnvironmentProblem, match="vl-convert-python"):
        page(report(small_trace()), small_trace())


def test_a_chart_alone() -> None:
    frame = pl.DataFrame({"a": ["x<y>", "]]>"], "b": [1.0, 2.0]})
    chart = alt.Chart(frame).mark_bar(clip=True).encode(x="a:N", y="b:Q", tooltip=["a:N", "b:Q"])
    one, two = svg(chart, "c0"), svg(chart, "c1")
    for text, name in ((one, "c0"), (two, "c1")):
        root = ET.fromstring(text)
        ids = [e.attrib["id"] for e in root.iter() if "id" in e.attrib]
        assert all(i.startswith(f"{name}-") for i in ids)
        assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)
    assert "currentColor" in one and "#010203" not in one and "aria-label" not in one
    assert "x&lt;y&gt;" in one


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_chromium_without_network_or_scripts(scheme: str, tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    trace = hostile()
    file = tmp_path / "report.html"
    file.write_text(page(report(trace), trace), encoding="utf-8")
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(offline=True, java_script_enabled=scheme == "light", color_scheme=scheme)
        tab = context.new_page()
        asked: list[str] = []
        said: list[str] = []
        tab.on("request", lambda r: asked.append(r.url) if not r.url.startswith("file:") else None)
        tab.on("console", lambda m: said.append(m.text))
        tab.on("dialog", lambda d: (said.append(d.message), d.dismiss()))
        tab.goto(file.as_uri())
        assert tab.locator("svg").count() >= 4 and tab.locator("table").count() >= 6
        assert "finished requests" in tab.inner_text("body")
        boxes = [tab.locator("svg").nth(i).bounding_box() for i in range(tab.locator("svg").count())]
        assert all(b["width"] > 400 and b["height"] > 40 for b in boxes)
        if scheme == "light":
            colours = tab.evaluate(
                "() => [getComputedStyle(document.body).color, getComputedStyle(document.querySelector('svg text')).fill]"
            )
            assert colours[0] == colours[1], "the text of charts has the page's colour"
            assert tab.evaluate("() => document.body.scrollWidth <= document.documentElement.clientWidth")
        browser.close()
    assert asked == [] and said == []
