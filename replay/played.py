"""Plays what is prepared: the rows of one replay, and nothing beside them."""

from __future__ import annotations

from collections.abc import Callable

from hoptrace.errors import HoptraceError
from hoptrace.replay.memory_trace import FramesTrace, Parts
from hoptrace.replay.outcome import REQUEST, UNFINISHED
from hoptrace.replay.parent import Parent
from hoptrace.replay.planning import Planned
from hoptrace.replay.prepare import Prepared
from hoptrace.replay.rows.manifest import manifest_of
from hoptrace.replay.rows.recorder import Recorder, Submit, coverage
from hoptrace.replay.setting import Setting
from hoptrace.replay.simulation import Engine, Simulate, simulation
from hoptrace.replay.workload import Workload
from hoptrace.schema import TABLES

__all__ = ["play_into", "played"]

Tell = Callable[[float], None]


def played(
    prepared: Prepared, *, own: bool = False, engine: Engine = "auto", tokens: bool = True, fraction: Tell | None = None
) -> FramesTrace:
    """The rows of what is asked for, or (``own``) of the trace under its own policy and arrivals, in memory.

    Nothing is compared and the manifest says nothing of errors: see :func:`hoptrace.replay.run.run` for that.

    Args:
        engine: ``compiled``, ``plain``, or ``auto``: the plain one where the work is small.
        tokens: whether to make the rows of `tokens`.
        fraction: told how far it is, 0 to 1.

    Raises:
        HoptraceError: a request can neither run nor be refused.
    """
    p = prepared
    parent = p.parent if own or p.asked_parent is None else p.asked_parent
    work, planned = (p.own_work, p.own) if own else (p.asked_work, p.planned)
    manifest = manifest_of(parent.trace.manifest, planned.plan, planned.servers, work.left_out)
    parts = Parts()
    play_into(parent, work, planned, parts.submit, simulation(engine), tokens=tokens, tell=fraction or (lambda _: None))
    return FramesTrace(parts.frames(), manifest, f"{parent.trace.name}-{'own' if own else 'replay'}")


def play_into(
    parent: Parent,
    work: Workload,
    planned: Planned,
    submit: Submit,
    simulate: Simulate,
    *,
    tokens: bool = True,
    tell: Tell = lambda _: None,
) -> tuple[Setting, Recorder]:
    """Simulate, and give each table part by part to ``submit``. ``simulate``: the engine; parts of the user's own run in the
    plain one only.

    Raises:
        HoptraceError: a request can neither run nor be refused.
    """
    recorder = Recorder(parent, work, planned.plan, planned.servers, planned.overheads, submit, tokens=tokens)
    if planned.parts is not None:
        outcome = simulation("plain")(work, planned.plan, recorder, progress=tell, parts=planned.parts)
    else:
        outcome = simulate(work, planned.plan, recorder, progress=tell)
    if planned.plan.horizon_ns is None and (outcome.requests[:, REQUEST.index("status")] == UNFINISHED).any():
        raise HoptraceError("The replay got stuck: a request can neither run nor be refused.", hint="Please report this policy.")
    tell(0)
    s = recorder.finish(outcome, tell)
    # Moves of KV are all there where there can be any; messages only if the parent had them.
    moved = parent.messages or bool(planned.plan.ways)
    there = {"requests", "stages", "waits", "steps", "residency", *(["tokens"] * tokens), *(["moves"] * moved)}
    tables = [n for n in TABLES if n in there]
    submit("coverage", lambda: coverage(s, tables))
    return s, recorder
