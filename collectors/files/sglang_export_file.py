"""SGLang's export of requests: `sglang-request-metrics-HOUR.log` (`--export-metrics-to-file`), a JSON line a finished request.

Stamps are UTC seconds on the server; those of the scheduler are there with `--enable-metrics` only. What the request asked for
(`request_parameters`, which can hold the prompt) is not read but for its limit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.bench_rows import Measured, Reject, Rows, epoch_ns, ns, number, text, tokens_of
from hoptrace.collectors.files.json_lines import json_lines
from hoptrace.collectors.files.json_walk import one_line
from hoptrace.manifest import Server

__all__ = ["IMPORTER", "SglangExport"]

_SERVER = "sglang"
_ENGINE = "Times are the server's own (received, first work, first token, finished): nothing of the way to the client is in them."
_FINISHED = "The file has finished requests only: those that ran when it was written are not in it."
_NO_TIMES = "{n} requests have no request_finished_ts: their end is received + e2e_latency."
# Tiers as SGLang names them.
_TIERS = {"device": "cached_device_tokens", "host": "cached_host_tokens", "storage": "cached_disk_tokens"}


class SglangExport(Importer):
    """SGLang's request export."""

    kind = "sglang-export"
    summary = "SGLang request export (--export-metrics-to-file, JSON lines): engine times, cached tokens, retractions"

    def matches(self, path: Path, head: bytes) -> bool:
        line = head.split(b"\n", 1)[0].lstrip()
        return line.startswith(b"{") and b'"request_parameters"' in line and b'"prompt_tokens"' in head

    def read(self, path: Path, sink: Sink) -> None:
        sink.epoch = "utc"
        if sink.manifest.server(_SERVER) is None:
            sink.manifest.servers.append(Server(name=_SERVER, engine="sglang"))
        sink.note(_ENGINE)
        sink.note(_FINISHED)
        rows = Rows(sink, vantage="engine", server=_SERVER)
        for line, record in json_lines(sink):
            rows.record(line, _measured, sink, record)
        rows.close()


def _measured(sink: Sink, record: dict[str, Any]) -> Measured:
    received = _stamp(record, "request_received_ts")
    if received is None:
        raise Reject("it has no request_received_ts")
    waited = number(record.get("queue_time"), "queue_time")
    entered = _stamp(record, "forward_entry_time")
    first_s = number(record.get("first_token_latency"), "first_token_latency")
    end = _stamp(record, "request_finished_ts")
    latency = number(record.get("e2e_latency"), "e2e_latency")
    if end is None and latency is not None:
        end = received + ns(latency)
        sink.tally(_NO_TIMES)
    first = None if first_s is None else received + ns(first_s)
    queued = entered - ns(waited) if entered is not None and waited is not None else None
    error, reason = _ending(record.get("finish_reason"))
    rank = record.get("dp_rank")
    stay: dict[str, Any] = {
        "dp_rank": rank if type(rank) is int and rank >= 0 else None, "role": "both", "engine_request_id": text(record.get("id")),
        "enqueued_ns": queued if queued is not None and queued >= received else received, "scheduled_ns": entered, "end_ns": end,
        "end_reason": "failed" if error else "done", **_tiers(record.get("cached_tokens_details")),
    }  # fmt: skip
    more: dict[str, Any] = {
        "received_ns": received, "arrival_ns": received, "arrival_of": "received", "queued_ns": queued,
        "scheduled_ns": entered, "engine_first_token_ns": first,
    }  # fmt: skip
    return Measured(
        request_id=text(record.get("id")),
        first_ns=first,
        finish_ns=end,
        prompt_tokens=tokens_of(record.get("prompt_tokens"), "prompt_tokens"),
        output_tokens=tokens_of(record.get("completion_tokens"), "completion_tokens"),
        max_tokens=_limit(record.get("request_parameters")),
        cached_tokens=tokens_of(record.get("cached_tokens"), "cached_tokens"),
        finish_reason=reason,
        error=error,
        more=more,
        stay=stay,
    )


def _stamp(record: dict[str, Any], name: str) -> int | None:
    found = number(record.get(name), name)
    return None if found is None or found == 0 else epoch_ns(found, name)


def _ending(told: object) -> tuple[str | None, str | None]:
    if not isinstance(told, dict):
        return None, text(told)
    kind = text(told.get("type"))
    if kind == "abort":
        return one_line(told.get("message")) or "aborted", kind
    return None, kind


def _tiers(told: object) -> dict[str, int | None]:
    if not isinstance(told, dict):
        return {}
    return {column: tokens_of(told.get(tier), f"cached_tokens_details.{tier}") for tier, column in _TIERS.items() if tier in told}


def _limit(asked: object) -> int | None:
    """max_new_tokens of the request's sampling parameters; nothing else of them is kept."""
    if not isinstance(asked, str):
        return None
    try:
        found = json.loads(asked)
    except (ValueError, RecursionError):
        return None
    sampling = found.get("sampling_params") if isinstance(found, dict) else None
    limit = sampling.get("max_new_tokens") if isinstance(sampling, dict) else None
    return limit if type(limit) is int and limit >= 0 else None


IMPORTER = SglangExport()
