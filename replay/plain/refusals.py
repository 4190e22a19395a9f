"""Which requests could never fit, and which plans make no sense here."""

from __future__ import annotations

from hoptrace.errors import UsageError
from hoptrace.replay.plain.requests import Request
from hoptrace.replay.plan import EngineSpec, Plan

__all__ = ["check", "never_fit"]


def check(plan: Plan) -> None:
    """Whether the plan can be run at all.

    Raises:
        UsageError: it cannot; says why.
    """
    prefill = any(e.role == "prefill" for e in plan.engines)
    if not plan.entry and not plan.decoders:
        raise UsageError("The plan has no engine.")
    if not plan.entry:
        raise UsageError("The plan has decode engines only.", hint="Add one of role prefill or both.")
    if prefill and (plan.handover is None or not plan.decoders):
        raise UsageError(
            "A prefill engine has nobody to hand over to.", hint="A plan with role prefill needs decode engines and `handover`."
        )
    for e in plan.engines:
        if e.cache == "slot" and (plan.tiers or e.role != "both"):
            raise UsageError(f"{e.name}: slots cannot be combined with tiers or hand-over.")
        if e.cache == "slot" and e.max_sequences is None:
            raise UsageError(f"{e.name}: slots need max_sequences, which says how many there are.")


def never_fit(plan: Plan, requests: list[Request]) -> frozenset[int]:
    """Numbers of the requests that an engine which they may reach could not hold."""
    entry = [plan.engines[i] for i in plan.entry]
    decode = [plan.engines[i] for i in plan.decoders]
    below = plan.handover.local_below_tokens if plan.handover is not None else 0
    proposals = plan.speculation.tokens if plan.speculation is not None else 0
    refused = set()
    for r in requests:
        if decode and r.prompt_tokens < below:
            fits = all(_fits(r, e, proposals, first=True) for e in decode)
        else:
            fits = all(_fits(r, e, proposals, first=True) for e in entry)
            if r.output_tokens > 1 and any(e.role == "prefill" for e in entry):
                fits = fits and all(_fits(r, e, proposals, first=False) for e in decode)
        if not fits:
            refused.add(r.number)
    return frozenset(refused)


def _fits(r: Request, e: EngineSpec, proposals: int, *, first: bool) -> bool:
    output = 1 if e.role == "prefill" else r.output_tokens
    if e.context_tokens is not None and r.prompt_tokens + output > e.context_tokens:
        return False
    if e.capacity_tokens is not None:
        tokens = r.prompt_tokens + output - 1 + (0 if e.role == "prefill" else proposals)
        if -(-tokens // e.block_size_tokens) > e.capacity_tokens // e.block_size_tokens:
            return False
    whole = first and not e.chunked_prefill and e.max_batched_tokens is not None and e.mode != "prompts_first"
    return not (whole and r.prompt_tokens > (e.max_batched_tokens or 0))
