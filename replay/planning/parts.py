"""Parts of a plan that need the trace: the order of the queue, accepted proposals, time outside steps, costs taken away."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from hoptrace.errors import InputError
from hoptrace.manifest import Server
from hoptrace.replay.costs.hostfree import host_free
from hoptrace.replay.draws import MILLION
from hoptrace.replay.overheads import Overheads
from hoptrace.replay.plan import Order, Speculation
from hoptrace.replay.policy.model import Policy
from hoptrace.replay.policy.resolve import Resolved
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import StepCost

if TYPE_CHECKING:
    from hoptrace.replay.plain.parts import Parts

__all__ = [
    "acceptance_ppm",
    "is_plugin",
    "order_of",
    "outside_of",
    "parts_of",
    "speculation_of",
    "without_host",
    "without_prompts",
]

_PROMPT = ("any_prefill", "prefill_tokens", "prefill_context_tokens", "prefill_attention")


def order_of(resolved: Resolved, work: Workload, cost: StepCost) -> Order:
    """The order of the queue. ``slack``: arrival + slo − the time to compute the prompt alone, in one step.

    Raises:
        InputError: the trace tells no priorities, and they are asked for.
    """
    if resolved.order == "priority":
        priority = getattr(work, "priority", None)
        if priority is None:
            raise InputError(
                'order = "priority": the trace tells no priorities.',
                hint="requests.priority has to be known; or take another order.",
            )
        return Order(key=np.asarray(priority, dtype=np.int64), from_arrival=False, requeue=True)
    if resolved.order == "shortest":
        return Order(key=work.prompt_tokens.astype(np.int64), from_arrival=False)
    if resolved.order == "slack":
        if not resolved.slo_ttft_ns:
            raise InputError(
                'order = "slack" needs batching.slo_ttft_ms: when a first token is due.', hint="Set it beside order."
            )
        lengths, at = np.unique(work.prompt_tokens, return_inverse=True)
        alone = np.array([cost.cost_ns(prefill_tokens=int(t)) for t in lengths], dtype=np.int64)
        return Order(key=resolved.slo_ttft_ns - alone[at], from_arrival=True)
    return Order()


def is_plugin(name: str | None) -> bool:
    """Whether it names a part of the user's own."""
    return name is not None and name.startswith("python:")


def parts_of(policy: Policy) -> Parts | None:
    """The parts of the user's own that a policy names; null if it names none.

    Raises:
        InputError: there is no such entry point, or it cannot be loaded.
    """
    b, c, r = policy.batching, policy.prefix_cache, policy.routing
    decode = r.decode.kind if r.decode is not None else None
    named = {
        "router": r.kind, "decode_router": decode, "order": b.order, "victim": b.victim, "eviction": c.eviction,
        "tier_eviction": c.tier_eviction,
    }  # fmt: skip
    asked = {part: name for part, name in named.items() if name is not None and is_plugin(name)}
    if not asked:
        return None
    from hoptrace.replay.plain.parts import Parts, guarded, load

    made: dict[str, Any] = {
        p: guarded(n, "making it", load(n)) if p in ("order", "victim") else load(n) for p, n in asked.items()
    }
    return Parts(**made)


def speculation_of(policy: Policy, steps: pl.DataFrame | None, notes: list[str]) -> Speculation | None:
    """[speculation] in integers. InputError if acceptance is to come from a trace that does not tell it."""
    s = policy.speculation
    if s is None:
        return None
    ppm = acceptance_ppm(steps, notes) if s.acceptance == "trace" else round(s.acceptance * MILLION)
    if (s.kind or "ngram") in ("draft_model", "eagle"):
        notes.append("The draft's own KV takes no room in this replay.")
    return Speculation(s.tokens, ppm, round((s.draft_ms_per_token or 0) * 1e6), s.off_above)


