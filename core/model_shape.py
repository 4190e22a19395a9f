"""The shape of a transformer model, and what follows from it: parameters, bytes of weights, arithmetic of attention."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hoptrace.errors import InputError
from hoptrace.manifest import Server

__all__ = ["WEIGHT_BYTES", "Shape"]

WEIGHT_BYTES: dict[str, Fraction] = {
    "f32": Fraction(4),
    "float32": Fraction(4),
    "bf16": Fraction(2),
    "bfloat16": Fraction(2),
    "f16": Fraction(2),
    "float16": Fraction(2),
    "fp8": Fraction(1),
    "int8": Fraction(1),
    # OCP Microscaling Formats (MX) 1.0: 32 elements of 4 bits share a scale of 8.
    "mxfp4": Fraction(17, 32),
}
"""Bytes of a weight by type; FP8's scales are left out (one of 4 bytes for 128 × 128 weights)."""


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer with gated feed-forward layers.

    Attributes:
        heads, kv_heads, head_size: of grouped-query attention. Latent attention (MLA) has ``latent`` instead: ranks of the query
            and of the KV latent, and sizes of a head's part without and with position, and of its value.
        experts: routed ones of a layer, 0 if dense; ``experts_per_token`` of them are used by a token; ``shared_experts`` by
            all. ``dense_layers``: the first layers that have no experts.
        window_layers: layers whose attention slides over ``window_tokens``.
        dtype, expert_dtype: types of weights (:data:`WEIGHT_BYTES`).
        tied: one table for input and output embeddings. ``bias``: attention and router, experts have biases, and attention has
            sinks (gpt-oss). ``head_norms``: queries and keys are normalised (Qwen3). ``router_bias``: DeepSeek-V3.
    """

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context_tokens: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    latent: tuple[int, int, int, int, int] | None = None
    window_tokens: int | None = None
    window_layers: int = 0
    dtype: str = "bfloat16"
    expert_dtype: str | None = None
    kv_dtype: str = "bfloat16"
    tied: bool = False
    bias: bool = False
    head_norms: bool = False
    router_bias: bool = False

    def __post_init__(self) -> None:
        sizes = (
            self.layers,
            self.hidden_size,
            self.intermediate_size,
            self.heads,
            self.kv_heads,
            self.head_size,
            self.vocabulary,
        )
        if not all(0 < n < 1 << 32 for n in sizes):
            raise InputError("A model's layers, sizes, heads and vocabulary must be positive.")
        if self.experts and not (0 < self.experts_per_token <= self.experts and self.expert_intermediate_size > 0):
            raise InputError(f"A model of {self.experts} experts needs experts_per_token and expert_intermediate_size.")
        if not 0 <= self.dense_layers <= self.layers or not 0 <= self.window_layers <= self.layers:
            raise InputError("A model can't have more dense or sliding layers than layers.")
        for name in (self.dtype, self.expert_dtype or self.dtype):
            if name not in WEIGHT_BYTES:
                raise InputError(f"The weight type {name!r} is unknown.", hint=f"Known types: {', '.join(WEIGHT_BYTES)}.")

    @property
    def routed_parameters(self) -> int:
        """Of all routed experts."""
        one = 3 * self.hidden_size * self.expert_intermediate_size
        if self.bias:
            one += 2 * self.expert_intermediate_size + self.hidden_size
        return self.experts * one * (self.layers - self.dense_layers) if self.experts else 0

    @property
    def parameters(self) -> int:
        """All of them, as safetensors files count them (of DeepSeek-V3 without the layer of multi-token prediction)."""
        tables = self.vocabulary * self.hidden_size * (1 if self.tied else 2)
        norms = 2 * self.hidden_size * self.layers + self.hidden_size
        feed = 3 * self.hidden_size * self.intermediate_size * (self.dense_layers if self.experts else self.layers)
        if self.experts:
            router = self.hidden_size * self.experts + (self.experts if self.bias or self.router_bias else 0)
            shared = 3 * self.hidden_size * self.expert_intermediate_size * self.shared_experts
            feed += (router + shared) * (self.layers - self.dense_layers) + self.routed_parameters
        return tables + norms + feed + self._attention * self.layers

    @property
    def _attention(self) -> int:
        h = self.hidden_size
        if self.latent is not None:
            query, kv, nope, rope, value = self.latent
            down = h * query + query + h * (kv + rope) + kv
            return down + query * self.heads * (nope + rope) + kv * self.heads * (nope + value) + self.heads * value * h
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        n = 2 * h * q + 2 * h * kv
        if self.bias:
            n += q + 2 * kv + h + self.heads
        return n + (2 * self.head_size if self.head_norms else 0)

    @property
    def active_parameters(self) -> int:
        """Those that a token is multiplied with: the experts that it is routed to, and no table that is only looked up."""
        table = 0 if self.tied else self.vocabulary * self.hidden_size
        unused = self.routed_parameters * (self.experts - self.experts_per_token) // self.experts if self.experts else 0
        return self.parameters - table - unused

    @property
    def routed_bytes(self) -> int:
        """Bytes of all routed experts' weights."""
        return int(self.routed_parameters * WEIGHT_BYTES[self.expert_dtype or self.dtype])

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.routed_bytes + int((self.parameters - self.routed_parameters) * WEIGHT_BYTES[self.dtype])

    def server_fields(self) -> dict[str, Any]:
        """Fields of a manifest's :class:`~hoptrace.manifest.Server`, ``config`` among them, for ``model_copy(update=…)``."""
        config: dict[str, Any] = {
            "vocabulary": self.vocabulary,
            "active_parameters": self.active_parameters,
            "intermediate_size": self.intermediate_size,
        }
        kv_heads, head_size = self.kv_heads, self.head_size
        if self.experts:
            config |= {"experts": self.experts, "experts_per_token": self.experts_per_token, "routed_bytes": self.routed_bytes}
        if self.window_tokens and self.window_layers:
            config |= {"window_tokens": self.window_tokens, "window_layers": self.window_layers}
        if self.latent is not None:
            _, kv, nope, rope, value = self.latent
            kv_heads, head_size = 1, kv + rope
            config |= {"kv_lora_latent_size": kv + rope}
            # QKᵀ and its product with V: of whole heads in a prompt, of the latent vector itself in decoding.
            config["prefill_pair_flop"] = 2 * self.layers * self.heads * (nope + rope + value)
            config["decode_pair_flop"] = 2 * self.layers * self.heads * (kv + rope + kv)
        return {
            "parameters": self.parameters, "weight_bytes": self.weight_bytes, "layers": self.layers, "heads": self.heads,
            "kv_heads": kv_heads, "head_size": head_size, "hidden_size": self.hidden_size, "kv_dtype": self.kv_dtype,
            "config": config,
        }  # fmt: skip

    def server(self, name: str, model: str) -> Server:
        """A server of that model, nothing else known of it."""
        return Server.model_validate(
            {"name": name, "model": model, "context_tokens": self.context_tokens, **self.server_fields()}
        )
