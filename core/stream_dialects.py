"""The streams that are not OpenAI's chat or completions, told apart by the shape of their objects.

llama.cpp ``/completion`` and ``/infill``; OpenAI Responses (``response.…`` events); Anthropic's messages (served by vLLM and
llama.cpp too); TGI ``/generate_stream`` and ``/generate``; SGLang ``/generate``. Whole answers of the same paths as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hoptrace.stream_chunk import (
    Chunk,
    Emission,
    Usage,
    error_kind,
    error_text,
    read_count,
    read_progress,
    read_timings,
    read_usage,
    word,
)

__all__ = ["Running", "other_dialect"]


class Running:
    """Running totals of tokens, by sequence, whose differences are what single chunks hold."""

    def __init__(self) -> None:
        self._totals: dict[int, int] = {}

    def of(self, sequence: int) -> int:
        """The total so far."""
        return self._totals.get(sequence, 0)

    def difference(self, sequence: int, total: int | None) -> int | None:
        """Tokens since the chunk before; null where there is no total, or it fell."""
        before = self._totals.get(sequence, 0)
        if total is None or total < before:
            return None
        self._totals[sequence] = total
        return total - before


def other_dialect(data: Mapping[str, Any], running: Running) -> Chunk | None:
    """Decode an object without ``choices``; null if it is of no dialect that is known here."""
    kind = data.get("type")
    if isinstance(kind, str):
        if kind.startswith("response.") or (kind == "error" and "sequence_number" in data):
            return _responses(data, kind)
        if kind in _ANTHROPIC:
            return _anthropic(data, kind)
    if data.get("object") == "response" and "output" in data:
        return _response(data)
    if "content" in data and ("stop" in data or "tokens_predicted" in data):
        return _llamacpp(data, running)
    if "meta_info" in data:
        return _sglang(data, running)
    if "token" in data or "generated_text" in data or "error_type" in data:
        return _tgi(data)
    return None


# -- llama.cpp -----------------------------------------------------------------------------------------------------------


def _llamacpp(data: Mapping[str, Any], running: Running) -> Chunk:
    ids = data.get("tokens")
    index = read_count(data.get("index")) or 0
    total = read_count(data.get("tokens_predicted"))
    count = running.difference(index, total) if total is not None else len(ids) if isinstance(ids, list) else None
    reason = None
    usage = read_usage(data["usage"]) if data.get("usage") is not None else None
    if data.get("stop") is True:
        kind = data.get("stop_type")
        reason = {"limit": "length", "eos": "stop", "word": "stop"}.get(kind, "stop") if isinstance(kind, str) else "stop"
        if usage is None:
            usage = Usage(read_count(data.get("tokens_evaluated")), total)
    text = bool(data.get("content"))
    emissions: tuple[Emission, ...] = ()
    if text or count or reason is not None:
        emissions = (Emission(index, count if (text or count) else 0, text, False, reason),)
    error = data.get("error")
    return Chunk(
        emissions=emissions,
        usage=usage,
        timings=read_timings(data.get("timings")),
        progress=read_progress(data.get("prompt_progress")),
        error=error_text(error) if error else None,
        error_kind=error_kind(error) if error else None,
        id=word(data.get("id")),
        model=word(data.get("model")),
    )


# -- OpenAI Responses ----------------------------------------------------------------------------------------------------

_ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
# Media that is sent in pieces, and code that a tool runs: not the model's tokens.
_NO_TEXT = ("audio", "image", "partial")


def _responses(data: Mapping[str, Any], kind: str) -> Chunk:
    if kind.endswith(".delta"):
        if not isinstance(data.get("delta"), str) or not data["delta"] or any(w in kind for w in _NO_TEXT):
            return Chunk()
        logprobs = data.get("logprobs")
        count = len(logprobs) if isinstance(logprobs, list) and logprobs else None
        reasoning = "reasoning" in kind
        return Chunk((Emission(0, count, not reasoning, reasoning),))
    if kind == "error":
        return Chunk(error=error_text(data), error_kind=error_kind({"code": data.get("code")}))
    inner = data.get("response")
    if not isinstance(inner, dict):
        return Chunk()
    if kind in _ENDS:
        return _response(inner)
    return Chunk(id=word(inner.get("id")), model=word(inner.get("model")))


def _response(data: Mapping[str, Any]) -> Chunk:
    details = data.get("incomplete_details")
    reason = word(details.get("reason")) if isinstance(details, dict) else None
    error = data.get("error")
    return Chunk(
        emissions=(Emission(0, 0, False, False, reason or word(data.get("status"))),),
        usage=read_usage(data.get("usage")),
        error=error_text(error) if error else None,
        error_kind=error_kind(error) if error else None,
        id=word(data.get("id")),
        model=word(data.get("model")),
    )


# -- Anthropic messages --------------------------------------------------------------------------------------------------

_ANTHROPIC = frozenset(
    ("message", "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
     "message_stop", "ping", "error")
)  # fmt: skip
_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def _anthropic(data: Mapping[str, Any], kind: str) -> Chunk:
    if kind == "error":
        error = data.get("error", data)
        return Chunk(error=error_text(error), error_kind=error_kind(error))
    if kind == "content_block_delta":
        delta = data.get("delta")
        if not isinstance(delta, dict) or not delta.get(_DELTAS.get(str(delta.get("type")), "")):
            return Chunk()
        thinking = delta["type"] == "thinking_delta"
        return Chunk((Emission(0, None, not thinking, thinking),))
    inner = data.get("message") if kind == "message_start" else data
    if not isinstance(inner, dict):
        return Chunk()
    usage = read_usage(inner.get("usage"))
    if kind == "message_start" and usage is not None:
        usage = Usage(usage.prompt, None, None, usage.cached)  # its output is a first guess
    delta = data.get("delta") if kind == "message_delta" else inner
    reason = word(delta.get("stop_reason")) if isinstance(delta, dict) and kind != "message_start" else None
    return Chunk(
        emissions=(Emission(0, 0, False, False, reason),) if reason else (),
        usage=usage,
        id=word(inner.get("id")),
        model=word(inner.get("model")),
    )


# -- TGI -----------------------------------------------------------------------------------------------------------------


def _tgi(data: Mapping[str, Any]) -> Chunk:
    token, details = data.get("token"), data.get("details")
    reason, usage = None, None
    if isinstance(details, dict):
        reason = word(details.get("finish_reason"))
        prefill = details.get("prefill")
        prompt = read_count(details.get("input_length"))
        if prompt is None and isinstance(prefill, list) and prefill:
            prompt = len(prefill)
        usage = Usage(prompt, read_count(details.get("generated_tokens")))
    error = data.get("error")
    emissions: tuple[Emission, ...] = ()
    if isinstance(token, dict):
        # `index` counts tokens here, not sequences; a special token (end of sequence) is made, but not shown.
        emissions = (Emission(0, 1, bool(token.get("text")) and token.get("special") is not True, False, reason),)
    elif reason is not None or isinstance(data.get("generated_text"), str):
        emissions = (Emission(0, 0, False, False, reason),)
    return Chunk(
        emissions=emissions,
        usage=usage,
        error=error_text(error) if error else None,
        error_kind=word(data.get("error_type")) or (error_kind(error) if error else None),
    )


# -- SGLang --------------------------------------------------------------------------------------------------------------


def _sglang(data: Mapping[str, Any], running: Running) -> Chunk:
    """The text is all of it so far (or, with ``incremental_streaming_output``, the new part); totals run in either case."""
    meta = data.get("meta_info")
    if not isinstance(meta, dict):
        return Chunk()
    index = read_count(data.get("index")) or 0
    told = meta.get("finish_reason")
    reason = word(told.get("type")) if isinstance(told, dict) else word(told)
    total = read_count(meta.get("completion_tokens"))
    count = running.difference(index, total)
    if count is None:
        ids = data.get("output_ids")
        count = len(ids) if total is None and isinstance(ids, list) else None
    emissions: tuple[Emission, ...] = ()
    if count or reason or (count is None and data.get("text")):
        emissions = (Emission(index, count, bool(data.get("text")) or "text" not in data, False, reason),)
    error = data.get("error") or (told if reason == "abort" and isinstance(told, dict) and told.get("message") else None)
    return Chunk(
        emissions=emissions,
        usage=Usage(read_count(meta.get("prompt_tokens")), total, None, read_count(meta.get("cached_tokens"))),
        error=error_text(error) if error else None,
        error_kind=error_kind(error) if error else None,
        id=word(meta.get("id")),
    )
