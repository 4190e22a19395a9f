"""What one chunk of an OpenAI-compatible stream says: which tokens, visible or reasoning, totals, why it ended, errors.

Reads chat completions, completions, llama.cpp's own ``/completion``, and the same objects as non-streaming answers. Text is
looked at and forgotten; only structured reasoning is kept while its stream runs, to tell new text from text that is sent again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hoptrace.sse import DONE, ServerSentEvent

__all__ = ["Chunk", "Emission", "StreamDecoder", "Timings", "Usage", "error_kind"]

_MAX_COUNT = 1 << 53
_KEPT_REASONING_CHARS = 1 << 20
_NOTHING = (None, None)


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals as the server counts them, in tokens. ``reasoning`` is a part of ``output``, ``cached`` a part of ``prompt``."""

    prompt: int | None = None
    output: int | None = None
    reasoning: int | None = None
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """llama.cpp's ``timings``: ``prompt_tokens`` without the cached ones, ``predicted_ms`` from the first token to the latest."""

    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_ms: float | None = None
    predicted_tokens: int | None = None
    predicted_ms: float | None = None


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
    metrics: Mapping[str, Any] | None = None
    error: str | None = None
    error_kind: str | None = None
    id: str | None = None
    model: str | None = None
    done: bool = False
    malformed: bool = False


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not 0 <= value <= _MAX_COUNT or value != int(value):
        return None
    return int(value)


def _ms(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        return None
    return float(value)


def _word(value: object) -> str | None:
    return value[:256] if isinstance(value, str) and value else None


def _error_text(value: object) -> str:
    """One sentence of an error object: OpenAI's {"message": …}, a bare string, or FastAPI's {"detail": …}."""
    if isinstance(value, Mapping):
        for key in ("message", "detail", "error"):
            if value.get(key):
                return _error_text(value[key])
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split())[:300] or "error without a message"


def error_kind(value: object) -> str:
    """Type and code of an error object, without its message (which may quote the prompt)."""
    words = [value.get(k) for k in ("type", "code")] if isinstance(value, Mapping) else []
    return " ".join(str(w)[:60] for w in words if isinstance(w, str | int) and w != "") or "error"


def _usage(value: object) -> Usage | None:
    if not isinstance(value, Mapping):
        return None
    out = value.get("completion_tokens_details")
    into = value.get("prompt_tokens_details")
    return Usage(
        prompt=_count(value.get("prompt_tokens")),
        output=_count(value.get("completion_tokens")),
        reasoning=_count(out.get("reasoning_tokens") if isinstance(out, Mapping) else value.get("reasoning_tokens")),
        cached=_count(into.get("cached_tokens") if isinstance(into, Mapping) else None),
    )


def _timings(value: object) -> Timings | None:
    if not isinstance(value, Mapping):
        return None
    return Timings(
        _count(value.get("cache_n")),
        _count(value.get("prompt_n")),
        _ms(value.get("prompt_ms")),
        _count(value.get("predicted_n")),
        _ms(value.get("predicted_ms")),
    )


class _Sequence:
    """State of one choice: only what is needed to tell new text from text that is sent again."""

    __slots__ = ("cumulative", "pieces", "said")

    def __init__(self) -> None:
        self.said = ""
        self.pieces = 0
        self.cumulative: bool | None = None

    def new_reasoning(self, text: str) -> bool:
        """Whether structured reasoning holds anything new.

        Some servers send each piece, others all of it each time, others each piece and at the end all of it again. Text that
        begins with everything said so far is the second kind; all of it again, after two pieces or more, is nothing new.
        """
        if not text:
            return False
        if self.said and len(self.said) < _KEPT_REASONING_CHARS:
            if text == self.said and (self.pieces > 1 or self.cumulative):
                return False
            if self.cumulative is not False and len(text) > len(self.said) and text.startswith(self.said):
                self.cumulative = True
                self.said = text
                self.pieces += 1
                return True
            if self.cumulative and self.said.startswith(text):
                return False
            self.cumulative = bool(self.cumulative)
        self.said = (self.said + text)[:_KEPT_REASONING_CHARS]
        self.pieces += 1
        return True


