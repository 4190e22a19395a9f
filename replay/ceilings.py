"""How much better it could get at most: the trace replayed under its own policy with one cost taken away, against the same replay
with it. Nothing is written, and no table of the replays is made: only the times of their requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from hoptrace.errors import InputError
from hoptrace.manifest import Server
from hoptrace.metrics import request_metrics
from hoptrace.platform import load_platform
from hoptrace.reader import Trace
from hoptrace.reconstruct import Steps, steps_of
from hoptrace.replay.engine import Served, serve
from hoptrace.replay.hostfree import host_free
from hoptrace.replay.overheads import Overheads, overheads
from hoptrace.replay.policy import MOST_SEQUENCES, Policy, Resolved, resolve
from hoptrace.replay.rows import times
from hoptrace.replay.run import server_of
from hoptrace.replay.workload import Workload, workload
from hoptrace.roofline import platform_of
from hoptrace.stepcost import FEATURES, StepCost, features_array, fit, known_cost, outside, roofline

__all__ = ["QUESTIONS", "ceilings"]

Progress = Callable[[str], None]

QUESTIONS: dict[str, str] = {
    "host": "with host cost zero",
    "front": "with client, network, proxy and delivery at no cost",
    "unlimited": "with no waiting for places, KV space or budget",
    "cached": "with every prompt cached",
    "roofline": "with every step at its roofline",
    "transfers": "with transfers free",
    "interference": "with no interference",
}
_FRONT = ("arrival_to_sent_ns", "sent_to_received_ns", "received_to_enqueued_ns", "step_to_token_ns", "last_token_to_finish_ns")
_PROMPT = ("any_prefill", "prefill_tokens", "prefill_context_tokens", "prefill_attention")
# A slot cache looks at every slot at each admission.
_MOST_SLOTS = 1024
_METRICS = ("e2e", "ttft", "tpot")


@dataclass(frozen=True)
class _Run:
    """A replay of all requests; of each: request, e2e_ns, ttft_ns, tpot_ns, arrival_ns, finish_ns, output_tokens."""

    served: Served
    cost: StepCost
    of_request: pl.DataFrame


@dataclass(frozen=True)
class _Base:
    """What all what-ifs start from."""

    work: Workload
    server: Server
    policy: Resolved
    cost: StepCost
    overheads: Overheads
    seen: Steps


def ceilings(
    trace: Trace, *, platform: str | Mapping[str, Any] | None = None, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """All ceilings of a trace, in the order of QUESTIONS, as plain values (``ceilings.Ceiling`` reads them).

    A question that the trace does not allow has ``left_out`` with the reason, and no factor. That of transfers comes up only
    where there are any. The step cost is what the trace's manifest names, else fitted to its steps.

    Args:
        platform: name, file or rates, for the roofline; null: the platform graph of the manifest.
        progress: told what is being done.

    Raises:
        UsageError, InputError: there is no such platform.
    """
    say = progress or (lambda _: None)
    given = load_platform(platform) if isinstance(platform, str) else platform
    try:
        say("reading the workload")
        base = _base(trace)
        say("replaying under the trace's own policy")
        own = _play(base)
    except InputError as e:
        why = f"{e.message} {e.hint or ''}".strip()
        return [_left_out(name, why) for name in ("host", "front", "unlimited", "cached", "roofline")]
    error = _error(trace, own)
    found = []
    for name, ask in (("host", _host), ("front", _front), ("unlimited", _unlimited), ("cached", _cached)):
        say(f"replaying {QUESTIONS[name]}")
        found.append(ask(base, own, error))
    say(f"replaying {QUESTIONS['roofline']}")
    found.append(_roofline(trace, base, own, error, given))
    if _transfers(trace):
        found.append(_left_out("transfers", "A replay models one engine without transfers, so there is none to take away."))
    found.append(
        _left_out(
            "interference",
            "A step is priced whole: a replay cannot give one request the step without what others have in it. "
            "The accounting says how much interference there is.",
        )
    )
    return found


def _base(trace: Trace) -> _Base:
    server = server_of(trace)
    work = workload(trace)
    seen = steps_of(trace)
    cost = known_cost(trace.manifest)
    if cost is None:
        cost = fit(seen.steps)
    if not work.n:
        raise InputError("The trace has no request that can be replayed.")
    return _Base(
        work, server, resolve(Policy(name="as-recorded"), server), cost, overheads(trace, seen.steps, seen.residency), seen
    )


def _play(base: _Base, *, policy: Resolved | None = None, cost: StepCost | None = None, oh: Overheads | None = None) -> _Run:
    oh, cost = oh if oh is not None else base.overheads, cost or base.cost
    served = serve(base.work, policy or base.policy, cost, before_ns=oh.before_ns, gap_ns=oh.between_steps_ns)
    t = times(served, oh).with_columns(pl.Series("output_tokens", served.work.output_tokens))
    more = pl.col("output_tokens") > 1
    return _Run(
        served,
        cost,
        t.select(
            "request",
            "arrival_ns",
            "finish_ns",
            "output_tokens",
            (pl.col("finish_ns") - pl.col("arrival_ns")).alias("e2e_ns"),
            (pl.col("first_token_ns") - pl.col("arrival_ns")).alias("ttft_ns"),
            pl.when(more)
            .then((pl.col("last_token_ns") - pl.col("first_token_ns")) / (pl.col("output_tokens") - 1))
            .alias("tpot_ns"),
        ),
    )


def _figures(frame: pl.DataFrame) -> dict[str, float | None]:
    """Means in ns, and output tokens per second from the first arrival to the last finish."""
    means = {f"{m}_mean_ns": frame[f"{m}_ns"].cast(pl.Float64).mean() for m in _METRICS}
    span = int(frame.select(pl.col("finish_ns").max() - pl.col("arrival_ns").min()).item() or 0)
    tokens = int(frame["output_tokens"].sum())
    found = {k: float(v) if isinstance(v, int | float) else None for k, v in means.items()}
    return {**found, "output_tokens_per_s": tokens / span * 1e9 if span > 0 else None}


def _error(trace: Trace, own: _Run) -> dict[str, float] | None:
    """Relative error of the own-policy replay's means, over the requests whose times both know; null without any."""
    observed = request_metrics(trace).join(own.of_request, on="request", suffix="_own")
    found = {}
    for m in _METRICS:
        both = observed.select(pl.col(f"{m}_ns").cast(pl.Float64), pl.col(f"{m}_ns_own").cast(pl.Float64)).drop_nulls()
        seen = float(both[f"{m}_ns"].sum())
        if both.height and seen > 0:
            found[m] = float(f"{float(both[f'{m}_ns_own'].sum()) / seen - 1:.4g}")
    return found or None


