"""How much better it could get at most: the trace replayed under its own policy with one cost taken away, against the same replay
with it. What is taken away is a policy's ``[ceilings]``. Nothing is written, and no table of the replays is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from hoptrace.errors import InputError
from hoptrace.metrics import request_metrics
from hoptrace.platform import load_platform
from hoptrace.reader import Trace
from hoptrace.reconstruct import steps_of
from hoptrace.replay.arrivals import arrange
from hoptrace.replay.ceilings.runs import METRICS, Base, Run, compared, play
from hoptrace.replay.overheads import overheads
from hoptrace.replay.policy import Policy, parse_policy
from hoptrace.replay.policy.own import own_policy
from hoptrace.replay.workload import workload
from hoptrace.roofline import platform_of
from hoptrace.stepcost import StepCost, fit, known_cost
from hoptrace.stepcost_roofline import roofline

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
        least, why = _least(trace, base, given)
        base = replace(base, least=least)
        say("replaying under the trace's own policy")
        own = play(base)
    except InputError as e:
        why = f"{e.message} {e.hint or ''}".strip()
        return [_left_out(name, why) for name in ("host", "front", "unlimited", "cached", "roofline")]
    answer = _Answers(base, own, _error(trace, _as_it_was(trace, base, own)))
    found = []
    for name, ask in (("host", _host), ("front", _front), ("unlimited", _unlimited), ("cached", _cached)):
        say(f"replaying {QUESTIONS[name]}")
        found.append(ask(answer))
    say(f"replaying {QUESTIONS['roofline']}")
    found.append(_roofline(answer, str((given or platform_of(trace.manifest, base.own.server) or {}).get("name", "")), why))
    if own.planned.plan.ways:
        say(f"replaying {QUESTIONS['transfers']}")
        found.append(_links(answer))
    elif _transfers(trace):
        found.append(_left_out("transfers", "This replay models one engine without transfers, so there is none to take away."))
    found.append(
        _left_out(
            "interference",
            "A step is priced whole: a replay cannot give one request the step without what others have in it. "
            "The accounting says how much interference there is.",
        )
    )
    return found


def _base(trace: Trace) -> Base:
    own = own_policy(trace.manifest)
    ranks = trace.table("steps").select(pl.col("dp_rank").drop_nulls().n_unique()).collect().item()
    if ranks > 1:
        raise InputError(f"{trace.path} has {ranks} data-parallel ranks; a replay models one.")
    work, _ = arrange(workload(trace), trace, None)
    seen = steps_of(trace)
    cost = known_cost(trace.manifest)
    if cost is None:
        cost = fit(seen.steps)
    if not work.n:
        raise InputError("The trace has no request that can be replayed.")
    # Drawn residuals fall on other steps in each replay: on a short trace their scatter is more than what a ceiling is about.
    cost = replace(cost, residuals={})
    return Base(work, own, cost, overheads(trace, seen.steps, seen.residency), seen)


def _as_it_was(trace: Trace, base: Base, own: Run) -> Run:
    """The replay to hold against the trace: of a replayed one that with the residuals that it was made with."""
    cost = known_cost(trace.manifest)
    if cost is None or not cost.residuals or trace.manifest.replay is None:
        return own
    return play(replace(base, cost=cost, seed=trace.manifest.replay.seed))


def _least(trace: Trace, base: Base, given: Mapping[str, Any] | None) -> tuple[StepCost | None, str]:
    """The roofline of a step, or why there is none."""
    rates = given if given is not None else platform_of(trace.manifest, base.own.server)
    if rates is None:
        return None, "No platform is known: give --platform NAME or FILE."
    try:
        return roofline(base.own.server, rates), ""
    except InputError as e:
        return None, e.message


class _Answers:
    """Asks one question after another against the replay under the own policy."""

    def __init__(self, base: Base, own: Run, error: Mapping[str, float] | None) -> None:
        self.base, self.own, self.error = base, own, error

    def ask(
        self,
        name: str,
        taken_away: str | Callable[[Run], str],
        asked: Policy | None = None,
        *,
        cost: StepCost | None = None,
        warn: Callable[[Run], Sequence[str]] = lambda _: (),
    ) -> dict[str, Any]:
        """The factors over the requests that both replays serve; ``left_out`` where the trace does not allow the question."""
        try:
            other = play(self.base, asked, cost=cost)
        except InputError as e:
            return _left_out(name, e.message)
        before, after, n, added = compared(self.own, other)
        warnings = list(warn(other))
        if added:
            warnings.append(f"{added} requests that were refused are served now; the factors are over the others.")

        def times_better(key: str) -> float | None:
            x, y = before[key], after[key]
            return x / y if x is not None and y else None

        faster, slower = after["output_tokens_per_s"], before["output_tokens_per_s"]
        e2e = times_better("e2e_mean_ns")
        if e2e is not None and e2e < 1 - 1e-9 and name != "roofline":
            warnings.append("Slower on the whole, so not a ceiling but a what-if.")
        notes = [n for n in other.planned.notes if n not in self.own.planned.notes]
        return {
            "name": name,
            "question": QUESTIONS[name],
            "throughput": faster / slower if faster is not None and slower else None,
            "e2e": e2e,
            "ttft": times_better("ttft_mean_ns"),
            "tpot": times_better("tpot_mean_ns"),
            "taken_away": taken_away if isinstance(taken_away, str) else taken_away(other),
            "error": None if self.error is None else dict(self.error),
            "warnings": list(dict.fromkeys([*warnings, *notes, *self._notes(), *other.outside])),
            "left_out": None,
            "figures": {"own_policy": before, "what_if": after, "requests": n},
        }

    def _notes(self) -> list[str]:
        seen = self.base.seen
        found = [seen.note] if seen.note and self.base.cost.origin == "fitted" else []
        return [*found, *self.base.work.notes, *self.own.planned.notes]


def _policy(key: str, value: str) -> Policy:
    return parse_policy(f'name = "{key}"\n[ceilings]\n{key} = "{value}"')


def _error(trace: Trace, own: Run) -> dict[str, float] | None:
    """Relative error of the own-policy replay's means, over the requests whose times both know; null without any."""
    observed = request_metrics(trace).join(own.of_request, on="request", suffix="_own")
    found = {}
    for m in METRICS:
        both = observed.select(pl.col(f"{m}_ns").cast(pl.Float64), pl.col(f"{m}_ns_own").cast(pl.Float64)).drop_nulls()
        seen = float(both[f"{m}_ns"].sum())
        if both.height and seen > 0:
            found[m] = float(f"{float(both[f'{m}_ns_own'].sum()) / seen - 1:.4g}")
    return found or None


