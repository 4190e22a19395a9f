"""Recorded runs for the reconstruction of steps: token times as the proxy saw them, and the truth that the engine's scheduler
wrote down (benchmarks/support/modelled_vllm.py). Kept small in ``tests/data/steps/NAME/``: times in whole microseconds, the truth
as runs of steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

import hoptrace
from hoptrace.manifest import Manifest, Server
from hoptrace.reader import Trace
from hoptrace.writer import TraceWriter

__all__ = ["FOLDER", "Run", "load", "names", "save", "truth_of"]

FOLDER = Path(__file__).parents[1] / "data" / "steps"
SERVER = "vllm"


@dataclass(frozen=True)
class Run:
    """``trace``: requests, stages and tokens, no steps. ``steps``: step, start_ns, end_ns, preempted. ``members``: step,
    request, tokens, before, made, prompt_tokens. ``prompts``: request, prompt_tokens, output_tokens. ``budget``:
    max_num_batched_tokens."""

    name: str
    trace: Trace
    steps: pl.DataFrame
    members: pl.DataFrame
    prompts: pl.DataFrame
    budget: int


def names() -> list[str]:
    """The recorded runs, shortest steps first."""
    found = [p.parent.name for p in FOLDER.glob("*/run.json")]
    return sorted(found, key=lambda n: (json.loads((FOLDER / n / "run.json").read_text())["step_ms"], n))


def load(name: str, path: Path, *, observed: bool = False, known_budget: bool = False) -> Run:
    """Write the run as a trace at ``path``; with ``observed`` steps as an engine tells them, who was in them left out."""
    at = FOLDER / name
    info = json.loads((at / "run.json").read_text())
    table = {n: _times(pl.read_parquet(at / f"{n}.parquet"), info["zero_ns"]) for n in ("requests", "tokens", "steps")}
    runs = pl.read_parquet(at / "members.parquet")
    requests = table["requests"].with_columns(
        pl.lit("received").alias("arrival_of"), pl.lit("proxy").alias("source"), pl.col("received_ns").alias("arrival_ns")
    )
    stages = table["requests"].select(
        "request", pl.lit(0).alias("stage"), pl.lit(0).alias("attempt"), pl.lit(SERVER).alias("server"), "enqueued_ns",
        pl.col("finish_ns").alias("end_ns"), pl.lit("proxy").alias("source"),
    )  # fmt: skip
    tokens = table["tokens"].with_columns(
        pl.lit(0).alias("sequence"), pl.lit("proxy").alias("vantage"), pl.lit("proxy").alias("source")
    )
    prompts = requests.select("request", "prompt_tokens", "output_tokens")
    members = _spread(runs).join(prompts.select("request", "prompt_tokens"), on="request")
    server = Server.model_validate({"name": SERVER, "max_batched_tokens": info["budget"] if known_budget else None})
    with TraceWriter(path, Manifest(origin="recorded", servers=[server]), background=False) as w:
        w.append("requests", requests.drop("enqueued_ns").to_dicts())
        w.append("stages", stages.to_dicts())
        w.append("tokens", tokens.to_dicts())
        if observed:
            w.append("steps", _told(table["steps"], members).to_dicts())
    return Run(name, hoptrace.open(path), table["steps"], members, prompts, info["budget"])


def _told(steps: pl.DataFrame, members: pl.DataFrame) -> pl.DataFrame:
    """Steps with the counts that vLLM's iteration details give."""
    prompt = pl.col("before") < pl.col("prompt_tokens")
    counts = members.group_by("step").agg(
        prompt.sum().cast(pl.Int64).alias("prefill_requests"),
        pl.col("tokens").filter(prompt).sum().alias("prefill_tokens"),
        (~prompt).sum().cast(pl.Int64).alias("decode_requests"),
        pl.col("tokens").filter(~prompt).sum().alias("decode_tokens"),
    )
    return steps.drop("preempted").join(counts, on="step").with_columns(
        pl.lit(SERVER).alias("server"), pl.lit(0).alias("dp_rank"), pl.lit(0).alias("pp_rank"),
        pl.lit("observed").alias("origin"), pl.lit("vllm-log").alias("source"),
    )  # fmt: skip


