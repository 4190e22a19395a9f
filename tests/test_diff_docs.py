"""docs/diff.md names what there is: every field of the JSON, every figure, every question and answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.small import small_trace

from hoptrace.analysis.compare.diff import diff
from hoptrace.analysis.compare.diff_figures import could_be
from hoptrace.analysis.compare.rules import parse
from hoptrace.analysis.compare.verdict import QUESTIONS
from hoptrace.analysis.compare.verdict_terms import TERMS

DOC = (Path(__file__).parent.parent / "docs" / "diff.md").read_text(encoding="utf-8")
A, B, A2 = small_trace(name="a"), small_trace(slower_ms=3, name="b"), small_trace(slower_ms=1, name="a2")


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {k for v in value.values() for k in keys(v)}
    return {k for v in value for k in keys(v)} if isinstance(value, list) else set()


def test_every_field_and_every_figure_is_documented() -> None:
    d = diff(A, B, repeats_of_a=[A2])
    found = d.as_dict()
    values = {"proxy", "intended", "received", "schema"}  # names of what is seen, not fields
    told = set(re.findall(r"[a-z_]+", DOC))
    assert keys(found) - told - values == set()
    # Each figure there is could be in some trace, so that a rule on it is no misspelling.
    unknown = [n for n in d.changes if not could_be(n)]
    assert unknown == []
    for question in QUESTIONS.values():
        assert question in DOC
    assert {t.kind for t in TERMS} == {"comparison", "verdict"}


def test_the_rules_in_it_can_be_read() -> None:
    rules = re.findall(r"--fail-on '([^']+)'", DOC)
    assert len(rules) == 2 and all(parse(r) for r in rules)
