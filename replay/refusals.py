"""Why a request could never be served: in words, for those that the simulation refused."""

from __future__ import annotations

from collections.abc import Iterable

from hoptrace.replay.plan import EngineSpec, Plan
from hoptrace.replay.setting import Ints
from hoptrace.replay.workload import Workload

__all__ = ["refusals"]


def refusals(work: Workload, plan: Plan, refused: Ints) -> dict[int, str]:
    """By position in the work: the reason in a sentence. The rules are those of docs/replay-engine.md, Refusals."""
    return {int(i): _why(int(work.prompt_tokens[i]), int(work.output_tokens[i]), plan) for i in refused}


def _why(prompt: int, output: int, plan: Plan) -> str:
    several = len({(e.context_tokens, e.capacity_tokens, e.block_size_tokens) for e in plan.engines}) > 1
    for e, computes in _reachable(prompt, output, plan):
        on = f" on {e.name}" if several else ""
        only_prompt = e.role == "prefill" and output > 1
        length = prompt + 1 if only_prompt else prompt + output
        if e.context_tokens is not None and length > e.context_tokens:
            return f"cannot ever fit{on}: {length} tokens, the context holds {e.context_tokens}"
        # The last token is never computed on, so it takes no KV.
        peak = prompt if only_prompt else prompt + output - 1
        if plan.speculation is not None and not only_prompt:
            peak += plan.speculation.tokens
        block = e.block_size_tokens
        if e.capacity_tokens is not None and -(-peak // block) > e.capacity_tokens // block:
            return f"cannot ever fit{on}: {peak} tokens of KV, there is room for {e.capacity_tokens // block * block}"
        whole = computes and not e.chunked_prefill and e.mode != "prompts_first"
        if whole and e.max_batched_tokens is not None and prompt > e.max_batched_tokens:
            return f"cannot ever fit{on}: a prompt of {prompt} tokens in a step of {e.max_batched_tokens}, without chunks"
    return "cannot ever fit the engines that it may reach"


def _reachable(prompt: int, output: int, plan: Plan) -> Iterable[tuple[EngineSpec, bool]]:
    """Engines that it may come to, and whether it would compute its prompt there."""
    decoders = [plan.engines[i] for i in plan.decoders]
    if plan.handover is not None and prompt < plan.handover.local_below_tokens:
        return [(e, True) for e in decoders]
    entry = [plan.engines[i] for i in plan.entry]
    goes_on = output > 1 and any(e.role == "prefill" for e in entry)
    return [(e, True) for e in entry] + [(e, False) for e in decoders if goes_on]
