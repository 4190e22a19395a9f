"""Several recorded servers in a plan: their names, and a step cost for each role of a split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import polars as pl

from hoptrace.manifest import Server
from hoptrace.replay.planning import CostOf, Planned
from hoptrace.replay.policy.own import Own
from hoptrace.stepcost import StepCost
from hoptrace.stepcost_fit import MIN_STEPS

__all__ = ["by_role", "seen_as"]


def by_role(roles: Mapping[str, str], steps: pl.DataFrame, fit: Callable[[pl.DataFrame], StepCost], pooled: StepCost) -> CostOf:
    """The step cost of each role, fitted to the steps of its servers; of servers that do both, and of a role with too few steps
    of its own, that of all steps together."""
    found: dict[str, StepCost] = {}
    for role in sorted(set(roles.values())):
        mine = steps.filter(pl.col("server").is_in([name for name, r in roles.items() if r == role]))
        if mine.height >= MIN_STEPS:
            found[role] = fit(mine)

    def cost(server: Server, platform: str | None) -> StepCost:
        return found.get(str(server.config.get("role")), pooled)

    return cost


def seen_as(planned: Planned, own: Own) -> Planned:
    """The plan with the recorded servers' names and with what was taken for want of knowledge of them, where it has as many."""
    n = len(planned.plan.engines)
    if own.names and len(own.names) != n:
        return planned
    notes = tuple(dict.fromkeys((*own.notes, *planned.notes)))
    # Links and places of a split, and those of tiers, are called by the plan's own names.
    if not own.names or own.roles or planned.plan.ways:
        return replace(planned, notes=notes)
    engines = tuple(replace(e, name=name) for e, name in zip(planned.plan.engines, own.names, strict=True))
    servers = tuple(s.model_copy(update={"name": name}) for s, name in zip(planned.servers, own.names, strict=True))
    return replace(planned, notes=notes, plan=replace(planned.plan, engines=engines), servers=servers)
