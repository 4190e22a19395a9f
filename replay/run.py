"""A replay: a trace's work under another policy, as another trace, with the error of the method beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from hoptrace.bulk import BulkWriter
from hoptrace.comparison import Comparison, compare
from hoptrace.manifest import ReplayInfo
from hoptrace.reader import Trace, open_trace
from hoptrace.replay.arrivals import Arrivals
from hoptrace.replay.calibration.coverage import Coverage, coverage
from hoptrace.replay.memory_trace import FramesTrace, Parts
from hoptrace.replay.notes import basis, changed, compared, drift, noise, refused
from hoptrace.replay.played import play_into
from hoptrace.replay.policy import Policy
from hoptrace.replay.prepare import Prepared, prepare
from hoptrace.replay.rows.manifest import counts, manifest_of
from hoptrace.replay.rows.recorder import Recorder
from hoptrace.replay.setting import Setting
from hoptrace.replay.simulation import Engine, is_small, simulation, warm_up
from hoptrace.replay.uncertainty import LEVEL, Affordable, Intervals, affordable, intervals
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import StepCost
from hoptrace.writer import TraceWriter

__all__ = ["FramesTrace", "Replayed", "basis", "changed", "drift", "noise", "predict", "replay", "run", "write"]

Progress = Callable[[str], None]
Fraction_ = Callable[[float], None]
# Tokens of a replay that is only compared and not kept: more go to the disk.
_HELD_TOKENS = 20_000_000


@dataclass(frozen=True)
class Replayed:
    """A replay.

    Attributes:
        trace: its tables and its manifest, in memory or on the disk.
        own: the trace under its own policy against what was observed: the error of the method; null if nothing was observed.
        own_recorded: the same with the recorded arrivals, where ``own`` has others.
        intervals: of the figures of ``own``, ``against`` and ``change``; null where none were asked for, or nothing was observed.
        against: this replay against what was observed: what the policy changes, the method's error included; null likewise.
        change: this replay against the one under the trace's own policy, over the requests that both serve; null likewise.
        coverage: whether what the step cost was measured on covers this replay.
        cost: the step cost (of the first engine).
        arrivals: how requests arrived, and why so.
        requests: how many ended how: done, refused, unfinished, not_arrived.
        traffic: sums over the moves of KV.
    """

    trace: Trace
    own: Comparison | None
    own_recorded: Comparison | None
    intervals: Intervals | None
    against: Comparison | None
    change: Comparison | None
    coverage: Coverage
    cost: StepCost
    arrivals: Arrivals
    requests: dict[str, int]
    traffic: list[dict[str, Any]]


def replay(trace: Trace, policy: Policy | str | Path, *, out: Path | str, **options: Any) -> Trace:
    """Replay ``trace`` under ``policy`` and write the result as the trace ``out``; options as for :func:`run`."""
    return run(trace, policy, out=out, **options).trace


def predict(trace: Trace, policy: Policy | str | Path, **options: Any) -> Replayed:
    """Replay ``trace`` under ``policy`` in memory; options as for :func:`run`."""
    return run(trace, policy, out=None, **options)


def write(result: Replayed, out: Path | str) -> Trace:
    """Write a replay that is in memory as the trace ``out``."""
    assert isinstance(result.trace, FramesTrace)
    with TraceWriter(out, result.trace.manifest.model_copy(deep=True), background=False) as writer:
        for name, frame in result.trace.frames.items():
            if frame.height:
                writer.append_arrow(name, frame.to_arrow())
    return open_trace(out)


def run(
    trace: Trace,
    policy: Policy | str | Path,
    *,
    out: Path | str | None = None,
    cost: StepCost | str | None = None,
    platform: str | None = None,
    model: str | None = None,
    recorded_on: str | None = None,
    seed: int = 0,
    rate: Fraction | float | str = 1,
    arrivals: str | None = None,
    until: str | int | None = None,
    tokens: bool = True,
    check: bool = True,
    engine: Engine = "auto",
    draws: int | Literal["auto"] = 0,
    progress: Progress | None = None,
    fraction: Fraction_ | None = None,
) -> Replayed:
    """Replay ``trace`` under ``policy``; as the trace ``out``, or in memory without one.

    The trace is first replayed under its own policy and compared with what was observed: that error stands in the manifest of
    every what-if (law 3). The same arguments give the same rows (law 4): what is drawn is drawn by ``seed``.

    Args:
        policy: a policy, a preset's name, or a policy file.
        out: written part by part while the replay runs, so that a long one needs little memory; it appears when it is whole.
        cost: a step cost, or its name as for the command line; null: fitted, or a roofline where there are no steps.
        platform, model: names or files. recorded_on: the platform that the trace was recorded on, where it does not tell.
        rate: 1.5 for arrivals one and a half times as fast (and think times as short).
        arrivals: ``recorded``, ``sessions``, ``closed:N``; null follows the trace.
        until: nothing happens so long after the first arrival: ns, or ``10m``.
        tokens: whether to make the rows of `tokens`.
        check: whether to replay the trace under its own policy too.
        engine: ``compiled``, ``plain``, or ``auto``: the plain one where the work is small.
        draws: replays of each side for intervals (:mod:`hoptrace.replay.uncertainty`); ``auto``: as many as some seconds allow.
        progress: told what is being done. fraction: told how far it is, 0 to 1, starting anew with each thing.

    Raises:
        UsageError: ``out`` is there already, or an option is wrong.
        InputError: the trace does not tell what a replay needs, or the policy does not fit it.
        EnvironmentProblem: the disk refuses; nothing is left then.
    """
    say = progress or (lambda _: None)
    tell = fraction or (lambda _: None)
    p = prepare(
        trace, policy, cost=cost, platform=platform, model=model, recorded_on=recorded_on, seed=seed, rate=rate,
        arrivals=arrivals, until=until, say=say,
    )  # fmt: skip
    checks = check and p.observed
    if engine == "compiled" or (engine == "auto" and not is_small(p.asked_work)):
        say("starting the compiled engine (the first time it is compiled, which takes a minute or two)")
        warm_up()
    with ExitStack() as stack:
        again = recorded = None
        if checks:
            say("replaying under the trace's own policy")
            again = _again(p, p.own_work, tokens, engine, tell, stack, "own")
            if p.own_arrivals.kind != "recorded":
                say("replaying under the trace's own policy, arrivals as recorded")
                recorded = _again(p, p.work, tokens, engine, tell, stack, "recorded")
        own = None if again is None else compare(trace, again)
        own_recorded = None if recorded is None else compare(trace, recorded)
        bounds = _intervals(p, draws, engine, say, tell) if checks and draws else None
        say(f"replaying under {p.policy.name}")
        manifest = manifest_of(trace.manifest, p.planned.plan, p.planned.servers, p.work.left_out)
        writer = BulkWriter(out, manifest) if out is not None else None
        with writer or nullcontext():
            parts = Parts()
            s, recorder = play_into(
                p.parent, p.asked_work, p.planned, (writer or parts).submit, simulation(engine), tokens=tokens, tell=tell
            )
            say("writing" if writer is not None else "putting together")
            result: Trace
            if writer is None:
                result = FramesTrace(parts.frames(), manifest, f"{trace.name}-replay")
            else:
                result = Trace(writer.settle(), manifest)
            against = compare(trace, result) if checks else None
            ended = counts(s, recorder.late)
            covers = coverage(recorder.domains, trace.manifest.servers[0] if trace.manifest.servers else None)
            manifest.replay = _info(p, s, recorder, own, own_recorded, bounds, against, covers, check)
            manifest.title = f"{trace.name} under {p.policy.name}" + _how(p.arrivals)
            if recorder.late:
                manifest.rows_dropped["requests: not arrived by the horizon"] = recorder.late
            change = None if again is None else compare(again, result, known=trace)
            if writer is not None:
                result = open_trace(writer.close())
    first = p.planned.plan.costs[p.planned.plan.engines[0].cost]
    return Replayed(
        result, own, own_recorded, bounds, against, change, covers, first, p.arrivals, ended, recorder.traffic.as_list()
    )


def _intervals(p: Prepared, draws: int | Literal["auto"], engine: Engine, say: Progress, tell: Fraction_) -> Intervals:
    """Of as many draws as were asked for, or as are affordable."""
    if draws != "auto":
        found = Affordable(draws, engine)
    else:
        found = affordable((p.own_work, p.asked_work), engine, p.planned.parts is not None)
    if not found.draws:
        return Intervals(0, LEVEL, notes=(found.note,))
    say("drawing what is not known")
    got = intervals(p, draws=found.draws, level=LEVEL, engine=found.engine, progress=tell)
    return replace(got, notes=(*got.notes, found.note)) if found.note and got else got


def _how(a: Arrivals) -> str:
    if a.kind == "closed":
        return f", {a.label}"
    return "" if a.rate == 1 else f", {float(a.rate):g} x the rate"


def _again(p: Prepared, work: Workload, tokens: bool, engine: Engine, tell: Fraction_, stack: ExitStack, name: str) -> Trace:
    """The trace under its own policy, to be compared: in memory, or a folder that goes when ``stack`` ends."""
    manifest = manifest_of(p.parent.trace.manifest, p.own.plan, p.own.servers, work.left_out)
    tokens = tokens and bool(p.parent.vantages)  # ITL is compared only where the trace has it
    if int(work.output_tokens.sum()) <= _HELD_TOKENS or not tokens:
        parts = Parts()
        play_into(p.parent, work, p.own, parts.submit, simulation(engine), tokens=tokens, tell=tell)
        return FramesTrace(parts.frames(), manifest, f"{p.parent.trace.name}-{name}")
    folder: AbstractContextManager[str] = tempfile.TemporaryDirectory(prefix="hoptrace-")
    out = Path(stack.enter_context(folder)) / f"{name}.trace"
    with BulkWriter(out, manifest) as writer:
        play_into(p.parent, work, p.own, writer.submit, simulation(engine), tokens=tokens, tell=tell)
    return open_trace(out)


def _info(
    p: Prepared,
    s: Setting,
    recorder: Recorder,
    own: Comparison | None,
    own_recorded: Comparison | None,
    bounds: Intervals | None,
    against: Comparison | None,
    covers: Coverage,
    check: bool,
) -> ReplayInfo:
    """What the manifest says of how the replay was made, and how wrong it is."""
    plan = p.planned.plan
    cost = plan.costs[plan.engines[0].cost]
    found: dict[str, Any] = {
        "own_policy": None if own is None else own.as_dict(),
        "own_policy_recorded_arrivals": None if own_recorded is None else own_recorded.as_dict(),
        "intervals": None if bounds is None else bounds.as_dict(),
        "coverage": covers.as_dict(),
        "arriving": p.arrivals.as_dict(),
        "requests": counts(s, recorder.late),
        "traffic": recorder.traffic.as_list(),
        "until_ns": p.until_ns,
    }
    return ReplayInfo(
        parent=p.parent.trace.name,
        policy={
            "name": p.policy.name, "description": p.policy.description, "changes": p.policy.changes(), **p.planned.as_dict(),
        },
        cost_model={**p.how, "step": cost.to_dict(), "steps": {"origin": p.seen.origin, "note": p.seen.note},
                    "outside_steps": p.planned.overheads.as_dict()},
        seed=plan.seed,
        arrivals=p.arrivals.label,
        error=None if own is None else own.errors(),
        warnings=_warnings(p, recorder, own, against, cost, check),
        **{k: v for k, v in found.items() if v is not None},
    )  # fmt: skip


def _warnings(
    p: Prepared, recorder: Recorder, own: Comparison | None, against: Comparison | None, cost: StepCost, check: bool
) -> list[str]:
    trace = p.parent.trace
    found = [*p.work.notes, *changed(trace), *p.planned.notes]
    if check:
        found += compared(own, against, cost)
        if own is not None:
            found += [f"For the error under the trace's own policy: {n}" for n in p.own.notes if n not in p.planned.notes]
    here = p.how.get("kind") == "fitted"  # to the steps of this trace
    if here:
        found += [p.seen.note] if p.seen.note else []
        found += basis(trace, p.seen)
    found += refused([recorder.errors[i] for i in sorted(recorder.errors)])
    if recorder.late:
        found.append(f"{recorder.late:,} requests had not arrived by the horizon; they have no row.")
    if any(e.cache is not None for e in p.planned.plan.engines):
        if not len(p.work.block_id):
            found.append("The trace has no prefix blocks: the prefix cache finds nothing.")
        else:
            found.append("Prefix hits are counted in whole blocks of the trace, and a generated answer is never found again.")
    found += p.arrivals.notes
    found += (said for domain in recorder.domains for said in domain.sentences())
    if cost.origin == "fitted":
        found += noise(cost)
    if here:
        found += drift(p.seen.steps, cost)
    found += cost.notes
    return list(dict.fromkeys(found))