class StreamDecoder:
    """Decodes the chunks of one stream, in order. Counts that a server gives as running totals become differences.

    It runs once per token: what JSON parses to is asked for as ``dict``, since asking for a ``Mapping`` takes five times as long.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._running = 0

    def event(self, event: ServerSentEvent) -> Chunk:
        """Decode one server-sent event; never raises for what a server sends."""
        if event.data == DONE:
            return Chunk(done=True)
        try:
            data = json.loads(event.data)
        except (ValueError, RecursionError):
            data = None
        if event.event == "error":
            body = data.get("error", data) if isinstance(data, Mapping) else event.data
            return Chunk(error=_error_text(body), error_kind=error_kind(body))
        if not isinstance(data, dict):
            return Chunk(malformed=True)
        return self.object(data)

    def object(self, data: Mapping[str, Any]) -> Chunk:
        """Decode one chunk, or a whole non-streaming answer, that is already parsed."""
        told = data.get("usage")
        usage = None if told is None else _usage(told)
        told = data.get("timings")
        timings = None if told is None else _timings(told)
        native = "choices" not in data and "content" in data and ("stop" in data or "tokens_predicted" in data)
        if native and usage is None and data.get("stop") is True:
            usage = Usage(_count(data.get("tokens_evaluated")), _count(data.get("tokens_predicted")))
        emissions = self._native(data) if native else self._choices(data, usage, timings)
        metrics = data.get("metrics")
        error = data.get("error")
        return Chunk(
            emissions=emissions,
            usage=usage,
            timings=timings,
            metrics=metrics if isinstance(metrics, dict) else None,
            error=_error_text(error) if error else None,
            error_kind=error_kind(error) if error else None,
            id=_word(data.get("id")),
            model=_word(data.get("model")),
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _difference(self, total: int | None) -> int | None:
        """Tokens since the chunk before, from a running total; null where there is none, or it fell."""
        if total is None or total < self._running:
            return None
        new = total - self._running
        self._running = total
        return new

    def _native(self, data: Mapping[str, Any]) -> tuple[Emission, ...]:
        total = _count(data.get("tokens_predicted"))
        ids = data.get("tokens")
        count = self._difference(total) if total is not None else len(ids) if isinstance(ids, list) else None
        reason = None
        if data.get("stop") is True:
            kind = data.get("stop_type")
            reason = {"limit": "length", "eos": "stop", "word": "stop"}.get(kind, "stop") if isinstance(kind, str) else "stop"
        text = bool(data.get("content"))
        if not text and not count and reason is None:
            return ()
        index = _count(data.get("index")) or 0
        return (Emission(index, count if (text or count) else 0, text, False, reason),)

    def _choices(self, data: Mapping[str, Any], usage: Usage | None, timings: Timings | None) -> tuple[Emission, ...]:
        choices = data.get("choices")
        if not isinstance(choices, list) or not choices:
            return ()
        # A running total speaks of the whole request: with several sequences it can't be split.
        total = timings.predicted_tokens if timings else usage.output if usage else None
        lone = total is not None and len(choices) == 1 and not (self._sequences.keys() - {0})
        out = []
        for choice in choices[:1024]:
            if not isinstance(choice, dict):
                continue
            index = _count(choice.get("index")) or 0
            # A finish chunk's total also counts tokens that came without a total before: it can't be used as a difference.
            final = choice.get("finish_reason") is not None
            running = total if lone and index == 0 and (not final or self._running) else None
            one = self._choice(choice, index, running)
            if one is not None:
                out.append(one)
        return tuple(out)

    def _choice(self, choice: Mapping[str, Any], index: int, running: int | None) -> Emission | None:
        state = self._sequences.get(index)
        if state is None:
            state = self._sequences[index] = _Sequence()
        body = choice.get("delta")
        if not isinstance(body, dict):
            body = choice.get("message")
        if isinstance(body, dict):
            visible = bool(body.get("content") or body.get("refusal") or body.get("tool_calls") or body.get("function_call"))
            plain = body.get("reasoning"), body.get("reasoning_content")
            reasoning = plain != _NOTHING and any(map(_text, plain))
            parts = body.get("reasoning_details"), body.get("thinking_blocks")
            if parts != _NOTHING and (structured := "".join(map(_text, parts))):
                # Both are always asked: the memory of what was said must not depend on the plain field beside it.
                reasoning = state.new_reasoning(structured) or reasoning
        else:
            visible, reasoning = bool(choice.get("text")), False
        count = _listed(choice)
        difference = None if running is None else self._difference(running)
        if count is None:
            count = difference
        reason = _word(choice.get("finish_reason"))
        if not visible and not reasoning and not count:
            return Emission(index, 0, False, False, reason) if reason else None
        return Emission(index, count, visible, reasoning, reason)


def _text(value: object) -> str:
    """The text in a reasoning field: a string, or a list of parts of which only text and summaries count (not ``data``)."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "".join(v for k in ("text", "summary", "content", "thinking") if isinstance(v := value.get(k), str))
    if isinstance(value, list):
        return "".join(_text(v) for v in value[:256] if isinstance(v, Mapping | str))
    return ""


def _listed(choice: Mapping[str, Any]) -> int | None:
    """Tokens that the chunk lists one by one: ``token_ids``, or ``logprobs`` of either form; null if it lists none."""
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        return len(ids)
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        for key in ("content", "tokens"):
            listed = logprobs.get(key)
            if isinstance(listed, list) and listed:
                return len(listed)
    return None
