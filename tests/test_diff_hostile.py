"""Traces of anything that the schema allows: a comparison refuses, or gives figures, and never breaks."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.memory import MemoryTrace
from support.rows import rows_of

from hoptrace.analysis.compare.diff import diff
from hoptrace.analysis.compare.diff_text import render
from hoptrace.errors import HoptraceError
from hoptrace.schema import table

_TABLES = ("requests", "stages", "tokens", "moves", "waits", "coverage")
tables = st.fixed_dictionaries({n: st.lists(rows_of(table(n), 4 if table(n).key else None), max_size=5) for n in _TABLES})


def required(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Only rows with what a writer would not do without."""
    need = [c.name for c in table(name).columns if c.required and c.name != "source"]
    return [r for r in rows if all(r.get(c) is not None for c in need)]


@given(tables, tables)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_anything_compares_or_is_refused_in_a_sentence(a: dict[str, Any], b: dict[str, Any]) -> None:
    traces = [MemoryTrace({n: required(n, rows) for n, rows in x.items()}) for x in (a, b)]
    try:
        d = diff(*traces, anyway=True)
    except HoptraceError as e:
        assert e.message.endswith(".")
        return
    json.dumps(d.as_dict(), allow_nan=False)
    render(d)
