"""Forward-pass metrics, version 1, as SGLang (``--enable-forward-pass-metrics``) and Dynamo's vLLM publish them (msgpack).

Fields and their order are those of ``ForwardPassMetrics`` in sglang/srt/observability/forward_pass_metrics.py and
dynamo/common/forward_pass_metrics.py: version, worker_id, dp_rank, counter_id, wall_time, scheduled_requests, queued_requests.
Both are msgspec structures that are not ``array_like``, so on the wire they are maps by field name (SGLang's comment calls it
positional); arrays in the fields' order are read too. SGLang's first releases had neither version nor counter_id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

__all__ = ["VERSION", "Metrics", "Queued", "Scheduled", "UnknownVersion", "decode_metrics"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Requests of one iteration. ``prefill_kv_tokens``: context that the chunks read (prefix hits, earlier chunks)."""

    prefill_requests: int = 0
    prefill_tokens: int = 0
    prefill_length_variance: float = 0.0
    prefill_kv_tokens: int = 0
    decode_requests: int = 0
    decode_kv_tokens: int = 0
    decode_kv_variance: float = 0.0

    @property
    def idle(self) -> bool:
        """A heartbeat: nothing was computed."""
        return not self.prefill_requests and not self.decode_requests and not self.prefill_tokens


@dataclass(frozen=True, slots=True)
class Queued:
    """Requests that wait."""

    prefill_requests: int = 0
    prefill_tokens: int = 0
    prefill_length_variance: float = 0.0
    decode_requests: int = 0
    decode_kv_tokens: int = 0
    decode_kv_variance: float = 0.0


@dataclass(frozen=True, slots=True)
class Metrics:
    """One message. ``counter`` is null where the release has none (the frame before the payload has a number then)."""

    worker: str
    rank: int
    counter: int | None
    wall_s: float
    scheduled: Scheduled
    queued: Queued


@dataclass(frozen=True, slots=True)
class UnknownVersion:
    """A message of a version that this reader does not know."""

    version: int


_TOP = ("version", "worker_id", "dp_rank", "counter_id", "wall_time", "scheduled_requests", "queued_requests")
_TOP_UNVERSIONED = ("worker_id", "dp_rank", "wall_time", "scheduled_requests", "queued_requests")
_SCHEDULED = (
    "num_prefill_requests", "sum_prefill_tokens", "var_prefill_length", "sum_prefill_kv_tokens", "num_decode_requests",
    "sum_decode_kv_tokens", "var_decode_kv_tokens",
)  # fmt: skip
_QUEUED = (
    "num_prefill_requests", "sum_prefill_tokens", "var_prefill_length", "num_decode_requests", "sum_decode_kv_tokens",
    "var_decode_kv_tokens",
)  # fmt: skip
_DECODER = msgspec.msgpack.Decoder()


def decode_metrics(payload: bytes) -> Metrics | UnknownVersion | None:
    """The message; null for bytes that are none. Never raises."""
    try:
        data = _DECODER.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError, TypeError):
        return None
    if isinstance(data, list):
        unversioned = bool(data) and isinstance(data[0], str)
        data = dict(zip(_TOP_UNVERSIONED if unversioned else _TOP, data, strict=False))
    if not isinstance(data, dict) or "scheduled_requests" not in data:
        return None
    version = data.get("version", VERSION)
    if not _whole(version):
        return None
    if version != VERSION:
        return UnknownVersion(version)
    worker, rank, counter = data.get("worker_id", ""), data.get("dp_rank", 0), data.get("counter_id")
    wall = data.get("wall_time", 0.0)
    scheduled, queued = _numbers(data["scheduled_requests"], _SCHEDULED), _numbers(data.get("queued_requests", {}), _QUEUED)
    usable = isinstance(worker, str) and _whole(rank) and (counter is None or _whole(counter)) and _number(wall)
    if not usable or scheduled is None or queued is None:
        return None
    return Metrics(worker[:200], rank, counter, float(wall), Scheduled(*scheduled), Queued(*queued))


def _numbers(data: object, names: tuple[str, ...]) -> list[Any] | None:
    """The fields in order, 0 for one that is left out (its default); null if one is no number of its kind."""
    if isinstance(data, list):
        data = dict(zip(names, data, strict=False))
    if not isinstance(data, Mapping):
        return None
    out: list[Any] = []
    for name in names:
        value = data.get(name, 0)
        if not (_number(value) if name.startswith("var_") else _whole(value)):
            return None
        out.append(float(value) if name.startswith("var_") else value)
    return out


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18
