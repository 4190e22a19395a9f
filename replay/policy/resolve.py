"""A policy on top of the trace's own server, for one server, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hoptrace.errors import InputError
from hoptrace.kv import geometry
from hoptrace.manifest import Server
from hoptrace.replay.policy.model import Policy
from hoptrace.replay.policy.parts import Count, PrefixCache

__all__ = ["Resolved", "resolve", "resolve_server"]


@dataclass(frozen=True)
class Resolved:
    """One server under a policy, in numbers; null is unlimited. ``notes`` says what was taken for want of knowledge."""

    max_sequences: int | None
    max_batched_tokens: int | None
    mode: str
    chunked_prefill: bool
    capacity_tokens: int | None
    block_size_tokens: int
    context_tokens: int | None
    cache: str | None
    cache_capacity_tokens: int | None
    notes: tuple[str, ...] = ()
    order: str = "fcfs"
    slo_ttft_ns: int = 0
    watermark_tokens: int = 0
    kv_dtype: str | None = None

    def as_config(self) -> dict[str, Any]:
        """What a manifest's server has no field for; :func:`resolve_server` reads it back, so that a replay can be replayed."""
        found: dict[str, Any] = {"batching_mode": self.mode, "chunked_prefill": self.chunked_prefill}
        if self.cache is not None:
            found["prefix_cache_kind"] = self.cache
        if self.cache_capacity_tokens is not None:
            found["prefix_cache_capacity_tokens"] = self.cache_capacity_tokens
        if self.capacity_tokens is None:
            # A capacity that is null is unknown; this one was taken as without a limit, so there is always room.
            found["kv_unlimited"] = True
        if self.order != "fcfs":
            found["scheduling_order"] = self.order
        if self.order == "slack":
            found["slo_ttft_ns"] = self.slo_ttft_ns
        if self.watermark_tokens:
            found["watermark_tokens"] = self.watermark_tokens
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain values in the layout of a policy file, for the manifest."""

        def limit(value: int | None) -> int | str:
            return "unlimited" if value is None else value

        cache: dict[str, Any] = {"enabled": self.cache is not None}
        if self.cache is not None:
            cache["kind"] = self.cache
        if self.cache == "pool":
            cache["capacity_tokens"] = limit(self.cache_capacity_tokens)
        batching: dict[str, Any] = {
            "max_sequences": limit(self.max_sequences),
            "max_batched_tokens": limit(self.max_batched_tokens),
            "mode": self.mode,
            "chunked_prefill": self.chunked_prefill,
        }
        if self.order != "fcfs":
            batching["order"] = self.order
        if self.order == "slack":
            batching["slo_ttft_ms"] = self.slo_ttft_ns / 1e6
        if self.watermark_tokens:
            batching["watermark_tokens"] = self.watermark_tokens
        kv: dict[str, Any] = {
            "capacity_tokens": limit(self.capacity_tokens),
            "block_size_tokens": self.block_size_tokens,
            "context_tokens": limit(self.context_tokens),
        }
        if self.kv_dtype is not None:
            kv["dtype"] = self.kv_dtype
        return {"batching": batching, "kv": kv, "prefix_cache": cache}

    def on(self, server: Server) -> Server:
        """``server`` as a manifest has it, with these numbers."""
        kept = {k: v for k, v in server.config.items() if k not in _OWN}
        return server.model_copy(
            update={
                "max_sequences": self.max_sequences,
                "max_batched_tokens": self.max_batched_tokens,
                "context_tokens": self.context_tokens,
                "kv_capacity_tokens": self.capacity_tokens,
                "block_size_tokens": self.block_size_tokens,
                "block_count": None if self.capacity_tokens is None else self.capacity_tokens // self.block_size_tokens,
                "prefix_caching": self.cache is not None,
                "kv_dtype": self.kv_dtype or server.kv_dtype,
                "pid": None,
                "config": {**kept, **self.as_config()},
            }
        )


# What as_config may say; another policy's must not stay behind.
_OWN = (
    "batching_mode", "chunked_prefill", "prefix_cache_kind", "prefix_cache_capacity_tokens", "kv_unlimited", "scheduling_order",
    "slo_ttft_ns", "watermark_tokens",
)  # fmt: skip


def resolve(policy: Policy, server: Server | None) -> Resolved:
    """One server's part of a policy that asks for no more than one server without tiers.

    Raises:
        InputError: the parts do not fit together, or the policy asks for more; see :func:`hoptrace.replay.planning.plan_of`.
    """
    found = resolve_server(policy, server)
    more: list[str] = [
        k for k in ("split", "tiers", "speculation", "servers", "routing", "overheads", "ceilings") if k in policy.changes()
    ]
    if found.mode not in ("mixed", "prefill_first"):
        more.append(f'mode = "{found.mode}"')
    if found.order != "fcfs":
        more.append(f'order = "{found.order}"')
    if found.watermark_tokens:
        more.append("watermark")
    if more:
        raise InputError(f"{policy.name} asks for {', '.join(more)}: more than one server's numbers can say.")
    return found


def resolve_server(policy: Policy, server: Server | None) -> Resolved:
    """The policy on top of the trace's own server.

    Raises:
        InputError: the parts do not fit together.
    """
    own = server or Server(name="unknown")
    b, kv, cache = policy.batching, policy.kv, policy.prefix_cache
    notes: list[str] = []

    def known(asked: Count | None, recorded: int | None, what: str) -> int | None:
        if asked == "unlimited":
            return None
        value = asked if asked is not None else recorded
        if asked is None and recorded is not None and recorded < 1:
            raise InputError(
                f"{what} is {recorded} by the trace's manifest, which no server can run with.",
                hint="Correct it in manifest.json, or record the server again.",
            )
        if value is None:
            notes.append(f"{what} is unknown: taken as unlimited.")
        return value

    mode = b.mode or own.config.get("batching_mode") or _usual_mode(own)
    chunked = b.chunked_prefill
    if chunked is None and b.mode is None:
        chunked = own.config.get("chunked_prefill")
        if chunked is None and mode == _usual_mode(own) == "prefill_first":
            chunk = own.config.get("chunked_prefill_size")
            chunked = not isinstance(chunk, int) or chunk > 0  # SGLang's -1: off; its default: on, by the device's memory
    # Only what the engine is decides, never where the trace came from; a replay's server says it in its configuration.
    usual = "slot" if (own.engine or "").startswith("llama") else "pool"
    kind = cache.kind or own.config.get("prefix_cache_kind") or usual
    entries = cache.capacity_tokens
    if entries is None and kind == "pool":
        entries = own.config.get("prefix_cache_capacity_tokens")
    enabled = cache.enabled if cache.enabled is not None else own.prefix_caching
    if enabled is None:
        notes.append("Whether the server reuses prefixes is unknown: taken as not.")
    order = b.order or own.config.get("scheduling_order") or "fcfs"
    slo_ns = round(b.slo_ttft_ms * 1e6) if b.slo_ttft_ms is not None else own.config.get("slo_ttft_ns") or 0
    limits = (
        known(b.max_sequences, own.max_sequences, "How many requests run at once (max_sequences)"),
        known(b.max_batched_tokens, own.max_batched_tokens, "The token budget of a step (max_batched_tokens)"),
        known(kv.capacity_tokens, _capacity(policy, own, notes), "The KV space (capacity_tokens)"),
        known(kv.context_tokens, own.context_tokens, "The longest sequence (context_tokens)"),
    )
    capacity = limits[2]
    watermark = own.config.get("watermark_tokens") or 0 if b.watermark is None else 0
    block = kv.block_size_tokens or own.block_size_tokens or 1
    if b.watermark and capacity is not None:
        # Whole blocks, as vLLM has it: int(watermark * num_blocks), v1/core/kv_cache_manager.py.
        watermark = int(b.watermark * (capacity // block)) * block
    result = Resolved(
        max_sequences=limits[0],
        max_batched_tokens=limits[1],
        mode=mode,
        chunked_prefill=chunked if chunked is not None else mode == "mixed",
        capacity_tokens=capacity,
        block_size_tokens=block,
        context_tokens=limits[3],
        cache=kind if enabled else None,
        cache_capacity_tokens=entries if isinstance(entries, int) else None,
        notes=tuple(notes),
        order=order,
        slo_ttft_ns=slo_ns if order == "slack" else 0,
        watermark_tokens=watermark if capacity is not None else 0,
        kv_dtype=kv.dtype,
    )
    if result.cache == "slot":
        _check_slots(result, cache)
        if note := _host_cache(own):
            result = replace(result, notes=(*result.notes, note))
    return result


def _usual_mode(own: Server) -> str:
    """How the engine batches where nothing says so. SGLang computes prompts in steps of their own unless it was started with
    --enable-mixed-chunk (python/sglang/srt/managers/scheduler.py, 0.5.23)."""
    return "prefill_first" if own.engine == "sglang" and not own.config.get("enable_mixed_chunk") else "mixed"


def _capacity(policy: Policy, own: Server, notes: list[str]) -> int | None:
    """Tokens that fit into the trace's KV space, in the type that the policy wants."""
    capacity = own.kv_capacity_tokens
    if capacity is None and own.block_count and own.block_size_tokens:
        capacity = own.block_count * own.block_size_tokens
    asked = policy.kv.dtype
    if asked is None or capacity is None or policy.kv.capacity_tokens is not None:
        return capacity
    before, after = geometry(own), geometry(own.model_copy(update={"kv_dtype": asked}))
    if before is None or after is None:
        notes.append(
            f"The trace does not tell the type or the shape of its KV, so {asked} changes nothing in how many tokens fit: "
            "set kv.capacity_tokens."
        )
        return capacity
    return capacity * before.bytes_per_token // after.bytes_per_token


