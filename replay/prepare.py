"""All that a replay needs before anything is simulated: the work, who waits for whom, the step cost, two plans."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import polars as pl

from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Server
from hoptrace.platform_seen import platform_seen
from hoptrace.reader import Trace
from hoptrace.reconstruct import Steps, steps_of
from hoptrace.replay.arrivals import Arrivals, arrange, parse_arrivals
from hoptrace.replay.calibration.use import merged
from hoptrace.replay.cost import FROM_TRACE, Chosen, choose, not_told
from hoptrace.replay.overheads import overheads
from hoptrace.replay.parent import Parent, observed, one_rank, parent_of
from hoptrace.replay.planning import CostOf, Planned, RoomOf, plan_of
from hoptrace.replay.planning.places import NoPlatform
from hoptrace.replay.policy import Policy, load_policy
from hoptrace.replay.policy.own import Own, on_top, own_policy
from hoptrace.replay.several import by_role, seen_as
from hoptrace.replay.workload import Workload, parse_rate, workload
from hoptrace.stepcost import StepCost

__all__ = ["Prepared", "parse_until", "prepare"]

_UNITS = {
    "ns": 1,
    "us": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "min": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86400 * 10**9,
}
_MOST_NS = 1 << 61


@dataclass(frozen=True)
class Prepared:
    """``work``: as recorded. ``own_work``, ``own``: as the trace says that it arrived, under its own policy. ``asked_work``,
    ``planned``: what is asked for. ``how``: what the manifest says of the step cost. ``until_ns``: after the first arrival.
    ``plan_for``: plans another policy on top of what the trace ran under, for ``asked_work`` as ``planned`` is: many what-ifs
    of one trace need its step cost and its times only once."""

    parent: Parent
    policy: Policy
    seen: Steps
    observed: bool
    work: Workload
    own_work: Workload
    own_arrivals: Arrivals
    own: Planned
    asked_work: Workload
    arrivals: Arrivals
    planned: Planned
    how: dict[str, Any]
    until_ns: int | None
    plan_for: Callable[[Policy], Planned] | None = None
    asked_parent: Parent | None = None


def parse_until(text: str | int | None) -> int | None:
    """``10m``, ``90s``, ``1.5h`` (or ns as a number) in ns; null is for ever. UsageError if it is no positive time."""
    if text is None:
        return None
    if isinstance(text, int):
        found = text
    else:
        match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,9})?)\s*(ns|us|ms|s|min|m|h|d)\s*", text)
        found = int(Fraction(match[1]) * _UNITS[match[2]]) if match else 0
    if not 0 < found < _MOST_NS:
        raise UsageError(f"{str(text)[:40]!r} is not a time.", hint="Write --until 10m (ms, s, m, h, d).")
    return found


def prepare(
    trace: Trace,
    policy: Policy | str | Path,
    *,
    cost: StepCost | str | None,
    platform: str | None,
    model: str | None,
    recorded_on: str | None,
    seed: int,
    rate: Fraction | float | str,
    arrivals: str | None,
    until: str | int | None,
    say: Callable[[str], None],
    under: Own | None = None,
    doing: Trace | None = None,
) -> Prepared:
    """See :func:`hoptrace.replay.run.run` for the arguments and what is raised.

    ``under``: another server and what it ran under, which ``policy`` goes on top of instead of the trace's own. ``doing``: the
    trace whose requests are asked for; null: this one.
    """
    policy = policy if isinstance(policy, Policy) else load_policy(policy)
    fast = parse_rate(rate) if isinstance(rate, str) else Fraction(rate)
    kind, clients = parse_arrivals(arrivals)
    until_ns = parse_until(until)
    one_rank(trace)
    ran = own_policy(trace.manifest, trace)
    base = under or ran
    asked = on_top(base.policy, policy)  # what does not go together is said before anything is read
    server = ran.server
    # Of a replay: what its transfers go by. Its step cost is that of its own steps.
    named = None if platform == FROM_TRACE else platform
    seen_on, told_of_it = platform_seen(trace.manifest) if platform == FROM_TRACE else (None, ())
    paths_of = named or ran.platform or seen_on
    say("reading the workload")
    work = workload(trace)
    asked_work, how_asked = arrange(work if doing is None else workload(doing), doing or trace, arrivals, fast)
    # Recorded arrivals that were asked for are held against themselves; else the trace says what its own are.
    own_work, how_own = arrange(work, trace, "recorded" if kind == "recorded" else None)
    say("looking at the recorded steps")
    seen = steps_of(trace)
    say("choosing the step cost")
    outside = overheads(trace, seen.steps, seen.residency)

    def priced(own: Server, on: str | None, fitting: bool = False, steps: pl.DataFrame = seen.steps) -> Chosen:
        # Only what is asked for has to fit: the trace's own server may have fewer ranks than the model that is put on it.
        assert not isinstance(cost, StepCost)
        return choose(
            cost, steps, own, platform=on, model=model, recorded_on=recorded_on, manifest=trace.manifest, fitting=fitting
        )

    def room(fitting: bool) -> RoomOf:
        def tokens(own: Server, on: str | None) -> tuple[int | None, tuple[str, ...]]:
            untold = own.model_copy(update={"kv_capacity_tokens": None, "block_count": None})
            got = priced(untold, on or platform, fitting)
            if fitting and got.room == ():
                where = on or platform or "the platform"
                raise InputError(
                    f"The weights of {got.server.model or 'the model'} leave no room for KV on {where}.",
                    hint="Use more ranks (--set servers.tensor_parallel=2), a larger device, or set kv.capacity_tokens.",
                )
            return got.server.kv_capacity_tokens, got.room or ()

        return tokens

    rooms: tuple[RoomOf | None, RoomOf | None] = (None, None)
    if isinstance(cost, StepCost):
        costs: StepCost | CostOf = cost
        own_costs: StepCost | CostOf = cost
        how = {"kind": cost.origin}
    else:
        chosen = priced(server, platform)
        server, how = chosen.server, chosen.how | ({"assumed": list(chosen.notes)} if chosen.notes else {})
        outside = outside if chosen.outside is None else merged(chosen.outside, outside)
        rooms = (None, None) if chosen.room is None else (room(False), room(True))
        # What knows the machine is asked for each kind of server; what does not is one for all.
        several = how["kind"] in ("roofline", "aiconfigurator", "table")
        costs = (lambda own, on: priced(own, on or platform, True).cost) if several else chosen.cost
        own_costs = (lambda own, on: priced(own, on or platform).cost) if several else chosen.cost
        if ran.roles and how["kind"] == "fitted":
            fitted = by_role(ran.roles, seen.steps, lambda steps: priced(server, platform, steps=steps).cost, chosen.cost)
            costs = own_costs = fitted
        if "recorded_on" in how:
            # What was observed is held against the machine that it was observed on.
            own_costs = priced(server, None).cost

    def plan(p: Policy, w: Workload, priced: StepCost | CostOf, on: Server = server, **more: Any) -> Planned:
        more = {"platform": paths_of} | more
        try:
            found = plan_of(p, server=on, work=w, costs=priced, overheads=outside, steps=seen.steps, seed=seed, **more)
        except NoPlatform as e:
            if platform != FROM_TRACE:
                raise
            untold = not_told(told_of_it)
            raise InputError(f"{e} {untold}", hint=untold.hint) from None
        by_paths = found.sources and seen_on is not None and found.platform is seen_on
        return replace(found, notes=tuple(dict.fromkeys((*found.notes, *told_of_it)))) if by_paths else found

    own = seen_as(plan(ran.policy, own_work, own_costs, room=rooms[0]), ran)
    horizon = None if until_ns is None or not work.n else int(work.arrival_ns[0]) + until_ns

    def plan_for(another: Policy) -> Planned:
        full = on_top(base.policy, another)
        more: dict[str, Any] = {"clients": clients if kind == "closed" else None, "horizon_ns": horizon, "room": rooms[1]}
        if under is not None:
            there = under.server.kv_capacity_tokens or under.server.block_count
            more |= {"on": under.server, "platform": named or under.platform, "room": None if there else rooms[1]}
        return seen_as(plan(full, asked_work, costs, **more), base)

    planned = plan_for(policy)
    told = server.kv_capacity_tokens or server.block_count
    if under is None and named is not None and told and rooms[1] is None and asked.kv.capacity_tokens is None:
        note = f"KV space is the trace's server's, not that of {named}: set kv.capacity_tokens if it differs."
        planned = replace(planned, notes=(*planned.notes, note))
    return Prepared(
        parent_of(trace), policy, seen, observed(trace), work, own_work, how_own, own, asked_work, how_asked, planned, how,
        until_ns, plan_for, None if doing is None else parent_of(doing),
    )  # fmt: skip
