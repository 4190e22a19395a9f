"""Does what a step cost was measured on cover a what-if? A verdict, not a list of remarks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

from hoptrace.manifest import Server
from hoptrace.stepcost import StepCost
from hoptrace.stepcost_domain import BESIDE, Beyond, Domain

__all__ = ["COVERED", "HALF", "Coverage", "Verdict", "coverage", "coverage_of"]

COVERED = 0.01
"""Share of the step time that may rest on extrapolated costs in a what-if that counts as covered: were those costs wrong by half,
its times would still be right within half a percent, which is below every noise floor that was measured."""
HALF = 0.5
"""Above this share a what-if is not covered: most of its time is a guess."""

Verdict = Literal["covered", "partly", "not covered", "unknown"]

_LABELS = {
    "prefill_tokens": ("prompt tokens in a step", ""),
    "prefill_context_tokens": ("context before a chunk", " tokens"),
    "prefill_attention": ("pairs of positions in a prompt's attention", ""),
    "decode_requests": ("decoders in a step", ""),
    "decode_context_tokens": ("context of a step's decoders together", " tokens"),
    BESIDE: (BESIDE, ""),
}
# The setting of the captured server that bounds how far a probe can go.
_BOUNDS = {
    "decode_requests": ("max_sequences", "more sequences at once (--max-num-seqs, --parallel)"),
    "prefill_tokens": ("max_batched_tokens", "a larger token budget (--max-num-batched-tokens, --batch-size)"),
}


@dataclass(frozen=True)
class Coverage:
    """The verdict on one what-if.

    Attributes:
        verdict: *covered*: at most :data:`COVERED` of its step time rests on extrapolated costs; *partly*; *not covered*: more
            than :data:`HALF` of it; *unknown*: the step cost does not say what it was measured on (a roofline, constants).
        share: of the step time that rests on extrapolated costs; null where unknown.
        steps: of the what-if.
        beyond: the quantities that left what was measured, the dearest first.
        remedy: what would measure them, or null where there is nothing to measure.
    """

    verdict: Verdict
    share: float | None
    steps: int = 0
    beyond: tuple[Beyond, ...] = ()
    remedy: str | None = None

    def sentence(self) -> str:
        """The verdict in one or two sentences."""
        if self.share is None:
            return "Coverage unknown: the step cost does not say what it was measured on."
        if not self.beyond:
            return "Covered: every step lies within what the step cost was measured on."
        which = "; ".join(_said(b) for b in self.beyond[:3])
        more = f"; {len(self.beyond) - 3} more" if len(self.beyond) > 3 else ""
        head = {"covered": "Covered", "partly": "Partly covered", "not covered": "Not covered"}[self.verdict]
        return f"{head}: {_percent(self.share)} of the step time rests on extrapolated step costs ({which}{more})."

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and the manifest."""
        return {
            "verdict": self.verdict,
            "share_of_step_time": None if self.share is None else round(self.share, 6),
            "steps": self.steps,
            "beyond": [
                {"quantity": b.name, "label": _label(b.name), "asked": list(b.asked), "measured": list(b.seen),
                 "steps": b.steps, "step_ns": b.ns}
                for b in self.beyond
            ],
            "sentence": self.sentence(),
            "remedy": self.remedy,
        }  # fmt: skip


def coverage(domains: Iterable[Domain], server: Server | None = None) -> Coverage:
    """The verdict on a replay whose steps went through ``domains`` (one for each step cost; ``Recorder.domains``).

    Args:
        server: the captured one, whose settings bound what a probe of it can reach.
    """
    seen = list(domains)
    if not seen or not all(d.known for d in seen):
        return Coverage("unknown", None, sum(d.steps for d in seen))
    total, outside = (sum(d.step_ns[i] for d in seen) for i in (0, 1))
    merged: dict[str, Beyond] = {}
    for b in (b for d in seen for b in d.beyond()):
        merged[b.name] = _both(merged[b.name], b) if b.name in merged else b
    beyond = tuple(sorted(merged.values(), key=lambda b: (-b.ns, b.name)))
    share = outside / total if total > 0 else 0.0
    verdict: Verdict = "covered" if share <= COVERED else "partly" if share <= HALF else "not covered"
    return Coverage(verdict, share, sum(d.steps for d in seen), beyond, None if verdict == "covered" else _remedy(beyond, server))


def coverage_of(cost: StepCost, steps: pl.DataFrame, server: Server | None = None) -> Coverage:
    """The verdict on a what-if whose steps (rows of its table `steps`) all have one step cost."""
    domain = Domain(cost)
    domain.add(steps)
    return coverage([domain], server)


def _both(a: Beyond, b: Beyond) -> Beyond:
    """Of two step costs: asked for by either; measured is what both saw."""
    asked = min(a.asked[0], b.asked[0]), max(a.asked[1], b.asked[1])
    seen = max(a.seen[0], b.seen[0]), min(a.seen[1], b.seen[1])
    return Beyond(a.name, asked, seen, a.steps + b.steps, a.ns + b.ns)


def _label(name: str) -> str:
    return _LABELS.get(name, (name, ""))[0]


def _said(b: Beyond) -> str:
    if b.name == BESIDE:
        return "prompts beside decoders, never seen together"
    label, unit = _LABELS.get(b.name, (b.name, ""))
    if b.asked[1] > b.seen[1]:
        return f"{label}: up to {b.asked[1]:,}{unit} asked for, {b.seen[1]:,} measured"
    return f"{label}: down to {b.asked[0]:,}{unit} asked for, {b.seen[0]:,} measured"


def _percent(share: float) -> str:
    return "under 1 %" if share < 0.01 else f"{100 * share:.0f} %"


def _remedy(beyond: tuple[Beyond, ...], server: Server | None) -> str:
    """What `hoptrace calibrate --probe` would add, and what only another setting of the server can show."""
    within, first = [], []
    for b in beyond:
        setting, how = _BOUNDS.get(b.name, (None, ""))
        limit = getattr(server, setting) if server is not None and setting is not None else None
        if isinstance(limit, int) and b.asked[1] > limit:
            first.append(f"{how}, at least {b.asked[1]:,}")
        if b.name == BESIDE:
            within.append(BESIDE)
        elif b.asked[1] > b.seen[1]:
            within.append(f"{_label(b.name)} up to {b.asked[1]:,}")
        else:
            within.append(f"{_label(b.name)} from {b.asked[0]:,}")
    which = f"hoptrace calibrate --probe URL would measure {', '.join(within)}"
    if first:
        return f"Start the server with {' and '.join(first)}; then {which}."
    return f"{which}."
