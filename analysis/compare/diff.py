"""Two traces of the same work side by side: what changed, whether it is more than chance, and what it comes to (the verdict)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hoptrace.analysis.compare.diff_change import Change
from hoptrace.analysis.compare.diff_compare import compare
from hoptrace.analysis.compare.diff_figures import figures
from hoptrace.analysis.compare.diff_noise import Noise
from hoptrace.analysis.compare.diff_pairs import Pairing, pair
from hoptrace.analysis.compare.diff_settings import Setting, settings
from hoptrace.analysis.compare.diff_side import Side
from hoptrace.analysis.compare.diff_work import Reason, Work, notes_on, reasons_text, unequal
from hoptrace.analysis.compare.verdict import Verdict, judge
from hoptrace.analysis.report import origin_note
from hoptrace.errors import InputError
from hoptrace.reader import Trace

__all__ = ["SCHEMA", "Change", "Diff", "Work", "diff", "verdict"]

SCHEMA = "hoptrace.diff/2"


@dataclass(frozen=True)
class Diff:
    """Every figure of both traces as a change, by section and in a fixed order.

    ``pairing``: how the same requests were found on both sides, or null: then chance is judged of each side by itself.
    ``reasons``: why the work is not the same (only with ``anyway``). ``settings``: what differs in the servers' and the replays'
    settings. ``noise``: the repeats, or null. ``verdict``: what the change comes to. ``notes``: what a reader has to know.
    """

    a: str
    b: str
    a_note: str
    b_note: str
    a_work: Work
    b_work: Work
    pairing: Pairing | None
    reasons: list[Reason]
    settings: list[Setting]
    noise: Noise | None
    sections: dict[str, list[Change]]
    verdict: Verdict
    notes: list[str] = field(default_factory=list)

    @property
    def unequal(self) -> list[str]:
        """Why the work is not the same, in words."""
        return [r.text for r in self.reasons]

    @property
    def paired(self) -> bool:
        """Whether the same requests stand on both sides."""
        return self.pairing is not None

    @property
    def metrics(self) -> list[Change]:
        """Latencies and rates."""
        return self.sections["metrics"]

    @property
    def parts(self) -> list[Change]:
        """Mean time of each part per request."""
        return [c for c in self.sections["parts"] if c.name.endswith(".mean")]

    @property
    def moves(self) -> list[Change]:
        """What is moved per output token, by basis."""
        return [c for c in self.sections["ledger"] if "_per_token." in c.name]

    @property
    def changes(self) -> dict[str, Change]:
        """All figures by name."""
        return {c.name: c for section in self.sections.values() for c in section}

    def as_dict(self) -> dict[str, Any]:
        """Plain values under :data:`SCHEMA`: fields may be added, never change or go."""
        return {
            "schema": SCHEMA,
            "a": {"trace": self.a, "origin_note": self.a_note, "work": self.a_work.as_dict()},
            "b": {"trace": self.b, "origin_note": self.b_note, "work": self.b_work.as_dict()},
            "paired": self.paired,
            "paired_how": None if self.pairing is None else self.pairing.how,
            "unequal_work": [r.as_dict() for r in self.reasons],
            "settings": [s.as_dict() for s in self.settings],
            "noise": None if self.noise is None else self.noise.as_dict(),
            **{name: [self._change(c) for c in section] for name, section in self.sections.items()},
            "verdict": self.verdict.as_dict(),
            "notes": self.notes,
        }

    def _change(self, c: Change) -> dict[str, Any]:
        if self.noise is None:
            return c.as_dict()
        spread = self.noise.spread(c.name)
        return {**c.as_dict(), "run_spread": [None if s is None else round(s, 6) for s in spread]}


def diff(
    a: Trace, b: Trace, *, anyway: bool = False, repeats_of_a: Sequence[Trace] = (), repeats_of_b: Sequence[Trace] = ()
) -> Diff:
    """Compare ``b`` against ``a``.

    Args:
        anyway: compare even though the work is not the same.
        repeats_of_a, repeats_of_b: more runs of the policy of ``a`` (of ``b``): how much they differ is noise.

    Raises:
        InputError: the traces did not do the same work, or a repeat is none, and ``anyway`` is false; says what differs.
    """
    left, right = Side(a), Side(b)
    pairs = pair(left.done, right.done)
    found = unequal(a, b, (left.work, right.work), (left.done, right.done), pairs)
    if found and not anyway:
        raise InputError(
            f"{a.name} and {b.name} did not do the same work: {reasons_text(found)}.",
            hint="Figures of different work do not compare. Add --anyway to see them side by side nevertheless.",
        )
    notes = notes_on(a, b, left.work, right.work)
    noise = None
    if repeats_of_a or repeats_of_b:
        runs_a, said_a = _runs(left, repeats_of_a, anyway)
        runs_b, said_b = _runs(right, repeats_of_b, anyway)
        noise = Noise(runs_a, runs_b)
        notes += [*said_a, *said_b, noise.said]
    sections, said = compare(left, right, pairs, noise)
    return Diff(
        a=a.name,
        b=b.name,
        a_note=origin_note(a),
        b_note=origin_note(b),
        a_work=left.work,
        b_work=right.work,
        pairing=pairs,
        reasons=found,
        settings=settings(a.manifest, b.manifest),
        noise=noise,
        sections=sections,
        verdict=judge({c.name: c for section in sections.values() for c in section}),
        notes=notes + said,
    )


def verdict(
    a: Trace, b: Trace, *, anyway: bool = False, repeats_of_a: Sequence[Trace] = (), repeats_of_b: Sequence[Trace] = ()
) -> Verdict:
    """The verdict on ``b`` against ``a`` alone. Raises as :func:`diff`."""
    return diff(a, b, anyway=anyway, repeats_of_a=repeats_of_a, repeats_of_b=repeats_of_b).verdict


def _runs(first: Side, repeats: Sequence[Trace], anyway: bool) -> tuple[tuple[tuple[str, Any], ...], list[str]]:
    """The figures of all runs of one policy, and what is odd about them."""
    runs = [(first.name, figures(first))]
    notes = []
    for trace in repeats:
        side = Side(trace)
        pairs = pair(first.done, side.done)
        why = reasons_text(unequal(first.trace, trace, (first.work, side.work), (first.done, side.done), pairs))
        differ = settings(first.trace.manifest, trace.manifest)
        if differ:
            why = "; ".join([*filter(None, [why]), *(f"{s.name} {s.a} against {s.b}" for s in differ)])
        if why and not anyway:
            raise InputError(
                f"{trace.name} is no repeat of {first.name}: {why}.",
                hint="A repeat is another run of the same work under the same settings. Add --anyway to take it nevertheless.",
            )
        if why:
            notes.append(f"{trace.name} is no exact repeat of {first.name}: {why}.")
        if trace.path.resolve() == first.trace.path.resolve():
            raise InputError(f"{trace.name} is given as a repeat of itself.", hint="A repeat is another run of the same policy.")
        runs.append((side.name, figures(side)))
    return tuple(runs), notes
