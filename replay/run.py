"""A replay: a trace's work under another policy, as another trace, with the error of the method beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import polars as pl

from hoptrace.errors import InputError
from hoptrace.manifest import Manifest, ReplayInfo, Server
from hoptrace.reader import Trace, open_trace
from hoptrace.reconstruct import Steps, steps_of
from hoptrace.replay.cost import choose_cost
from hoptrace.replay.engine import Served, serve
from hoptrace.replay.fidelity import COMPOSITION, Comparison, compare
from hoptrace.replay.overheads import Overheads, overheads
from hoptrace.replay.policy import Policy, Resolved, load_policy, resolve
from hoptrace.replay.rows import frames
from hoptrace.replay.workload import Workload, workload
from hoptrace.schema import TABLES
from hoptrace.stepcost import FEATURES, StepCost, features_array, outside
from hoptrace.writer import TraceWriter

__all__ = ["FramesTrace", "Replayed", "drift", "predict", "replay", "server_of", "write"]

Progress = Callable[[str], None]
_DRIFT = 0.15
_NOISE = 0.1
# What a step cost needs to know of a step.


class FramesTrace(Trace):
    """A trace in memory: the same ``table`` and ``manifest`` as one on the disk."""

    def __init__(self, tables: dict[str, pl.DataFrame], manifest: Manifest, name: str) -> None:
        super().__init__(Path(f"{name}.trace"), manifest)
        self.frames = tables

    def table(self, name: str) -> pl.LazyFrame:
        """All rows of a table; see :meth:`hoptrace.reader.Trace.table`."""
        if name in self.frames:
            return self.frames[name].lazy()
        empty = pl.from_arrow(TABLES[name].arrow.empty_table())
        assert isinstance(empty, pl.DataFrame)
        return empty.lazy()

    def has(self, name: str) -> bool:
        """Whether the table holds any row."""
        return name in self.frames and self.frames[name].height > 0


@dataclass(frozen=True)
class Replayed:
    """A replay in memory.

    Attributes:
        trace: its tables and its manifest.
        own: the trace under its own policy against what was observed: the error of the method; null if nothing was observed.
        against: this replay against what was observed: what the policy changes, the method's error included; null likewise.
        change: this replay against the one under the trace's own policy, over the requests that both serve; null likewise.
        cost: the step cost.
    """

    trace: FramesTrace
    own: Comparison | None
    against: Comparison | None
    change: Comparison | None
    cost: StepCost


def replay(
    trace: Trace,
    policy: Policy | str | Path,
    *,
    out: Path | str,
    cost: StepCost | str | None = None,
    platform: str | None = None,
    seed: int = 0,
    rate: Fraction | float = 1,
    progress: Progress | None = None,
) -> Trace:
    """Replay ``trace`` under ``policy`` and write the result as the trace ``out``; see :func:`predict`.

    Raises:
        UsageError: ``out`` is there already, or an option is wrong.
        InputError: the trace does not tell what a replay needs.
        EnvironmentProblem: the disk refuses.
    """
    return write(predict(trace, policy, cost=cost, platform=platform, seed=seed, rate=rate, progress=progress), out)


def write(result: Replayed, out: Path | str) -> Trace:
    """Write a replay as the trace ``out``."""
    with TraceWriter(out, result.trace.manifest.model_copy(deep=True), background=False) as writer:
        for name, frame in result.trace.frames.items():
            if frame.height:
                writer.append_arrow(name, frame.to_arrow())
    return open_trace(out)


def predict(
    trace: Trace,
    policy: Policy | str | Path,
    *,
    cost: StepCost | str | None = None,
    platform: str | None = None,
    seed: int = 0,
    rate: Fraction | float = 1,
    progress: Progress | None = None,
) -> Replayed:
    """Replay ``trace`` under ``policy`` in memory.

    The trace is first replayed under its own policy and compared with what was observed: that error stands in the manifest of
    every what-if (law 3). Nothing is drawn at random, so ``seed`` is only kept; the same arguments give the same rows (law 4).

    Args:
        policy: a policy, a preset's name, or a policy file.
        cost: a step cost, or ``fitted`` (the default), ``roofline`` (with ``platform``), ``fixed:PREFILL_MS,DECODE_MS``.
        rate: 1.5 for arrivals one and a half times as fast.
        progress: told what is being done.

    Raises:
        UsageError, InputError: see :func:`replay`.
    """
    say = progress or (lambda _: None)
    policy = policy if isinstance(policy, Policy) else load_policy(policy)
    server = server_of(trace)
    say("reading the workload")
    work = workload(trace)
    say("looking at the recorded steps")
    seen = steps_of(trace)
    own_policy = resolve(Policy(name="as-recorded"), server)
    chosen = resolve(policy, server)
    say("choosing the step cost")
    if isinstance(cost, StepCost):
        step_cost, how = cost, {"kind": cost.origin}
    else:
        step_cost, how = choose_cost(cost or "fitted", seen.steps, server, platform)
    oh = overheads(trace, seen.steps, seen.residency)
    say("replaying under the trace's own policy")
    observed = _observed(trace)
    again = _play(trace, work, own_policy, server, step_cost, oh)[0] if observed else None
    own = None if again is None else compare(trace, again)
    say(f"replaying under {policy.name}")
    result, served = _play(trace, work.at_rate(rate), chosen, server, step_cost, oh)
    against = compare(trace, result) if observed else None
    info = ReplayInfo(
        parent=trace.name,
        own_policy=None if own is None else own.as_dict(),  # type: ignore[call-arg]  # beside `error`, in full
        policy={"name": policy.name, "description": policy.description, "changes": policy.changes(), **chosen.as_dict()},
        cost_model={**how, "step": step_cost.to_dict(), "steps": {"origin": seen.origin, "note": seen.note},
                    "outside_steps": oh.as_dict()},
        seed=seed,
        arrivals="recorded" if rate == 1 else f"recorded, {float(rate):g} times as fast",
        error=None if own is None else own.errors(),
        warnings=_warnings(trace, work, chosen, own_policy, served, step_cost, seen, own, against),
    )  # fmt: skip
    result.manifest.replay = info
    result.manifest.title = f"{trace.name} under {policy.name}" + ("" if rate == 1 else f", {float(rate):g} x the rate")
    change = None if again is None else compare(again, result)
    return Replayed(result, own, against, change, step_cost)


def _play(
    trace: Trace, work: Workload, policy: Resolved, server: Server, cost: StepCost, oh: Overheads
) -> tuple[FramesTrace, Served]:
    served = serve(work, policy, cost, before_ns=oh.before_ns, gap_ns=oh.between_steps_ns)
    changed = server.model_copy(
        update={
            "max_sequences": policy.max_sequences,
            "max_batched_tokens": policy.max_batched_tokens,
            "context_tokens": policy.context_tokens,
            "kv_capacity_tokens": policy.capacity_tokens,
            "block_size_tokens": policy.block_size_tokens,
            "prefix_caching": policy.cache is not None,
            "pid": None,
            "config": {**{k: v for k, v in server.config.items() if k != "kv_unlimited"}, **policy.as_config()},
        }
    )
    m = trace.manifest
    manifest = Manifest(
        origin="replayed",
        utc_offset_ns=m.utc_offset_ns,
        servers=[changed],
        platform=m.platform,
        imported_from=m.imported_from,
        rows_dropped={f"requests: {why}": n for why, n in work.left_out.items()},
    )
    return FramesTrace(frames(trace, served, changed, oh), manifest, f"{trace.name}-replay"), served


def server_of(trace: Trace) -> Server:
    """The one server that a replay models. InputError if there are several, or several data-parallel ranks."""
    servers = trace.manifest.servers
    if len(servers) > 1:
        names = ", ".join(s.name for s in servers)
        raise InputError(
            f"{trace.path} has {len(servers)} servers ({names}); a replay models one.", hint="Capture or import them apart."
        )
    ranks = trace.table("steps").select(pl.col("dp_rank").drop_nulls().n_unique()).collect().item()
    if ranks > 1:
        raise InputError(f"{trace.path} has {ranks} data-parallel ranks; a replay models one.")
    return servers[0].model_copy(deep=True) if servers else Server(name="engine")


def _observed(trace: Trace) -> bool:
    """Whether the trace says how long its requests took."""
    known = pl.col("finish_ns").is_not_null() & pl.col("first_token_ns").is_not_null() & pl.col("error").is_null()
    return bool(trace.table("requests").select(known.any()).collect().item())


def _warnings(
    trace: Trace,
    work: Workload,
    policy: Resolved,
    own: Resolved,
    served: Served,
    cost: StepCost,
    seen: Steps,
    error: Comparison | None,
    against: Comparison | None,
) -> list[str]:
    found = list(work.notes)
    found += changed(trace)
    found += policy.notes
    if error is not None:
        found += [f"Error under the trace's own policy: {n}" for n in error.notes]
        if against is not None:
            found += [f"What-if against observed: {n}" for n in against.notes if n not in error.notes]
        found += [f"For the error under the trace's own policy: {n}" for n in own.notes if n not in policy.notes]
        if cost.origin != "fitted":
            found.append("The step cost is not the recorded machine's: the error under its own policy holds that difference too.")
    else:
        found.append("The trace holds no observed latencies, so the error of this replay is unknown.")
    if seen.note and cost.origin == "fitted":
        found.append(seen.note)
    if cost.origin == "fitted":
        found += basis(trace, seen)
    if served.refused.height:
        reasons = served.refused["error"].to_list()
        found.append(
            f"1 request is refused: {reasons[0]}."
            if len(reasons) == 1
            else f"{len(reasons)} requests are refused; the first: {reasons[0]}."
        )
    if policy.cache is not None:
        if not len(work.block_id):
            found.append("The trace has no prefix blocks: the prefix cache finds nothing.")
        else:
            found.append("Prefix hits are counted in whole blocks of the trace, and a generated answer is never found again.")
    if trace.table("requests").select(pl.col("client_slot").is_not_null().any()).collect().item():
        found.append(
            "The load was a closed loop; its arrivals are kept as recorded, though another policy would have moved them."
        )
    if served.steps.height and cost.domain:
        features = features_array(served.steps)
        low, high = features.min(axis=0), features.max(axis=0)
        found += outside(cost.domain, {f: (int(low[i]), int(high[i])) for i, f in enumerate(FEATURES)})
    if cost.origin == "fitted":
        found += noise(cost)
        found += drift(seen.steps, cost)
    found += cost.notes
    return list(dict.fromkeys(found))


def changed(trace: Trace) -> list[str]:
    """Whether the server's own configuration changed while it was recorded: what stays as it was is then the first one."""
    events = trace.table("events").filter(pl.col("kind") == "configuration change").sort("time_ns")
    details = events.select(pl.col("detail").fill_null("not said what")).collect()["detail"].to_list()
    if not details:
        return []
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return [
        f"The server's configuration changed during the recording ({details[0][:200]}){more}. "
        "The replay takes the one at its start throughout, and a fitted step cost mixes both: "
        "the error under the trace's own policy holds that too."
    ]


