"""Vidur's profiles (github.com/microsoft/vidur, data/profiling) as a step cost: the sum of a layer's operators, times the layers.

Which operators make up a layer, and that each layer has two all-reduces, is Vidur's (entities/execution_time.py); it lets a
random forest interpolate between the points, here lines do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Server
from hoptrace.replay.costs.table_rows import Measured, chosen, grid_of, numbers, with_ps
from hoptrace.roofline import rank_count
from hoptrace.stepcost import StepCost
from hoptrace.stepcost_table import DECODE, EVER, PROMPT, Piece

__all__ = ["is_vidur", "vidur"]

_LAYER = (
    "attn_pre_proj", "attn_post_proj", "attn_rope", "input_layernorm", "post_attention_layernorm", "mlp_up_proj", "mlp_act",
    "mlp_down_proj", "add",
)  # fmt: skip
_HOST = (
    "schedule_median",
    "sampler_e2e_median",
    "prepare_inputs_e2e_median",
    "process_model_outputs_median",
    "ray_comm_time_mean",
)
_MS = 1e9
_RANKS = "num_tensor_parallel_workers"
_SHAPE = ("n_embd", "n_head", "n_kv_head", "n_expanded_embd")
_KEYS = (
    "layers",
    "tensor_parallel",
    "n_embd",
    "n_head",
    "n_kv_head",
    "n_expanded_embd",
    "block_size",
    "model_name",
    "attention_backend",
)


def is_vidur(frame: pl.DataFrame) -> bool:
    """Whether a table is one of Vidur's profiles."""
    return _kind(frame) is not None


def _kind(frame: pl.DataFrame) -> str | None:
    columns = set(frame.columns)
    if "time_stats.mlp_up_proj.median" in columns:
        return "mlp"
    if {"time_stats.attn_prefill.median", "time_stats.attn_decode.median"} <= columns:
        return "attention"
    if "time_stats.all_reduce.median" in columns:
        return "all_reduce"
    return "host" if "schedule_median" in columns and "batch_size" in columns else None


def vidur(tables: Sequence[tuple[str, pl.DataFrame]], rows: Mapping[str, str], server: Server | None) -> StepCost:
    """The step cost of one model at one tensor-parallel degree.

    Args:
        tables: name and rows of mlp.csv and attention.csv, of all_reduce.csv where there are several ranks, and of
            cpu_overheads.csv (null: no host time).
        rows: ``layers``, ``tensor_parallel`` and what else chooses rows; what it leaves out the server says.

    Raises:
        UsageError, InputError: see :func:`hoptrace.replay.costs.table.read_table`.
    """
    for key in rows:
        if key not in _KEYS:
            raise UsageError(f"A profile of Vidur has no {key!r} to choose rows by.", hint=f"Keys: {', '.join(_KEYS)}.")
    found = {kind: (name, frame) for name, frame in tables if (kind := _kind(frame))}
    for kind in ("mlp", "attention"):
        if kind not in found:
            raise InputError(f"Vidur's profile lacks {kind}.csv.", hint="table:mlp.csv,attention.csv[,all_reduce.csv]")
    layers, ranks = _layers(rows, server), _ranks(rows, server)
    shape = {k: v for k, v in rows.items() if k in _SHAPE} or _shape(server)

    name, frame = found["mlp"]
    mlp, said = chosen(name, frame, {**shape, _RANKS: str(ranks)}, (*_SHAPE, _RANKS))
    pieces = [_piece(_sum(name, mlp, "num_tokens", _LAYER, layers), "operators", ("none", "tokens"), EVER)]
    hidden = int(said["n_embd"])

    name, frame = found["attention"]
    keys = {"n_embd": said["n_embd"], "n_q_head": said["n_head"], "n_kv_head": said["n_kv_head"], _RANKS: str(ranks)}
    other = {k: v for k, v in rows.items() if k in ("block_size", "attention_backend")}
    attention, _ = chosen(name, frame, {**keys, **other}, (*keys, "block_size", "attention_backend"))
    attention = numbers(name, attention, ("batch_size", "prefill_chunk_size", "kv_cache_size")).with_columns(
        pl.max_horizontal("prefill_chunk_size", "batch_size").alias("num_tokens")
    )
    prompt, decode = attention.filter(pl.col("prefill_chunk_size") > 0), attention.filter(pl.col("prefill_chunk_size") == 0)
    saved = "time_stats.attn_kv_cache_save.median"
    if saved in attention.columns:
        pieces.append(
            _piece(_sum(name, attention, "num_tokens", ("attn_kv_cache_save",), layers), "KV write", ("none", "tokens"), EVER)
        )
    for what, part, by, factors in (
        ("attn_prefill", prompt, ("prefill_context_tokens", "prompt_tokens_rms"), PROMPT),
        ("attn_decode", decode, ("decode_batch", "decode_context"), DECODE),
    ):
        outer, inner = ("kv_cache_size", "prefill_chunk_size") if what == "attn_prefill" else ("batch_size", "kv_cache_size")
        part = part.filter(pl.col(f"time_stats.{what}.median").fill_null(0) > 0)
        if not part.height:
            raise InputError(f"{name} has no {what} for this model and {ranks} ranks.")
        times = with_ps(name, part, f"time_stats.{what}.median", _MS * layers)
        pieces.append(_piece(grid_of(name, times, outer, inner), what, by, factors))
    notes = []
    if ranks > 1:
        pieces.append(_all_reduce(found, ranks, layers, hidden))
    if "host" in found:
        pieces.append(_host(found["host"], rows, ranks))
    else:
        notes.append("The profile holds no host time (cpu_overheads.csv): steps are as long as the device's work.")
    note = f"Vidur's profile: medians of a layer's operators × {layers} layers, {ranks} tensor-parallel ranks, linear between."
    return StepCost({}, "table", pieces=tuple(pieces), notes=(note, *notes))


