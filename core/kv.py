"""KV bytes per token, weight bytes, and what each step reads and writes of the device's own memory."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import polars as pl

from hoptrace.errors import InputError
from hoptrace.manifest import Server

__all__ = ["DTYPE_BYTES", "KvGeometry", "dtype_bytes", "geometry", "step_bytes"]

DTYPE_BYTES: dict[str, Fraction] = {
    "f32": Fraction(4),
    "float32": Fraction(4),
    "f16": Fraction(2),
    "fp16": Fraction(2),
    "float16": Fraction(2),
    "half": Fraction(2),
    "bf16": Fraction(2),
    "bfloat16": Fraction(2),
    "fp8": Fraction(1),
    "fp8_e4m3": Fraction(1),
    "fp8_e5m2": Fraction(1),
    "int8": Fraction(1),
    # llama.cpp: bytes of a block of 32 elements, scale (and minimum) included; ggml's block_q*_* structures.
    "q8_0": Fraction(34, 32),
    "q8_1": Fraction(36, 32),
    "q5_0": Fraction(22, 32),
    "q5_1": Fraction(24, 32),
    "q4_0": Fraction(18, 32),
    "q4_1": Fraction(20, 32),
    "iq4_nl": Fraction(18, 32),
}


def dtype_bytes(name: str) -> tuple[Fraction, Fraction]:
    """Bytes per element of K and of V. ``name`` is one type (`f16`) or K's and V's apart (`q8_0/f16`).

    Raises:
        InputError: a type that is not in the table.
    """
    parts = name.lower().split("/")
    try:
        sizes = [DTYPE_BYTES[p.strip()] for p in parts]
    except KeyError as e:
        raise InputError(f"The KV type {e.args[0]!r} is unknown.", hint=f"Known types: {', '.join(DTYPE_BYTES)}.") from None
    if len(sizes) > 2:
        raise InputError(f"The KV type {name!r} names more than K and V.")
    return sizes[0], sizes[-1]


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """How a model keeps its KV cache.

    ``tp`` ranks hold ``kv_heads`` between them; a rank holds at least one head, so with more ranks than heads they are copied.
    ``latent_size`` is set for latent attention (MLA): one vector of that many elements a layer, whole on every rank. ``layers``
    are those that keep KV (of hybrid models the attention layers only); ``window_layers`` of them keep at most the last
    ``window_tokens`` positions (sliding window).
    """

    layers: int
    kv_heads: int
    head_size: int
    dtype: str = "f16"
    tp: int = 1
    latent_size: int | None = None
    window_layers: int = 0
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_size, self.tp) < 1 or (self.latent_size or 1) < 1:
            raise InputError(f"A KV geometry needs positive sizes: {self}.")
        if not 0 <= self.window_layers <= self.layers or (self.window_layers and (self.window_tokens or 0) < 1):
            raise InputError(f"{self.window_layers} of {self.layers} layers can't have a window of {self.window_tokens} tokens.")
        dtype_bytes(self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's KV over all layers and ranks: 2 × layers × heads held × head size × bytes per element."""
        return _whole(self._bytes_per_position * self.layers)

    @property
    def _bytes_per_position(self) -> Fraction:
        """Bytes of one position in one layer, over all ranks."""
        k, v = dtype_bytes(self.dtype)
        if self.latent_size is not None:
            return k * self.latent_size * self.tp
        return (k + v) * (-(-self.kv_heads // self.tp) * self.tp) * self.head_size

    def bytes_of(self, tokens: int) -> int:
        """Bytes that a sequence of ``tokens`` positions keeps: layers with a window keep no more than it. An engine that does not
        free what has left the window holds ``tokens`` × :attr:`bytes_per_token`."""
        inside = min(tokens, self.window_tokens) if self.window_layers and self.window_tokens else tokens
        return _whole(self._bytes_per_position * ((self.layers - self.window_layers) * tokens + self.window_layers * inside))

    @property
    def amplification(self) -> Fraction:
        """Bytes held ÷ bytes of one copy (Qwen3-235B with 4 KV heads on 8 ranks: 2)."""
        if self.latent_size is not None:
            return Fraction(self.tp)
        return Fraction(-(-self.kv_heads // self.tp) * self.tp, self.kv_heads)


def _whole(x: Fraction) -> int:
    return -(-x.numerator // x.denominator)


def geometry(server: Server) -> KvGeometry | None:
    """The geometry of a manifest's server, or None where the manifest does not tell it whole or its KV type is unknown.

    From its ``config``: ``tensor_parallel_size``; ``kv_lora_latent_size``, or ``mla`` (then ``head_size`` is the latent vector);
    ``kv_layers`` (layers that keep KV, where they are not all), ``window_layers`` and ``window_tokens``.
    """
    if not server.layers or not server.kv_heads or not server.head_size or not server.kv_dtype:
        return None

    def told(name: str) -> int | None:
        value = server.config.get(name)
        return value if type(value) is int and value > 0 else None

    window = told("window_tokens")
    layers = min(told("kv_layers") or server.layers, server.layers)
    latent = told("kv_lora_latent_size") or (server.head_size if server.config.get("mla") is True else None)
    try:
        return KvGeometry(
            layers=layers,
            kv_heads=server.kv_heads,
            head_size=server.head_size,
            dtype=server.kv_dtype,
            tp=told("tensor_parallel_size") or 1,
            latent_size=latent,
            window_layers=min(told("window_layers") or 0, layers) if window else 0,
            window_tokens=window,
        )
    except InputError:
        return None


_Frame = TypeVar("_Frame", pl.DataFrame, pl.LazyFrame)


def step_bytes(steps: _Frame, server: Server) -> _Frame:
    """``steps`` with weight_bytes, kv_read_bytes and kv_write_bytes filled from the server's geometry; what a row has is kept.

    *Weights* are read once per pass over the model; a step of more tokens than the physical batch (llama.cpp's ``n_ubatch``,
    where the manifest's ``config`` has it) is at least tokens ÷ n_ubatch passes, rounded up. *KV read* counts every position of
    every sequence in the step once (context and the step's own tokens), and once more for each further pass where one prompt is
    computed in several; where several prompts share the passes, it is not known which were split, and none is taken. Layers with
    a sliding window read no more than it of each sequence's context. It is a lower bound (of contexts that differ much, windows
    apart), since an attention kernel may read a tile again. *KV written* is one position per token computed. A column is
    null where the geometry or the step's composition is unknown.
    """
    g = geometry(server)
    tokens = pl.col("prefill_tokens") + pl.col("decode_tokens")
    positions = pl.col("prefill_context_tokens") + pl.col("decode_context_tokens") + tokens
    none = pl.lit(None, dtype=pl.Int64)
    ubatch = server.config.get("n_ubatch")
    passes = (tokens > 0).cast(pl.Int64)
    if isinstance(ubatch, int) and ubatch > 0:
        passes = (tokens + ubatch - 1) // ubatch
        if "prefill_requests" in steps.collect_schema():
            one = (pl.col("prefill_requests") == 1).fill_null(False)
            positions = positions + pl.when(one).then(_read_again(ubatch)).otherwise(0)
    per_token = None if g is None else g.bytes_per_token
    read = none if g is None else positions * per_token
    if g is not None and g.window_layers:
        cut = g.bytes_per_token * g.window_layers // g.layers
        names = steps.collect_schema().names()
        inside = tokens + _in_window("prefill", g, names) + _in_window("decode", g, names)
        read = positions * (g.bytes_per_token - cut) + inside * cut
    return steps.with_columns(
        pl.coalesce("weight_bytes", none if server.weight_bytes is None else passes * server.weight_bytes).alias("weight_bytes"),
        pl.coalesce("kv_read_bytes", read).alias("kv_read_bytes"),
        pl.coalesce("kv_write_bytes", none if per_token is None else tokens * per_token).alias("kv_write_bytes"),
    )


def _in_window(phase: str, g: KvGeometry, columns: list[str]) -> pl.Expr:
    """Σ contexts of a step's prompts or decoders, of each no more than the window; null where their number is not told."""
    context, name = pl.col(f"{phase}_context_tokens"), f"{phase}_requests"
    if name not in columns:
        return pl.when(context == 0).then(0)
    most = pl.col(name) * g.window_tokens
    return pl.when(context == 0).then(0).when(most.is_not_null()).then(pl.min_horizontal(context, most))


def _read_again(ubatch: int) -> pl.Expr:
    """Positions that the only prompt of a step reads more than once: each pass but the last reads its context and its own tokens
    up to there. llama.cpp puts the decoders' tokens before the prompt's, so the first pass has less room for it."""
    prompt = pl.col("prefill_tokens")
    begin = pl.min_horizontal(prompt, ubatch - pl.col("decode_tokens") % ubatch)
    further = (prompt - begin + ubatch - 1) // ubatch
    return further * (pl.col("prefill_context_tokens") + begin) + ubatch * further * (further - 1) // 2