def truth_of(lines: Path, trace: Trace) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Steps and members of the trace's requests, on its clock, from what modelled_vllm.py wrote."""
    offset = trace.manifest.utc_offset_ns
    assert offset is not None
    requests = trace.table("requests").select("request", "request_id", "output_tokens").collect()
    number = dict(zip(requests["request_id"], requests["request"], strict=True))
    steps, members = [], []
    for line in lines.read_text().splitlines():
        d = json.loads(line)
        # The server's own names: cmpl-<our id>-<prompt>-<eight hex digits>.
        mine = [(number.get(k.removeprefix("cmpl-").rsplit("-", 2)[0]), *v) for k, v in d["r"].items()]
        mine = [m for m in mine if m[0] is not None]
        if mine:
            steps.append((d["n"], d["s"] + offset, d["e"] + offset, len(d["p"])))
            members += [(d["n"], *m) for m in mine]
    # Drafts accepted beyond the request's limit are thrown away.
    before = pl.col("made").cum_sum().over("request") - pl.col("made")
    kept = (
        pl.DataFrame(members, schema=["step", "request", "tokens", "before", "made"], orient="row")
        .sort("request", "step")
        .join(requests.select("request", "output_tokens"), on="request", how="left", maintain_order="left")
        .with_columns(pl.min_horizontal(pl.col("made"), pl.col("output_tokens") - before).clip(lower_bound=0).alias("made"))
        .drop("output_tokens")
    )
    return pl.DataFrame(steps, schema=["step", "start_ns", "end_ns", "preempted"], orient="row"), kept


def save(name: str, trace: Trace, steps: pl.DataFrame, members: pl.DataFrame, info: dict[str, object]) -> None:
    """Keep a run in :data:`FOLDER`."""
    at = FOLDER / name
    at.mkdir(parents=True, exist_ok=True)
    zero = int(steps["start_ns"].min())  # type: ignore[arg-type]
    stages = trace.table("stages").select("request", "enqueued_ns").collect()
    requests = trace.table("requests").select("request", "received_ns", "finish_ns", "prompt_tokens", "output_tokens").collect()
    tokens = trace.table("tokens").select("request", "index", "time_ns", "count", "coalesced").sort("request", "index").collect()
    tables = {
        "requests": requests.join(stages, on="request", how="left").sort("request"),
        "tokens": tokens,
        "steps": steps,
        "members": _joined(members),
    }
    for key, frame in tables.items():
        told = frame.select(
            ((pl.col(c) - zero) / 1000).round().cast(pl.Int64).alias(f"{c[:-3]}_us") if c.endswith("_ns") else pl.col(c)
            for c in frame.columns
        )
        whole = [c for c, t in told.schema.items() if t == pl.Int64]
        pq.write_table(
            told.to_arrow(), at / f"{key}.parquet", compression="zstd", compression_level=19, use_dictionary=False,
            column_encoding=dict.fromkeys(whole, "DELTA_BINARY_PACKED"), write_statistics=False,
        )  # fmt: skip
    length = (steps["end_ns"] - steps["start_ns"]).median()
    told_info = {"zero_ns": zero, "step_ms": round(float(length) / 1e6, 1), **info}  # type: ignore[arg-type]
    (at / "run.json").write_text(json.dumps(told_info, indent=1) + "\n")


def _times(frame: pl.DataFrame, zero_ns: int) -> pl.DataFrame:
    return frame.select(
        (pl.col(c) * 1000 + zero_ns).alias(f"{c[:-3]}_ns") if c.endswith("_us") else pl.col(c) for c in frame.columns
    )


def _joined(members: pl.DataFrame) -> pl.DataFrame:
    """Runs of steps in which a request does the same."""
    same = (
        (pl.col("request") == pl.col("request").shift(1))
        & (pl.col("step") == pl.col("step").shift(1) + 1)
        & (pl.col("tokens") == pl.col("tokens").shift(1))
        & (pl.col("made") == pl.col("made").shift(1))
        & (pl.col("before") == pl.col("before").shift(1) + pl.col("tokens"))
    )
    return (
        members.sort("request", "step")
        .with_columns((~same.fill_null(False)).cast(pl.Int64).cum_sum().alias("run"))
        .group_by("run", maintain_order=True)
        .agg(pl.col("request", "step", "tokens", "before", "made").first(), pl.len().cast(pl.Int64).alias("steps"))
        .drop("run")
    )


def _spread(runs: pl.DataFrame) -> pl.DataFrame:
    return (
        runs.with_columns(pl.int_ranges(0, pl.col("steps")).alias("i"))
        .explode("i")
        .select(pl.col("step") + pl.col("i"), "request", "tokens", pl.col("before") + pl.col("i") * pl.col("tokens"), "made")
    )
