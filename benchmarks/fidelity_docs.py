"""Writes docs/fidelity.md from what was measured: ``python benchmarks/fidelity_docs.py [--page]``.

What needs no server is measured again first (half a minute; not with ``--page``): the agreement with reference simulators and the
published checks. Errors against real servers are measured by ``benchmarks/fidelity/run.py``; its tables, tier1.json and
tier2.json, are kept in benchmarks/fidelity/results/ as all figures of the page are. The prose is support/fidelity_page.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.fidelity_tables import page

_ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "fidelity" / "results"
TEMPLATE = Path(__file__).parent / "support" / "fidelity_page.md"
PAGE = _ROOT / "docs" / "fidelity.md"


def results() -> dict[str, Any]:
    """What has been measured, by name of the file."""
    return {p.stem: json.loads(p.read_text()) for p in sorted(RESULTS.glob("*.json"))}


def _run() -> None:
    from published import CHECKS
    from support.agreement import agreements

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    _keep("references", [a.as_dict() for a in agreements(say)])
    published = []
    for name, check in CHECKS.items():
        say(f"published check {name}")
        published.append(check().as_dict())
    _keep("published", published)


def _keep(name: str, rows: list[dict[str, Any]]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def main(arguments: list[str]) -> int:
    """Write the page."""
    if set(arguments) - {"--page"}:
        print(__doc__, file=sys.stderr)
        return 2
    if not arguments:
        _run()
    PAGE.write_text(page(TEMPLATE.read_text(), results()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