def _left_out(name: str, why: str) -> dict[str, Any]:
    return {"name": name, "question": QUESTIONS[name], "left_out": why, "warnings": []}


def _host(a: _Answers) -> dict[str, Any]:
    return a.ask("host", lambda run: run.planned.taken_away, _policy("host_cost", "zero"))


def _front(a: _Answers) -> dict[str, Any]:
    oh = a.base.overheads
    names = ("arrival_to_sent_ns", "sent_to_received_ns", "received_to_enqueued_ns", "enqueued_to_ready_ns", "between_steps_ns",
             "step_to_token_ns", "last_token_to_finish_ns")  # fmt: skip
    told = [n for n in _FRONT if oh.n[names.index(n)]]
    if not told:
        return _left_out("front", "The trace tells no time outside the engine.")
    taken = ", ".join(f"{getattr(oh, n):,} ns {n.removesuffix('_ns').replace('_', ' ')}" for n in told)
    return a.ask("front", taken, _policy("front_cost", "zero"))


def _unlimited(a: _Answers) -> dict[str, Any]:
    first = a.own.planned.plan.engines[0]

    def warn(run: Run) -> list[str]:
        places = run.planned.plan.engines[0].max_sequences
        found = []
        if places is not None and run.most_running >= places and places < a.base.work.n:
            found.append(f"{places:,} places are the most that a replay models here, and all were taken.")
        if first.cache == "slot":
            found.append("Each place keeps its own prompt, so with more of them prompts are found again elsewhere than before.")
        return found

    taken = (
        f"the limits: places {_limit(first.max_sequences)}, tokens of a step {_limit(first.max_batched_tokens)}, "
        f"tokens of KV {_limit(first.capacity_tokens)}"
    )
    return a.ask("unlimited", taken, _policy("limits", "none"), warn=warn)


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def _cached(a: _Answers) -> dict[str, Any]:
    return a.ask(
        "cached",
        "the cost of computing prompt tokens; the step that yields the first token remains",
        _policy("prompts", "cached"),
        warn=lambda _: ("An upper bound: no cache holds every prompt.",),
    )  # fmt: skip


def _links(a: _Answers) -> dict[str, Any]:
    return a.ask("transfers", "the time of every transfer of KV", _policy("links", "infinite"))


def _roofline(a: _Answers, platform: str, why: str) -> dict[str, Any]:
    least = a.base.least
    if least is None:
        return _left_out("roofline", why)
    warnings = [*least.notes]
    faster, steps, faster_ns, steps_ns = a.own.faster
    if faster:
        warnings.insert(
            0,
            f"{faster:,} of {steps:,} steps ({100 * faster_ns / max(1, steps_ns):.3g} % of their time) are faster than this "
            f"roofline: the platform {platform} or the model's sizes are wrong, so this ceiling is not one.",
        )
    taken = f"all of a step but its roofline on {platform or 'the platform'}"
    return a.ask("roofline", taken, cost=least, warn=lambda _: warnings)


def _transfers(trace: Trace) -> bool:
    kv = trace.table("moves").select((pl.col("object") == "kv").any()).collect().item()
    waited = trace.table("waits").select((pl.col("kind") == "transfer").any()).collect().item()
    return bool(kv) or bool(waited)
