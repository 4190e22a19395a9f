"""Tables of the errors against real servers: tier 1 (modelled steps) and tier 2 (real compute)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "fidelity"))

from harness.table_text import markdown

__all__ = ["tier1", "tier2"]

_DISTURBED = 0.3
"""Share of the servers' cores that others took above which times say little (recipes/tier1.toml); who is in which step does."""
_STATISTICS = ("mean", "p50", "p95")


def tier1(found: dict[str, Any]) -> str:
    """Real scheduler, stated step times: ``fidelity-tier1/1`` as benchmarks/fidelity/tier1.py writes it."""
    heads = ["policy", "requests", "steps", "equal steps", "cached tokens", "preemptions", "E2E %", "TPOT %", "TTFT %", "others"]
    lines = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for r in found["rows"]:
        forced, share = r["forced"], r["gauges"]["foreign_share"]
        disturbed = share > _DISTURBED
        name = r["policy"] + ("" if r["cell"] == "one-server" else f" ({r['cell']})")
        counts = forced["preemptions"]
        cells = [
            name, f"{r['requests']:,}", f"{r['steps']:,}", _all(forced["equal_steps_share"]), _all(forced["cached_equal_share"]),
            f"{counts['observed']}, {counts['predicted']}", *(_errors(r, m) for m in ("e2e", "tpot", "ttft")),
            f"{share:.0%}{' *disturbed*' if disturbed else ''}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    noise = found["noise_pct"]
    floor = "; ".join(f"{m.upper()} {_three(noise[m])}" for m in ("e2e", "tpot", "ttft") if m in noise)
    return "\n".join([
        *lines, "",
        "Equal steps, cached tokens, preemptions (observed, predicted): with the arrival at the engine and the start and end of "
        "steps as recorded, so that the scheduler alone decides. Errors of mean, p50 and p95, calibrated on the base run that "
        "was disturbed least, mean of eight seeds. Others: share of the servers' cores that other processes took; above 30 % "
        f"times say little (*disturbed*). Noise floor, base against base: {floor} %.",
    ])  # fmt: skip


def _all(share: float | None) -> str:
    return "–" if share is None else "100 %" if share == 1 else f"{100 * share:.2f} %"


def _errors(row: dict[str, Any], metric: str) -> str:
    return " / ".join(f"{row['error_pct'][metric][s]['mean']:+.1f}" for s in _STATISTICS)


def _three(of: dict[str, Any]) -> str:
    return " / ".join(f"{of[s]['median']:.1f}" for s in _STATISTICS)


def tier2(found: dict[str, Any]) -> str:
    """Real compute: ``fidelity-cells/1`` as the harness writes it, a level deeper in the page."""
    return markdown(found).strip().replace("\n## ", "\n### ").replace("## ", "### ", 1)