def basis(trace: Trace, seen: Steps) -> list[str]:
    """How much of the work a fit rests on, where that is not all: steps of unknown composition, requests that no step shows."""
    said = []
    steps = seen.steps.filter(pl.col("pp_rank").fill_null(0) == 0)
    known = steps.drop_nulls(COMPOSITION)
    if known.height < steps.height:
        took, all_took = (int((s["end_ns"] - s["start_ns"]).sum()) for s in (known, steps))
        share = f", {100 * took / all_took:.0f} % of their time" if all_took > 0 else ""
        said.append(
            f"The step cost rests on {known.height} of {steps.height} recorded steps{share}: "
            "what the others held, or how long they took, is unknown."
        )
    finished = trace.table("requests").filter(pl.col("finish_ns").is_not_null() & pl.col("error").is_null())
    done = finished.select("request", pl.col("output_tokens").fill_null(0)).collect()
    shown = done.join(seen.residency.select("request").unique(), on="request", how="semi")
    if shown.height < done.height and seen.residency.height:
        tokens, all_tokens = int(shown["output_tokens"].sum()), int(done["output_tokens"].sum())
        share = f" ({100 * tokens / all_tokens:.0f} % of the output tokens)" if all_tokens else ""
        said.append(
            f"The recorded steps show {shown.height} of {done.height} finished requests{share}; "
            "what the others did in them is unknown, so the step cost may be theirs too."
        )
    return said


