"""Which step cost a replay uses: fitted to the trace's steps, looked up, a roofline of a platform, or fixed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from hoptrace.errors import InputError, UsageError
from hoptrace.kv import geometry
from hoptrace.manifest import Manifest, Server
from hoptrace.model_catalogue import ASSUMED_MODEL, Model, known_as, load_model
from hoptrace.platform import load_platform, platforms
from hoptrace.platform_seen import AS_FOUND, platform_seen
from hoptrace.replay.costs.fixed import fixed
from hoptrace.replay.costs.host import mean_host_ns
from hoptrace.replay.costs.scaled import on_platform
from hoptrace.replay.costs.table import read_table
from hoptrace.replay.overheads import Overheads
from hoptrace.roofline import platform_of
from hoptrace.stepcost import StepCost, fit
from hoptrace.stepcost_fit import MIN_STEPS
from hoptrace.stepcost_roofline import roofline

__all__ = ["ASSUMED_PLATFORM", "FROM_TRACE", "KINDS", "Chosen", "choose", "choose_cost", "not_told"]

KINDS = ("fitted", "file:FILE", "roofline", "table:FILE", "aiconfigurator", "fixed:PREFILL_MS,DECODE_MS")
ASSUMED_PLATFORM = "h100-sxm-80gb"
"""Taken, and said to be taken, where neither the trace nor the user names a machine."""
FROM_TRACE = "from-trace"

_HINT = f"Use {', '.join(KINDS)}."


@dataclass(frozen=True)
class Chosen:
    """What a replay computes with.

    Attributes:
        cost: of a step.
        how: for the manifest: kind, and the model and platform that it rests on.
        server: the trace's, with the model's sizes where another model was named or assumed.
        notes: what was assumed, in sentences; also in ``cost.notes``.
        room: null where the KV space is told, or the memory is not known; else what was assumed of it, in sentences, and
            ``server.kv_capacity_tokens`` is its size; empty where the weights leave none. It hangs on the ranks and the platform,
            so a plan asks for each kind of server.
        outside: null, or the times outside steps that a cost file tells.
    """

    cost: StepCost
    how: dict[str, Any]
    server: Server
    notes: tuple[str, ...] = ()
    room: tuple[str, ...] | None = None
    outside: Overheads | None = None


def choose(
    text: str | None,
    steps: pl.DataFrame | None,
    server: Server | None,
    *,
    platform: str | None = None,
    model: str | None = None,
    recorded_on: str | None = None,
    manifest: Manifest | None = None,
    fitting: bool = True,
) -> Chosen:
    """The step cost that ``text`` names.

    Args:
        text: one of :data:`KINDS`; ``fitted:mean`` is a fit without the scatter of the recorded steps. Null: fitted, where the
            trace has steps to fit to and no model is named; else a roofline.
        steps: the trace's steps, or null.
        server: the trace's, or null.
        platform: name or file of the machine to compute for; :data:`FROM_TRACE` or null: the recorded one.
        model: name or config.json of the model to compute for; null: the trace's.
        recorded_on: platform that the trace was recorded on, where its manifest does not tell.
        manifest: the trace's: its platform graph says what it was recorded on.
        fitting: whether weights that do not fit into the devices' memory are refused.

    Raises:
        UsageError: no such cost model, table, model or platform, or two options contradict each other.
        InputError: the trace does not tell enough.
    """
    server = server or Server(name="engine")
    from_trace = platform == FROM_TRACE
    platform = None if from_trace else platform
    kind, _, rest = (text or _default(steps, model)).partition(":")
    asked = _Asked(server, steps, platform, model, recorded_on, manifest, fitting, from_trace)
    if kind == "fitted" and rest in ("", "mean"):
        return _fitted(asked, rest == "mean")
    if kind == "roofline" and not rest:
        return _roofline(asked)
    if kind == "file" and rest:
        from hoptrace.replay.calibration.use import use

        used = use(rest, server, steps, model=model, platform=platform, recorded_on=recorded_on)
        return Chosen(used.cost, used.how, used.server, used.notes, outside=used.outside)
    if kind == "table" and rest:
        found = load_model(model).on(server) if model else server
        return _noted(Chosen(read_table(rest, found), {"kind": "table", "table": rest}, found), _untouched("table's", platform))
    if kind == "aiconfigurator" and not rest:
        from hoptrace.replay.costs.aiconfigurator import aiconfigurator

        chosen, notes = _model(asked)
        name, on, said = _platform(asked)
        if fitting:
            _refuse_what_does_not_fit(chosen, on)
        chosen, room = _with_room(chosen, on)
        cost, how = aiconfigurator(chosen, name)
        return _noted(Chosen(cost, how, chosen, room=room), notes + said)
    if kind == "fixed":
        found = load_model(model).on(server) if model else server
        return _noted(Chosen(fixed(rest), {"kind": "fixed"}, found), _untouched("given one", platform))
    raise UsageError(f"There is no cost model {text!r}.", hint=_HINT)


def choose_cost(
    text: str | None, steps: pl.DataFrame | None, server: Server | None, platform: str | None = None, **more: Any
) -> tuple[StepCost, dict[str, Any]]:
    """The step cost that ``text`` names, and what the manifest says of it; see :func:`choose`."""
    chosen = choose(text, steps, server, platform=platform, **more)
    return chosen.cost, chosen.how


@dataclass(frozen=True)
class _Asked:
    server: Server
    steps: pl.DataFrame | None
    platform: str | None
    model: str | None
    recorded_on: str | None
    manifest: Manifest | None
    fitting: bool
    from_trace: bool = False

    @property
    def asynchronous(self) -> bool:
        """Whether host work may run beside the device."""
        return self.server.config.get("async_scheduling") is True


def _default(steps: pl.DataFrame | None, model: str | None) -> str:
    return "fitted" if steps is not None and steps.height >= MIN_STEPS and model is None else "roofline"


def _fitted(asked: _Asked, mean: bool) -> Chosen:
    steps, server = asked.steps, asked.server
    if asked.model is not None:
        raise UsageError(
            "A fitted step cost is that of the model that was recorded.", hint="Leave out --model, or use --cost roofline."
        )
    if steps is None or not steps.height:
        # What the trace cannot do either is no remedy.
        sized = server.parameters is not None and server.weight_bytes is not None
        hint = "Use --cost fixed:PREFILL_MS,DECODE_MS, table:FILE" + (
            ", or --cost roofline --platform NAME." if sized else ", or --cost roofline --model NAME --platform NAME."
        )
        raise InputError("The trace has no steps to fit a step cost to.", hint=hint)
    cost = fit(steps)
    how: dict[str, Any] = {"kind": "fitted"}
    if asked.platform is not None:
        target, recorded = load_platform(asked.platform), _recorded(asked)
        if target["name"] != recorded["name"]:
            cost = on_platform(cost, steps, recorded, target, asynchronous=asked.asynchronous)
            how |= {"platform": target, "recorded_on": dict(recorded)}
    if mean:
        cost = replace(cost, residuals={})
        how["scatter"] = False
    return Chosen(cost, how, server)


def _recorded(asked: _Asked) -> Mapping[str, Any]:
    if asked.recorded_on is not None:
        return load_platform(asked.recorded_on)
    found = platform_of(asked.manifest, asked.server) if asked.manifest is not None else None
    if found is not None:
        return found
    seen, said = _seen(asked)
    if seen is None:
        hint = f"Name it: --recorded-on {' | '.join(platforms())} | FILE.toml. Or --cost roofline --platform {asked.platform}."
        told = "The trace does not say what machine it was recorded on, so its step cost can't be scaled to another."
        raise InputError(" ".join((told, *said)), hint=hint)
    # A step's time hangs on the device, not on the links that were found of it.
    return load_platform(seen["base"]) if str(seen.get("name")).endswith(AS_FOUND) else seen


def _roofline(asked: _Asked) -> Chosen:
    server, notes = _model(asked)
    host_ns, told = mean_host_ns(asked.steps, asynchronous=asked.asynchronous)
    recorded = platform_of(asked.manifest, server) if asked.manifest is not None and asked.platform is None else None
    if recorded is not None:
        platform: Mapping[str, Any] = recorded
    else:
        _, platform, said = _platform(asked)
        notes += said
    if asked.fitting:
        _refuse_what_does_not_fit(server, platform)
    if told:
        notes += (f"Host time of a step, {host_ns / 1e6:.3f} ms, is the mean of {told} recorded steps.",)
    else:
        notes += ("No step tells its host time: none is added to the roofline, and real steps are longer by it.",)
    server, room = _with_room(server, platform)
    cost = roofline(server, platform, host_ns=host_ns)
    how = {"kind": "roofline", "platform": dict(platform), "model": server.model, "host_ns": host_ns if told else None}
    return _noted(Chosen(cost, how, server, room=room), notes)


_MEMORY_SHARE = 0.92
"""Of a device's memory that vLLM 0.32 takes by default (gpu_memory_utilization)."""


