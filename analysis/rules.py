"""Rules of the regression gate: ``ttft.p95>10%``."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from hoptrace.analysis.diff import Change, Diff
from hoptrace.errors import UsageError

__all__ = ["Outcome", "Rule", "check", "parse"]

_RULE = re.compile(r"^\s*([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)?)\s*(<|>)\s*([+-]?\d+(?:\.\d+)?)\s*(%|ns|us|µs|ms|s|)\s*$")
_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "": 1.0}


@dataclass(frozen=True, slots=True)
class Rule:
    """Fails when the change from A to B is above (or below) ``limit``: relative with ``percent``, else B − A (times in ns)."""

    text: str
    figure: str
    above: bool
    limit: float
    percent: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rule found. ``failed`` is null where the figure is unknown in one of the traces."""

    rule: Rule
    change: Change
    failed: bool | None

    def as_dict(self) -> dict[str, object]:
        return {"rule": self.rule.text, "failed": self.failed, "relative": self.change.relative, "change": self.change.change}


def parse(text: str) -> Rule:
    """Read one rule. UsageError says what is wrong and shows a right one."""
    m = _RULE.match(text)
    if m is None:
        raise UsageError(
            f"The rule {text!r} cannot be read.",
            hint="Write FIGURE>LIMIT or FIGURE<LIMIT, for example 'ttft.p95>10%', 'e2e.mean>50ms', 'output_tokens_per_s<-5%'.",
        )
    figure, sign, number, unit = m.groups()
    scale = 0.01 if unit == "%" else _NS[unit]
    return Rule(text.strip(), figure, sign == ">", float(number) * scale, unit == "%")


def check(rules: list[Rule], result: Diff, *, beyond_noise: bool = False) -> list[Outcome]:
    """Judge the rules. With ``beyond_noise`` a change within noise fails none.

    Raises:
        UsageError: a rule names a figure that the comparison does not have; names the nearest.
    """
    known = result.changes
    out = []
    for rule in rules:
        if rule.figure not in known:
            near = difflib.get_close_matches(rule.figure, known, n=1)
            raise UsageError(
                f"The rule {rule.text!r} names {rule.figure!r}, which is no figure of this comparison.",
                hint=f"Did you mean {near[0]!r}?" if near else "`hoptrace diff A B --json` lists them.",
            )
        change = known[rule.figure]
        value = change.relative if rule.percent else change.change
        failed = None if value is None else (value > rule.limit if rule.above else value < rule.limit)
        if value is None and change.a == 0 and change.b is not None and rule.percent:
            failed = rule.above  # from nothing to something is more than any percentage
        if failed and beyond_noise and change.within_noise:
            failed = False
        out.append(Outcome(rule, change, failed))
    return out
