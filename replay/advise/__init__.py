"""Which flag of the captured engine to change: the what-ifs that are real flags, tried, weighed and decided.

docs/advise.md says what is tried, how it is weighed and what the decision rests on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import polars as pl

from hoptrace.errors import HoptraceError, InputError
from hoptrace.reader import Trace
from hoptrace.replay.advise.catalogue import catalogue_of, judge, named
from hoptrace.replay.advise.decide import Decision, acceptable, decide
from hoptrace.replay.advise.error import OwnError, own_error
from hoptrace.replay.advise.evidence import Evidence
from hoptrace.replay.advise.model import NOT_JUDGED, Change, Left, Verdict
from hoptrace.replay.advise.objective import Objective, objective_of
from hoptrace.replay.advise.scene import Scene
from hoptrace.replay.advise.trials import Point, Trials
from hoptrace.replay.advise.weigh import verdict
from hoptrace.replay.policy import Policy
from hoptrace.replay.prepare import Prepared, prepare
from hoptrace.replay.simulation import Engine, warm_up
from hoptrace.replay.uncertainty import Study
from hoptrace.replay.workload import Workload
from hoptrace.roofline import platform_of
from hoptrace.stepcost import StepCost

__all__ = ["Advice", "advise"]

_ROWS = 8
_PAIRED = 3
_DRAWS = 20
"""The ends of a 90 % interval are then about the least and the greatest draw."""
# CPU seconds of the plain engine: a run, and a token (see replay.uncertainty.budget). Compiling takes about as long as the limit.
_PLAIN_RUN_S, _PLAIN_TOKEN_S, _PLAIN_MOST_S = 4e-3, 20e-6, 45.0

Say = Callable[[str], None]
Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Advice:
    """Attributes:
    engine: whose flags. objective: what counts as better.
    decision: what to do. verdicts: of what was weighed, the best first. idle: changes that were tried and gain nothing.
    left: flags that were not tried, with the reason. evidence: of the own policy's run.
    own: figures of the own policy's replay (ns, per second). error: how far these are from what was observed; null without.
    cost: what the step cost is (fitted, roofline, …). arrivals: how requests arrive. url: of the server. driven:
    whether a load generator sent its requests, so that another drive can be held against it.
    notes: what limits all of it.
    """

    engine: str
    objective: Objective
    decision: Decision
    verdicts: tuple[Verdict, ...]
    idle: tuple[Verdict, ...]
    left: tuple[Left, ...]
    evidence: Evidence
    own: Mapping[tuple[str, str], float]
    error: OwnError | None
    cost: str
    arrivals: str
    draws: int
    url: str | None = None
    driven: bool = False
    notes: tuple[str, ...] = ()

    @property
    def tried(self) -> int:
        """Changes that were replayed, pairs among them."""
        return len(self.verdicts) + len(self.idle)


def advise(
    trace: Trace,
    *,
    objective: str | None = None,
    slo: Mapping[str, int] | None = None,
    tries: Sequence[str] = (),
    cost: StepCost | str | None = None,
    platform: str | None = None,
    model: str | None = None,
    recorded_on: str | None = None,
    rate: Fraction | float | str = 1,
    arrivals: str | None = None,
    seed: int = 0,
    draws: int = _DRAWS,
    engine: Engine = "auto",
    say: Say = lambda _: None,
    tell: Tell = lambda _done, _of: None,
) -> Advice:
    """Advice on the flags of the engine that ``trace`` was recorded from.

    Args:
        objective: one of :data:`hoptrace.replay.advise.objective.OBJECTIVES`; null: goodput with ``slo``, else end-to-end time.
        slo: limits in ns. tries: changes that the user names, ``max-num-seqs=32``.
        cost, platform, model, recorded_on, rate, arrivals, seed, engine: as :func:`hoptrace.replay.run.run` has them.
        draws: replays of each change that is weighed, for its interval; 0: none.
        say: told what is being done; tell: how much of it is done.

    Raises:
        UsageError: an option is wrong. InputError: the trace does not tell its engine, or what a replay needs.
    """
    aim = objective_of(objective, slo)
    catalogue = catalogue_of(trace.manifest.servers[0] if trace.manifest.servers else None)
    p = prepare(
        trace, Policy(name="as-recorded"), cost=cost, platform=platform, model=model, recorded_on=recorded_on, seed=seed,
        rate=rate, arrivals=arrivals, until=None, say=say,
    )  # fmt: skip
    if p.planned.policy.split is not None:
        raise InputError(
            "The trace ran with prompts and answers on servers of their own; advice is about one kind of server.",
            hint="hoptrace sweep tries other numbers of each, and other settings of both.",
        )
    _told(p, platform, model)
    chosen = _engine(engine, p.asked_work, draws)
    if chosen == "compiled":
        say("starting the compiled engine (the first time it is compiled, which takes a minute or two)")
        warm_up()
    study, notes = _study(p, draws, seed, say)
    trials = Trials(p, aim, chosen, study)
    say("replaying the trace's own policy")
    own, evidence = trials.point(), trials.evidence()
    if own.undone == p.asked_work.n:  # nothing to better: "keep" would sound like an answer
        raise InputError(
            f"The replay of {trace.name} under its own policy refuses every request: none fits the server of its manifest.",
            hint="hoptrace replay T.trace -o OUT.trace says why; correct the context or the KV space in manifest.json.",
        )
    scene = _scene(p, evidence)
    changes, left = judge(catalogue, scene)
    asked = named(catalogue, scene, tries)
    say(f"replaying {len(changes) + len(asked)} changes")
    points = _points(trials, [*asked, *changes], left, tell)
    weighed = _weighed(aim, own, points, {c.typed for c in asked})
    say("replaying on other draws")
    verdicts = []
    for i, (change, point) in enumerate(weighed):
        verdicts.append(verdict(aim, (change,), own, point, trials.draws(point.planned)))
        tell(i + 1, len(weighed))
    pairs = _pairs(trials, aim, own, verdicts)
    verdicts = sorted([*verdicts, *pairs], key=lambda v: -(v.gain if v.gain is not None else -1e9))
    shown = {c.typed for c, _ in weighed}
    idle = [verdict(aim, (c,), own, point, []) for c, point in points if c.typed not in shown]
    error = own_error(p, trials.lens_of(p.own_work), chosen)
    off = None if error is None else max((abs(error.of[k]) for k in aim.keys if k in error.of), default=None)
    return Advice(
        engine=catalogue.engine,
        objective=aim,
        decision=decide(aim, verdicts, len(points), off, str(p.how.get("kind"))),
        verdicts=tuple(verdicts),
        idle=tuple(idle),
        left=tuple(left),
        evidence=evidence,
        own=own.figures,
        error=error,
        cost=str(p.how.get("kind")),
        arrivals=p.arrivals.label,
        draws=0 if study is None else len(study.draws),
        url=trace.manifest.servers[0].url,
        driven=_driven(trace),
        notes=tuple(dict.fromkeys([*notes, *_assumed(p), *p.work.notes, *p.planned.notes])),
    )


def _told(p: Prepared, platform: str | None, model: str | None) -> None:
    """Refuses a roofline of a machine or a model that nobody named: a replay may assume one and say so, advice may not."""
    if p.how.get("kind") != "roofline":
        return
    own = p.parent.trace.manifest.servers[0]
    lacks = [
        f"--{what} NAME"
        for what, named, known in (
            ("platform", platform, platform_of(p.parent.trace.manifest, own) is not None),
            ("model", model, own.parameters is not None),
        )
        if named is None and not known
    ]  # fmt: skip
    if lacks:
        raise InputError(
            "The trace has too few steps to tell what a step costs, and no machine to compute it for.",
            hint=f"Name it ({' '.join(lacks)}), or say what steps cost: --cost fixed:PREFILL_MS,DECODE_MS.",
        )


def _driven(trace: Trace) -> bool:
    """Whether every request says when it was meant to be sent."""
    intended = pl.col("arrival_of") == "intended"
    return bool(trace.table("requests").select(intended.fill_null(False).all()).collect(engine="streaming").item())


def _assumed(p: Prepared) -> list[str]:
    """What was taken for the step cost for want of knowledge."""
    found = p.how.get("assumed")
    return [found] if isinstance(found, str) else [str(x) for x in found or ()]


def _engine(asked: Engine, work: Workload, draws: int) -> Engine:
    """The plain engine while all that it has to do takes less than compiling does."""
    if asked != "auto":
        return asked
    runs = (draws + 1) * (_ROWS + 4)
    each = _PLAIN_RUN_S + _PLAIN_TOKEN_S * (int(work.output_tokens.sum()) + 5 * work.n)
    return "plain" if runs * each < _PLAIN_MOST_S else "compiled"


def _study(p: Prepared, draws: int, seed: int, say: Say) -> tuple[Study | None, tuple[str, ...]]:
    """The draws that all changes share; null and why where there are none."""
    if not draws:
        return None, ("No intervals were asked for, so nothing is sure here.",)
    say("drawing step costs, residuals and requests anew")
    study = Study(p, draws, seed)
    return (study, tuple(study.notes)) if study.draws else (None, (f"{study.unknown} So nothing is sure here.",))


def _scene(p: Prepared, evidence: Evidence) -> Scene:
    planned, steps = p.planned, p.seen.steps
    blocks = p.work.block_tokens
    speculates = "draft_proposed" in steps.columns and bool((steps["draft_proposed"].fill_null(0) > 0).any())
    return Scene(
        server=planned.servers[0],
        resolved=planned.resolved[0],
        evidence=evidence,
        servers=len(planned.servers),
        blocks_tokens=int(blocks.max()) if len(blocks) else None,
        speculates=speculates or planned.policy.speculation is not None,
    )


def _points(trials: Trials, changes: Sequence[Change], left: list[Left], tell: Tell) -> list[tuple[Change, Point]]:
    """Each change replayed once; what cannot be replayed goes to ``left``."""
    found: list[tuple[Change, Point]] = []
    done: set[tuple[str, ...]] = set()
    for i, change in enumerate(changes):
        if change.typed not in done:
            done.add(change.typed)
            try:
                found.append((change, trials.point((change,))))
            except HoptraceError as e:
                left.append(Left(change.text, NOT_JUDGED, str(e.args[0]) if e.args else str(e)))
        tell(i + 1, len(changes))
    return found


def _weighed(
    aim: Objective, own: Point, points: Sequence[tuple[Change, Point]], asked: set[tuple[str, ...]]
) -> list[tuple[Change, Point]]:
    """What is worth draws: what the user named, each flag's best value if it gains anything, then further values that gain."""
    scored = [(aim.gain(own.figures, point.figures), c, point) for c, point in points]
    gaining = sorted(((g, c, p) for g, c, p in scored if g is not None and g > 0.005), key=lambda x: -x[0])
    found = [(c, p) for _, c, p in scored if c.typed in asked]
    flags: set[str] = set()
    best = [(c, p) for _, c, p in gaining if c.flag not in flags and not flags.add(c.flag)]  # type: ignore[func-returns-value]
    for c, p in [*best, *((c, p) for _, c, p in gaining)]:
        if len(found) < _ROWS and c.typed not in {x.typed for x, _ in found}:
            found.append((c, p))
    return found


def _pairs(trials: Trials, aim: Objective, own: Point, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The best changes of different flags, two at a time, where both gain beyond doubt and need nothing."""
    ranked = sorted((v for v in verdicts if acceptable(aim, v) and not v.needs), key=lambda v: -(v.gain or 0))
    best: dict[str, Verdict] = {}
    for v in ranked:
        best.setdefault(v.changes[0].flag, v)
    found = []
    for one, other in itertools.combinations(list(best.values())[:_PAIRED], 2):
        both = (*one.changes, *other.changes)
        keys = [s.partition("=")[0] for c in both for s in c.settings]
        if len(keys) != len(set(keys)):
            continue
        try:
            point = trials.point(both)
            found.append(verdict(aim, both, own, point, trials.draws(point.planned)))
        except HoptraceError:
            continue
    return found
