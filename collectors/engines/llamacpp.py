"""llama.cpp's server: its settings into the manifest, and its ``/metrics`` and ``/slots`` as counters."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hoptrace.collectors.base import Collector, Finding, ServerAway
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.http import Api, Reply
from hoptrace.collectors.engines.prometheus import Kind, samples
from hoptrace.collectors.hardware.listener import Found
from hoptrace.errors import HoptraceError
from hoptrace.gguf_file import read_gguf
from hoptrace.manifest import Server
from hoptrace.writer import TraceWriter

__all__ = ["KNOWN", "MetricsCollector", "SlotsCollector", "describe", "sources"]

DEFAULT_BATCH_TOKENS = 2048
"""llama.cpp's default of ``-b``: prompt tokens of one iteration at most. No endpoint tells the real value."""

DEFAULT_PHYSICAL_BATCH_TOKENS = 512
"""llama.cpp's default of ``-ub``: an iteration of more tokens is several passes over the weights. No endpoint tells it either."""

_CUMULATIVE_TOKENS = Kind("tokens", "cumulative", whole=True)
_CUMULATIVE_S = Kind("s", "cumulative")
KNOWN: dict[str, Kind] = {
    "llamacpp:prompt_tokens_total": _CUMULATIVE_TOKENS,
    "llamacpp:prompt_tokens_cached_total": _CUMULATIVE_TOKENS,
    "llamacpp:prompt_seconds_total": _CUMULATIVE_S,
    "llamacpp:tokens_predicted_total": _CUMULATIVE_TOKENS,
    "llamacpp:tokens_predicted_seconds_total": _CUMULATIVE_S,
    "llamacpp:n_decode_total": Kind("calls", "cumulative", whole=True),
    # Declared a counter, but it is a high-water mark.
    "llamacpp:n_tokens_max": Kind("tokens", "gauge", whole=True),
    "llamacpp:spec_decode_num_draft_tokens_total": _CUMULATIVE_TOKENS,
    "llamacpp:spec_decode_num_accepted_tokens_total": _CUMULATIVE_TOKENS,
    "llamacpp:spec_decode_num_accepted_tokens_per_pos_total": _CUMULATIVE_TOKENS,
    "llamacpp:spec_decode_num_drafts_total": Kind("drafts", "cumulative", whole=True),
    # Averages since the server's start, not rates of now.
    "llamacpp:prompt_tokens_seconds": Kind("tokens/s", "gauge"),
    "llamacpp:predicted_tokens_seconds": Kind("tokens/s", "gauge"),
    "llamacpp:n_busy_slots_per_decode": Kind("slots", "gauge"),
    "llamacpp:requests_processing": Kind("requests", "gauge", whole=True),
    "llamacpp:requests_deferred": Kind("requests", "gauge", whole=True),
}
"""How llama.cpp's metrics read, by name. Others are kept under their own names, read as their TYPE line says."""