def _piece(measured: Measured, name: str, by: tuple[str, str], factors: tuple[int, int, int]) -> Piece:
    return Piece(measured.grid, by[1], by[0], factors, seen=measured.seen, name=name)


def _sum(name: str, frame: pl.DataFrame, by: str, operators: Sequence[str], layers: int) -> Measured:
    columns = [f"time_stats.{o}.median" for o in operators if f"time_stats.{o}.median" in frame.columns]
    frame = numbers(name, frame, (by,))
    total = frame.group_by(by).agg(pl.col(c).cast(pl.Float64).fill_null(0).median() for c in columns)
    total = total.with_columns(pl.sum_horizontal(columns).alias("_sum")).filter(pl.col("_sum") > 0)
    if not total.height:
        raise InputError(f"{name} has no times for this model.")
    return grid_of(name, with_ps(name, total, "_sum", _MS * layers), None, by)


def _all_reduce(found: Mapping[str, tuple[str, pl.DataFrame]], ranks: int, layers: int, hidden: int) -> Piece:
    if "all_reduce" not in found:
        raise InputError(
            f"{ranks} ranks need all_reduce.csv beside the other profiles.", hint="Name it after table:, by a comma."
        )
    name, frame = found["all_reduce"]
    frame = frame.filter((pl.col("num_workers") == ranks) & (pl.col("collective") == "all_reduce"))
    if "devices_per_node" in frame.columns:
        frame = frame.filter(pl.col("devices_per_node") == ranks)
    # Two bytes an element, one vector of the hidden size a token.
    frame = numbers(name, frame, ("size",)).with_columns((pl.col("size") // (2 * hidden)).alias("tokens"))
    frame = frame.filter(pl.col("tokens") > 0)
    if not frame.height:
        raise InputError(f"{name} has no all_reduce of {ranks} ranks in one node.")
    times = with_ps(name, frame, "time_stats.all_reduce.median", _MS * layers * 2)
    return _piece(grid_of(name, times, None, "tokens"), "all_reduce", ("none", "tokens"), EVER)


def _host(table: tuple[str, pl.DataFrame], rows: Mapping[str, str], ranks: int) -> Piece:
    name, frame = table
    pick = {"tensor_parallel_degree": str(ranks)} | ({"model_name": rows["model_name"]} if "model_name" in rows else {})
    frame, _ = chosen(name, frame, pick, ("tensor_parallel_degree", "model_name"))
    columns = [c for c in _HOST if c in frame.columns]
    frame = numbers(name, frame, ("batch_size",)).with_columns(pl.sum_horizontal(columns).alias("_sum"))
    return _piece(grid_of(name, with_ps(name, frame, "_sum", _MS), None, "batch_size"), "host", ("none", "sequences"), EVER)


def _layers(rows: Mapping[str, str], server: Server | None) -> int:
    text = rows.get("layers") or (str(server.layers) if server is not None and server.layers else "")
    if not text.isdecimal() or not 0 < int(text) < 10_000:
        raise UsageError(
            "A profile of Vidur does not say how many layers the model has.", hint="table:…,layers=32, or --model NAME"
        )
    return int(text)


def _ranks(rows: Mapping[str, str], server: Server | None) -> int:
    text = rows.get("tensor_parallel") or str(rank_count(server) if server is not None else 1)
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"tensor_parallel={text} is no number of ranks.")
    return int(text)


def _shape(server: Server | None) -> dict[str, str]:
    if server is None or not (server.hidden_size and server.heads and server.kv_heads):
        return {}
    found = {"n_embd": str(server.hidden_size), "n_head": str(server.heads), "n_kv_head": str(server.kv_heads)}
    wide = server.config.get("intermediate_size")
    return found | ({"n_expanded_embd": str(wide)} if type(wide) is int else {})
