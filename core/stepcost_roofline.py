"""The roofline of a server on a platform as a step cost: the larger of arithmetic and memory time, plus what adds to either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hoptrace.errors import InputError
from hoptrace.kv import KvGeometry, geometry
from hoptrace.manifest import Server
from hoptrace.roofline import Roofline, roofline_of
from hoptrace.stepcost import StepCost
from hoptrace.stepcost_table import DECODE, PROMPT, Grid, Piece

__all__ = ["roofline"]

_KNOTS = 8
_COLLECTIVES = 2
"""All-reduces in a layer: after attention and after the feed-forward part (Megatron-LM, arXiv:1909.08053, figure 4)."""


def roofline(server: Server, platform: Mapping[str, Any], *, host_ns: int = 0) -> StepCost:
    """The least time that the platform's arithmetic and memory allow a step: the larger of the two, plus a constant overhead.

    Arithmetic: 2 × parameters FLOP per token (less the embeddings, which are looked up, where the vocabulary is known; of a
    mixture of experts those that a token is routed to; of a prompt without the output table, where that is told apart), and
    4 × layers × heads × head size per pair of positions in attention (QKᵀ and its product with V). Memory: all weights once, the
    KV of every context position once, the KV of each new token once.
    Of the experts' weights a step of n tokens reads E × (1 − (1 − k ÷ E)^n) of E, the expectation where a token's k of them are
    drawn evenly. Layers whose attention slides see no more than their window. Tensor-parallel ranks share both sides; their two
    all-reduces a layer are added where the platform says what one takes. Pipeline stages work one after another.

    Args:
        server: needs parameters, weight_bytes and the KV geometry.
        platform: of one device, ``flops_per_s`` and ``memory_bytes_per_s`` (attainable: peak × efficiency), ``step_overhead_ns``
            (0 if missing), ``allreduce``: measured curves of ``bytes`` and ``ns`` by ``ranks``.
        host_ns: host time of a step, measured elsewhere; taken beside the platform's overhead.

    Raises:
        InputError: something is missing; says what.
    """
    try:
        r = roofline_of(server, platform)
    except InputError as e:
        hint = "Name the model (--model), use the cost model `fitted`, or write the values into the trace's manifest."
        raise InputError(e.message, hint=hint) from None
    g = geometry(server)
    assert g is not None
    flop_ps, byte_ps = 1e12 / r.flops_per_s, 1e12 / r.memory_bytes_per_s
    overhead_ps = (float(platform.get("step_overhead_ns") or 0) + host_ns) * 1000
    token, full = r.token_flop * flop_ps, (g.layers - g.window_layers) / g.layers
    prompt_pair = r.pair_flop * flop_ps
    decode_pair = (r.pair_flop if r.decode_pair_flop is None else r.decode_pair_flop) * flop_ps
    kv = r.kv_token_bytes * byte_ps
    weights, pieces, notes = _weights(server, r, byte_ps)
    memory = {
        "step": weights * byte_ps + overhead_ps,
        "prefill_tokens": kv,
        "prefill_context_tokens": kv * full,
        "decode_requests": kv,
        "decode_context_tokens": kv * full,
    }
    compute = {
        "step": overhead_ps,
        "prefill_tokens": token - r.head_flop * flop_ps,
        "prefill_attention": prompt_pair * full * 1000,
        "decode_requests": token,
        "decode_context_tokens": decode_pair * full,
    }
    if g.window_layers and g.window_tokens:
        pieces += _windows(g, kv * (1 - full), prompt_pair * (1 - full), decode_pair * (1 - full))
    collective, said = _all_reduce(server, platform, r.ranks)
    return StepCost(
        {k: round(v) for k, v in memory.items()},
        "roofline",
        compute_ps={k: round(v) for k, v in compute.items()},
        pieces=(*pieces, *collective),
        notes=(
            "A lower bound from peak rates; not measured.",
            *(n for n in r.notes if not (notes and "one token passes" in n)),
            *notes,
            *said,
        ),
    )


def _count(server: Server, key: str) -> int:
    value = server.config.get(key)
    return value if type(value) is int and value > 0 else 0


def _weights(server: Server, r: Roofline, byte_ps: float) -> tuple[float, list[Piece], list[str]]:
    """Bytes of weights that every step reads; what its experts add, by tokens."""
    experts, each, routed = (_count(server, k) for k in ("experts", "experts_per_token", "routed_bytes"))
    if not (experts and each and routed and server.weight_bytes) or routed >= server.weight_bytes:
        return float(r.weight_bytes), [], []
    # Data-parallel ranks that share the experts see each other's tokens, and each device reads its share of them.
    spread = max(1, _count(server, "expert_parallel_size") // r.ranks)
    unused = 1 - min(each, experts) / experts
    knots = sorted({0, *(round(2 ** (i / 4)) for i in range(4 * 14))})
    points = tuple((n, round(routed / spread * (1 - unused ** (n * spread)) * byte_ps)) for n in knots)
    note = (
        f"{server.name}: of {experts} experts a step reads those that its tokens are routed to, as if evenly"
        + (f"; {spread} data-parallel ranks, as busy as this one, share them." if spread > 1 else ".")
    )  # fmt: skip
    piece = Piece(Grid((0,), (points,)), "tokens", name="experts' weights")
    return float(server.weight_bytes - routed), [piece], [note]


def _windows(g: KvGeometry, kv_ps: float, prompt_pair_ps: float, decode_pair_ps: float) -> list[Piece]:
    """What the layers with sliding attention read and compute."""
    w = g.window_tokens
    assert w is not None

    def flat(ps: float) -> Grid:
        return Grid((0,), (((0, 0), (w, round(w * ps)), (2 * w, round(w * ps))),))

    def pairs(context: int, tokens: int) -> float:
        """Σ min(context + i, window), i from 1 to tokens, as a continuous sum."""
        growing = min(tokens, max(w - context, 0))
        return growing * (context + growing / 2) + (tokens - growing) * w

    contexts = sorted({w * i // _KNOTS for i in range(_KNOTS + 1)} | {2 * w})
    rows = []
    for c in contexts:
        knots = sorted({(max(w - c, 0)) * i // _KNOTS for i in range(_KNOTS + 1)} | {max(w - c, 0) + w})
        rows.append(tuple((t, round(pairs(c, t) * prompt_pair_ps)) for t in knots))
    prompts, decoders, computed = "prefill_requests", "decode_requests", "attention in windows"
    steady, attended = Grid(tuple(contexts), tuple(rows)), flat(decode_pair_ps)
    return [
        Piece(flat(kv_ps), "decoder_context", factors=DECODE, times=decoders, name="windows read"),
        Piece(flat(kv_ps), "prompt_context", factors=PROMPT, times=prompts, name="windows read"),
        Piece(attended, "decoder_context", factors=DECODE, times=decoders, side=1, name=computed),
        Piece(steady, "prompt_tokens", "prompt_context", PROMPT, prompts, side=1, name=computed),
    ]


def _all_reduce(server: Server, platform: Mapping[str, Any], ranks: int) -> tuple[list[Piece], list[str]]:
    """The collectives of tensor-parallel ranks, on either side, from the platform's measured curve of so many ranks."""
    if ranks < 2:
        return [], []
    curves = platform.get("allreduce")
    curve = next((c for c in curves if c.get("ranks") == ranks), None) if isinstance(curves, list) else None
    if curve is None or not server.hidden_size or not server.layers:
        return [], [
            f"The all-reduces of {ranks} tensor-parallel ranks are not counted: the platform does not say what one takes."
        ]
    token_bytes = 2 * server.hidden_size  # activations in 16 bits
    times = _COLLECTIVES * server.layers
    points: dict[int, int] = {}
    for size, ns in zip(curve["bytes"], curve["ns"], strict=True):
        tokens = int(size) // token_bytes
        # A message below one token's bounds a step of one from below; the largest of those counts.
        if times * float(ns) <= 1e12:  # a grid ends at 1000 s, and goes on in its last line
            points[max(tokens, 0)] = round(times * float(ns) * 1000)
    if not points:
        return [], [f"The all-reduces of {ranks} tensor-parallel ranks are not counted: the platform's take more than 1000 s."]
    grid = Grid((0,), (tuple(sorted(points.items())),))
    seen = (min(points), max(points), 0, 0)
    made = [Piece(grid, "tokens", side=s, seen=seen if s == 0 else None, name="all-reduce") for s in (0, 1)]
    return made, [
        f"{times} all-reduces a step over {ranks} ranks, measured on {platform.get('name') or 'the platform'}, are added."
    ]
