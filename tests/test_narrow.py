"""The report on narrow terminals: nothing is cut off, and what stands in a trace steers no terminal."""

from __future__ import annotations

import io
import re
import shutil
from functools import cache
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.text import Text
from support.memory import MemoryTrace
from support.small import small_trace

import hoptrace
from hoptrace.analysis.latency.time_text import LOOK
from hoptrace.analysis.report import SECTIONS, Report, report
from hoptrace.analysis.report_text import print_report
from hoptrace.app.static_report import page
from hoptrace.cli.console import PlainConsole
from hoptrace.cli.report import command
from hoptrace.errors import EnvironmentProblem, UsageError
from hoptrace.manifest import Manifest, Server
from hoptrace.printable import printable

REAL = Path(__file__).parent / "data" / "vllm_traces" / "preempted.trace"
HOSTILE = "\x1b[31mred\x1b]0;title\x07\u202eback\x9b2J"


@cache
def real() -> Report:
    return report(hoptrace.open(REAL))


def shown(found: Report, width: int, *sections: str, console: type[Console] = Console) -> str:
    out = io.StringIO()
    print_report(found, console(file=out, width=width, color_system=None, highlight=False), sections=sections or None)
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_figure_is_lost_where_it_is_narrow(width: int) -> None:
    for name in SECTIONS:
        wide, narrow = (shown(real(), w, name) for w in (240, width))
        figures = {word for word in wide.split() if re.search(r"\d", word)}
        # Broken between characters at worst, as long words are.
        joined = "".join(narrow.split())
        lost = {f for f in figures - set(narrow.split()) if f.strip("().,;:") not in joined}
        if width >= 80:
            assert not lost, (name, sorted(lost))
        assert all(len(line) <= width for line in narrow.splitlines()), name


def test_tables_keep_their_first_column() -> None:
    for name in ("stranding", "reversibility"):
        rows = [line for line in shown(real(), 80, name).splitlines() if line.startswith(("vllm  ", "KV of vllm", "role both"))]
        assert len(rows) >= 2, name


@pytest.mark.parametrize("width", [60, 70, 80, 110, 200])
def test_bars_are_scaled_and_never_cut(width: int) -> None:
    signs = {sign: klass for klass, (sign, _) in LOOK.items()}
    bars = [x for x in shown(real(), width, "time").splitlines() if x.startswith(("mean ", "around p"))]
    drawn = [[c for c in line if c in signs] for line in bars]
    assert len(drawn) == 4 and len({len(b) for b in drawn}) == 1 and 10 <= len(drawn[0]) <= 50
    for bar, composition in zip(drawn, real().accounting.compositions.values(), strict=True):
        for sign, klass in signs.items():
            share = composition.class_shares[klass] or 0.0
            assert abs(bar.count(sign) / len(bar) - share) <= 1.01 / len(bar), (klass, width)


def test_the_legend_is_whole() -> None:
    for width in (60, 80, 110):
        text = shown(real(), width)
        assert all(f"{LOOK[k][0]} {k}" in text for k in ("work", "coordination", "capacity"))


def hostile() -> MemoryTrace:
    """The small trace, its server named by somebody who would like to run your terminal."""
    base = small_trace()
    named = {
        t: f.with_columns(pl.lit(HOSTILE).alias("server")).to_dicts() if "server" in f.columns else f.to_dicts()
        for t, f in base._frames.items()
    }
    server = Server(name=HOSTILE, engine=HOSTILE, model=HOSTILE, max_sequences=2)
    return MemoryTrace(named, Manifest(origin="recorded", servers=[server], closed=True), name=HOSTILE.replace("/", ""))


def test_a_trace_gives_a_terminal_no_commands() -> None:
    found = report(hostile())
    text = shown(found, 110, *SECTIONS, console=PlainConsole)
    assert "red" in text and not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_its_own_colours_reach_the_terminal() -> None:
    out = io.StringIO()
    PlainConsole(file=out, force_terminal=True, color_system="standard", width=80).print(Text("a\x1b[2Jb", style="red"))
    assert out.getvalue() == "\x1b[31ma\N{REPLACEMENT CHARACTER}[2Jb\x1b[0m\n"


def test_a_page_of_names_with_control_characters() -> None:
    # vl-convert ends the whole process where such a character reaches its SVG.
    text = page(report(hostile()), hostile())
    assert "red" in text and not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_what_is_text_stays() -> None:
    text = "日本語 émoji🚀 ↔ naïve\ttab\nline"
    assert printable(text) == text
    assert printable("a\x00\ud800b") == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"


def test_a_page_replaces_no_other_file(tmp_path: Path) -> None:
    trace = tmp_path / "t.trace"
    shutil.copytree(REAL, trace)
    notes = tmp_path / "notes.md"
    notes.write_text("precious")
    done = CliRunner().invoke(command, [str(trace), "--html", str(notes)])
    assert isinstance(done.exception, UsageError) and notes.read_text() == "precious"
    done = CliRunner().invoke(command, [str(trace), "--html", str(tmp_path / "none" / "x.html")])
    assert isinstance(done.exception, EnvironmentProblem)
    earlier = tmp_path / "run.html"
    earlier.write_text("<!doctype html><title>old: hoptrace report</title>")
    done = CliRunner().invoke(command, [str(trace), "--html", str(earlier), "-q"])
    assert done.exit_code == 0 and earlier.stat().st_size > 100_000


def test_times_that_cannot_be_are_told() -> None:
    trace = MemoryTrace(
        {"requests": [{"request": i, "arrival_ns": 10**12, "received_ns": 10**12, "finish_ns": 5} for i in range(3)]}
    )
    found = report(trace)
    assert "3 finished requests end before arriving" in found.headline
    assert found.warnings and found.warnings[0].startswith("3 finished requests end before arriving")
