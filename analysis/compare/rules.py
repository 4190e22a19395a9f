"""Rules of the regression gate: ``ttft_p95>+5%``."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from hoptrace.analysis.compare.diff import Diff
from hoptrace.analysis.compare.diff_change import Change
from hoptrace.analysis.compare.diff_figures import could_be
from hoptrace.errors import UsageError

__all__ = ["Outcome", "Rule", "check", "parse"]

_RULE = re.compile(r"^\s*(\S.*?)\s*(<|>)\s*([+-]?\d+(?:\.\d+)?)\s*(%|pp|ns|us|µs|ms|s|B|KiB|MiB|GiB|)\s*$")
_NAME = re.compile(r"^[a-z][a-z0-9_]*(\.[^\s<>]+)?$|^bytes_per_token\[[^<>]+\]$")
_STAT = re.compile(r"_(mean|p50|p95|p99)$")
_SCALE = {
    "%": 0.01, "pp": 0.01, "ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "": 1.0, "B": 1.0, "KiB": 1024.0,
    "MiB": 1024.0**2, "GiB": 1024.0**3,
}  # fmt: skip
# Which units a figure of a unit can be limited in, besides % (relative). Other figures are limited by a plain number.
_UNITS = {"ns": ("ns", "us", "µs", "ms", "s"), "bytes": ("B", "KiB", "MiB", "GiB"), "share": ("pp",)}


@dataclass(frozen=True, slots=True)
class Rule:
    """Fails when the change from A to B is above (or below) ``limit``: relative with ``percent``, else B − A in the figure's
    own unit (times in ns, shares 0 to 1). ``figure``: the name as the rule wrote it. ``unit``: as the rule wrote it."""

    text: str
    figure: str
    above: bool
    limit: float
    percent: bool
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rule found. ``failed`` is null where the figure is unknown in one of the traces: that does not pass.

    ``change`` is null where neither trace has the figure.
    """

    rule: Rule
    change: Change | None
    failed: bool | None

    @property
    def passed(self) -> bool:
        return self.failed is False

    def as_dict(self) -> dict[str, object]:
        c = self.change
        return {
            "rule": self.rule.text,
            "figure": self.rule.figure if c is None else c.name,
            "failed": self.failed,
            "passed": self.passed,
            "relative": None if c is None else c.relative,
            "change": None if c is None else c.change,
            "within_noise": None if c is None else c.within_noise,
        }


def parse(text: str) -> Rule:
    """Read one rule. UsageError says what is wrong and shows a right one."""
    m = _RULE.match(text)
    if m is None or not _NAME.match(m.group(1)):
        raise UsageError(
            f"The rule {text!r} cannot be read.",
            hint="Write FIGURE>LIMIT or FIGURE<LIMIT, for example 'ttft_p95>+5%', 'e2e.mean>50ms', 'coordination_share>+2pp', "
            "'output_tokens_per_s<-5%'.",
        )
    figure, sign, number, unit = m.groups()
    return Rule(text.strip(), figure, sign == ">", float(number) * _SCALE[unit], unit == "%", unit)


def check(rules: list[Rule], result: Diff, *, beyond_noise: bool = False) -> list[Outcome]:
    """Judge the rules. With ``beyond_noise`` a change within noise fails none.

    Raises:
        UsageError: a rule names a figure that no comparison has, with the nearest; or limits one in another's unit.
    """
    known = result.changes
    out = []
    for rule in rules:
        change = known.get(rule.figure) or known.get(_dotted(rule.figure))
        if change is None:
            if not could_be(rule.figure) and not could_be(_dotted(rule.figure)):
                raise _no_figure(rule, known)
            out.append(Outcome(rule, None, None))
            continue
        _check_unit(rule, change)
        value = change.relative if rule.percent else change.change
        failed = None if value is None else (value > rule.limit if rule.above else value < rule.limit)
        if value is None and change.a == 0 and change.b is not None and rule.percent:
            failed = (change.b > 0) == rule.above  # from nothing to something is more than any percentage
        if failed and beyond_noise and change.within_noise:
            failed = False
        out.append(Outcome(rule, change, failed))
    return out


def _dotted(name: str) -> str:
    """ttft_p95 → ttft.p95; coordination_share_p95 → coordination_share.p95; coordination_share_mean → coordination_share."""
    dotted = _STAT.sub(r".\1", name)
    return dotted.removesuffix(".mean") if dotted.endswith("_share.mean") else dotted


def _no_figure(rule: Rule, known: dict[str, Change]) -> UsageError:
    near = difflib.get_close_matches(rule.figure, known, n=1) or difflib.get_close_matches(_dotted(rule.figure), known, n=1)
    return UsageError(
        f"The rule {rule.text!r} names {rule.figure!r}, which is no figure of a comparison.",
        hint=f"Did you mean {near[0]!r}?" if near else "`hoptrace diff A B --json` lists them.",
    )


def _check_unit(rule: Rule, change: Change) -> None:
    allowed = _UNITS.get(change.unit, ())
    if rule.unit == "%" or rule.unit in allowed:
        return
    if not rule.unit:
        # 2 may be meant as 2 ms, 2 % or 2 points; of a share it would be 200 points, which no change ever reaches.
        if not allowed or not rule.limit:
            return
        number = rule.text.split(">" if rule.above else "<")[-1].strip()
        raise UsageError(
            f"The rule {rule.text!r} limits {change.name!r} by {number} of no unit.",
            hint=f"Write {number}% for a relative limit, or a unit ({', '.join(allowed)}): {number}{allowed[-2:][0]}.",
        )
    unit = {"1": "a plain number", "share": "a share: % of it, or pp"}.get(change.unit, f"in {change.unit}")
    raise UsageError(
        f"The rule {rule.text!r} limits {change.name!r} in {rule.unit}, but that figure is {unit}.",
        hint=f"Write {rule.figure}{'>' if rule.above else '<'}{'+' if rule.above else '-'}5% for a relative limit.",
    )
