"""Sums over the steps that coordination and the hidden kinds of carrying are made of: one pass, out of core, one row a server."""

from __future__ import annotations

import polars as pl

from hoptrace.step_source import StepSource

__all__ = ["basis_of", "step_totals"]


def step_totals(steps: StepSource) -> pl.DataFrame:
    """One row per (server, origin), sorted. Steps of pipeline rank 0 only, but for ``pp_ranks``, which counts the ranks.

    Columns, sums unless said otherwise: server, origin, steps, step_ns (end − start), timed_steps (those with a length);
    launches, launches_known (steps that tell), syncs, syncs_known, preempted, preempted_known, collective_ns,
    collective_ns_known, collective_bytes, collective_bytes_known;
    known_steps (that say what was in them), mixed_steps (prompt tokens and decoders in one), decoders, held_decoders (those of
    mixed steps), decoder_ns and held_decoder_ns (decoders × length of the step);
    batched_decoders, batched_context, batched_square (of steps with two decoders or more and a known variance: decoders, their
    context tokens, decoders × variance), batched_prompts, batched_prompt_square (likewise of prompts).
    A sum of nothing known is null. Products are Float64.
    """
    n, prompts = pl.col("decode_requests"), pl.col("prefill_requests")
    # Hostile stamps may differ by more than an int64 holds: the sign of the floating-point difference tells.
    rough = pl.col("end_ns").cast(pl.Float64) - pl.col("start_ns").cast(pl.Float64)
    length = (pl.col("end_ns") - pl.col("start_ns")).cast(pl.Float64)
    timed = (rough >= 0) & (rough < 1 << 62)
    first = pl.col("pp_rank").fill_null(0) == 0
    mixed = (pl.col("prefill_tokens") > 0) & (n > 0)
    wide = (n >= 2) & pl.col("decode_context_variance").is_finite() & (pl.col("decode_context_tokens") > 0)
    several = (prompts >= 2) & pl.col("prefill_length_variance").is_finite()

    def total(of: pl.Expr, where: pl.Expr, name: str) -> pl.Expr:
        kept = of.filter(where.fill_null(False))
        return pl.when(kept.count() > 0).then(kept.cast(pl.Float64).sum()).alias(name)

    def told(column: str) -> list[pl.Expr]:
        sure = first & (pl.col(column) >= 0)
        return [total(pl.col(column), sure, column), sure.fill_null(False).sum().alias(f"{column}_known")]

    found = (
        steps.steps.with_columns(pl.col("origin").fill_null("observed"), pl.col("pp_rank").fill_null(0))
        .group_by("server", "origin")
        .agg(
            first.sum().alias("steps"),
            pl.col("pp_rank").n_unique().alias("pp_ranks"),
            (first & timed).fill_null(False).sum().alias("timed_steps"),
            total(length, first & timed, "step_ns"),
            *told("launches"),
            *told("syncs"),
            *told("preempted"),
            *told("collective_ns"),
            *told("collective_bytes"),
            (first & pl.col("prefill_tokens").is_not_null() & n.is_not_null()).sum().alias("known_steps"),
            (first & mixed).fill_null(False).sum().alias("mixed_steps"),
            total(n, first & n.is_not_null(), "decoders"),
            total(n, first & mixed, "held_decoders"),
            total(n.cast(pl.Float64) * length, first & timed, "decoder_ns"),
            total(n.cast(pl.Float64) * length, first & timed & mixed, "held_decoder_ns"),
            total(n, first & wide, "batched_decoders"),
            total(pl.col("decode_context_tokens"), first & wide, "batched_context"),
            total(n * pl.col("decode_context_variance"), first & wide, "batched_square"),
            total(prompts, first & several, "batched_prompts"),
            total(prompts * pl.col("prefill_length_variance"), first & several, "batched_prompt_square"),
        )
        .collect(engine="streaming")
    )
    counts = [c for c in found.columns if found.schema[c].is_integer()]
    return found.with_columns(pl.col(counts).cast(pl.Int64)).sort("server", "origin")


def basis_of(origin: str) -> str:
    """How a number is known that a step of this origin tells: observed ones counted it; others follow from something else."""
    return "counted" if origin == "observed" else "derived"
