"""A vLLM run that LLMServingSim's bench recorded: `requests.jsonl`, with `timeseries.csv` and `meta.json` beside it.

Two clocks: `queued_ts` and what follows are the engine's monotonic seconds, `arrival_time` and meta's `started_at` are UTC. A
latency is never taken across them: the trace is on the engine's clock, a request arrives when it enters the engine's queue.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.bench_rows import Measured, Reject, Rows, epoch_ns, number, text, tokens_of
from hoptrace.collectors.files.json_lines import json_lines
from hoptrace.manifest import Server

__all__ = ["IMPORTER", "LlmServingSimRun"]

_SERVER = "vllm"
_CLOCK = "Times are the engine's monotonic clock. Arrival is queued_ts: what was before the engine's queue is not in the file."
_TICKS = (
    "timeseries.csv counts from started_at (UTC). It is put on the engine's clock by the requests themselves: none is queued "
    "before it arrived, so UTC is ahead by at least the largest arrival_time − queued_ts."
)
_NO_KV = "kv_cache_pct is 0 in every row of timeseries.csv: it was not logged, and is left out."
_NO_PLACE = "timeseries.csv was not used: meta.json has no started_at, or no request has arrival_time."
_STAMPS = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts", "arrival_time")
# Column: name in `counters`, unit. `requests_deferred` is what the accounting reads as "found no place": vLLM's waiting requests
# wait for KV space, a sequence or the token budget, however many sequences it may run at most.
_COLUMNS = {
    "prompt_throughput": ("prompt_tokens_per_s", "tokens/s"),
    "gen_throughput": ("generation_tokens_per_s", "tokens/s"),
    "running": ("requests_running", "requests"),
    "waiting": ("requests_deferred", "requests"),
    "kv_cache_pct": ("kv_cache_usage", "%"),
}


class LlmServingSimRun(Importer):
    """A run that LLMServingSim's bench recorded."""

    kind = "llmservingsim-run"
    summary = "LLMServingSim bench recording of vLLM (requests.jsonl, timeseries.csv, meta.json): engine times, load, server"

    def matches(self, path: Path, head: bytes) -> bool:
        line = head.split(b"\n", 1)[0]
        return b'"queued_ts"' in line and b'"first_token_ts"' in line and b'"input_toks"' in line

    def companions(self, path: Path) -> list[Path]:
        return [path.with_name("timeseries.csv"), path.with_name("meta.json")]

    def read(self, path: Path, sink: Sink) -> None:
        sink.epoch = "relative"
        sink.note(_CLOCK)
        about = _meta(sink, path.with_name("meta.json"))
        ahead: list[float] = []
        rows = Rows(sink, vantage="engine", server=_SERVER)
        for line, record in json_lines(sink):
            rows.record(line, _measured, record, ahead)
        _ticks(sink, path.with_name("timeseries.csv"), about, ahead)
        rows.close()


def _measured(record: dict[str, Any], ahead: list[float]) -> Measured:
    stamps = {
        n: number(record.get(n), n) for n in ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts", "arrival_time")
    }
    queued = stamps["queued_ts"]
    if queued is None:
        raise Reject("it has no queued_ts")
    if stamps["arrival_time"] is not None:
        ahead[:] = [max([stamps["arrival_time"] - queued, *ahead])]
    at = {n: None if s is None else epoch_ns(s, n) for n, s in stamps.items()}
    start = at["queued_ts"]
    scheduled, first, last = at["scheduled_ts"], at["first_token_ts"], at["last_token_ts"]
    if start is not None and scheduled is not None and scheduled < start:
        raise Reject("its scheduled_ts is before its queued_ts")
    if scheduled is not None and first is not None and first < scheduled:
        raise Reject("its first_token_ts is before its scheduled_ts")
    stay: dict[str, Any] = {
        "role": "both", "engine_request_id": text(record.get("request_id")), "enqueued_ns": start, "scheduled_ns": scheduled,
        "end_ns": last, "end_reason": None if last is None else "done",
    }  # fmt: skip
    return Measured(
        request_id=text(record.get("request_id")),
        first_ns=first,
        last_ns=last,
        finish_ns=last,
        prompt_tokens=tokens_of(record.get("input_toks"), "input_toks"),
        output_tokens=tokens_of(record.get("output_toks"), "output_toks"),
        more={"arrival_ns": start, "queued_ns": start, "scheduled_ns": scheduled, "engine_first_token_ns": first},
        stay=stay,
    )