def _devices(server: Server) -> int:
    sizes = (server.config.get(f"{k}_parallel_size") for k in ("tensor", "pipeline", "expert"))
    tensor, pipeline, expert = (v if type(v) is int and v > 0 else 1 for v in sizes)
    return pipeline * max(tensor, expert)


def _memory(platform: Mapping[str, Any]) -> float | None:
    memory = platform.get("memory_bytes")
    return float(memory) if isinstance(memory, int | float) and not isinstance(memory, bool) and memory > 0 else None


def _with_room(server: Server, platform: Mapping[str, Any]) -> tuple[Server, tuple[str, ...] | None]:
    """The server with as much KV space as the devices' memory has beside the weights, where nobody says how much it has; and
    ``Chosen.room``."""
    memory, g = _memory(platform), geometry(server)
    told = server.kv_capacity_tokens or server.block_count or server.config.get("kv_unlimited")
    if memory is None or g is None or told or not server.weight_bytes:
        return server, None
    block = server.block_size_tokens or 1
    tokens = int(memory * _MEMORY_SHARE * _devices(server) - server.weight_bytes) // g.bytes_per_token // block * block
    if tokens < 1:
        return server, ()
    note = (
        f"KV space of {tokens:,} tokens is assumed: {100 * _MEMORY_SHARE:.0f} % of the memory of {platform.get('name')}, less "
        "the weights; activations take some of it too (kv.capacity_tokens)."
    )
    return server.model_copy(update={"kv_capacity_tokens": tokens}), (note,)