def acceptance_ppm(steps: pl.DataFrame | None, notes: list[str]) -> int:
    """Chance that a proposal is taken, given that those before it were, in millionths, from steps that count proposals.

    With k proposals a request, α + α² + … + α^k of them are taken on average (Leviathan et al., Fast inference from transformers
    via speculative decoding, ICML 2023, eq. 1 less the token that comes anyway); α is what makes that the recorded number. k is
    proposals ÷ decoders over the steps that propose, rounded to a whole number, at least 1.
    """
    hint = "Give speculation.acceptance as a number from 0 to 1."
    needed = ("draft_proposed", "draft_accepted", "decode_requests")
    if steps is None or any(c not in steps.columns for c in needed):
        raise InputError('acceptance = "trace": the trace has no steps that count proposals.', hint=hint)
    told = steps.filter((pl.col("draft_proposed") > 0) & pl.col("draft_accepted").is_not_null() & (pl.col("decode_requests") > 0))
    if not told.height:
        raise InputError('acceptance = "trace": no step of the trace tells draft_proposed and draft_accepted.', hint=hint)
    proposed, accepted, decoders = (int(told[c].sum()) for c in needed)
    if not 0 <= accepted <= proposed:
        raise InputError(f'acceptance = "trace": {accepted:,} of {proposed:,} proposals were accepted, by its steps.', hint=hint)
    k = max(1, round(proposed / decoders))
    wanted = accepted / proposed * k
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**j for j in range(1, k + 1)) < wanted else (low, middle)
    ppm = round(high * MILLION)
    notes.append(
        f"Acceptance from the trace: {accepted:,} of {proposed:,} proposals, about {k} a request and step, so each is taken with "
        f"{100 * ppm / MILLION:.3g} % if those before it were."
    )
    return ppm


def outside_of(policy: Policy, measured: Overheads) -> Overheads:
    """Time outside the steps, with [overheads] and [ceilings] on top of what was measured."""
    o, c = policy.overheads, policy.ceilings
    n = list(measured.n)
    found = measured
    if o.before_ms is not None:
        found = replace(
            found,
            arrival_to_sent_ns=0,
            sent_to_received_ns=0,
            received_to_enqueued_ns=round(o.before_ms * 1e6),
            enqueued_to_ready_ns=0,
        )
        n[:4] = [max(1, x) for x in n[:4]]
    if o.gap_ms is not None:
        found = replace(found, between_steps_ns=round(o.gap_ms * 1e6))
        n[4] = max(1, n[4])
    if o.after_ms is not None:
        found = replace(found, step_to_token_ns=0, last_token_to_finish_ns=round(o.after_ms * 1e6))
        n[5:] = [max(1, x) for x in n[5:]]
    if c.host_cost is not None:
        found = replace(found, between_steps_ns=0, enqueued_to_ready_ns=0)
    if c.front_cost is not None:
        found = replace(
            found,
            arrival_to_sent_ns=0,
            sent_to_received_ns=0,
            received_to_enqueued_ns=0,
            step_to_token_ns=0,
            last_token_to_finish_ns=0,
        )
    return replace(found, n=tuple(n))


def without_host(
    cost: StepCost, steps: pl.DataFrame | None, server: Server, measured: Overheads, notes: list[str]
) -> tuple[StepCost, str]:
    """The step cost less the host's part of a step, and what is taken away in words.

    Raises:
        InputError: the trace tells no host time at all.
    """
    free = None if steps is None else host_free(cost, steps, asynchronous=server.config.get("async_scheduling") is True)
    gap = bool(measured.n[4])
    if (free is None or free.cost is None) and not gap:
        why = "its steps are not given" if free is None else free.why
        raise InputError(f"The trace tells no host time: steps that touch were reconstructed, or replayed without it; {why}.")
    taken = []
    if gap:
        taken.append(f"{measured.between_steps_ns:,} ns between steps")
    else:
        notes.append("Time between steps is not told, so none is taken away.")
    if measured.n[3] and measured.enqueued_to_ready_ns:
        taken.append(f"{measured.enqueued_to_ready_ns:,} ns before the engine takes a request")
    if free is not None and free.cost is not None and free.share is not None:
        taken.append(f"{100 * free.share:.3g} % of the steps' time")
        if free.told < free.steps:
            notes.append(f"Only {free.told:,} of {free.steps:,} steps tell their host time.")
    elif free is not None and free.why:
        notes.append(f"Of the steps themselves nothing is taken away: {free.why}.")
    return (free.cost if free is not None and free.cost is not None else cost), ", ".join(taken)


def without_prompts(cost: StepCost) -> StepCost:
    """The step cost with prompt tokens free of charge. InputError if it is looked up whole, prompts and decoders together."""
    if any(p.inner != "decode_batch" or p.outer != "none" or p.factors[0] for p in cost.pieces):
        raise InputError("The step cost is looked up, so what prompts cost in it cannot be taken away.", hint="Use a fitted one.")
    return replace(
        cost,
        coefficients_ps={k: v for k, v in cost.coefficients_ps.items() if k not in _PROMPT},
        compute_ps={k: v for k, v in cost.compute_ps.items() if k not in _PROMPT},
        # What decoders add to a step of prompts is less than what they take alone: that is what is left of it.
        pieces=tuple(replace(p, factors=(0, p.factors[1], p.factors[1])) for p in cost.pieces),
    )
