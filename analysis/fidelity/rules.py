"""The gate of a fidelity study: ``e2e_p50>3%`` fails where that error is larger, either way."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hoptrace.analysis.compare.rules import Rule
from hoptrace.analysis.compare.rules import parse as _parse
from hoptrace.analysis.fidelity.study import Judged, Study
from hoptrace.comparison import METRICS, STATISTICS
from hoptrace.errors import UsageError

__all__ = ["Outcome", "gate", "gated", "parse"]

_HINT = "Write FIGURE>LIMIT or FIGURE<LIMIT, for example 'e2e_p50>3%', 'own.ttft_p95>8%', 'equal_steps<99%', 'wrong_signs>0'."
_SCOPES = ("own", "changed")
_RATES = {"output_tokens_per_s": "output tokens", "requests_per_s": "requests"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rule found in one policy. ``value``: errors and shares as a fraction, or null where it is unknown: that does not
    pass."""

    rule: str
    trace: str
    value: float | None
    failed: bool | None

    @property
    def passed(self) -> bool:
        return self.failed is False

    def as_dict(self) -> dict[str, Any]:
        value = None if self.value is None else round(self.value, 6)
        return {"rule": self.rule, "trace": self.trace, "value": value, "failed": self.failed, "passed": self.passed}


def parse(text: str) -> Rule:
    """Read one rule and check that there is such a figure, in that unit.

    Raises:
        UsageError: says what is wrong, and shows a right one.
    """
    try:
        rule = _parse(text)
    except UsageError as e:
        raise UsageError(e.message, hint=_HINT) from None
    _, name = _parted(rule.figure)
    if name not in _names():
        near = difflib.get_close_matches(name, _names(), n=1)
        raise UsageError(
            f"The rule {rule.text!r} names {rule.figure!r}, which is no figure of a fidelity study.",
            hint=f"Did you mean {near[0]!r}?" if near else _HINT,
        )
    if rule.unit != ("" if name == "wrong_signs" else "%"):
        what = "a plain number" if name == "wrong_signs" else "in %"
        raise UsageError(f"The rule {rule.text!r} limits {name!r}, which is {what}.", hint=_HINT)
    return rule


def gate(rules: Sequence[Rule], result: Study) -> list[Outcome]:
    """Judge each rule for each policy that it speaks of: ``own.`` in front for the base policy alone, ``changed.`` for the
    others, nothing for all (``wrong_signs`` and ``at_speed_``, which the base policy has not: the others).

    Raises:
        UsageError: a rule speaks of policies that the study has not.
    """
    found = []
    for rule in rules:
        scope, name = _parted(rule.figure)
        scope = "changed" if name.startswith(("wrong_signs", "at_speed_")) and scope is None else scope
        cases = [c for c in result.cases if scope is None or c.own == (scope == "own")]
        if not cases:
            raise UsageError(f"The rule {rule.text!r} speaks of changed policies, and there is none.", hint="Name B.trace too.")
        for case in cases:
            value = gated(case, name)
            failed = None if value is None else (value > rule.limit if rule.above else value < rule.limit)
            found.append(Outcome(rule.text, case.trace, value, failed))
    return found


def gated(case: Judged, name: str) -> float | None:
    """The figure of that name, errors without their sign: see docs/fidelity-command.md; null where it is unknown."""
    own = case.own_terms
    counts = {"steps": own.steps.count, "cached_tokens": own.cached_tokens, "preemptions": own.preemptions}
    if name in counts:
        return _size(counts[name].error_pct)
    shares = {
        "equal_steps": own.steps.equal_share,
        "alike_steps": own.steps.alike_share,
        "equal_cached_tokens": own.cached_equal_share,
        "first_token_order": None if own.first_tokens is None else own.first_tokens.share,
        "finish_order": None if own.finishes is None else own.finishes.share,
    }
    if name in shares:
        return shares[name]
    if name == "wrong_signs":
        return float(len(case.signs["wrong"]))
    which = next((p for p in ("raw", "at_speed") if name.startswith(p + "_")), "")
    rest = name.removeprefix(which + "_") if which else name
    metric, _, statistic = rest.rpartition("_")
    figure = case.figure("throughput", _RATES[rest]) if rest in _RATES else case.figure(metric, statistic)
    return _size({"raw": figure.raw.error_pct, "at_speed": figure.at_speed_pct}.get(which, figure.error_pct))


def _names() -> list[str]:
    errors = [*(f"{m}_{s}" for m in METRICS for s in STATISTICS), *_RATES]
    return [
        *errors, *(f"raw_{e}" for e in errors), *(f"at_speed_{e}" for e in errors), "steps", "cached_tokens", "preemptions",
        "equal_steps", "alike_steps", "equal_cached_tokens", "first_token_order", "finish_order", "wrong_signs",
    ]  # fmt: skip


def _parted(figure: str) -> tuple[str | None, str]:
    """own.e2e_p50 → own, e2e_p50; e2e.p50 → none, e2e_p50."""
    scope, dot, rest = figure.partition(".")
    if dot and scope in _SCOPES:
        return scope, rest.replace(".", "_")
    return None, figure.replace(".", "_")


def _size(pct: float | None) -> float | None:
    return None if pct is None else abs(pct) / 100
