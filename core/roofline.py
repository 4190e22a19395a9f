"""The least time that a platform's arithmetic and its memory allow each step, as expressions over the table `steps`.

The formulas are those of :func:`hoptrace.stepcost.roofline`, which a replay uses; here they take what each step itself recorded
(bytes of weights and KV, drafted tokens), and give the two sides apart, so that the larger one can be named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.errors import InputError
from hoptrace.kv import geometry
from hoptrace.manifest import Manifest, Server
from hoptrace.platform import graph_of

__all__ = ["Roofline", "active_parameters", "platform_of", "rank_count", "roofline_of"]


@dataclass(frozen=True, slots=True)
class Roofline:
    """What bounds the steps of one server.

    Attributes:
        server: its name.
        platform: name of the platform.
        ranks: devices that share each step's work (tensor-parallel ranks).
        flops_per_s, memory_bytes_per_s: of all of them together.
        token_flop: arithmetic of one token, attention apart. ``pair_flop``: of one pair of positions in a prompt's attention;
            ``decode_pair_flop``: in a decoder's (latent attention: another number).
        weight_bytes: read once a pass. ``pass_tokens``: tokens of one pass, or null where every step is one.
        kv_token_bytes: KV of one token, over all ranks. ``window_tokens``: of sliding attention, or null.
        notes: what a reader has to know.
        head_flop: the output table's part of ``token_flop``, which of a prompt only the last token needs; 0 if not told apart.
    """

    server: str
    platform: str
    ranks: int
    flops_per_s: float
    memory_bytes_per_s: float
    token_flop: float
    pair_flop: float
    weight_bytes: int
    pass_tokens: int | None
    kv_token_bytes: int
    window_tokens: int | None
    notes: tuple[str, ...] = ()
    head_flop: float = 0.0
    decode_pair_flop: float | None = None

    def sides(self) -> tuple[pl.Expr, pl.Expr]:
        """Expressions over `steps`: arithmetic time and memory time of a step, Float64 ns; null where its composition is.

        Speculation: a decoder computes all its drafted tokens (``decode_tokens``), each over its whole context. Of several
        prompts in one step the mean length stands for each, which is never more pairs than there were.
        """
        prompt, prompt_context = _number("prefill_tokens"), self._window("prefill_context_tokens", "prefill_requests")
        decoders = _number("decode_requests")
        decoded = pl.max_horizontal(pl.coalesce(_number("decode_tokens"), decoders), decoders)
        decode_context = self._window("decode_context_tokens", "decode_requests")
        tokens = prompt + decoded
        prompts = pl.max_horizontal(_number("prefill_requests").fill_null(1), pl.lit(1.0))
        own = prompt / prompts
        if self.window_tokens is not None:
            own = pl.min_horizontal(own, float(self.window_tokens))
        pairs = prompt * (prompt_context / prompts + own / 2)
        decode_pair = self.pair_flop if self.decode_pair_flop is None else self.decode_pair_flop
        attended = pairs * self.pair_flop + decode_context * decoded / pl.max_horizontal(decoders, pl.lit(1.0)) * decode_pair
        multiplied = tokens * self.token_flop - prompt * self.head_flop
        arithmetic = (multiplied + attended) * (1e9 / self.flops_per_s)
        passes = pl.when(tokens > 0).then(1.0).otherwise(0.0)
        if self.pass_tokens is not None:
            passes = (tokens / self.pass_tokens).ceil()
        weights = pl.coalesce(_number("weight_bytes"), passes * float(self.weight_bytes))
        kv = pl.coalesce(_number("kv_read_bytes"), (prompt_context + decode_context + tokens) * float(self.kv_token_bytes))
        known = tokens.is_not_null() & prompt_context.is_not_null() & decode_context.is_not_null()
        memory = pl.when(known).then((weights + kv) * (1e9 / self.memory_bytes_per_s))
        return arithmetic, memory

    def _window(self, column: str, requests: str) -> pl.Expr:
        context = _number(column)
        if self.window_tokens is None:
            return context
        # Layers of sliding attention read a window at most; a lower bound where only some layers do.
        most = pl.max_horizontal(_number(requests).fill_null(1), pl.lit(1.0)) * float(self.window_tokens)
        return pl.when(context.is_not_null()).then(pl.min_horizontal(context, most))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "server": self.server,
            "platform": self.platform,
            "ranks": self.ranks,
            "flops_per_s": self.flops_per_s,
            "memory_bytes_per_s": self.memory_bytes_per_s,
            "weight_bytes": self.weight_bytes,
            "kv_token_bytes": self.kv_token_bytes,
            "token_flop": self.token_flop,
            "notes": list(self.notes),
        }


def _number(column: str) -> pl.Expr:
    # Hostile counts near the end of int64 must not wrap round; what is below 0 is no count.
    value = pl.col(column).cast(pl.Float64)
    return pl.when(value >= 0).then(value)


def rank_count(server: Server) -> int:
    """Devices that share the work of each step: tensor-parallel ranks; 1 where nothing says otherwise.

    Pipeline stages work one after another on a step, so they lend it no speed; data-parallel ranks have steps of their own.
    """
    tp = server.config.get("tensor_parallel_size")
    return tp if isinstance(tp, int) and not isinstance(tp, bool) and tp > 0 else 1


def active_parameters(server: Server) -> tuple[int | None, str | None]:
    """Parameters that each token is multiplied with, or null with the reason.

    The table of input embeddings is looked up, not multiplied: where the vocabulary is known, vocabulary × hidden size is taken
    off. Of a mixture of experts only the engine knows; ``config.active_parameters`` may say it.
    """
    active = server.config.get("active_parameters")
    if isinstance(active, int) and not isinstance(active, bool) and active > 0:
        return active, None
    if not server.parameters:
        return None, "parameters"
    experts = server.config.get("experts")
    if isinstance(experts, int) and experts > 1:
        return None, f"how many parameters a token of a mixture of {experts} experts passes (config.active_parameters)"
    vocabulary = server.config.get("vocabulary")
    looked_up = vocabulary * (server.hidden_size or 0) if isinstance(vocabulary, int) and vocabulary > 0 else 0
    return (server.parameters - looked_up if 0 < looked_up < server.parameters else server.parameters), None


def platform_of(manifest: Manifest, server: Server) -> dict[str, Any] | None:
    """The platform of a server by the manifest's graph: its node of known arithmetic and memory rate; null if there is none.

    A node belongs to a server by its name, else by its host; the only such node of the graph belongs to all.
    """
    rated = [n for n in graph_of(manifest).nodes.values() if n.flops_per_s and n.memory_bytes_per_s]
    own = [n for n in rated if n.server == server.name] or [n for n in rated if n.host is not None and n.host == server.host]
    found = own or (rated if len(rated) == 1 else [])
    if not found:
        return None
    # Several devices of one server: the slowest bounds each rank.
    return {
        "name": found[0].name,
        "flops_per_s": min(n.flops_per_s or 0 for n in found),
        "memory_bytes_per_s": min(n.memory_bytes_per_s or 0 for n in found),
    }


def roofline_of(server: Server, platform: Mapping[str, Any]) -> Roofline:
    """The roofline of a server on a platform (rates of one device).

    Raises:
        InputError: something is missing; says what.
    """
    g = geometry(server)
    active, why = active_parameters(server)
    missing = [why] if why else []
    missing += [n for n in ("weight_bytes", "layers", "heads", "kv_heads", "head_size", "kv_dtype") if not getattr(server, n)]
    missing += [n for n in ("flops_per_s", "memory_bytes_per_s") if not _positive(platform.get(n))]
    if missing or g is None or active is None:
        raise InputError(
            f"A roofline for server {server.name!r} needs {', '.join(missing) or 'a known kv_dtype'}.",
            hint="Name the model's file at attach, or write the values into the trace's manifest.",
        )
    assert server.weight_bytes and server.layers and server.heads and server.head_size
    ranks = rank_count(server)
    ubatch, window = server.config.get("n_ubatch"), server.config.get("window_tokens")
    notes = []
    if ranks > 1:
        notes.append(
            f"{server.name}: {ranks} tensor-parallel ranks share each step; the platform's rates are taken {ranks} times."
        )
    weights = server.weight_bytes
    if server.parameters and active < server.parameters and isinstance(server.config.get("experts"), int):
        weights = weights * active // server.parameters
        notes.append(f"{server.name}: of the experts' weights, those that one token passes are taken; a larger batch reads more.")
    if server.parameters and server.weight_bytes < 1.9 * server.parameters:
        notes.append(
            f"{server.name}: weights of fewer than 16 bits, priced at the platform's rate for 16: where the device multiplies "
            "them as they are (FP8, FP4) its arithmetic takes half the time or less."
        )
    # Hybrids with Mamba or linear attention: only the layers that keep KV attend.
    pair = 4.0 * g.layers * server.heads * server.head_size
    return Roofline(
        server=server.name,
        platform=str(platform.get("name") or "unnamed"),
        ranks=ranks,
        flops_per_s=float(platform["flops_per_s"]) * ranks,
        memory_bytes_per_s=float(platform["memory_bytes_per_s"]) * ranks,
        token_flop=2.0 * active,
        pair_flop=_told(server, "prefill_pair_flop", pair),
        weight_bytes=weights,
        pass_tokens=ubatch if isinstance(ubatch, int) and ubatch > 0 else None,
        kv_token_bytes=g.bytes_per_token,
        window_tokens=window if isinstance(window, int) and window > 0 else None,
        notes=tuple(notes),
        head_flop=_head_flop(server, active),
        decode_pair_flop=_told(server, "decode_pair_flop", pair),
    )


def _told(server: Server, key: str, otherwise: float) -> float:
    value = server.config.get(key)
    return float(value) if type(value) is int and value > 0 else otherwise


def _head_flop(server: Server, active: int) -> float:
    """Where ``config.active_parameters`` is told the output table is among them; from a count of all, nobody knows."""
    vocabulary, hidden = server.config.get("vocabulary"), server.hidden_size
    if active != server.config.get("active_parameters") or type(vocabulary) is not int or not hidden:
        return 0.0
    return 2.0 * vocabulary * hidden if 0 < vocabulary * hidden < active else 0.0


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