def _int(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def _get(data: object, *path: str) -> Any:
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def sources(ctx: Context) -> list[Collector]:
    """What is to be asked while it runs."""
    args = ctx.api, ctx.server.name, ctx.host, ctx.writer
    return [MetricsCollector(*args), SlotsCollector(*args)]


async def describe(ctx: Context) -> list[str]:
    """Fill the context's server with what ``/props``, ``/slots``, ``/v1/models`` and the model's file tell; gives notes.

    The model's path is seen from the folder and root of the server's process, where that is known.
    """
    api, server, find = ctx.api, ctx.server, ctx.find
    notes: list[str] = []
    props_reply, models_reply = await api.get("/props"), await api.get("/v1/models")
    props = props_reply.json() if props_reply.ok else None
    listed = _get(models_reply.json(), "data") if models_reply.ok else None
    model = listed[0] if isinstance(listed, list) and listed else None
    server.max_sequences = _int(_get(props, "total_slots"))
    server.context_tokens = _int(_get(props, "default_generation_settings", "n_ctx")) or _int(_get(model, "meta", "n_ctx"))
    if server.max_sequences is None and (slots := await api.get("/slots")).ok and isinstance(slots.json(), list):
        server.max_sequences = len(slots.json())
    # With -kvu the slots share one context, without it each has its own, and no endpoint tells which.
    notes.append(f"{server.name}: KV capacity is not known: no endpoint tells whether slots share one context (-kvu).")
    server.parameters = _int(_get(model, "meta", "n_params"))
    server.weight_bytes = _int(_get(model, "meta", "size"))
    server.hidden_size = _int(_get(model, "meta", "n_embd"))
    server.prefix_caching = True
    build = _get(props, "build_info")
    server.engine_version = build if isinstance(build, str) else server.engine_version
    server.max_batched_tokens = DEFAULT_BATCH_TOKENS
    notes.append(f"{server.name}: max_batched_tokens {DEFAULT_BATCH_TOKENS} is llama.cpp's default (-b), no endpoint tells it.")
    server.config["n_ubatch"] = DEFAULT_PHYSICAL_BATCH_TOKENS
    notes.append(f"{server.name}: n_ubatch {DEFAULT_PHYSICAL_BATCH_TOKENS} is llama.cpp's default (-ub), no endpoint tells it.")
    notes.append(f"{server.name}: prefix caching is llama.cpp's default (cache_prompt); a request may turn it off.")
    path = _get(props, "model_path")
    if isinstance(path, str):
        server.model_path = path
        server.model = path.rsplit("/", 1)[-1]
        notes += await asyncio.to_thread(_geometry, server, path, find)
    else:
        notes.append(f"{server.name}: the model's file is not known ({_why(props_reply, '/props', '--props')}).")
    told = {k: _get(props, k) for k in ("model_ftype", "modalities", "endpoint_slots", "endpoint_metrics")}
    server.config |= {k: v for k, v in told.items() if v is not None}
    return notes


_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def _geometry(server: Server, path: str, find: Callable[[], Found] | None) -> list[str]:
    """Layers, heads and sizes from the model's own file, if it is on this machine."""
    pid = find().pid if find is not None else None
    places = [] if pid is None else [Path(f"/proc/{pid}/root{path}" if path.startswith("/") else f"/proc/{pid}/cwd/{path}")]
    if path.startswith("/"):
        places.append(Path(path))
    elif not places:
        return [
            f"{server.name}: layers and heads are not known: the model's path is relative, and the server's process is not known "
            "(--pid)."
        ]
    model = None
    for place in places:
        try:
            model = read_gguf(place)
            break
        except (HoptraceError, OSError):
            continue
    if model is None:
        return [f"{server.name}: layers and heads are not known: the model's file can't be read here."]
    split = _SPLIT.search(path) is not None
    # On another machine, or in a container, the same path may be another file: the server's own figures tell.
    same = pid is not None if server.parameters is None else split or model.parameters == server.parameters
    if not same or (server.hidden_size or model.hidden_size) != model.hidden_size:
        return [f"{server.name}: layers and heads are not known: the file of that name here is not the server's model."]
    for name in ("layers", "heads", "kv_heads", "head_size", "hidden_size"):
        value = getattr(model, name)
        if value is not None:
            setattr(server, name, value)
    if not split:  # a part tells its own size only
        server.parameters, server.weight_bytes = model.parameters, model.weight_bytes
    server.kv_dtype = "f16"
    return [f"{server.name}: kv_dtype f16 is llama.cpp's default (-ctk, -ctv), no endpoint tells it."]


def _why(reply: Reply, path: str, flag: str) -> str:
    if reply.status == 401:
        return f"{path} needs the server's API key: name the variable that holds it with --key-env"
    if reply.status in (403, 404, 501):
        return f"{path} is turned off: start llama-server with {flag}"
    return f"{path}: {reply.problem or f'HTTP {reply.status}'}"


class _Polled:
    """What the two collectors share: one question per sample, and the server's incarnation in each row."""

    name = ""
    path = ""
    flag = ""
    tables = ("counters",)

    def __init__(self, api: Api, server: str, host: str, writer: TraceWriter | None) -> None:
        self._api = api
        self._server = server
        self._host = host
        self._writer = writer
        self._incarnation = 1

    async def probe(self) -> Finding:
        reply = await self._api.get(self.path)
        if not reply.ok:
            return Finding(False, _why(reply, self.path, self.flag))
        return Finding(True)

    async def start(self) -> None:
        return None

    def restarted(self) -> None:
        self._incarnation += 1

    async def close(self) -> None:
        return None

    async def sample(self) -> int:
        assert self._writer is not None
        clock = self._writer.clock
        before = clock.now_ns()
        # The answer waits for the iteration in progress, and a long prompt's may take many seconds: slow is not dead.
        reply = await self._api.get(self.path, timeout_s=60.0)
        after = clock.now_ns()
        if reply.status is None and reply.problem != "timeout":
            raise ServerAway(reply.problem)
        rows = list(self._rows(reply)) if reply.ok else []
        common = {
            "time_ns": (before + after) // 2, "uncertainty_ns": (after - before) // 2, "host": self._host, "source": self.name,
            "incarnation": f"{self._server}#{self._incarnation}",
        }  # fmt: skip
        self._writer.append("counters", [common | row for row in rows])
        return len(rows)

    def _rows(self, reply: Reply) -> Iterator[dict[str, Any]]:
        raise NotImplementedError


class MetricsCollector(_Polled):
    """``/metrics``: totals since the server's start, and how many requests it works on."""

    name = "llamacpp-metrics"
    path = "/metrics"
    flag = "--metrics"

    def __init__(self, api: Api, server: str, host: str, writer: TraceWriter | None) -> None:
        super().__init__(api, server, host, writer)
        self._last: dict[str, float] = {}

    def restarted(self) -> None:
        super().restarted()
        self._last = {}

    def _rows(self, reply: Reply) -> Iterator[dict[str, Any]]:
        assert self._writer is not None
        try:
            page = list(samples(reply.text, KNOWN))
        except ValueError:
            self._writer.drop("llamacpp-metrics: page that is not in the text format", 1)
            return
        totals = {s.name: s.value for s in page if s.kind and s.kind.semantics == "cumulative" and s.value is not None}
        if any(value < self._last.get(name, value) for name, value in totals.items()):
            # A total that fell: the server was restarted between two samples.
            self.restarted()
            now = self._writer.clock.now_ns()
            self._writer.append(
                "events",
                [{"time_ns": now, "host": self._host, "server": self._server, "kind": "restart",
                  "detail": "a cumulative metric fell", "source": self.name}],
            )  # fmt: skip
        self._last = totals
        for s in page:
            whole = s.kind is not None and s.kind.whole
            yield {
                "entity": f"server:{self._server}",
                "incarnation": f"{self._server}#{self._incarnation}",
                "name": s.name,
                "value_int": int(s.value) if whole and s.value is not None else None,
                "value_float": s.value if not whole else None,
                "unit": s.kind.unit if s.kind else None,
                "semantics": s.kind.semantics if s.kind else None,
                "status": "ok" if s.value is not None else "absent",
            }


_SLOT_FIELDS = {
    "is_processing": "1", "id_task": "1", "n_prompt_tokens": "tokens", "n_prompt_tokens_processed": "tokens",
    "n_prompt_tokens_cache": "tokens", "n_decoded": "tokens",
}  # fmt: skip


class SlotsCollector(_Polled):
    """``/slots``: what each slot does at the moment. A value is written when it has changed."""

    name = "llamacpp-slots"
    path = "/slots"
    flag = "--slots"

    def __init__(self, api: Api, server: str, host: str, writer: TraceWriter | None) -> None:
        super().__init__(api, server, host, writer)
        self._last: dict[tuple[str, str], int] = {}

    def restarted(self) -> None:
        super().restarted()
        self._last = {}

    def _rows(self, reply: Reply) -> Iterator[dict[str, Any]]:
        slots = reply.json()
        if not isinstance(slots, list):
            return
        slots = [s for s in slots if isinstance(s, Mapping)]
        yield self._row(f"server:{self._server}", "slots_processing", sum(bool(s.get("is_processing")) for s in slots), "slots")
        for slot in slots:
            entity = f"server:{self._server}/slot:{_int(slot.get('id'))}"
            following = slot.get("next_token")
            first = following[0] if isinstance(following, list) and following else following
            values = dict(slot) | {"n_decoded": _get(first, "n_decoded"), "is_processing": int(bool(slot.get("is_processing")))}
            for name, unit in _SLOT_FIELDS.items():
                value = _int(values.get(name))
                if value is not None and self._last.get((entity, name)) != value:
                    self._last[(entity, name)] = value
                    yield self._row(entity, name, value, unit)

    @staticmethod
    def _row(entity: str, name: str, value: int, unit: str) -> dict[str, Any]:
        return {"entity": entity, "name": name, "value_int": value, "unit": unit, "semantics": "gauge", "status": "ok"}
