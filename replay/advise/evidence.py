"""What the trace's own policy, replayed, shows of which limits ever held anybody up: most flags are settled by that alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hoptrace.replay.outcome import BUDGET, KV, REQUEST, SLOTS, STEP, Kept, Outcome
from hoptrace.replay.workload import Workload

__all__ = ["Evidence", "evidence_of", "reuse_share"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_C = {name: i for i, name in enumerate(STEP)}
_R = {name: i for i, name in enumerate(REQUEST)}


@dataclass(frozen=True)
class Evidence:
    """The own policy's run.

    Attributes:
        requests: of the work. steps: of all engines.
        most_running: requests that held a place at once on one engine, at most. mean_running: over the time that steps took.
        most_waiting: most that ran and waited at once on one engine.
        stood: share of the time from the first arrival to the end in which a queue stood for want of a place (``slots``), KV
            space (``kv``), or the step's budget (``budget``).
        most_step_tokens: of one step. budget_ns: share of step time in steps that were as large as the budget.
        most_beside: most prompt tokens in a step that also held decoders. beside_ns: share of step time in such steps.
        preemptions: how often a request was driven out.
        most_kv_tokens: held by requests at once on one engine.
        reusable: share of all prompt tokens that a cache without end would find; null: the trace holds no prefix blocks.
        reused: share that the own policy found.
        priorities: whether requests bear different priorities.
    """

    requests: int
    steps: int
    most_running: int
    mean_running: float
    most_waiting: int
    stood: dict[str, float]
    most_step_tokens: int
    budget_ns: float
    most_beside: int
    beside_ns: float
    preemptions: int
    most_kv_tokens: int
    reusable: float | None
    reused: float
    priorities: bool

    @property
    def lacks_kv(self) -> bool:
        """Whether KV space ever held anybody up, or made the cache forget what would have been found again."""
        return self.stood["kv"] > 0 or self.preemptions > 0 or (self.reused > 0 and self.forgets)

    @property
    def forgets(self) -> bool:
        """Whether the cache lost what an endless one would have found: more than a hundredth of all prompt tokens."""
        return self.reusable is not None and self.reusable - self.reused > 0.01


def evidence_of(work: Workload, outcome: Outcome, kept: Kept, budget: int | None) -> Evidence:
    """``kept``: steps of the own policy's run; ``budget``: tokens of one step at most, null without a limit."""
    steps = kept.rows("step")
    took = steps[:, _C["end_ns"]] - steps[:, _C["start_ns"]]
    total = max(1, int(took.sum()))
    prompt, decoders = steps[:, _C["prefill_tokens"]], steps[:, _C["decode_requests"]]
    tokens = prompt + steps[:, _C["decode_tokens"]]
    running, waiting = steps[:, _C["running"]], steps[:, _C["waiting"]]
    beside = (prompt > 0) & (decoders > 0)
    prompts = max(1, int(work.prompt_tokens.sum()))
    arrival = outcome.requests[:, _R["arrival_ns"]]
    first = int(arrival[arrival >= 0].min()) if (arrival >= 0).any() else 0
    return Evidence(
        requests=work.n,
        steps=len(steps),
        most_running=_most(running),
        mean_running=float((running * took).sum() / total),
        most_waiting=_most(running + waiting),
        stood=_stood(steps, max(1, outcome.end_ns - first)),
        most_step_tokens=_most(tokens),
        budget_ns=0.0 if budget is None else float(took[tokens >= budget].sum() / total),
        most_beside=_most(prompt[beside]),
        beside_ns=float(took[beside].sum() / total),
        preemptions=int(np.maximum(0, outcome.requests[:, _R["preemptions"]]).sum()),
        most_kv_tokens=_most(steps[:, _C["kv_used_tokens"]]),
        reusable=reuse_share(work),
        reused=float(np.maximum(0, outcome.requests[:, _R["cached_tokens"]]).sum() / prompts),
        priorities=work.priority is not None and len(np.unique(work.priority)) > 1,
    )


def _most(values: _Ints) -> int:
    return int(values.max()) if len(values) else 0


def _stood(steps: _Ints, span_ns: int) -> dict[str, float]:
    """Share of the time in which a queue stood still, by what lacked; of several engines the mean."""
    found = dict.fromkeys(("slots", "kv", "budget"), 0.0)
    engines = np.unique(steps[:, _C["engine"]])
    for e in engines:
        mine = steps[steps[:, _C["engine"]] == e]
        begin = mine[:, _C["start_ns"]]
        until = np.append(begin[1:], mine[-1:, _C["end_ns"]])
        for name, code in (("slots", SLOTS), ("kv", KV), ("budget", BUDGET)):
            found[name] += float((until - begin)[mine[:, _C["blocked_by"]] == code].sum() / span_ns / len(engines))
    return found


def reuse_share(work: Workload) -> float | None:
    """Share of the prompt tokens whose blocks an earlier prompt had too, the last token of each apart, which is always computed.
    Null where no request tells its blocks."""
    if not len(work.block_id):
        return None
    seen: set[int] = set()
    found = 0
    for i in range(work.n):
        low, high = int(work.block_ptr[i]), int(work.block_ptr[i + 1])
        ids = work.block_id[low:high].tolist()
        known = next((j for j, block in enumerate(ids) if block not in seen), len(ids))
        if known:
            found += min(int(work.block_end[low + known - 1]), int(work.prompt_tokens[i]) - 1)
        seen.update(ids)
    return found / max(1, int(work.prompt_tokens.sum()))
