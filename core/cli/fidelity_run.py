"""Runs the replays of a fidelity study and hands them to the analysis: what `hoptrace fidelity` does before it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import polars as pl

    from hoptrace.analysis.fidelity.study import Case, Study
    from hoptrace.manifest import Server
    from hoptrace.reader import Trace
    from hoptrace.replay.memory_trace import FramesTrace
    from hoptrace.replay.plan import Plan
    from hoptrace.replay.prepare import Prepared
    from hoptrace.replay.simulation import Engine
    from hoptrace.stepcost import StepCost
    from hoptrace.stepcost_domain import Domain

__all__ = ["SMALL_REQUESTS", "SMALL_TOKENS", "measure"]

SMALL_REQUESTS, SMALL_TOKENS = 500, 15_000
"""Up to so many requests, and so many output tokens, the error is taken apart unasked: each truth is a replay on the plain
engine."""

Say = Callable[[str], None]
Tell = Callable[[float], None]


def measure(
    a: Trace,
    others: Sequence[Trace] = (),
    repeats: Sequence[Trace] = (),
    *,
    anyway: bool = False,
    cost: StepCost | str | None = None,
    seed: int = 0,
    engine: Engine = "auto",
    truths: Sequence[str] | Literal["auto"] = "auto",
    say: Say = lambda _: None,
    tell: Tell = lambda _: None,
) -> Study:
    """Calibrate on ``a``, replay its own policy and that of each of ``others``, and hold each replay against its recording.

    The work is that of ``a``. Of a trace that did other work (only with ``anyway``) it is that trace's own.

    Args:
        repeats: more recordings of the policy of ``a``, in the order in which they were made: the noise floor.
        cost: a step cost or its name; null: fitted to the steps of ``a``.
        truths: which parts of the recorded truth to put in, each alone and then all that there are together, to tell where the
            error comes from (names as in :data:`hoptrace.replay.truths.TRUTHS`); empty for none; ``auto``: all of them where
            the work is small.
        say, tell: told what is being done, and how far that is (0 to 1).

    Raises:
        InputError: the recordings cannot be studied together, or one of them cannot be replayed.
    """
    from hoptrace.analysis.fidelity.same_work import other_work
    from hoptrace.analysis.fidelity.study import check, study
    from hoptrace.errors import InputError
    from hoptrace.replay.against import against

    check(a, others, repeats, anyway=anyway)
    base = against(a, a, cost=cost, seed=seed, say=say)
    whole = _whole(base)
    # Of a prefill/decode split each role has a step cost of its own: none of them is the other's, so all are fitted again.
    known = whole if base.how.get("kind") == "fitted" and not isinstance(cost, str) and len(base.own.plan.costs) == 1 else cost
    say(f"replaying {a.name} under its own policy")
    own = _put_in(_case(base, a, True, None, engine, say, tell), base, truths, say, tell)
    cases = []
    for b in others:
        work: Literal["a", "b"] = "b" if anyway and other_work(a, b) else "a"
        try:
            p = against(a, b, work=work, cost=known, seed=seed, say=say)
        except InputError as e:
            raise InputError(f"{b.name} cannot be predicted from {a.name}: {e.message}", hint=e.hint) from None
        say(f"replaying {a.name} under the policy of {b.name}")
        case = _case(p, b, False, _speed(a, b, whole), engine, say, tell)
        mine = p if work == "b" else against(a, b, work="b", cost=known, seed=seed)
        case = _put_in(case, mine, truths, say, tell)
        if work == "b":
            note = f"The requests of {b.name} itself were replayed, with the step cost and the times of {a.name}."
            case = replace(case, notes=(note, *case.notes))
        cases.append(case)
    return study(own, cases, repeats, cost=whole, anyway=anyway, notes=_notes(base, whole), say=say)


def _whole(p: Prepared) -> StepCost:
    """The step cost of all servers: where each role has its own, one that is fitted to the steps of all."""
    from hoptrace.stepcost import fit

    plan = p.own.plan
    return fit(p.seen.steps) if len(plan.costs) > 1 and p.how.get("kind") == "fitted" else plan.costs[plan.engines[0].cost]


def _speed(a: Trace, b: Trace, cost: StepCost) -> float | None:
    from hoptrace.analysis.fidelity.speed import machine_speed

    return machine_speed(a, b, cost)


def _case(p: Prepared, observed: Trace, own: bool, speed: float | None, engine: Engine, say: Say, tell: Tell) -> Case:
    from hoptrace.analysis.fidelity.study import Case
    from hoptrace.replay.calibration.coverage import coverage
    from hoptrace.replay.calibration.use import scaled
    from hoptrace.replay.played import played
    from hoptrace.replay.simulation import is_small, warm_up

    work, planned = (p.own_work, p.own) if own else (p.asked_work, p.planned)
    if engine == "compiled" or (engine == "auto" and not is_small(work)):
        say("starting the compiled engine (the first time it is compiled, which takes a minute or two)")
        warm_up()
    tokens = bool(p.parent.vantages)
    predicted = played(p, own=own, engine=engine, tokens=tokens, fraction=tell)
    at_speed = None
    if speed is not None:
        say(f"the same at the speed of {observed.name}")
        plan = replace(planned.plan, costs=tuple(scaled(c, speed) for c in planned.plan.costs))
        slower = replace(p, planned=replace(planned, plan=plan))
        at_speed = played(slower, engine=engine, tokens=tokens, fraction=tell)
    turned_away = _refused(predicted, observed)
    notes = [*turned_away, *work.notes, *planned.notes, *(p.own_arrivals if own else p.arrivals).notes]
    domains = _domains(planned.plan, predicted.frames["steps"])
    remedy = coverage(domains, _server(p)).remedy
    return Case(observed, predicted, at_speed, domains=domains, remedy=remedy, notes=tuple(dict.fromkeys(notes)))


def _refused(predicted: FramesTrace, observed: Trace) -> list[str]:
    """That requests are refused, in a sentence: figures of the others stand against those of all.

    Raises:
        InputError: all are, so nothing is predicted.
    """
    from hoptrace.errors import InputError
    from hoptrace.replay.notes import refused

    requests = predicted.frames["requests"].sort("request")
    said = refused(requests["error"].drop_nulls().to_list())
    if said and "steps" not in predicted.frames:
        raise InputError(
            f"Nothing of {observed.name} is predicted: {said[0]}", hint="What is the server's limit in its manifest?"
        )
    return [f"In the prediction {s[:1].lower()}{s[1:]} They are in no figure of it." for s in said]


def _domains(plan: Plan, steps: pl.DataFrame) -> tuple[Domain, ...]:
    """For each step cost of the plan where its engines' steps leave what it was measured on."""
    import polars as pl

    from hoptrace.stepcost_domain import Domain

    found = []
    for i, cost in enumerate(plan.costs):
        mine = pl.DataFrame(
            [(e.name, e.dp_rank) for e in plan.engines if e.cost == i],
            schema={"server": pl.String, "dp_rank": steps.schema["dp_rank"]}, orient="row",
        )  # fmt: skip
        found.append(Domain(cost))
        found[-1].add(steps.join(mine, on=["server", "dp_rank"], how="semi"))
    return tuple(found)


