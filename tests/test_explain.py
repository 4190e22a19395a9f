"""`hoptrace explain`: every figure has a definition, each SQL runs, and a near miss is met with the right name."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from support.small import small_trace

from hoptrace.analysis.latency.accounting import account
from hoptrace.analysis.latency.parts import CLASSES, PART_OF_WAIT, PARTS, part
from hoptrace.analysis.terms import find, terms
from hoptrace.cli.explain import command
from hoptrace.errors import UsageError
from hoptrace.metrics import METRICS
from hoptrace.schema import WAIT_KINDS


def test_every_metric_and_every_part_is_explained() -> None:
    known = terms()
    assert set(METRICS) | {p.name for p in PARTS} | {c.replace(" ", "_") for c in CLASSES} <= set(known)
    for t in known.values():
        assert t.doc.endswith((".", ";")) and t.formula and t.title


def test_every_wait_has_a_part_and_every_part_a_class() -> None:
    assert set(PART_OF_WAIT) == set(WAIT_KINDS)
    names = [p.name for p in PARTS]
    assert set(PART_OF_WAIT.values()) <= set(names) and len(set(names)) == len(names)
    assert {p.klass for p in PARTS} == set(CLASSES)
    assert part("delivery_ns").klass == "coordination"


def test_the_parts_are_the_columns_of_the_accounting() -> None:
    assert account(small_trace()).parts.columns[4:] == [p.column for p in PARTS]


@pytest.mark.parametrize("name", [t.name for t in terms().values() if t.sql])
def test_the_sql_runs(name: str) -> None:
    assert small_trace().sql(terms()[name].sql).width > 0


def test_names_are_found_as_people_write_them() -> None:
    assert find("TTFT").name == "ttft"
    assert find("queue_kv_ns").name == "queue_kv"
    assert find("Semantic density").name == "semantic_density"
    assert find("repeated work").kind == "class of latency"
    assert find("queue, with room").name == "queue_room"


def test_a_near_miss() -> None:
    with pytest.raises(UsageError, match="Did you mean 'semantic_density'"):
        find("semantic_densty")
    with pytest.raises(UsageError, match="Run `hoptrace explain` for the list"):
        find("zzzzzzzz")


def test_the_command() -> None:
    listed = CliRunner().invoke(command, []).stdout
    assert all(f"  {name} " in listed for name in terms())
    one = CliRunner().invoke(command, ["ttft"]).stdout
    assert "Formula: first_token_ns − arrival_ns" in one and "quantile_cont" in one
    assert json.loads(CliRunner().invoke(command, ["ttft", "--json"]).stdout)["name"] == "ttft"
    assert len(json.loads(CliRunner().invoke(command, ["--json"]).stdout)) == len(terms())
