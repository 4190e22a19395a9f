"""docs/report.md documents every key that `hoptrace report --json` prints, and no key that it never prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.hardware import hardware_trace
from support.small import small_trace

import hoptrace
from hoptrace.analysis.layers.ceilings import Ceiling
from hoptrace.analysis.report import report
from hoptrace.samples import sample
from hoptrace.slo import parse_slo

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data" / "vllm_traces"
# What no trace here has: a link whose data took another wire, several KV spaces, a platform graph …
NEVER_SEEN = {
    "ledger.elsewhere[]",
    "stranding.pool.*",
    "stranding.platform[].*",
    "ledger.steps.missing[]",
    "field.notes[]",
    "ledger.notes[]",
    "layers.warnings[]",
}


def patterns() -> list[list[str]]:
    """Rows of the table of keys, each the patterns of its first column with `{a, b}` written out."""
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8").split("| keys | are |")[1]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [[one for span in re.findall(r"`([^`]+)`", row) for one in spread(span)] for row in rows]


def spread(pattern: str) -> list[str]:
    found = re.search(r"\{([^}]+)\}", pattern)
    if not found:
        return [pattern]
    return [x for name in found[1].split(",") for x in spread(pattern[: found.start()] + name.strip() + pattern[found.end() :])]


def regex(pattern: str) -> re.Pattern[str]:
    out = []
    for part in pattern.split("."):
        name = part.removesuffix("[]")
        word = ".+" if name == "*" or re.fullmatch(r"[A-Z]+", name) else re.escape(name)
        out.append(word + (r"\[\]" if part.endswith("[]") else ""))
    return re.compile(r"\.".join(out))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, bool]]:
    """Paths of what is no object and no list; (path, true) for null and what is empty: more may stand below it elsewhere."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from leaves(inner, f"{path}[]")
    else:
        yield path, value is None or value in ({}, [])


@cache
def printed() -> dict[str, bool]:
    traces = [hoptrace.open(DATA / "preempted.trace"), hoptrace.open(sample("azure-2023-conv")), small_trace(), hardware_trace()]
    slo, ceiling = parse_slo("ttft=1s"), Ceiling("host", "with host cost zero", e2e=2.0)
    rates = {"name": "toy", "flops_per_s": 1e14, "memory_bytes_per_s": 1e12}
    out: dict[str, bool] = {}
    for trace in traces:
        for path, empty in leaves(report(trace, slo=slo, ceilings=[ceiling], platform=rates).as_dict()):
            out[path] = out.get(path, True) and empty
    return out


def test_every_key_is_documented() -> None:
    known = [p for row in patterns() for p in row]
    exact = [regex(p) for p in known]
    undocumented = [
        path
        for path, empty in printed().items()
        if not any(r.fullmatch(path) for r in exact)
        and not (empty and any(p.startswith((f"{path}.", f"{path}[]")) for p in known))
        and not (empty and any(regex(p.rsplit(".", 1)[0]).fullmatch(path) for p in known))
    ]
    assert undocumented == []


@pytest.mark.parametrize("row", patterns(), ids=lambda row: row[0])
def test_every_documented_key_is_printed(row: list[str]) -> None:
    for pattern in row:
        r = regex(pattern)
        seen = any(r.fullmatch(path) for path in printed()) or any(
            r.fullmatch(f"{p}[]") for p, empty in printed().items() if empty
        )
        assert seen or pattern in NEVER_SEEN, pattern


def test_an_undocumented_key_would_be_seen() -> None:
    known = [regex(p) for row in patterns() for p in row]
    assert not any(r.fullmatch("metrics.surprise") or r.fullmatch("ledger.rows[].surprise") for r in known)
    assert list(leaves({"a": [{"b": 1}, {}], "c": None})) == [("a[].b", False), ("a[]", True), ("c", True)]