def _answer(
    name: str, base: _Base, own: _Run, other: _Run, error: Mapping[str, float] | None, taken_away: str, warnings: list[str]
) -> dict[str, Any]:
    """The factors over the requests that both replays serve."""
    a = own.of_request.join(other.of_request, on="request", how="semi")
    b = other.of_request.join(own.of_request, on="request", how="semi")
    before, after = _figures(a), _figures(b)

    def times_better(key: str) -> float | None:
        x, y = before[key], after[key]
        return x / y if x is not None and y else None

    faster, slower = after["output_tokens_per_s"], before["output_tokens_per_s"]
    added = other.of_request.height - a.height
    if added:
        warnings = [*warnings, f"{added} requests that were refused are served now; the factors are over the others."]
    e2e = times_better("e2e_mean_ns")
    if e2e is not None and e2e < 1 - 1e-9 and name != "roofline":
        warnings = [
            *warnings,
            "Slower on the whole, so not a ceiling but a what-if.",
        ]
    return {
        "name": name,
        "question": QUESTIONS[name],
        "throughput": faster / slower if faster is not None and slower else None,
        "e2e": e2e,
        "ttft": times_better("ttft_mean_ns"),
        "tpot": times_better("tpot_mean_ns"),
        "taken_away": taken_away,
        "error": None if error is None else dict(error),
        "warnings": list(dict.fromkeys([*warnings, *_notes(base), *_extrapolated(other)])),
        "left_out": None,
        "figures": {"own_policy": before, "what_if": after, "requests": a.height},
    }


def _notes(base: _Base) -> list[str]:
    found = [base.seen.note] if base.seen.note and base.cost.origin == "fitted" else []
    return [*found, *base.work.notes, *base.policy.notes]


def _extrapolated(run: _Run) -> list[str]:
    steps = run.served.steps
    if not steps.height or not run.cost.domain:
        return []
    features = features_array(steps)
    low, high = features.min(axis=0), features.max(axis=0)
    # What costs nothing may be anything.
    asked = {f: (int(low[i]), int(high[i])) for i, f in enumerate(FEATURES) if run.cost.coefficients_ps.get(f)}
    return outside(run.cost.domain, asked)


def _left_out(name: str, why: str) -> dict[str, Any]:
    return {"name": name, "question": QUESTIONS[name], "left_out": why, "warnings": []}


def _host(base: _Base, own: _Run, error: Mapping[str, float] | None) -> dict[str, Any]:
    oh = base.overheads
    gap, ready = bool(oh.n[4]), bool(oh.n[3])
    free = host_free(base.cost, base.seen.steps, asynchronous=base.server.config.get("async_scheduling") is True)
    if free.cost is None and not gap:
        return _left_out(
            "host", f"The trace tells no host time: steps that touch were reconstructed, or replayed without it; {free.why}."
        )
    taken = []
    warnings = []
    if gap:
        taken.append(f"{oh.between_steps_ns:,} ns between steps")
    else:
        warnings.append("Time between steps is not told, so none is taken away.")
    if ready and oh.enqueued_to_ready_ns:
        taken.append(f"{oh.enqueued_to_ready_ns:,} ns before the engine takes a request")
    if free.cost is not None and free.share is not None:
        taken.append(f"{100 * free.share:.3g} % of the steps' time")
        if free.told < free.steps:
            warnings.append(f"Only {free.told:,} of {free.steps:,} steps tell their host time.")
    elif free.why:
        warnings.append(f"Of the steps themselves nothing is taken away: {free.why}.")
    other = _play(base, cost=free.cost, oh=replace(oh, between_steps_ns=0, enqueued_to_ready_ns=0))
    return _answer("host", base, own, other, error, ", ".join(taken), warnings)


