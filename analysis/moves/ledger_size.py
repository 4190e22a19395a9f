"""Amplification: the bytes that were moved for an object ÷ its size, counted once, where that size is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import polars as pl

from hoptrace.analysis.moves.ledger_rows import known_sum
from hoptrace.analysis.moves.stepcover import StepCover
from hoptrace.errors import InputError
from hoptrace.kv import dtype_bytes
from hoptrace.manifest import Server
from hoptrace.reader import Trace

__all__ = ["Amplification", "amplification"]

_TOKEN_ID_BYTES = 4  # a token id is an int32 in every engine's batch
_WEAK = {"counted": 0, "derived": 1, "assumed": 2}
_LOGIT_BYTES = 4  # engines sample from float32 logits


@dataclass(frozen=True, slots=True)
class Amplification:
    """``moved_bytes`` for an object (links, own memory) ÷ ``size_bytes``, its size counted once, known as ``size_is`` says;
    ``moved_basis`` of what moved (what moved on another basis has a factor of its own), ``basis`` of the size: counted, derived
    or assumed. ``at_least``: not all that moved is known."""

    object: str
    moved_bytes: int
    size_bytes: int
    size_is: str
    at_least: bool = False
    basis: str = "derived"
    moved_basis: str = "derived"

    @property
    def weakest(self) -> str:
        """What the factor rests on: the weaker of both."""
        return max(self.moved_basis, self.basis, key=lambda b: _WEAK.get(b, len(_WEAK)))

    @property
    def factor(self) -> float:
        return self.moved_bytes / self.size_bytes

    def as_dict(self) -> dict[str, Any]:
        return {
            "object": self.object,
            "moved_bytes": self.moved_bytes,
            "size_bytes": self.size_bytes,
            "size_is": self.size_is,
            "size_basis": self.basis,
            "moved_basis": self.moved_basis,
            "factor": round(self.factor, 4),
            "at_least": self.at_least,
        }


def amplification(
    trace: Trace, rows: pl.DataFrame, steps: pl.LazyFrame, output_tokens: int | None, cover: StepCover
) -> list[Amplification]:
    """Of weights, KV, activations, logits, tokens and prompts, each where it moved and its size is known.

    *weights*: the manifest's ``weight_bytes``. *kv*: each token's KV once, as written. *activations*: one vector of the hidden
    size for each token computed, in the model's type: what a pipeline stage hands on. *logits*: one float32 per word of the
    vocabulary for each output token. *tokens*: 4 bytes an id. *prompt*: 1 byte a character. What moved on different bases is
    never added up: an object has a factor for each.
    """
    summed = (
        rows.group_by("object", "basis")
        .agg(known_sum("link_bytes"), pl.col("bytes_unknown").sum(), pl.col("partly").any())
        .sort("object", "basis")
    )
    moved: dict[str, list[tuple[str, int, bool]]] = {}
    for name_, of, size_, unknown_, partly in summed.rows():
        if size_:
            moved.setdefault(name_, []).append((of, size_, bool(unknown_) or bool(partly)))
    out: list[Amplification] = []
    servers = trace.manifest.servers

    def add(name: str, size: int | None, size_is: str, basis: str, at_least: bool) -> None:
        for of, size_moved, partly in moved.get(name, ()) if size else ():
            assert size
            out.append(Amplification(name, size_moved, size, size_is, at_least or partly, basis, of))

    weights = [s.weight_bytes for s in servers]
    if weights and all(weights):
        add("weights", sum(w for w in weights if w), "the manifest's weight_bytes", "derived", not cover.whole)
    written = rows.filter((pl.col("object") == "kv") & pl.col("src").str.starts_with("compute:"))["bytes"].sum()
    known = "" if cover.whole else " in the known steps"
    # With steps missing both what moved and the size lack their part: the factor is of the known steps, not a bound.
    add("kv", int(written), f"each token's KV once, as written{known}", "derived", False)
    if "activations" in moved:
        size = _of_servers(servers, steps, _activation_bytes)
        add("activations", size, "hidden size × type, once a token computed", "derived", not cover.whole)
    if "logits" in moved and output_tokens:
        words = {s.config.get("vocabulary") for s in servers}
        one = words.pop() if len(words) == 1 else None
        size = output_tokens * one * _LOGIT_BYTES if type(one) is int else None
        add("logits", size, "vocabulary × 4 bytes, once an output token (assumed type)", "assumed", False)
    if output_tokens:
        add("tokens", output_tokens * _TOKEN_ID_BYTES, "4 bytes a token id (assumed)", "assumed", False)
    if "prompt" in moved:
        chars = pl.col("prompt_chars")
        n, unknown = (
            trace.table("requests")
            .select(chars.sum().alias("n"), chars.null_count().alias("unknown"))
            .collect(engine="streaming")
            .row(0)
        )
        add("prompt", None if unknown else int(n), "1 byte a character of the prompt (assumed)", "assumed", False)
    return out


def _of_servers(servers: list[Server], steps: pl.LazyFrame, each: Callable[[Server], Fraction | None]) -> int | None:
    """Σ over servers of tokens computed × bytes a token; null where a server with steps does not tell one of them."""
    tokens = pl.col("prefill_tokens") + pl.col("decode_tokens")
    computed = (
        steps.filter(pl.col("pp_rank").fill_null(0) == 0)
        .group_by("server")
        .agg(tokens.sum().alias("n"), tokens.null_count().alias("unknown"))
        .collect(engine="streaming")
    )
    total = Fraction(0)
    for name, n, unknown in computed.rows():
        server = next((s for s in servers if s.name == name), None)
        size = each(server) if server is not None else None
        if size is None or unknown:
            return None
        total += size * int(n)
    return int(total) or None


def _activation_bytes(server: Server) -> Fraction | None:
    dtype = server.config.get("dtype")
    if not server.hidden_size or not isinstance(dtype, str):
        return None
    try:
        return server.hidden_size * dtype_bytes(dtype)[0]
    except InputError:
        return None