def _meta(sink: Sink, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        sink.note("There is no meta.json beside the requests: the server's configuration is unknown.")
        return {}
    except (OSError, ValueError, RecursionError):
        sink.note("meta.json beside the requests cannot be read: the server's configuration is unknown.")
        return {}
    if not isinstance(found, dict):
        return {}
    asked, kv = _part(found, "engine_kwargs"), _part(found, "kv_cache")
    server = Server(
        name=_SERVER,
        engine="vllm",
        engine_version=text(found.get("vllm_version")),
        model=text(found.get("model")),
        kv_dtype=text(asked.get("kv_cache_dtype")),
        max_sequences=_whole(asked, "max_num_seqs"),
        max_batched_tokens=_whole(asked, "max_num_batched_tokens"),
        context_tokens=_whole(asked, "max_model_len"),
        block_size_tokens=_whole(kv, "block_size"),
        block_count=_whole(kv, "num_gpu_blocks"),
        kv_capacity_tokens=_whole(kv, "num_kv_tokens"),
        prefix_caching=kv.get("enable_prefix_caching") if isinstance(kv.get("enable_prefix_caching"), bool) else None,
        config={"engine_kwargs": asked, "hardware": _part(found, "hardware")},
    )
    if sink.manifest.server(_SERVER) is None:
        sink.manifest.servers.append(server)
    return found


def _ticks(sink: Sink, path: Path, about: dict[str, Any], ahead: list[float]) -> None:
    if not path.exists():
        return
    started = _utc(about.get("started_at"))
    if started is None or not ahead:
        sink.note(_NO_PLACE)
        return
    try:
        frame = pl.read_csv(path, infer_schema_length=None)
    except (pl.exceptions.PolarsError, OSError) as e:
        sink.note(f"timeseries.csv cannot be read ({str(e).splitlines()[0]}).")
        return
    known = [c for c in _COLUMNS if c in frame.columns and frame[c].dtype.is_numeric()]
    if "t" not in frame.columns or not frame["t"].dtype.is_numeric() or not known:
        sink.note("timeseries.csv has not the columns that it should have: it was not used.")
        return
    if "kv_cache_pct" in known and frame["kv_cache_pct"].max() == 0:
        known.remove("kv_cache_pct")
        sink.note(_NO_KV)
    sink.note(_TICKS)
    offset = epoch_ns(ahead[0])
    begin = started - offset
    long = (
        frame.select("t", *(pl.col(c).cast(pl.Float64) for c in known))
        .unpivot(index="t", variable_name="column", value_name="value_float")
        .filter(pl.col("value_float").is_not_null() & pl.col("t").is_not_null())
        .with_columns(
            ((pl.col("t") * 1e9).round().cast(pl.Int64) + begin).alias("time_ns"),
            pl.lit(f"server:{_SERVER}").alias("entity"),
            pl.col("column").replace_strict({c: n for c, (n, _) in _COLUMNS.items()}, return_dtype=pl.String).alias("name"),
            pl.col("column").replace_strict({c: u for c, (_, u) in _COLUMNS.items()}, return_dtype=pl.String).alias("unit"),
            pl.when(pl.col("column").str.ends_with("throughput")).then(pl.lit("rate")).otherwise(pl.lit("gauge")).alias("semantics"),
            pl.when(pl.col("column").str.ends_with("throughput"))
            .then(round(float(about.get("tick_seconds") or 1.0) * 1e9))
            .otherwise(None)
            .cast(pl.Int64)
            .alias("window_ns"),
            pl.lit("ok").alias("status"),
        )
    )  # fmt: skip
    sink.write("counters", long.drop("t", "column"))
    sink.write("clock_sync", pl.DataFrame({"time_ns": [begin], "clock": ["utc"], "offset_ns": [offset]}))


def _utc(value: object) -> int | None:
    if not isinstance(value, str):
        return None
    try:
        stamp = datetime.fromisoformat(value)
    except ValueError:
        return None
    if stamp.tzinfo is None:
        stamp = stamp.replace(tzinfo=UTC)
    since = stamp - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000


def _part(found: dict[str, Any], name: str) -> dict[str, Any]:
    part = found.get(name)
    return part if isinstance(part, dict) else {}


def _whole(found: dict[str, Any], name: str) -> int | None:
    value = found.get(name)
    return value if type(value) is int and value >= 0 else None


IMPORTER = LlmServingSimRun()