def _front(base: _Base, own: _Run, error: Mapping[str, float] | None) -> dict[str, Any]:
    oh = base.overheads
    names = ("arrival_to_sent_ns", "sent_to_received_ns", "received_to_enqueued_ns", "enqueued_to_ready_ns", "between_steps_ns",
             "step_to_token_ns", "last_token_to_finish_ns")  # fmt: skip
    told = [n for n in _FRONT if oh.n[names.index(n)]]
    if not told:
        return _left_out("front", "The trace tells no time outside the engine.")
    nothing = replace(oh, arrival_to_sent_ns=0, sent_to_received_ns=0, received_to_enqueued_ns=0, step_to_token_ns=0,
                      last_token_to_finish_ns=0)  # fmt: skip
    other = _play(base, oh=nothing)
    taken = ", ".join(f"{getattr(oh, n):,} ns {n.removesuffix('_ns').replace('_', ' ')}" for n in told)
    return _answer("front", base, own, other, error, taken, [])


def _unlimited(base: _Base, own: _Run, error: Mapping[str, float] | None) -> dict[str, Any]:
    places = min(base.work.n, _MOST_SLOTS if base.policy.cache == "slot" else MOST_SEQUENCES)
    if base.policy.max_sequences is not None:
        places = max(places, base.policy.max_sequences)
    policy = replace(base.policy, max_sequences=places, max_batched_tokens=None, capacity_tokens=None)
    other = _play(base, policy=policy)
    warnings = []
    if int(other.served.steps["running"].max() or 0) >= places and places < base.work.n:  # type: ignore[arg-type]
        warnings.append(f"{places:,} places are the most that a replay models here, and all were taken.")
    if base.policy.cache == "slot":
        warnings.append("Each place keeps its own prompt, so with more of them prompts are found again elsewhere than before.")
    p = base.policy
    taken = (
        f"the limits: places {_limit(p.max_sequences)}, tokens of a step {_limit(p.max_batched_tokens)}, "
        f"tokens of KV {_limit(p.capacity_tokens)}"
    )
    return _answer("unlimited", base, own, other, error, taken, warnings)


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def _cached(base: _Base, own: _Run, error: Mapping[str, float] | None) -> dict[str, Any]:
    cost = replace(
        base.cost,
        coefficients_ps={k: v for k, v in base.cost.coefficients_ps.items() if k not in _PROMPT},
        compute_ps={k: v for k, v in base.cost.compute_ps.items() if k not in _PROMPT},
    )
    # A prompt is one step long however long it is: without a budget it takes only one.
    policy = replace(base.policy, max_batched_tokens=None)
    other = _play(base, policy=policy, cost=cost)
    return _answer(
        "cached", base, own, other, error, "the cost of computing prompt tokens; the step that yields the first token remains",
        ["An upper bound: no cache holds every prompt."],
    )  # fmt: skip


def _roofline(
    trace: Trace, base: _Base, own: _Run, error: Mapping[str, float] | None, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    rates = given if given is not None else platform_of(trace.manifest, base.server)
    if rates is None:
        return _left_out("roofline", "No platform is known: give --platform NAME or FILE.")
    try:
        cost = roofline(base.server, rates)
    except InputError as e:
        return _left_out("roofline", e.message)
    other = _play(base, cost=cost)
    warnings = [*cost.notes]
    steps = own.served.steps
    took = (steps["end_ns"] - steps["start_ns"]).to_numpy()
    least = cost.cost_ns_array(steps)
    faster = took < least * 0.98
    if faster.any():
        share = float(np.sum(took[faster]) / max(1, int(np.sum(took))))
        warnings.insert(
            0,
            f"{int(faster.sum()):,} of {len(took):,} steps ({100 * share:.3g} % of their time) are faster than this roofline: "
            f"the platform {rates.get('name', '')!s} or the model's sizes are wrong, so this ceiling is not one.",
        )
    return _answer(
        "roofline", base, own, other, error, f"all of a step but its roofline on {rates.get('name', 'the platform')}", warnings
    )


def _transfers(trace: Trace) -> bool:
    kv = trace.table("moves").select((pl.col("object") == "kv").any()).collect().item()
    waited = trace.table("waits").select((pl.col("kind") == "transfer").any()).collect().item()
    return bool(kv) or bool(waited)
