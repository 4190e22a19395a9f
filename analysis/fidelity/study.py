"""A fidelity study: the base policy and others, each predicted from a recording of the base policy and held against its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hoptrace.analysis.compare.diff_settings import Setting, settings
from hoptrace.analysis.compare.diff_work import reasons_text
from hoptrace.analysis.fidelity.figures import Figure, Pair, figures
from hoptrace.analysis.fidelity.noise import Noise, noise_of
from hoptrace.analysis.fidelity.own_terms import OwnTerms, own_terms
from hoptrace.analysis.fidelity.same_work import other_work, require_latencies, require_repeat
from hoptrace.analysis.fidelity.samples import Side
from hoptrace.analysis.fidelity.sources import Source, Truth, sources
from hoptrace.analysis.fidelity.speed import machine_speed
from hoptrace.analysis.report import origin_note
from hoptrace.comparison import Comparison, compare, matched
from hoptrace.errors import InputError
from hoptrace.reader import Trace
from hoptrace.reconstruct import steps_of
from hoptrace.stepcost import StepCost
from hoptrace.stepcost_domain import Domain

__all__ = ["FORMAT", "Case", "Judged", "Study", "check", "study"]

FORMAT = "fidelity/1"


@dataclass(frozen=True)
class Case:
    """What whoever runs the replays hands in, of one policy.

    Attributes:
        observed: the recording under the policy.
        predicted: the replay of the base policy's recording under this one.
        at_speed: the same with every step cost multiplied by :func:`hoptrace.analysis.fidelity.speed.machine_speed` of the two
            recordings; null where that is not known.
        truths: replays with recorded truth put in, in the order to show, the one with none first.
        domains: for each step cost of the prediction where its steps leave what it was measured on; empty: the study's one cost
            made them all.
        remedy: what would measure the steps that lie outside the step cost's domain; null where there is nothing to measure.
        notes: what the replay says of itself.
    """

    observed: Trace
    predicted: Trace
    at_speed: Trace | None = None
    truths: tuple[Truth, ...] = ()
    domains: tuple[Domain, ...] = ()
    remedy: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judged:
    """One policy, judged.

    Attributes:
        trace: the recording's name. own: whether it is the base policy.
        settings: what differs from the base policy's recording, as its server says; empty of the base policy.
        compared: the recording against the replay as they are, with their notes.
        figures: one per metric and statistic, then throughputs.
        own_terms: the same without times.
        speed: how much longer equal steps took than in the base policy's recording; 1 of that one; null where steps do not tell.
        sources: where the error comes from; empty if it was not asked for.
        beyond: share of the replay's step time outside what its step cost was measured on; null where that is not known.
        domain: which quantities lie outside, in sentences.
        remedy: what would measure them.
        notes: what else a reader has to know.
    """

    trace: str
    own: bool
    settings: tuple[Setting, ...]
    compared: Comparison
    figures: tuple[Figure, ...]
    own_terms: OwnTerms
    speed: float | None
    sources: tuple[Source, ...]
    beyond: float | None
    domain: tuple[str, ...]
    remedy: str | None
    notes: tuple[str, ...]

    def figure(self, metric: str, statistic: str) -> Figure:
        """The figure of that name; KeyError if there is none. Throughputs: metric ``throughput``, statistic ``output tokens`` or
        ``requests``."""
        for f in self.figures:
            if f.metric == metric and f.statistic == statistic:
                return f
        raise KeyError(f"{metric} {statistic}")

    @property
    def signs(self) -> dict[str, Any]:
        """``right``: changes against the base policy that go the predicted way; ``wrong``: the names of those that do not;
        ``within_noise``: changes too small to judge."""
        return {
            "right": sum(f.sign == "right" for f in self.figures),
            "wrong": [f"{f.metric} {f.statistic}" for f in self.figures if f.sign == "wrong"],
            "within_noise": sum(f.sign == "within noise" for f in self.figures),
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "trace": self.trace,
            "own": self.own,
            "settings": [s.as_dict() for s in self.settings],
            "paired": self.compared.paired,
            "requests": {"observed": self.compared.requests[0], "predicted": self.compared.requests[1]},
            "per_request_pct": self.compared.per_request,
            "speed": None if self.speed is None else round(self.speed, 6),
            "figures": [f.as_dict() for f in self.figures],
            "signs": None if self.own else self.signs,
            "own_terms": self.own_terms.as_dict(),
            "sources": [s.as_dict() for s in self.sources],
            "domain": {
                "share": None if self.beyond is None else round(self.beyond, 6),
                "beyond": list(self.domain),
                "remedy": self.remedy,
            },
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Study:
    """The whole: ``cases`` (the base policy's first), the ``noise`` between repeats (null: unknown), ``notes`` on all of it."""

    cases: tuple[Judged, ...]
    noise: Noise | None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values under :data:`FORMAT`, whose keys docs/fidelity-command.md explains: some may be added, none change or
        go."""
        return {
            "format": FORMAT,
            "noise": None if self.noise is None else self.noise.as_dict(),
            "cases": [c.as_dict() for c in self.cases],
            "notes": list(self.notes),
        }


def check(a: Trace, others: Sequence[Trace], repeats: Sequence[Trace] = (), *, anyway: bool = False) -> dict[str, list[str]]:
    """Whether the recordings can be studied together, before anything is replayed. What is odd about each, in sentences, by the
    trace's name.

    Raises:
        InputError: a recording holds no latencies; or is of other work, another engine or model than ``a``, or a repeat is none,
            and ``anyway`` is false.
    """
    said: dict[str, list[str]] = {}
    require_latencies(a)
    for b in others:
        require_latencies(b)
        why = reasons_text(other_work(a, b))
        if why and not anyway:
            raise InputError(
                f"{b.name} is no run of the work of {a.name} under another policy: {why}.",
                hint="A prediction of other work cannot be held against it. Add --anyway to do so nevertheless.",
            )
        if why:
            said.setdefault(b.name, []).append(f"{b.name} is not of the same work as {a.name}: {why}.")
    for r in repeats:
        if odd := require_repeat(a, r, anyway=anyway):
            said.setdefault(r.name, []).extend(odd)
    return said


def study(
    own: Case,
    others: Sequence[Case] = (),
    repeats: Sequence[Trace] = (),
    *,
    cost: StepCost | None = None,
    anyway: bool = False,
    notes: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Study:
    """Hold predictions against recordings. Reads traces, runs nothing: :mod:`hoptrace.cli.fidelity_run` runs the replays.

    ``own`` is the base policy: its recording is what all predictions were calibrated on, its prediction the replay under its own
    policy. For each of ``others`` the headline is the ratio to the base policy, predicted ÷ predicted against observed ÷
    observed: what a shared machine's speed did to both runs, and what the step cost gets wrong in both, cancels.

    Intervals (95 %) come from redrawing requests, together on all sides where they hold the same ones. They say how much
    the figure hangs on which requests came; they know nothing of what the machine did between the runs: that is ``repeats``.

    Args:
        repeats: more recordings of the base policy, in the order in which they were made.
        cost: the step cost that was fitted to ``own.observed``, for the machine's speed and the domain.
        anyway: study traces of other work too; what differs is noted.
        say: told what is being done.

    Raises:
        InputError: as :func:`check`.
    """
    odd = check(own.observed, [c.observed for c in others], repeats, anyway=anyway)
    if repeats:
        say("comparing the repeats")
    noise = noise_of(own.observed, repeats, cost)
    base = _pair(own)
    judged = []
    for case in (own, *others):
        say(f"comparing {case.observed.name} with its prediction")
        first = case is own
        pair = base if first else _pair(case)
        at_speed = None if case.at_speed is None else compare(case.observed, case.at_speed)
        between = None if first else matched(own.observed, case.observed)
        a, b = own.observed, case.observed
        beyond, domain = _domain(case, cost)
        judged.append(
            Judged(
                trace=b.name,
                own=first,
                settings=() if first else tuple(settings(a.manifest, b.manifest)),
                compared=pair.compared,
                figures=tuple(figures(base, None if first else pair, between, at_speed, noise)),
                own_terms=own_terms(b, case.predicted, pair.twins),
                speed=machine_speed(a, b, cost),
                sources=sources(b, case.truths),
                beyond=beyond,
                domain=tuple(domain),
                remedy=case.remedy,
                notes=tuple(dict.fromkeys([*odd.get(b.name, []), *_said(b), *pair.compared.notes, *case.notes])),
            )
        )
    said = [n for r in repeats for n in odd.get(r.name, [])]
    return Study(tuple(judged), noise, tuple(dict.fromkeys([*notes, *said])))


def _pair(case: Case) -> Pair:
    twins = matched(case.observed, case.predicted)
    return Pair(Side(case.observed), Side(case.predicted), compare(case.observed, case.predicted), twins)


def _said(trace: Trace) -> list[str]:
    """What a recording is, where that matters to whoever takes it for the truth."""
    found = []
    if trace.manifest.origin != "recorded":
        found.append(f"{trace.name} was not measured here: {origin_note(trace)}")
    if not trace.manifest.closed:
        found.append(f"{trace.name} was not closed cleanly: at most its last second is missing.")
    return found


def _domain(case: Case, cost: StepCost | None) -> tuple[float | None, list[str]]:
    domains = case.domains
    if not domains:
        if cost is None:
            return None, []
        domains = (Domain(cost),)
        domains[0].add(steps_of(case.predicted).steps)
    whole, outside = (sum(d.step_ns[i] for d in domains) for i in (0, 1))
    if not whole or not all(d.known for d in domains):
        return None, []
    # The last sentence of each is on the time of its own steps.
    said = [s for d in domains for s in (d.sentences() if len(domains) == 1 else d.sentences()[:-1])]
    if said and len(domains) > 1:
        said.append(f"{100 * outside / whole:.0f} % of the replay's step time rests on extrapolated step costs.")
    return outside / whole, list(dict.fromkeys(said))