def _server(p: Prepared) -> Server | None:
    servers = p.parent.trace.manifest.servers
    return servers[0] if servers else None


def _put_in(case: Case, p: Prepared, truths: Sequence[str] | Literal["auto"], say: Say, tell: Tell) -> Case:
    """``case`` with replays with recorded truth put in. ``p``: over the requests of the recording itself."""
    from hoptrace.analysis.fidelity.sources import ALL, Truth
    from hoptrace.reconstruct import steps_of
    from hoptrace.replay.truths import TRUTHS, lacking, replayed_with

    if truths == "auto":
        small = p.asked_work.n <= SMALL_REQUESTS and int(p.asked_work.output_tokens.sum()) <= SMALL_TOKENS
        if not small:
            note = f"Where the error comes from was not asked, {p.asked_work.n:,} requests being many: --truth all."
            return replace(case, notes=(*case.notes, note))
        truths = TRUTHS
    if not truths:
        return case
    recorded = case.observed
    inferred = steps_of(recorded).origin != "observed"
    why = lacking(p, recorded, inferred=inferred)
    told = tuple(t for t in truths if why[t] is None)
    asked = [(None, ()), *((t, (t,)) for t in truths), *([(ALL, told)] if len(told) > 1 else [])]
    found = []
    for name, together in asked:
        if name in why and why[name] is not None:
            found.append(Truth(name, None, why[name], together))
            continue
        say(
            f"replaying with the recorded {', '.join(t.replace('_', ' ') for t in together)}"
            if together
            else "once more, as it is"
        )
        replay = replayed_with(p, recorded, frozenset(together), inferred=inferred, tokens=False, fraction=tell)
        found.append(Truth(name, replay, None, together))
    notes = case.notes
    if inferred and told:
        notes = (*notes, f"Recorded steps that were put in are those that token times tell of {recorded.name}.")
    return replace(case, truths=tuple(found), notes=notes)


def _notes(p: Prepared, cost: StepCost) -> list[str]:
    """On what all the predictions rest."""
    from hoptrace.replay.notes import basis, changed, drift, noise

    found = changed(p.parent.trace)
    if p.how.get("kind") == "fitted":
        found += [p.seen.note] if p.seen.note else []
        found += [*basis(p.parent.trace, p.seen), *noise(cost), *drift(p.seen.steps, cost)]
    else:
        found.append(
            f"The step cost is not fitted to {p.parent.trace.name} ({p.how.get('kind')}): the errors hold how far that is "
            "from the recorded machine."
        )
    return [*found, *cost.notes]
