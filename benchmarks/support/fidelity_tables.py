"""The tables of docs/fidelity.md, made of what was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.fidelity_servers import tier1, tier2

__all__ = ["page"]

_HEAD = (
    "<!-- Made by `python benchmarks/fidelity_docs.py` from benchmarks/fidelity/results and benchmarks/support/fidelity_page.md: "
    "change those. -->\n\n"
)


def page(template: str, results: dict[str, Any]) -> str:
    """The page: the template with each ``{{name}}`` replaced by its table, or by a sentence where nothing was measured.

    Raises:
        KeyError: the template asks for a table that does not exist.
    """
    tables: dict[str, Callable[[Any], str]] = {
        "references": _references, "published": _published, "tier1": tier1, "tier2": tier2,
    }  # fmt: skip
    pieces = template.split("{{")
    made = [_HEAD, pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        there = results.get(name)
        made += [tables[name](there) if there else "*Not measured yet.*", rest]
    return "".join(made)


def _references(rows: list[dict[str, Any]]) -> str:
    lines = ["| reference | what it shows | compared | equal |", "| --- | --- | --- | --- |"]
    for r in rows:
        cases = f", {r['cases']} scenarios" if r["cases"] > 1 else ""
        equal = "all" if r["equal"] == r["compared"] else f"{r['equal']:,}"
        worst = f"; {r['worst']}" if r["worst"] else ""
        lines.append(f"| {r['reference']} | {r['what']} | {r['compared']:,} {r['things']}{cases} | {equal}{worst} |")
    return "\n".join(lines)


def _published(rows: list[dict[str, Any]]) -> str:
    lines = ["| check | figure | published | replay | |", "| --- | --- | --- | --- | --- |"]
    for check in rows:
        for i, row in enumerate(check["rows"]):
            name = f"**{check['id']}** {check['setting']}" if i == 0 else ""
            verdict = ("met" if check["met"] else "**missed**") if i == 0 else ""
            lines.append(f"| {name} | {row['what']} | {row['published']} | {row['ours']} | {verdict} |")
        if check["why"]:
            lines.append(f"| | {check['why']} | | | |")
    return "\n".join(lines)
