"""Checks of steps, and of the residency that refers to them."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from hoptrace.reader import Trace
from hoptrace.validate import Finding, check

__all__: list[str] = []

_RANK = ("server", "dp_rank")


def _ranks(frame: pl.LazyFrame, *more: str) -> pl.LazyFrame:
    """A null rank is the only one: 0."""
    return frame.with_columns(pl.col(n).fill_null(0) for n in ("dp_rank", *more))


@check("steps")
def steps_do_not_overlap(trace: Trace) -> Iterator[Finding]:
    """Steps of one (server, dp_rank, pp_rank) end before the next begins, and their numbers ascend with time."""
    within = [*_RANK, "pp_rank"]
    frame = _ranks(trace.table("steps"), "pp_rank").sort([*within, "start_ns", "step"])
    backward = frame.filter(pl.col("end_ns") < pl.col("start_ns")).collect()
    if backward.height:
        yield Finding(
            "error", "steps_do_not_overlap", f"{backward.height:,} steps end before they start.", "steps", backward.height
        )
    overlap = frame.filter(pl.col("start_ns") < pl.col("end_ns").shift(1).over(within)).collect()
    if overlap.height:
        first = overlap.row(0, named=True)
        message = (
            f"{overlap.height:,} steps start before the one ahead of them ended (first: {first['server']} step {first['step']})."
        )
        yield Finding("error", "steps_do_not_overlap", message, "steps", overlap.height)
    unordered = frame.filter(pl.col("step") <= pl.col("step").shift(1).over(within)).collect()
    if unordered.height:
        message = f"The numbers of {unordered.height:,} steps do not ascend with time."
        yield Finding("error", "steps_do_not_overlap", message, "steps", unordered.height)


@check("steps", "residency")
def residency_refers_to_steps(trace: Trace) -> Iterator[Finding]:
    """Runs go forward, and their first and last steps exist."""
    if not trace.manifest.tables.get("residency"):
        return
    runs = _ranks(trace.table("residency"))
    backward = runs.filter(pl.col("last_step") < pl.col("first_step")).collect()
    if backward.height:
        message = f"{backward.height:,} runs end at a step before their first."
        yield Finding("error", "residency_refers_to_steps", message, "residency", backward.height)
    steps = _ranks(trace.table("steps")).select(*_RANK, "step").unique()
    for end in ("first_step", "last_step"):
        lost = runs.join(steps, left_on=[*_RANK, end], right_on=[*_RANK, "step"], how="anti").collect().sort("request")
        if lost.height:
            message = f"{lost.height:,} runs have a {end} that `steps` does not have (first: request {lost['request'][0]})."
            yield Finding("error", "residency_refers_to_steps", message, "residency", lost.height)


@check("steps", "residency")
def residency_fits_steps(trace: Trace) -> Iterator[Finding]:
    """The tokens of a step's residents are the step's tokens: more is impossible, fewer means requests that nobody saw."""
    if not trace.manifest.tables.get("residency"):
        return
    for phase, column in (("chunk", "prefill_tokens"), ("decode", "decode_tokens")):
        joined = _tokens_by_step(trace, phase, column)
        over = joined.filter(pl.col("resident") > pl.col(column))
        if over.height:
            first = over.row(0, named=True)
            message = (
                f"{over.height:,} steps hold more resident {phase} tokens than {column} "
                f"(first: {first['server']} step {first['step']}: {first['resident']} against {first[column]})."
            )
            yield Finding("error", "residency_fits_steps", message, "residency", over.height)
        under = joined.filter(pl.col("resident") < pl.col(column))
        if under.height:
            message = f"{under.height:,} steps computed more {column} than their residents account for."
            yield Finding("warning", "residency_fits_steps", message, "residency", under.height)


def _tokens_by_step(trace: Trace, phase: str, column: str) -> pl.DataFrame:
    """Each step with the sum of its residents' tokens: runs are added where they begin, taken off after their end."""
    runs = _ranks(trace.table("residency")).filter((pl.col("phase") == phase) & pl.col("tokens_per_step").is_not_null())
    begin = runs.select(*_RANK, step=pl.col("first_step"), change=pl.col("tokens_per_step"))
    end = runs.select(*_RANK, step=pl.col("last_step") + 1, change=-pl.col("tokens_per_step"))
    level = (
        pl.concat([begin, end])
        .group_by(*_RANK, "step")
        .agg(pl.col("change").sum())
        .sort(*_RANK, "step")
        .with_columns(resident=pl.col("change").cum_sum().over(_RANK))
        .drop("change")
        .sort("step")
    )
    steps = _ranks(trace.table("steps"), "pp_rank").filter((pl.col("pp_rank") == 0) & pl.col(column).is_not_null())
    return (
        steps.select(*_RANK, "step", column)
        .sort("step")
        .join_asof(level, on="step", by=list(_RANK), check_sortedness=False)
        .with_columns(pl.col("resident").fill_null(0))
        .collect()
        .sort(*_RANK, "step")
    )