def noise(cost: StepCost) -> list[str]:
    """What the mean cost of a step leaves out: equal steps that took unequal time."""
    p95 = cost.error.get("p95") if cost.error else None
    if not isinstance(p95, float) or p95 <= _NOISE:
        return []
    return [
        f"Each step takes its mean time; recorded ones were up to {100 * p95:.0f} % off it (p95). That scatter is not predicted, "
        "so p95 and p99 of ITL and TPOT come out too short."
    ]


def drift(steps: pl.DataFrame, cost: StepCost) -> list[str]:
    """Whether equal steps took longer in one quarter of the recording than in another: others used the machine then.

    A replay runs at the recording's mean speed, so the error under the own policy holds this too, most of all in what queued.
    """
    frame = steps.drop_nulls(COMPOSITION).filter(pl.col("end_ns") > pl.col("start_ns")).sort("start_ns")
    if frame.height < 40:
        return []
    took = (frame["end_ns"] - frame["start_ns"]).to_numpy()
    predicted = cost.cost_ns_array(frame)
    quarters = [int(took[q].sum()) / max(1, int(predicted[q].sum())) for q in np.array_split(np.arange(len(took)), 4)]
    spread = max(quarters) / min(quarters) - 1
    if spread <= _DRIFT:
        return []
    return [
        f"The recorded machine was not steady: equal steps took {100 * spread:.0f} % longer in its slowest quarter than in its "
        "fastest. A replay runs at the mean speed."
    ]
