"""docs/metrics.md is what the code says, every query in it runs, and those of the metrics give what the report shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hoptrace
from hoptrace.analysis.metrics_docs import markdown
from hoptrace.analysis.moves.ledger import ledger
from hoptrace.analysis.terms import terms
from hoptrace.field_metrics import FIELD_METRICS, TIMES, field_metrics
from hoptrace.metrics import METRICS, summary
from hoptrace.samples import sample

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"
TRACES = [Path(__file__).parent / "data" / "vllm_traces" / "preempted.trace", Path(sample("llamacpp-four-slots"))]
TEXT = DOCS.read_text(encoding="utf-8")
QUERIES = dict(re.findall(r"### (\w+)\n(?:(?!### ).)*?```sql\n(.*?)\n```", TEXT, re.S))


def test_the_file_is_what_the_code_says() -> None:
    assert markdown() == TEXT, "python -m hoptrace.analysis.metrics_docs > docs/metrics.md"


def test_every_figure_is_in_it_once() -> None:
    headings = re.findall(r"^### (.+)$", TEXT, re.M)
    assert headings == list(terms()) and len(set(headings)) == len(headings)
    assert set(QUERIES) == {t.name for t in terms().values() if t.sql}


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
@pytest.mark.parametrize("name", QUERIES)
def test_every_query_runs(name: str, path: Path) -> None:
    assert hoptrace.open(path).sql(QUERIES[name]).width > 0


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_the_queries_give_what_python_gives(path: Path) -> None:
    trace = hoptrace.open(path)
    s, f, book = summary(trace), field_metrics(trace), ledger(trace)
    got = {name: trace.sql(QUERIES[name]).row(0, named=True) for name in QUERIES if terms()[name].kind == "metric"}
    for name, found in s.items():
        assert got[name] == found.as_dict(), name
    for name in TIMES:
        assert got[name] == f.times[name].as_dict(), name
    assert got["itl_chunk"] == f.itl_chunk.as_dict()
    for name in ("output_tokens_per_s", "requests_per_s", "failed", "unfinished", "itl_left_out"):
        assert got[name]["value"] == pytest.approx(getattr(s, name)), name
    assert got["total_tokens_per_s"]["value"] == pytest.approx(f.total_tokens_per_s)
    assert got["preemptions"]["value"] == f.preemption.preemptions
    assert got["preempted_requests"]["value"] == f.preemption.requests
    assert got["draft_acceptance"]["value"] == f.drafts.acceptance
    assert got["cached_token_rate"]["value"] == pytest.approx(book.reuse.share)
    assert got["prefix_hit_by_tier"] == book.reuse.by_tier
    assert got["resumed_tokens"]["value"] == book.reuse.resumed_tokens
    # goodput has a test of its own, with other limits: test_field_metrics.py
    cache = {"prefix_hit_by_tier", "cached_token_rate", "resumed_tokens"}
    assert set(got) == set(METRICS) | set(FIELD_METRICS) | cache
