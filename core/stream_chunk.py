"""What one chunk of a stream says, whichever dialect it is in, and how single values in it are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Chunk", "Emission", "Progress", "Timings", "Usage", "error_kind", "error_text", "read_count", "read_ms", "read_progress",
    "read_timings", "read_usage", "read_vllm_metrics", "usage_over", "usage_sum",
    "word",
]  # fmt: skip

_MAX_COUNT = 1 << 53


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals as the server counts them, in tokens. ``reasoning`` is a part of ``output``, ``cached`` a part of ``prompt``."""

    prompt: int | None = None
    output: int | None = None
    reasoning: int | None = None
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations and counts in the engine. ``prompt_tokens`` without the cached ones; ``prompt_ms`` from the begin of the work to
    the first token, ``predicted_ms`` from the first token to the latest, ``queue_ms`` before the begin.

    llama.cpp's ``timings``; vLLM's ``metrics`` (--enable-per-request-metrics) says the same durations under other names.
    """

    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_ms: float | None = None
    predicted_tokens: int | None = None
    predicted_ms: float | None = None
    queue_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """llama.cpp's ``prompt_progress``: tokens of the prompt, of those from a cache, processed so far (cached ones included), and
    the time since its processing began."""

    total: int | None = None
    cache: int | None = None
    processed: int | None = None
    time_ms: float | None = None


# These two are made once per token: not frozen, which would treble the cost.
@dataclass(slots=True)
class Emission:
    """What one chunk gives one sequence. ``count`` is null where the chunk does not tell how many tokens it holds."""

    sequence: int
    count: int | None
    visible: bool
    reasoning: bool
    finish_reason: str | None = None


@dataclass(slots=True)
class Chunk:
    """One chunk. ``emissions`` is empty for chunks that hold no token (role, usage, keep-alive).

    ``error`` is the server's message, which may quote the request; ``error_kind`` is its type and code, which do not.
    """

    emissions: tuple[Emission, ...] = ()
    usage: Usage | None = None
    timings: Timings | None = None
    progress: Progress | None = None
    error: str | None = None
    error_kind: str | None = None
    id: str | None = None
    model: str | None = None
    done: bool = False
    malformed: bool = False


def read_count(value: object) -> int | None:
    """A count of tokens; null for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not 0 <= value <= _MAX_COUNT or value != int(value):
        return None
    return int(value)


def read_ms(value: object) -> float | None:
    """A duration; null for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        return None
    return float(value)


def word(value: object) -> str | None:
    """A short string; null for what is none."""
    return value[:256] if isinstance(value, str) and value else None


def error_text(value: object) -> str:
    """One sentence of an error object: OpenAI's {"message": …}, a bare string, or FastAPI's {"detail": …}."""
    if isinstance(value, Mapping):
        for key in ("message", "detail", "error"):
            if value.get(key):
                return error_text(value[key])
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split())[:300] or "error without a message"


def error_kind(value: object) -> str:
    """Type and code of an error object, without its message (which may quote the prompt)."""
    words = [value.get(k) for k in ("type", "code")] if isinstance(value, Mapping) else []
    return " ".join(str(w)[:60] for w in words if isinstance(w, str | int) and w != "") or "error"


def read_usage(value: object) -> Usage | None:
    """``usage`` of OpenAI's chat and completions, and of Responses and Anthropic's messages, which name its parts otherwise.

    Anthropic counts the tokens that came from a cache, or went into it, apart from ``input_tokens``.
    """
    if not isinstance(value, Mapping):
        return None
    out = value.get("completion_tokens_details")
    into = value.get("prompt_tokens_details")
    if "prompt_tokens" not in value and ("input_tokens" in value or "output_tokens" in value):
        return _other_usage(value)
    return Usage(
        prompt=read_count(value.get("prompt_tokens")),
        output=read_count(value.get("completion_tokens")),
        reasoning=read_count(out.get("reasoning_tokens") if isinstance(out, Mapping) else value.get("reasoning_tokens")),
        cached=read_count(into.get("cached_tokens") if isinstance(into, Mapping) else None),
    )


def _other_usage(value: Mapping[str, Any]) -> Usage:
    out, into = value.get("output_tokens_details"), value.get("input_tokens_details")
    prompt = read_count(value.get("input_tokens"))
    cached = read_count(into.get("cached_tokens")) if isinstance(into, Mapping) else None
    beside = [read_count(value.get(f"cache_{kind}_input_tokens")) for kind in ("read", "creation")]
    if into is None and any(n is not None for n in beside):
        cached = beside[0]
        prompt = None if prompt is None else prompt + sum(n or 0 for n in beside)
    reasoning = read_count(out.get("reasoning_tokens")) if isinstance(out, Mapping) else None
    return Usage(prompt, read_count(value.get("output_tokens")), reasoning, cached)


def read_timings(value: object) -> Timings | None:
    """llama.cpp's ``timings``."""
    if not isinstance(value, Mapping):
        return None
    return Timings(
        read_count(value.get("cache_n")),
        read_count(value.get("prompt_n")),
        read_ms(value.get("prompt_ms")),
        read_count(value.get("predicted_n")),
        read_ms(value.get("predicted_ms")),
    )


def read_vllm_metrics(value: object) -> Timings | None:
    """vLLM's ``metrics``: queue, prefill and decode intervals as its engine measured them (``build_per_request_timing_metrics``
    in vllm/entrypoints/generate/base/serving.py of 0.32: ``time_to_first_token_ms`` counts from the scheduling)."""
    if not isinstance(value, Mapping):
        return None
    prompt_ms = read_ms(value.get("time_to_first_token_ms"))
    if prompt_ms is None:
        return None
    return Timings(
        prompt_ms=prompt_ms,
        predicted_ms=read_ms(value.get("generation_time_ms")),
        queue_ms=read_ms(value.get("queue_time_ms")),
    )


def read_progress(value: object) -> Progress | None:
    """llama.cpp's ``prompt_progress``."""
    if not isinstance(value, Mapping):
        return None
    total, cache, processed = (read_count(value.get(k)) for k in ("total", "cache", "processed"))
    return Progress(total, cache, processed, read_ms(value.get("time_ms")))


def usage_over(new: Usage, old: Usage | None) -> Usage:
    """What was told last, field by field: some servers tell the prompt's tokens first and the output's last."""
    if old is None:
        return new
    pairs = ((getattr(new, f), getattr(old, f)) for f in ("prompt", "output", "reasoning", "cached"))
    return Usage(*(b if a is None else a for a, b in pairs))


def usage_sum(usages: Sequence[Usage | None]) -> Usage:
    """Of several answers in one; a part that one of them does not tell is unknown."""

    def total(name: str) -> int | None:
        values = [None if u is None else getattr(u, name) for u in usages]
        return None if None in values else sum(v for v in values if v is not None)

    return Usage(*(total(name) for name in ("prompt", "output", "reasoning", "cached")))