def _host_cache(own: Server) -> str | None:
    """A server with slots may keep prompts of others in host memory besides (llama.cpp's --cache-ram, on by default)."""
    size = own.config.get("cache_ram_mib", own.config.get("cache_ram"))
    if isinstance(size, int | float) and size == 0:
        return None
    known = "is on" if isinstance(size, int | float) else "may be on (its size is unknown)"
    return (
        f"llama.cpp's host prompt cache (--cache-ram) {known} and is not modelled: "
        "prompts that only it would find again are computed anew."
    )


def _check_slots(r: Resolved, cache: PrefixCache) -> None:
    if cache.capacity_tokens is not None:
        raise InputError(
            'prefix_cache.capacity_tokens does not go with kind = "slot": a slot keeps one prompt.', hint="Leave it out."
        )
    if r.max_sequences is None:
        raise InputError(
            'prefix_cache.kind = "slot" needs batching.max_sequences: the number of slots.',
            hint="Set it, or set prefix_cache.enabled = false.",
        )
    if r.capacity_tokens is not None and (r.context_tokens is None or r.capacity_tokens < r.max_sequences * r.context_tokens):
        raise InputError(
            f'prefix_cache.kind = "slot" needs KV space for every slot: {r.max_sequences} slots of '
            f"{r.context_tokens or 'unlimited'} tokens do not fit into {r.capacity_tokens}.",
            hint="A KV space that slots share (--kv-unified) is not modelled. Set kv.context_tokens or kv.capacity_tokens.",
        )
