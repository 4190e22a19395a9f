"""A replay in which some of what is predicted is replaced by what was recorded: where does its error come from? docs/truths.md.

The four truths: *arrival* (when the engine could begin with each request, and which engine), *step_time* (when its steps began
and ended), *batching* (who computed how many tokens in which step; what the cache found is part of that), *cache* (what each
admission found). What is left with all of them is the way out: from the end of a step until the client has the token.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

import numpy as np
import polars as pl

from hoptrace.errors import InputError, UsageError
from hoptrace.reader import Trace
from hoptrace.replay.memory_trace import FramesTrace
from hoptrace.replay.memory_trace import Parts as Tables
from hoptrace.replay.outcome import Outcome
from hoptrace.replay.plain.parts import Parts
from hoptrace.replay.played import play_into
from hoptrace.replay.prepare import Prepared
from hoptrace.replay.rows.manifest import manifest_of
from hoptrace.replay.simulation import Simulate, simulation
from hoptrace.replay.truths.arrival import Assigned, put_back, ready_ns, timed
from hoptrace.replay.truths.batching import retimed, unplaced
from hoptrace.replay.truths.cache import RecordedCache, untold
from hoptrace.replay.truths.clock import RecordedClock
from hoptrace.replay.truths.recorded import COMPOSITION, Recorded

__all__ = ["TRUTHS", "lacking", "replayed_with"]

TRUTHS = ("arrival", "step_time", "batching", "cache")
_HINT = "hoptrace.replay.truths.lacking says which truths a recording has."


def replayed_with(
    prepared: Prepared,
    recorded: Trace,
    truths: Set[str] = frozenset(),
    *,
    inferred: bool = False,
    tokens: bool = True,
    fraction: Callable[[float], None] | None = None,
) -> FramesTrace:
    """What is asked for in ``prepared``, played with these truths of ``recorded``; the rows in memory. Without any it is the
    prediction itself. A table `waits` there is only then: recorded times leave none to be simulated.

    Args:
        prepared: the plan, over the requests of ``recorded`` (``against(a, recorded, work="b")``, or the own policy of it).
        truths: of :data:`TRUTHS`.
        inferred: whether steps that were reconstructed from token times pass for recorded ones.
        tokens: whether to make the rows of `tokens`.
        fraction: told how far it is, 0 to 1.

    Raises:
        UsageError: there is no such truth, or the requests are not those of ``recorded``.
        InputError: the recording does not tell one of the truths; says why.
    """
    wanted = frozenset(truths)
    for name in sorted(wanted - set(TRUTHS)):
        raise UsageError(f"There is no truth {name!r}.", hint=f"There are: {', '.join(TRUTHS)}.")
    told = Recorded(recorded, prepared.planned.plan)
    _check(prepared, told)
    for name, why in _lacking(told, prepared, inferred).items():
        if name in wanted and why is not None:
            raise InputError(f"The truth of {name} cannot be had from {recorded.path}: {why}", hint=_HINT)
    return _play(prepared, told, wanted, tokens, fraction or (lambda _: None))


def lacking(prepared: Prepared, recorded: Trace, *, inferred: bool = False) -> dict[str, str | None]:
    """Each of :data:`TRUTHS`: null, or why ``recorded`` does not tell it, in a sentence. UsageError as for
    :func:`replayed_with`."""
    told = Recorded(recorded, prepared.planned.plan)
    _check(prepared, told)
    return _lacking(told, prepared, inferred)


def _check(p: Prepared, told: Recorded) -> None:
    mine, its = p.asked_work, told.work
    same = mine.n == its.n and all(
        np.array_equal(getattr(mine, c), getattr(its, c)) for c in ("request", "prompt_tokens", "output_tokens")
    )
    if not same:
        raise UsageError(
            f"What was prepared is not about the requests of {told.trace.path}, so none of its truths can be put in.",
            hint='Prepare it over them: against(a, recorded, work="b").',
        )
    if p.planned.plan.clients is not None or p.until_ns is not None or p.arrivals.rate != 1:
        raise UsageError("A truth is one of the recorded load: no closed loop of N, other rate or horizon goes with it.")


def _lacking(told: Recorded, p: Prepared, inferred: bool) -> dict[str, str | None]:
    plan, work = p.planned.plan, p.asked_work
    found: dict[str, str | None] = dict.fromkeys(TRUTHS)
    steps = None
    if not told.steps.height:
        steps = "it has no steps."
    elif told.inferred and not inferred:
        steps = "its steps were reconstructed from token times: they are inferred, not recorded."
    elif told.steps["engine"].null_count() or len(told.places) > len(plan.engines):
        steps = f"it has {len(told.places)} engines with steps, the plan {len(plan.engines)}."
    found["step_time"] = found["batching"] = steps
    if steps is None:
        found["batching"] = _no_batching(told, p)
    if plan.handover is not None:
        found["arrival"] = "requests of a prefill/decode split arrive twice, and when the second time is decided by the transfer."
    missing = untold(told, work)
    if missing:
        found["cache"] = f"it does not tell what {missing:,} of {work.n:,} requests found in the cache."
    elif plan.tiers:
        found["cache"] = "the plan has tiers below the device's cache, and what came from which is not put in."
    return found


def _no_batching(told: Recorded, p: Prepared) -> str | None:
    if p.planned.plan.handover is not None:
        return "a prefill/decode split computes a request on two engines; only whole ones are timed anew."
    unknown = told.steps.filter(pl.any_horizontal(pl.col(c).is_null() for c in COMPOSITION)).height
    if unknown:
        return f"{unknown:,} of its {told.steps.height:,} steps do not tell their composition."
    missing = unplaced(told, p.asked_work)
    if missing:
        return f"of {missing:,} of {p.asked_work.n:,} requests it does not tell the steps of all their tokens."
    return None


def _play(p: Prepared, told: Recorded, wanted: frozenset[str], tokens: bool, tell: Callable[[float], None]) -> FramesTrace:
    work, planned = p.asked_work, p.planned
    parent = p.parent if p.asked_parent is None else p.asked_parent
    plan, parts = planned.plan, planned.parts
    ready = None
    if "arrival" in wanted:
        ready = ready_ns(told, work, planned.overheads)
        work = timed(work, ready, plan.before_ns)
        ready = work.arrival_ns + plan.before_ns
    simulate: Simulate
    if "batching" in wanted:
        as_recorded = "step_time" in wanted

        def simulate(work, plan, sink, *, progress=None, **more) -> Outcome:  # type: ignore[no-untyped-def]
            return retimed(told, work, plan, sink, ready, steps_as_recorded=as_recorded)

        planned = replace(planned, parts=None)
    elif wanted:
        router = (lambda _: Assigned(told, work)) if "arrival" in wanted and len(plan.engines) > 1 else None
        mine = replace(
            parts or Parts(),
            clock=RecordedClock(told) if "step_time" in wanted else None,
            cached=RecordedCache(told, work) if "cache" in wanted else None,
        )
        planned = replace(planned, parts=mine if router is None else replace(mine, router=router))
        simulate = simulation("plain")
    else:
        simulate = simulation("auto")
    tables = Tables()
    manifest = manifest_of(parent.trace.manifest, plan, planned.servers, work.left_out)
    play_into(parent, work, planned, tables.submit, simulate, tokens=tokens, tell=tell)
    frames = tables.frames()
    if "batching" in wanted:
        frames |= _as_recorded(frames, told)
    if "arrival" in wanted:
        frames = put_back(frames, told)
    if wanted:
        frames.pop("waits", None)
        frames["coverage"] = frames["coverage"].filter(pl.col("table") != "waits")
    return FramesTrace(frames, manifest, f"{parent.trace.name}-with-{'-'.join(sorted(wanted)) or 'nothing'}")


def _as_recorded(frames: dict[str, pl.DataFrame], told: Recorded) -> dict[str, pl.DataFrame]:
    """The recorded steps with the times that they have now, and who was in them as recorded."""
    columns = frames["steps"].columns
    parts = []
    for e, s in enumerate(told.engines):
        if not s.rows.height:
            continue
        spec = told.plan.engines[e]
        mine = (pl.col("server") == spec.name) & (pl.col("dp_rank") == spec.dp_rank)
        now = frames["steps"].filter(mine).sort("start_ns", "step").select("start_ns", "end_ns")
        parts.append(s.rows.with_columns(now["start_ns"], now["end_ns"]).select(columns))
    return {
        "steps": pl.concat(parts).sort("server", "dp_rank", "step"),
        "residency": told.residency.select(frames["residency"].columns).sort("request", "first_step"),
    }
