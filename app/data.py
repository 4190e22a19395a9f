"""What the pages show, computed once per state of a trace and kept: pages ask here and nowhere else.

A cached value is shared between sessions and reruns; no page changes one. (Streamlit leaves arguments whose name begins with an
underscore out of the key, so the stamp is called ``version``.)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import streamlit as st

import hoptrace
from hoptrace.analysis import report as report_module
from hoptrace.analysis import request_detail
from hoptrace.analysis import timeline as timeline_module
from hoptrace.analysis.compare import diff as diff_module
from hoptrace.analysis.compare.diff import Diff
from hoptrace.analysis.report import Report
from hoptrace.analysis.request_detail import Detail
from hoptrace.analysis.timeline import Series, Timeline
from hoptrace.app.fidelity_run import run_study
from hoptrace.app.traces import labels, resolve
from hoptrace.manifest import FILE
from hoptrace.reader import Trace

__all__ = [
    "counter_bins",
    "counter_series",
    "detail",
    "diff",
    "extent",
    "given",
    "name_of",
    "opened",
    "report",
    "request_table",
    "selected",
    "stamp",
    "study",
    "timeline",
]

_KEPT = 16


def given() -> list[str]:
    """Paths of the traces that the dashboard was started with: the arguments behind ``--``, else the samples."""
    return [str(p) for p in resolve(sys.argv[1:])]


def name_of(path: str) -> str:
    """The short name of one of the given traces."""
    return labels([Path(p) for p in given()]).get(Path(path), Path(path).name)


def stamp(path: str) -> int:
    """A number that changes when the trace does: the manifest's time of change, and what its journals have grown to."""
    folder = Path(path)
    total = 0
    with contextlib.suppress(OSError):
        total = (folder / FILE).stat().st_mtime_ns
        # A trace that is being recorded grows in its journals, and the manifest stays as it is.
        total += sum(p.stat().st_size for p in folder.glob("*/*.journal"))
    return total


def opened(path: str) -> Trace:
    """The trace at ``path``. InputError as `hoptrace.open`."""
    return hoptrace.open(path)


def selected() -> str:
    """The path chosen in the sidebar."""
    paths = given()
    choice = st.session_state.get("trace")
    return choice if choice in paths else paths[0]


# -- figures ----------------------------------------------------------------------------------------------------------


def extent(path: str) -> tuple[int, int] | None:
    """First and last instant of the trace."""
    return _extent(path, stamp(path))


@st.cache_data(max_entries=_KEPT, show_spinner=False)
def _extent(path: str, version: int) -> tuple[int, int] | None:
    return timeline_module.extent(opened(path))


def timeline(path: str, from_ns: int, to_ns: int) -> Timeline:
    """The series of a window."""
    return _timeline(path, stamp(path), from_ns, to_ns)


@st.cache_resource(max_entries=_KEPT, show_spinner="Reading the series …")
def _timeline(path: str, version: int, from_ns: int, to_ns: int) -> Timeline:
    return timeline_module.timeline(opened(path), from_ns, to_ns)


def counter_series(path: str) -> list[Series]:
    """The counters there are."""
    return _counter_series(path, stamp(path))


@st.cache_data(max_entries=_KEPT, show_spinner=False)
def _counter_series(path: str, version: int) -> list[Series]:
    return timeline_module.counter_series(opened(path))


def counter_bins(path: str, series: Sequence[Series], from_ns: int, to_ns: int) -> pl.DataFrame:
    """Some counters in a window."""
    return _counter_bins(path, stamp(path), tuple(series), from_ns, to_ns)


@st.cache_resource(max_entries=_KEPT, show_spinner="Reading the counters …")
def _counter_bins(path: str, version: int, series: tuple[Series, ...], from_ns: int, to_ns: int) -> pl.DataFrame:
    return timeline_module.counter_bins(opened(path), series, from_ns, to_ns)


def report(path: str) -> Report:
    """Headline, latencies, accounting, ledger, coordination, and what cannot be seen."""
    return _report(path, stamp(path))


@st.cache_resource(max_entries=_KEPT, show_spinner="Accounting for the time …")
def _report(path: str, version: int) -> Report:
    return report_module.report(opened(path))


def request_table(path: str) -> pl.DataFrame:
    """All requests with their parts."""
    return _request_table(path, stamp(path))


@st.cache_resource(max_entries=_KEPT, show_spinner="Reading the requests …")
def _request_table(path: str, version: int) -> pl.DataFrame:
    return request_detail.request_table(opened(path), _report(path, version).accounting)


def detail(path: str, request: int) -> Detail:
    """One request in detail."""
    return _detail(path, stamp(path), request)


@st.cache_resource(max_entries=4 * _KEPT, show_spinner=False)
def _detail(path: str, version: int, request: int) -> Detail:
    return request_detail.detail(opened(path), _report(path, version).accounting, _request_table(path, version), request)


def diff(a: str, b: str) -> Diff:
    """Two traces compared, even if their work differs."""
    return _diff(a, stamp(a), b, stamp(b))


@st.cache_resource(max_entries=_KEPT, show_spinner="Comparing …")
def _diff(a: str, version_a: int, b: str, version_b: int) -> Diff:
    return diff_module.diff(opened(a), opened(b), anyway=True)


def study(a: str, others: Sequence[str], repeats: Sequence[str], truth: bool) -> dict[str, Any]:
    """A fidelity study, as its JSON has it."""
    runs = (a, *others, *repeats)
    return _study(a, tuple(others), tuple(repeats), truth, tuple(stamp(p) for p in runs))


@st.cache_data(max_entries=_KEPT, show_spinner="Replaying and comparing …")
def _study(a: str, others: tuple[str, ...], repeats: tuple[str, ...], truth: bool, version: tuple[int, ...]) -> dict[str, Any]:
    return run_study(a, others, repeats, truth=truth)
