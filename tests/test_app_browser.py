"""The dashboard in real Chromium: `hoptrace app` is started as a user starts it, and each page is loaded by its address."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hoptrace.samples import samples

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
MS = 1_000_000
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>:red[no]"

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]


def _hostile(path: Path) -> Path:
    from hoptrace.manifest import Manifest, Server
    from hoptrace.writer import TraceWriter

    manifest = Manifest(
        origin="recorded", servers=[Server(name="s", engine="llama.cpp", model=HOSTILE, max_sequences=2)], notes=[HOSTILE]
    )
    with TraceWriter(path, manifest) as w:
        for i in range(12):
            at = i * 50 * MS
            w.append("requests", [{
                "request": i, "request_id": HOSTILE, "model": HOSTILE, "arrival_ns": at, "received_ns": at,
                "first_token_ns": at + 40 * MS, "last_token_ns": at + 90 * MS, "finish_ns": at + 91 * MS, "prompt_tokens": 20 + i,
                "output_tokens": 6, "finish_reason": HOSTILE, "source": "test",
            }])  # fmt: skip
            w.append("stages", [{"request": i, "stage": 0, "server": "s", "enqueued_ns": at + MS, "scheduled_ns": at + 5 * MS,
                                 "end_ns": at + 90 * MS, "source": "test"}])  # fmt: skip
            w.append("tokens", [{"request": i, "sequence": 0, "index": k, "time_ns": at + 40 * MS + k * 10 * MS, "count": 1,
                                 "vantage": "proxy", "source": "test"} for k in range(6)])  # fmt: skip
    return path


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`hoptrace app --no-browser` on a hostile trace and a sample, ended by Ctrl-C, which must end it cleanly."""
    trace = _hostile(tmp_path_factory.mktemp("app") / "hostile.trace")
    command = [sys.executable, "-m", "hoptrace", "app", str(trace), str(samples()[0]), "--no-browser", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), process.stderr and process.stderr.read()
            yield address
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=30)
            assert process.returncode == 0, err
            assert "Traceback" not in out + err
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """A page that fails the test if it asks anyone but the dashboard, or if foreign text ran as code."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    asked: list[str] = []
    ran: list[str] = []

    def dialog(d: Any) -> None:
        ran.append(d.message)
        d.dismiss()

    page.on("request", lambda r: asked.append(r.url) if r.url.startswith("http") and not r.url.startswith(url) else None)
    page.on("dialog", dialog)
    yield page
    page.close()
    assert asked == []
    assert ran == []


def _load(page: Any, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("h1", timeout=30_000)
    page.wait_for_function(
        "() => !document.querySelector('[data-testid=stStatusWidget]') && !document.querySelector('[data-stale=true]')",
        timeout=30_000,
    )
    assert page.locator("[data-testid=stException]").count() == 0
    assert page.locator("[data-testid=stAlertContentError]").count() == 0
    assert page.locator("img[src=x]").count() == 0


def _charts(page: Any, least: int) -> None:
    page.wait_for_function(
        f"() => document.querySelectorAll('[data-testid=stVegaLiteChart] svg.marks').length >= {least}", timeout=30_000
    )
    sizes = page.evaluate(
        "() => [...document.querySelectorAll('[data-testid=stVegaLiteChart] svg.marks')]"
        ".map(c => [c.getBoundingClientRect().width, c.getBoundingClientRect().height])"
    )
    assert all(w > 200 and h > 40 for w, h in sizes), sizes


def _sees(page: Any, *texts: str) -> None:
    """Each text comes up on the page: Streamlit fetches the code of some elements only when it first shows one."""
    for text in texts:
        page.wait_for_function(
            "t => document.querySelector('[data-testid=stMain]').innerText.includes(t)", arg=text, timeout=30_000
        )


def test_overview(page: Any, url: str) -> None:
    _load(page, url)
    _charts(page, 2)
    _sees(
        page,
        "Coordination share",
        "Where the time goes",
        "12 of 12",
        "Recorded: measured on a live server",
        "<img src=x onerror",
    )
    assert page.locator("nav a, [data-testid=stSidebarNavLink]").count() >= 4


def test_time_zooms_where_one_drags(page: Any, url: str) -> None:
    _load(page, f"{url}/time")
    _charts(page, 3)
    _sees(page, "Requests in the server")
    whole = page.locator("[data-testid=stCaptionContainer]").first.inner_text()
    box = page.locator("[data-testid=stVegaLiteChart] svg.marks").first.bounding_box()
    middle = box["y"] + box["height"] / 3
    page.mouse.move(box["x"] + box["width"] * 0.3, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, middle, steps=6)
    page.mouse.up()
    page.wait_for_function(
        "t => document.querySelector('[data-testid=stCaptionContainer]').innerText !== t", arg=whole, timeout=20_000
    )
    page.get_by_role("button", name="Zoom in").click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('button')].some(b => b.innerText.includes('Back') && !b.disabled)", timeout=20_000
    )
    assert page.locator("[data-testid=stException]").count() == 0


def test_requests(page: Any, url: str) -> None:
    _load(page, f"{url}/requests")
    _charts(page, 3)
    _sees(
        page,
        "12 requests pass",
        "TTFT against prompt length",
        "From arrival to finish",
        "Beside it",
        "<script>alert(2)</script>",
    )


def test_compare(page: Any, url: str) -> None:
    _load(page, f"{url}/compare")
    assert "Compare" in page.inner_text("h1")


def test_a_request_log_explains_itself(page: Any, url: str) -> None:
    """The sample without times: chosen in the sidebar as a person does."""
    _load(page, url)
    page.locator("[data-testid=stSidebar] [data-testid=stSelectbox] input").click()
    page.get_by_role("option").nth(1).click()
    page.wait_for_function("() => !document.querySelector('h1').innerText.includes('hostile')", timeout=30_000)
    assert page.locator("[data-testid=stException]").count() == 0
