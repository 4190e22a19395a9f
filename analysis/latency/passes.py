"""One pass over some requests: laid end to end on one line, their time cut by stamps, waits and runs, and evaluated."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.latency.axis import Axis, Ints
from hoptrace.analysis.latency.evaluate import Evaluation, evaluate
from hoptrace.analysis.latency.fullness import Fullness
from hoptrace.analysis.latency.interference import Model
from hoptrace.analysis.latency.marks import outline
from hoptrace.analysis.latency.scope import Key
from hoptrace.analysis.latency.stepline import StepLine

__all__ = ["MOST_NS", "account_for", "in_passes"]

MOST_NS = 1 << 61  # Σ e2e of one pass; more is done in several


def account_for(
    requests: pl.DataFrame,
    stays: pl.DataFrame,
    runs: pl.DataFrame,
    waits: pl.DataFrame,
    keys: list[Key],
    by_server: dict[Key, StepLine],
    full: dict[Key, Fullness],
    model: Model | None,
    spans: bool,
    ttft: bool = True,
) -> Evaluation:
    axis = Axis.of(
        requests["request"].to_numpy(),
        requests["arrival_ns"].to_numpy(),
        (requests["finish_ns"] - requests["arrival_ns"]).to_numpy(),
    )
    only = requests.select("request")
    own_runs = runs.join(only, on="request", how="semi", maintain_order="left")
    own_stays = stays.join(only, on="request", how="semi", maintain_order="left")
    own_waits = waits.join(only, on="request", how="semi", maintain_order="left")
    index = {k: i for i, k in enumerate(keys)}
    line_of_stay = _line_of(own_stays, index)
    run_end = np.full(len(axis.request), -1, dtype=np.int64)
    at = axis.find(own_runs["request"].to_numpy())
    np.maximum.at(run_end, at, own_runs["end_ns"].to_numpy())
    plan = outline(axis, requests, own_stays, line_of_stay, run_end, _complete(requests, own_runs))
    return evaluate(
        axis,
        plan,
        own_runs,
        _line_of(own_runs, index),
        own_waits,
        [by_server.get(k) for k in keys],
        [full[k] for k in keys],
        keys,
        model,
        requests["ttft_token_ns"],
        spans=spans,
        ttft=ttft,
    )


def _complete(requests: pl.DataFrame, runs: pl.DataFrame) -> npt.NDArray[np.bool_]:
    """Whether the runs account for all output tokens (the last chunk of a prompt, and of what is computed again after a
    preemption, gives one too): else time after them is unexplained."""
    more = (pl.col("phase") == "chunk").shift(-1).over("request", "sequence").fill_null(False)
    made = runs.sort("request", "sequence", "start_ns").select(
        "request",
        pl.when(pl.col("phase") == "decode").then("tokens").otherwise(0).alias("_made")
        + ((pl.col("phase") == "chunk") & ~more).cast(pl.Int64),
    )
    made = made.group_by("request").agg(pl.col("_made").sum())
    frame = requests.select("request", "output_tokens").join(made, on="request", how="left", maintain_order="left")
    return (
        frame.select(pl.col("output_tokens").is_null() | (pl.col("_made").fill_null(0) >= pl.col("output_tokens")))
        .to_series()
        .to_numpy()
    )


def _line_of(frame: pl.DataFrame, index: dict[Key, int]) -> Ints:
    """Server index of each row; −1 where the row names no server and there are several."""
    only = next(iter(index.values())) if len(index) == 1 else -1
    out = pl.when(pl.col("server").is_null()).then(pl.lit(only, dtype=pl.Int64)).otherwise(pl.lit(-1, dtype=pl.Int64))
    for (server, rank), i in index.items():
        here = (pl.col("server") == server) & (pl.col("dp_rank").fill_null(0) == rank)
        out = pl.when(here).then(pl.lit(i, dtype=pl.Int64)).otherwise(out)
    found: Ints = frame.select(out).to_series().to_numpy()
    return found


def in_passes(requests: pl.DataFrame) -> list[pl.DataFrame]:
    """All in one, or in several such that Σ e2e of each fits in an int64."""
    total = 0
    cuts = [0]
    lengths = (
        (requests["finish_ns"] - requests["arrival_ns"]).to_list()
        if float((requests["finish_ns"] - requests["arrival_ns"]).cast(pl.Float64).sum()) > MOST_NS
        else []
    )
    for i, n in enumerate(lengths):
        if total + n > MOST_NS and i > cuts[-1]:
            cuts.append(i)
            total = 0
        total += n
    cuts.append(requests.height)
    return [requests.slice(a, b - a) for a, b in pairwise(cuts)]
