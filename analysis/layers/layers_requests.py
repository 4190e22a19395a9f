"""Each request's time by layer: the accounting's parts, those in steps divided as the steps that the request was in are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.layers.layer_of import IN_STEPS, LAYER_OF_PART, LAYERS
from hoptrace.analysis.layers.layers_steps import PIECES, ServerSteps
from hoptrace.step_source import StepSource

__all__ = ["per_request"]

Ints = npt.NDArray[np.int64]

_COLUMNS = ("request", "arrival_ns", "e2e_ns", *(f"{layer}_ns" for layer in LAYERS))
_COMPUTE, _STATE, _SCHEDULING, _UNEXPLAINED, _UNDIVIDED = range(5)


def per_request(batches: Iterable[pl.DataFrame], source: StepSource, split: list[ServerSteps]) -> pl.DataFrame:
    """request, arrival_ns, e2e_ns and a column per layer of LAYERS, which add up to e2e_ns. ``batches``: the accounting's parts,
    requests ascending in each.

    The parts in steps (prefill and decode, each with its interference) are divided in the ratio of the pieces of the steps in
    which the request computed its prompt, or generated. Recomputed tokens lie in the former: their roofline time is state.
    """
    done = [_some(parts, source, split) for parts in batches]
    return pl.concat(done) if done else pl.DataFrame(schema=dict.fromkeys(_COLUMNS, pl.Int64))


def _some(parts: pl.DataFrame, source: StepSource, split: list[ServerSteps]) -> pl.DataFrame:
    def ns(*names: str) -> Ints:
        total = np.zeros(parts.height, dtype=np.int64)
        for n in names:
            total += parts[n + "_ns"].fill_null(0).to_numpy()
        return total

    def of(layer: str) -> list[str]:
        return [p for p, (where, _) in LAYER_OF_PART.items() if where == layer and p != "recompute"]

    prefill_sums, decode_sums = _sums(parts["request"], source, split)
    prefill = ns("prefill", "prefill_interference")
    decode = ns("decode", "decode_interference")
    # Of what is recomputed, that which the steps hold beyond the rest lies in them; the other was a recorded wait outside.
    again = ns("recompute")
    inside = np.clip(prefill_sums.sum(axis=0) - prefill, 0, again)
    first, second, third = (
        divide(prefill, prefill_sums), divide(decode, decode_sums), divide(inside, prefill_sums)
    )  # fmt: skip
    pieces = first + second + third
    pieces[_COMPUTE] -= third[_COMPUTE]
    pieces[_STATE] += third[_COMPUTE]
    columns = {
        "compute": pieces[_COMPUTE],
        "state": pieces[_STATE] + ns(*of("state")) + again - inside,
        "scheduling": pieces[_SCHEDULING] + ns(*of("scheduling")),
        "unexplained": pieces[_UNEXPLAINED] + ns(*of("unexplained")),
        "undivided": pieces[_UNDIVIDED],
        "outside": ns(*of("outside")),
    }
    # Of no step of the request is it known what bounds it: then compute is not 0, but unknown.
    blind = (pieces[_UNDIVIDED] > 0) & (pieces[_COMPUTE] + pieces[_STATE] + pieces[_UNEXPLAINED] == 0)
    frame = parts.select("request", "arrival_ns", "e2e_ns").with_columns(
        pl.Series(f"{layer}_ns", columns[layer], dtype=pl.Int64) for layer in LAYERS
    )
    dark = pl.Series(blind)
    return frame.with_columns(
        pl.when(~dark).then("compute_ns").alias("compute_ns"),
        # What lies outside steps is state for certain: then it is at least that.
        pl.when(~dark | (pl.col("state_ns") > 0)).then("state_ns").alias("state_ns"),
    )


assert {p for p, (layer, _) in LAYER_OF_PART.items() if layer == IN_STEPS} == {
    "prefill", "prefill_interference", "decode", "decode_interference",
}  # fmt: skip


def _sums(request: pl.Series, source: StepSource, split: list[ServerSteps]) -> tuple[Ints, Ints]:
    """[5, requests] each: Σ of the pieces of the steps in which each request computed its prompt, and in which it generated.
    ``request``: ascending."""
    n = request.len()
    out = {phase: np.zeros((len(PIECES), n), dtype=np.int64) for phase in ("chunk", "decode")}
    if not n or not split:
        return out["chunk"], out["decode"]
    runs = (
        source.residency.filter(
            pl.col("request").is_between(int(request[0]), int(request[-1])) & pl.col("phase").is_in(["chunk", "decode"])
        )
        .select("request", "server", pl.col("dp_rank").fill_null(0), "phase", "first_step", "last_step")
        .collect(engine="streaming")
    )
    numbers = request.to_numpy()
    for s in split:
        for phase, total in out.items():
            mine = runs.filter((pl.col("server") == s.server) & (pl.col("dp_rank") == s.dp_rank) & (pl.col("phase") == phase))
            if not mine.height:
                continue
            at = np.minimum(np.searchsorted(numbers, mine["request"].to_numpy()), n - 1)
            known = numbers[at] == mine["request"].to_numpy()
            pieces = s.between(mine["first_step"].to_numpy(), mine["last_step"].to_numpy())
            for i in range(len(PIECES)):
                np.add.at(total[i], at[known], pieces[i][known])
    return out["chunk"], out["decode"]


def divide(whole: Ints, ratio: Ints) -> Ints:
    """[5, n]: ``whole`` [n] in the ratio of ``ratio`` [5, n], in whole ns that add up to it; where the ratio is all 0, all of it
    is undivided. Exact where the ratio adds up to the whole; else the rounding goes to the largest."""
    total = ratio.sum(axis=0)
    out = np.zeros_like(ratio)
    if not len(whole):
        return out
    exact = total == whole
    share = ratio / np.maximum(total, 1)
    out[:] = np.where(exact, ratio, np.floor(whole * share).astype(np.int64))
    # Floating point may make a floor one too many of a huge number: the correction below takes that back too.
    largest = np.argmax(ratio, axis=0)
    rows = np.arange(len(whole))
    out[largest, rows] += whole - out.sum(axis=0)
    none = total == 0
    out[:, none] = 0
    out[_UNDIVIDED, none] = whole[none]
    return out
