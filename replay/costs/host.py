"""Host time of recorded steps, as far as they tell it."""

from __future__ import annotations

import polars as pl

__all__ = ["COMPOSITION", "HOST", "host_time", "mean_host_ns"]

COMPOSITION = ["start_ns", "end_ns", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens"]
HOST = ("schedule_ns", "launch_ns", "update_ns")


def host_time(steps: pl.DataFrame, *, asynchronous: bool) -> pl.DataFrame:
    """The usable steps with ``_took`` and ``_host`` in ns (Float64, null where a step does not tell).

    Host time of a step is its length less ``device_ns`` or, where that is unknown, schedule + launch + update; the latter may run
    beside the device under asynchronous scheduling, and says nothing then.
    """
    frame = steps.filter(pl.col("pp_rank").fill_null(0) == 0) if "pp_rank" in steps.columns else steps
    frame = frame.drop_nulls(COMPOSITION).filter(
        (pl.col("end_ns") > pl.col("start_ns")) & (pl.col("prefill_tokens") + pl.col("decode_requests") > 0)
    )
    frame = frame.with_columns(pl.lit(None, dtype=pl.Int64).alias(c) for c in (*HOST, "device_ns") if c not in frame.columns)
    took = (pl.col("end_ns") - pl.col("start_ns")).cast(pl.Float64)
    known = {c: pl.when(pl.col(c) >= 0).then(pl.col(c).cast(pl.Float64)) for c in (*HOST, "device_ns")}
    parts = [] if asynchronous else [known[c] for c in HOST]
    told = pl.any_horizontal(p.is_not_null() for p in parts) if parts else pl.lit(False)
    spent = pl.sum_horizontal(p.fill_null(0) for p in parts) if parts else pl.lit(0.0)
    idle = pl.when(known["device_ns"].is_not_null()).then(took - known["device_ns"]).when(told).then(spent)
    return frame.with_columns(idle.clip(0, took).alias("_host"), took.alias("_took"))


def mean_host_ns(steps: pl.DataFrame | None, *, asynchronous: bool) -> tuple[int, int]:
    """(mean host time of a step, over how many steps); (0, 0) where none tells. The mean, so that its sum over steps is right."""
    if steps is None or not steps.height:
        return 0, 0
    some = host_time(steps, asynchronous=asynchronous)["_host"].drop_nulls()
    return (round(float(some.mean())), some.len()) if some.len() else (0, 0)  # type: ignore[arg-type]
