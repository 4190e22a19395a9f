"""docs/fidelity.md is what its generator makes of the figures that are kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

RESULTS = ROOT / "benchmarks" / "fidelity" / "results"


def test_the_page_is_made_of_the_kept_figures() -> None:
    import fidelity_docs

    made = fidelity_docs.page(fidelity_docs.TEMPLATE.read_text(), fidelity_docs.results())
    assert fidelity_docs.PAGE.read_text() == made, "run: python benchmarks/fidelity_docs.py"


def test_a_reference_that_is_not_met_shows() -> None:
    from support.fidelity_tables import page

    row = {"reference": "R", "what": "w", "cases": 1, "compared": 1000, "things": "steps", "equal": 999, "worst": "x"}
    assert "| R | w | 1,000 steps | 999; x |" in page("{{references}}", {"references": [row]})
    missed = {"id": "P0", "setting": "s", "rows": [{"what": "a", "published": "1", "ours": "2"}], "met": False, "why": "b"}
    assert "| **P0** s | a | 1 | 2 | **missed** |" in page("{{published}}", {"published": [missed]})
    assert page("a {{tier1}} b", {}).endswith("a *Not measured yet.* b")
    with pytest.raises(KeyError):
        page("{{nonsense}}", {"nonsense": [1]})


def test_every_reference_and_check_is_met() -> None:
    references = json.loads((RESULTS / "references.json").read_text())
    assert len(references) >= 18
    assert [r for r in references if r["equal"] != r["compared"]] == []
    assert [c["id"] for c in json.loads((RESULTS / "published.json").read_text()) if not c["met"]] == []