def _refuse_what_does_not_fit(server: Server, platform: Mapping[str, Any]) -> None:
    """InputError if the weights are larger than the memory of the devices that share them."""
    memory, devices = _memory(platform), _devices(server)
    if memory is None or not server.weight_bytes:
        return
    if server.weight_bytes > memory * devices:
        needed = -(-server.weight_bytes // int(memory))
        raise InputError(
            f"{server.weight_bytes / 1e9:,.0f} GB of weights do not fit into {devices} {platform.get('name') or 'device'} "
            f"of {memory / 1e9:,.0f} GB.",
            hint=f"At least {needed} are needed: --set servers.tensor_parallel={1 << (needed - 1).bit_length()}.",
        )


def _seen(asked: _Asked) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    return platform_seen(asked.manifest) if asked.manifest is not None else (None, ())


def _platform(asked: _Asked) -> tuple[str, Mapping[str, Any], tuple[str, ...]]:
    """The catalogue's name (or the file) of the platform to compute for, its content, and what was taken from where."""
    if (name := asked.platform or asked.recorded_on) is not None:
        return name, load_platform(name), ()
    seen, said = _seen(asked)
    if seen is not None:
        return str(seen["base"] if str(seen.get("name")).endswith(AS_FOUND) else seen.get("name")), seen, said
    if asked.from_trace:
        raise not_told(said)
    told = " ".join(("No platform was named and the trace tells none:", *said))
    note = f"{told} one {ASSUMED_PLATFORM} is assumed (--platform NAME)."
    return ASSUMED_PLATFORM, load_platform(ASSUMED_PLATFORM), (note,)


def not_told(said: tuple[str, ...]) -> InputError:
    """What --platform from-trace says where the machine is not known. ``said``: what the platform graph has, in sentences."""
    return InputError(
        " ".join((f"--platform {FROM_TRACE}: the trace does not say what machine it was recorded on.", *said)),
        hint=f"Name it: --platform {' | '.join(platforms())} | FILE.toml.",
    )


def _model(asked: _Asked) -> tuple[Server, tuple[str, ...]]:
    """The server with its model's sizes, and what was assumed."""
    server = asked.server
    if asked.model is not None:
        return load_model(asked.model).on(server), ()
    if server.parameters and server.weight_bytes and server.layers:
        return server, ()
    named: Model | None = known_as(server.model) if server.model else None
    if named is not None:
        note = f"The trace names the model {server.model} but not its sizes: those of {named.model} in the catalogue are taken."
        room = {"kv_capacity_tokens": server.kv_capacity_tokens, "block_count": server.block_count}
        return named.on(server).model_copy(update=room), (note,)
    if server.model:
        raise InputError(
            f"The trace names the model {server.model}, but neither it nor the catalogue tells its sizes.",
            hint="Name a like model, or its config.json: --model NAME|config.json.",
        )
    assumed = load_model(ASSUMED_MODEL)
    note = f"No model was named and the trace tells none: {assumed.model} is assumed (--model NAME|config.json)."
    return assumed.on(server), (note,)


def _untouched(whose: str, platform: str | None) -> tuple[str, ...]:
    if platform is None:
        return ()
    return (f"The step cost is the {whose} on any platform: {platform} is where transfers and memory are taken from.",)


def _noted(chosen: Chosen, notes: tuple[str, ...]) -> Chosen:
    cost = replace(chosen.cost, notes=(*notes, *chosen.cost.notes))
    return replace(chosen, cost=cost, notes=notes)
