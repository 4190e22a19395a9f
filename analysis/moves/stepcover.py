"""How much of the servers' work the known steps are: figures per token from steps that are not all there are too low."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.analysis.counters import counter_totals
from hoptrace.analysis.text import counted
from hoptrace.reader import Trace
from hoptrace.step_source import StepSource

__all__ = ["StepCover", "step_cover"]

_ENOUGH = 0.995  # what is missing beyond it would show in three digits
_PASSES = "llamacpp:n_decode_total"
# The server's counter is read every tenth of a second or so, and reconstructed steps are off by a few.
_PASSES_ENOUGH = 0.97


@dataclass(frozen=True, slots=True)
class StepCover:
    """``tokens`` of all ``output_tokens`` came out of the known steps (null: not known). ``passes``: what the servers counted,
    null where they do not; ``steps``: those known of the servers that count. ``missing``: what the steps lack; with anything in
    it sums over steps are lower bounds."""

    tokens: int | None
    output_tokens: int | None
    steps: int
    passes: int | None
    missing: list[str]

    @property
    def whole(self) -> bool:
        return not self.missing

    def as_dict(self) -> dict[str, Any]:
        return {
            "whole": self.whole,
            "tokens_from_steps": self.tokens,
            "output_tokens": self.output_tokens,
            "passes_counted": self.passes,
            "missing": self.missing,
        }


def step_cover(trace: Trace, found: StepSource, output_tokens: int | None) -> StepCover:
    """What the steps cover. A step's tokens: one for each decoder, and the first one of each stay that is in the steps."""
    own = found.steps.filter(pl.col("pp_rank").fill_null(0) == 0)
    decoded = pl.coalesce("decode_tokens", "decode_requests")
    sums = own.select(
        pl.len().alias("steps"),
        decoded.sum().alias("decoded"),
        decoded.null_count().alias("decoded_unknown"),
        pl.any_horizontal(pl.col("prefill_tokens", "decode_tokens").is_null()).sum().alias("silent"),
    )
    row = sums.collect(engine="streaming").row(0, named=True)
    if not row["steps"]:
        return StepCover(None, output_tokens, 0, None, ["no steps are known"])
    missing: list[str] = []
    tokens: int | None = None
    stays = _stays(found)
    if not row["decoded_unknown"]:
        tokens = int(row["decoded"]) + (stays or trace.rows("requests"))
    if output_tokens and tokens is not None and tokens < _ENOUGH * output_tokens:
        missing.append(f"the known steps gave {tokens:,} of {output_tokens:,} output tokens")
    if stays and (n := _outside(trace, found)):
        missing.append(f"{counted(n, 'request')} with output {'is' if n == 1 else 'are'} in no known step")
    known, passes = _passes(trace, own, row["steps"])
    if passes is not None and known < _PASSES_ENOUGH * passes - 2:
        missing.append(f"the server counted {passes:,} passes over the model, {known:,} steps are known")
    parted = _least_fraction(trace)
    if parted is not None:
        missing.append(f"the coverage of the steps is {parted:.0%}")
    if n := row["silent"]:
        missing.append(f"{counted(n, 'step does', 'steps do')} not say what was in them")
    return StepCover(tokens, output_tokens, known, passes, missing)


def _stays(found: StepSource) -> int:
    """Different (request, sequence, server) in the steps."""
    whose = found.residency.select("request", pl.col("sequence").fill_null(0), "server").unique()
    return int(whose.select(pl.len()).collect(engine="streaming").item())


def _outside(trace: Trace, found: StepSource) -> int:
    """Requests with output of which no step is known."""
    gave = trace.table("requests").filter(pl.col("output_tokens").fill_null(0) > 0).select("request")
    lost = gave.join(found.residency.select("request"), on="request", how="anti").select(pl.len())
    return int(lost.collect(engine="streaming").item())


def _passes(trace: Trace, steps: pl.LazyFrame, all_steps: int) -> tuple[int, int | None]:
    """Known steps of the servers that count their passes, and what they counted; null where none does."""
    totals = counter_totals(trace, [_PASSES]).filter(pl.col("total").is_not_null())
    if not totals.height:
        return all_steps, None
    servers = [e.removeprefix("server:") for e in totals["entity"].to_list()]
    known = steps.filter(pl.col("server").is_in(servers)).select(pl.len()).collect(engine="streaming").item()
    return int(known), round(sum(totals["total"].to_list()))


def _least_fraction(trace: Trace) -> float | None:
    rows = trace.table("coverage").filter((pl.col("table") == "steps") & (pl.col("fraction") < 1)).collect()
    least = rows["fraction"].min()
    return float(least) if isinstance(least, float) else None
