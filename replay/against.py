"""One recorded run predicted from another: the step cost and the times of ``a``, under the policy and the server of ``b``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath
from typing import Any, Literal

from hoptrace.errors import InputError
from hoptrace.manifest import Server
from hoptrace.reader import Trace
from hoptrace.replay.parent import one_rank
from hoptrace.replay.policy.model import Policy
from hoptrace.replay.policy.own import own_policy
from hoptrace.replay.prepare import Prepared, prepare
from hoptrace.stepcost import StepCost

__all__ = ["against"]

# What makes a model another one, as far as both manifests tell it; names and paths are those of a machine.
_SHAPE = ("parameters", "layers", "hidden_size", "heads", "kv_heads", "head_size")
# What a measured step cost hangs on besides. Names as in `config`; absent is the first value.
_MACHINE: tuple[tuple[str, Any], ...] = (
    ("tensor_parallel_size", 1), ("pipeline_parallel_size", 1), ("expert_parallel", False), ("dtype", None),
    ("quantization", None), ("device", None), ("model_ftype", None), ("enforce_eager", None), ("n_gpu_layers", None),
    ("threads", None), ("flash_attn", None), ("n_cpu_moe", None),
)  # fmt: skip
# Settings that change who is in which step and that no plan has. Names as in `config`, and what they are when off.
_UNPLANNED: tuple[tuple[str, Any], ...] = (
    ("long_prefill_token_threshold", 0), ("cache_reuse", 0), ("decode_context_parallel_size", 1),
    ("prefill_context_parallel_size", 1),
)  # fmt: skip


def against(
    a: Trace,
    b: Trace,
    *,
    work: Literal["a", "b"] = "a",
    cost: StepCost | str | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Prepared:
    """What ``b``'s run is predicted to be from ``a``: step cost and times outside steps are measured on ``a``; how many servers
    there are, their limits, KV space, cache, order and routing are what ``b``'s manifest states.

    ``Prepared.own`` is ``a`` under its own policy; ``Prepared.planned`` is the prediction, over the requests of ``a`` or of ``b``
    (``work``), arriving as that trace tells. ``b`` = ``a`` gives the own policy on both sides. Play it with
    :func:`hoptrace.replay.played.played`.

    Args:
        cost: a step cost or its name; null: fitted to ``a``'s steps, or a roofline where it has none.
        say: told what is being done.

    Raises:
        InputError: the two ran other models, or on machines that ``a``'s step cost cannot tell of; ``b`` ran under something that
            cannot be replayed (its key is named); or either cannot be replayed at all.
    """
    one_rank(b)
    ran, there = own_policy(a.manifest, a), own_policy(b.manifest, b)
    measured = isinstance(cost, StepCost) or (cost or "fitted").startswith(("fitted", "file:"))
    notes = _differences(ran.server, there.server, measured) + _shared_host(a, b)
    found = prepare(
        a, Policy(name=there.policy.name), cost=cost, platform=None, model=None, recorded_on=None, seed=seed, rate=1,
        arrivals=None, until=None, say=say, under=there, doing=b if work == "b" else None,
    )  # fmt: skip
    planned = replace(found.planned, notes=tuple(dict.fromkeys((*notes, *found.planned.notes))))
    return replace(found, planned=planned)


def _differences(a: Server, b: Server, measured: bool) -> list[str]:
    """What is not carried over from ``b``, in sentences. ``measured``: the step cost is one of ``a``'s own steps.

    Raises:
        InputError: the prediction would be one of something else.
    """
    for key in _SHAPE:
        mine, its = getattr(a, key), getattr(b, key)
        if mine is not None and its is not None and mine != its:
            raise _other("model", f"{_name(a)} and {_name(b)}: {key} is {mine} and {its}")
    shapes = all(s.parameters is not None or s.layers is not None for s in (a, b))
    if not shapes and _name(a) != _name(b):
        raise _other("model", f"{_name(a)} and {_name(b)}")
    if a.engine and b.engine and a.engine != b.engine:
        raise _other("engine", f"{a.engine} and {b.engine}")
    for key, off in _MACHINE:
        mine, its = a.config.get(key, off), b.config.get(key, off)
        if mine != its and measured and (off is not None or (mine is not None and its is not None)):
            raise InputError(
                f"{b.name} ran with {key} = {its}, {a.name} with {mine}: a step cost measured on one cannot tell the other's.",
                hint="Use a step cost that knows both: --cost roofline or aiconfigurator.",
            )
    for key, off in _UNPLANNED:
        if (its := b.config.get(key, off)) not in (off, None, False):
            raise InputError(
                f"{b.name} ran with {key} = {its}, which a replay does not model.",
                hint=f"Record it with {key} = {off}; docs/policies.md says what can be replayed.",
            )
    _refuse_other_speculators(a, b)
    return [*_kv_types(a, b, measured), *_asynchronous(a, b)]


def _shared_host(a: Trace, b: Trace) -> list[str]:
    """Several servers on one host take time from each other, which a run of fewer does not show."""
    mine, its = ([s.host for s in t.manifest.servers if s.host is not None] for t in (a, b))
    most = max((its.count(h) for h in its), default=0)
    if most < 2 or most <= max((mine.count(h) for h in mine), default=0):
        return []
    return [
        f"{most} servers of {b.name} ran on one host, those of {a.name} did not: what they take from each other (cores, memory "
        "bandwidth) is not in the step cost. If they share cores or a device, the prediction is far too good."
    ]


def _kv_types(a: Server, b: Server, measured: bool) -> list[str]:
    if a.kv_dtype == b.kv_dtype or not measured:
        return []
    mine, its = a.kv_dtype or "of unknown type", b.kv_dtype or "of unknown type"
    return [
        f"KV is {its} on {b.name} and {mine} on {a.name}: room and bytes are taken over; what a step gains or loses by the "
        "type is not, since the step cost was measured with the other."
    ]


def _refuse_other_speculators(a: Server, b: Server) -> None:
    mine, its = speculator(a), speculator(b)
    if mine != its:
        raise InputError(
            f"{b.name} ran with {its or 'no speculator'}, {a.name} with {mine or 'none'}: which proposals would be accepted, and "
            "what proposing costs, cannot be told from a run without it.",
            hint="Predict it with a policy that says both: hoptrace replay with [speculation], docs/policies.md.",
        )


def _asynchronous(a: Server, b: Server) -> list[str]:
    if bool(a.config.get("async_scheduling")) == bool(b.config.get("async_scheduling")):
        return []
    return [
        f"async_scheduling differs: the host's time between steps is that of {a.name}, and each step is planned when the one "
        "before has ended."
    ]


def speculator(server: Server) -> str | None:
    """How a server proposes tokens, in words; null without."""
    c = server.config
    kind = c.get("speculation") or c.get("speculation_method") or c.get("spec_type") or c.get("speculative_algorithm")
    if not kind and not c.get("draft_max") and not c.get("spec_draft_n_max"):
        return None
    if kind is not None and str(kind).lower() == "none":
        return None
    tokens = next(
        (c[k] for k in ("speculative_tokens", "speculation_num_speculative_tokens", "spec_draft_n_max", "draft_max") if c.get(k)),
        None,
    )
    return f"the speculator {kind or 'of a draft model'}" + (f" ({tokens} tokens)" if tokens else "")


def _name(server: Server) -> str:
    """Of a model, as both machines would call it."""
    return PurePath(server.model_path or server.model or "unknown").name


def _other(what: str, which: str) -> InputError:
    return InputError(
        f"The two traces ran another {what}: {which}.", hint="A prediction is of one model on one engine under another policy."
    )
