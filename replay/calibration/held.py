"""What the steps of captures held: batch sizes, prompt tokens, contexts; and which settings of the engine that covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.manifest import Server

__all__ = ["FEWEST", "Held", "Span", "held", "usable"]

_KNOWN = ["start_ns", "end_ns", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens"]
FEWEST = 20
"""Steps of a kind below which its scatter is not told (:mod:`hoptrace.stepcost_residuals`)."""


@dataclass(frozen=True, slots=True)
class Span:
    """One quantity over the ``steps`` that hold it: least, median, 95th percentile, most."""

    steps: int
    least: int
    p50: int
    p95: int
    most: int

    def as_dict(self) -> dict[str, int]:
        return {"steps": self.steps, "least": self.least, "p50": self.p50, "p95": self.p95, "most": self.most}


@dataclass(frozen=True)
class Held:
    """Spans by quantity (null: no step holds it), steps by kind, and the steps of both phases at their most."""

    decoders: Span | None
    prompt_tokens: Span | None
    context_before: Span | None
    context_each: Span | None
    kinds: dict[str, int]
    beside_decoders: int
    beside_prompt_tokens: int

    @property
    def spans(self) -> dict[str, Span | None]:
        """By name, as people read them."""
        return {
            "decoders in a step": self.decoders,
            "context of each decoder": self.context_each,
            "prompt tokens in a step": self.prompt_tokens,
            "context before a chunk": self.context_before,
        }

    def as_dict(self) -> dict[str, Any]:
        spans = {
            "decode_requests": self.decoders, "decoder_context_tokens": self.context_each,
            "prefill_tokens": self.prompt_tokens, "prefill_context_tokens": self.context_before,
        }  # fmt: skip
        return {
            "quantities": {name: None if s is None else s.as_dict() for name, s in spans.items()},
            "steps_by_kind": self.kinds,
            "beside": {"decode_requests": self.beside_decoders, "prefill_tokens": self.beside_prompt_tokens},
        }

    def covers(self, server: Server) -> list[dict[str, Any]]:
        """For each setting of the engine up to what value its steps were measured, and what the server is set to:
        ``setting``, ``measured`` (null: no such step), ``server`` (null: not told), ``covered``, ``sentence``."""
        budget = max(self.prompt_tokens.most if self.prompt_tokens else 0, 0)
        context = max((s.most for s in (self.context_each, self.context_before) if s), default=0)
        rows = (
            ("max_sequences", self.decoders.most if self.decoders else 0, server.max_sequences, "sequences at once"),
            ("max_batched_tokens", budget, server.max_batched_tokens, "prompt tokens in a step"),
            ("context_tokens", context, server.context_tokens, "tokens of context"),
        )
        found = []
        for setting, measured, limit, what in rows:
            # A budget is shared with the decoders, and a last chunk seldom fills it: within 2 % it was reached.
            covered = None if limit is None else measured >= 0.98 * limit
            against = "" if limit is None else f" of the server's {limit:,}"
            short = "" if covered or covered is None else "; beyond is extrapolated"
            found.append(
                {"setting": setting, "measured": measured, "server": limit, "covered": covered,
                 "sentence": f"{what}: up to {measured:,}{against}{short}"}
            )  # fmt: skip
        both = self.kinds["mixed"] > 0
        said = (
            f"prompts beside decoders: up to {self.beside_prompt_tokens:,} prompt tokens beside up to {self.beside_decoders:,}"
            if both
            else "prompts beside decoders: none was measured; what-ifs with them are extrapolated"
        )
        found.append({"setting": "beside", "measured": self.kinds["mixed"], "server": None, "covered": both, "sentence": said})
        return found


def usable(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps that a cost can be fitted to: times and composition known, something in them, the first pipeline rank's."""
    frame = steps.drop_nulls(_KNOWN).filter(
        (pl.col("end_ns") > pl.col("start_ns")) & (pl.col("prefill_tokens") + pl.col("decode_requests") > 0)
    )
    if "pp_rank" in frame.columns:
        frame = frame.filter(pl.col("pp_rank").fill_null(0) == 0)
    return frame.sort("start_ns")


def held(steps: pl.DataFrame) -> Held:
    """What usable steps hold."""
    decode, prefill = pl.col("decode_requests") > 0, pl.col("prefill_tokens") > 0
    prompts = pl.col("prefill_requests").fill_null(1).clip(1) if "prefill_requests" in steps.columns else pl.lit(1)
    mixed = steps.filter(decode & prefill)
    return Held(
        _span(steps.filter(decode)["decode_requests"]),
        _span(steps.filter(prefill)["prefill_tokens"]),
        _span(steps.filter(prefill & (pl.col("prefill_context_tokens") > 0)).select(
            (pl.col("prefill_context_tokens") // prompts).clip(1).alias("c"))["c"]),
        _span(steps.filter(decode).select((pl.col("decode_context_tokens") // pl.col("decode_requests")).alias("c"))["c"]),
        {
            "decode": steps.filter(decode & ~prefill).height,
            "prefill": steps.filter(prefill & ~decode).height,
            "mixed": mixed.height,
        },
        int(mixed["decode_requests"].max() or 0),  # type: ignore[arg-type]
        int(mixed["prefill_tokens"].max() or 0),  # type: ignore[arg-type]
    )  # fmt: skip


def _span(values: pl.Series) -> Span | None:
    if not values.len():
        return None
    at = [values.quantile(q, "lower") for q in (0.0, 0.5, 0.95, 1.0)]
    least, p50, p95, most = (int(v) for v in at if v is not None)
    return Span(values.len(), least, p50, p95, most)
