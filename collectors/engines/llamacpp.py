"""llama.cpp's server: its settings into the manifest, and its ``/metrics`` and ``/slots`` as counters."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hoptrace.collectors.base import Collector
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines import names_llamacpp
from hoptrace.collectors.engines.command_line import Allowed, Flags, of_server
from hoptrace.collectors.engines.http import Reply
from hoptrace.collectors.engines.llamacpp_log import LlamaCppLog, kv_unified_of
from hoptrace.collectors.engines.log_tail import log_of
from hoptrace.collectors.engines.metrics_source import MetricsSource
from hoptrace.collectors.engines.polled import Polled
from hoptrace.errors import HoptraceError
from hoptrace.gguf_file import read_gguf
from hoptrace.manifest import Server

__all__ = ["SlotsCollector", "describe", "sources"]

DEFAULT_BATCH_TOKENS = 2048
"""llama.cpp's default of ``-b``: prompt tokens of one iteration at most. No endpoint tells the real value."""

DEFAULT_PHYSICAL_BATCH_TOKENS = 512
"""llama.cpp's default of ``-ub``: an iteration of more tokens is several passes over the weights. No endpoint tells it either."""


def _int(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def _get(data: object, *path: str) -> Any:
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


FLAGS: Allowed = {
    "-c=--ctx-size": "int", "--ctx-size": "int", "-np=--parallel": "int", "--parallel": "int", "-b=--batch-size": "int",
    "--batch-size": "int", "-ub=--ubatch-size": "int", "--ubatch-size": "int", "-ctk=--cache-type-k": "word",
    "--cache-type-k": "word", "-ctv=--cache-type-v": "word", "--cache-type-v": "word", "-kvu=--kv-unified": "flag",
    "--kv-unified": "flag", "-cram=--cache-ram": "int", "--cache-ram": "int", "-fa=--flash-attn": "word", "--flash-attn": "word",
    "--spec-type": "word", "--spec-draft-n-max": "int", "--draft-max": "int", "--cache-prompt": "flag", "--cache-reuse": "int",
    "-ngl=--n-gpu-layers": "word", "--n-gpu-layers": "word", "-t=--threads": "int", "--threads": "int",
    "-cb=--cont-batching": "flag", "--cont-batching": "flag", "-ot=--override-tensor": "word", "--n-cpu-moe": "int",
}  # fmt: skip
"""Flags of llama-server that are read from its command line (common/arg.cpp)."""


def sources(ctx: Context) -> list[Collector]:
    """What is to be asked while it runs."""
    metrics = MetricsSource(ctx, "llamacpp-metrics", names_llamacpp.KNOWN, off="is turned off: start llama-server with --metrics")
    return [metrics, SlotsCollector(ctx), LlamaCppLog(ctx)]


async def describe(ctx: Context) -> list[str]:
    """Fill the context's server with what ``/props``, ``/slots``, ``/v1/models``, the command line, the log and the model's file
    tell; gives notes on the rest.

    The model's path is seen from the folder and root of the server's process, where that is known.
    """
    api, server = ctx.api, ctx.server
    notes: list[str] = []
    props_reply, models_reply = await api.get("/props"), await api.get("/v1/models")
    props = props_reply.json() if props_reply.ok else None
    listed = _get(models_reply.json(), "data") if models_reply.ok else None
    model = listed[0] if isinstance(listed, list) and listed else None
    server.max_sequences = _int(_get(props, "total_slots"))
    server.context_tokens = _int(_get(props, "default_generation_settings", "n_ctx")) or _int(_get(model, "meta", "n_ctx"))
    if server.max_sequences is None and (slots := await api.get("/slots")).ok and isinstance(slots.json(), list):
        server.max_sequences = len(slots.json())
    server.parameters = _int(_get(model, "meta", "n_params"))
    server.weight_bytes = _int(_get(model, "meta", "size"))
    server.hidden_size = _int(_get(model, "meta", "n_embd"))
    build = _get(props, "build_info")
    server.engine_version = build if isinstance(build, str) else server.engine_version
    flags = (await asyncio.to_thread(of_server, ctx, FLAGS, re.compile(r"llama")))[0] or {}
    server.config |= flags
    # Looking for the process and its log takes some ten milliseconds, and a proxy may share this thread.
    pid, unified = await asyncio.to_thread(_seen_here, ctx)
    notes += _settings(server, flags, unified)
    path = _get(props, "model_path")
    if isinstance(path, str):
        server.model_path = path
        server.model = path.rsplit("/", 1)[-1]
        notes += await asyncio.to_thread(_geometry, server, path, pid, flags)
    else:
        why = props_reply.why("/props", "is turned off: start llama-server with --props")
        notes.append(f"{server.name}: the model's file is not known ({why}).")
    told = {k: _get(props, k) for k in ("model_ftype", "modalities", "endpoint_slots", "endpoint_metrics")}
    server.config |= {k: v for k, v in told.items() if v is not None}
    return notes


def _settings(server: Server, flags: Flags, unified: bool | None) -> list[str]:
    """What no endpoint tells: from the command line and the log, else llama.cpp's defaults, said to be such."""
    notes = []
    unified = flags.get("kv_unified", unified)
    if unified is not None:
        server.config["kv_unified"] = unified
    slots, context = server.max_sequences, server.context_tokens
    if unified is not None and context is not None and (unified or slots is not None):
        # One context for all, or one for each slot; /props tells that of one slot.
        server.kv_capacity_tokens = context if unified else context * (slots or 0)
    else:
        notes.append(f"{server.name}: KV capacity is not known: no endpoint tells whether slots share one context (-kvu).")
    server.max_batched_tokens = flags.get("batch_size", DEFAULT_BATCH_TOKENS)
    if "batch_size" not in flags:
        notes.append(
            f"{server.name}: max_batched_tokens {DEFAULT_BATCH_TOKENS} is llama.cpp's default (-b), no endpoint tells it."
        )
    server.config["n_ubatch"] = flags.get("ubatch_size", DEFAULT_PHYSICAL_BATCH_TOKENS)
    if "ubatch_size" not in flags:
        what = f"n_ubatch {DEFAULT_PHYSICAL_BATCH_TOKENS}"
        notes.append(f"{server.name}: {what} is llama.cpp's default (-ub), no endpoint tells it.")
    server.prefix_caching = flags.get("cache_prompt", True)
    if "cache_prompt" not in flags:
        notes.append(f"{server.name}: prefix caching is llama.cpp's default (cache_prompt); a request may turn it off.")
    return notes


def _seen_here(ctx: Context) -> tuple[int | None, bool | None]:
    """The server's process, and whether its log says that all slots share one context."""
    pid = ctx.find().pid if ctx.find is not None else None
    return pid, kv_unified_of(log_of(ctx, LlamaCppLog.order).path)


_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def _geometry(server: Server, path: str, pid: int | None, flags: Flags) -> list[str]:
    """Layers, heads and sizes from the model's own file, if it is on this machine."""
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
    keys, values = flags.get("cache_type_k"), flags.get("cache_type_v")
    if keys or values:
        keys, values = keys or "f16", values or "f16"
        server.kv_dtype = keys if keys == values else f"{keys}/{values}"
        return []
    server.kv_dtype = "f16"
    return [f"{server.name}: kv_dtype f16 is llama.cpp's default (-ctk, -ctv), no endpoint tells it."]


_SLOT_FIELDS = {
    "is_processing": "1", "id_task": "1", "n_prompt_tokens": "tokens", "n_prompt_tokens_processed": "tokens",
    "n_prompt_tokens_cache": "tokens", "n_decoded": "tokens",
}  # fmt: skip


class SlotsCollector(Polled):
    """``/slots``: what each slot does at the moment. A value is written when it has changed."""

    name = "llamacpp-slots"
    path = "/slots"
    off = "is turned off: start llama-server with --slots"

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._last: dict[tuple[str, str], int] = {}

    def restarted(self) -> None:
        super().restarted()
        self._last = {}

    def _rows(self, reply: Reply) -> Iterator[dict[str, Any]]:
        slots = reply.json()
        if not isinstance(slots, list):
            return
        slots = [s for s in slots if isinstance(s, Mapping)]
        yield self._row(
            f"server:{self._ctx.server.name}", "slots_processing", sum(bool(s.get("is_processing")) for s in slots), "slots"
        )
        for slot in slots:
            entity = f"server:{self._ctx.server.name}/slot:{_int(slot.get('id'))}"
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
