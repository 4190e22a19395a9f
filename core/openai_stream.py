"""Decodes the chunks of one stream, in order: which tokens, visible or reasoning, totals, why it ended, errors.

Reads chat completions and completions here, the other dialects in :mod:`hoptrace.stream_dialects`; the same objects as whole
answers too. Text is looked at and forgotten; only structured reasoning is kept while its stream runs, to tell new text from text
that is sent again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hoptrace.sse import DONE, ServerSentEvent
from hoptrace.stream_chunk import (
    Chunk,
    Emission,
    Progress,
    Timings,
    Usage,
    error_kind,
    error_text,
    read_count,
    read_progress,
    read_timings,
    read_usage,
    read_vllm_metrics,
    usage_over,
    usage_sum,
    word,
)
from hoptrace.stream_dialects import Running, other_dialect
from hoptrace.stream_fast import ABSENT, REASONING, VISIBLE, read_plain

__all__ = ["Chunk", "Emission", "Progress", "StreamDecoder", "Timings", "Usage", "error_kind", "usage_over", "usage_sum"]

_KEPT_REASONING_CHARS = 1 << 20
_NOTHING = (None, None)
_MISSES = 16


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
        self._running = Running()
        self._misses = 0

    def event(self, event: ServerSentEvent) -> Chunk:
        """Decode one server-sent event; never raises for what a server sends."""
        if event.data == DONE:
            return Chunk(done=True)
        plain = self.plain(event)
        if plain is not None:
            return self._plain(*plain)
        try:
            data = json.loads(event.data)
        except (ValueError, RecursionError):
            data = None
        if event.event == "error":
            body = data.get("error", data) if isinstance(data, Mapping) else event.data
            return Chunk(error=error_text(body), error_kind=error_kind(body))
        if not isinstance(data, dict):
            return Chunk(malformed=True)
        return self.object(data)

    def plain(self, event: ServerSentEvent) -> tuple[str | None, str | None, int, int, str | None] | None:
        """The usual chunk without the making of one: see :func:`hoptrace.stream_fast.read_plain`. Null: ask :meth:`event`."""
        if event.event == "error" or self._misses > _MISSES:
            return None
        plain = read_plain(event.data)
        if plain is None:
            self._misses += 1  # a stream with totals in each chunk is never plain: trying costs, too
        else:
            self._misses = 0
            if plain[2] not in self._sequences:
                self._sequences[plain[2]] = _Sequence()
        return plain

    def object(self, data: Mapping[str, Any]) -> Chunk:
        """Decode one chunk, or a whole non-streaming answer, that is already parsed."""
        if "choices" not in data:
            other = other_dialect(data, self._running)
            if other is not None:
                return other
        told = data.get("usage")
        usage = None if told is None else read_usage(told)
        told = data.get("timings")
        timings = None if told is None else read_timings(told)
        emissions = self._choices(data, usage, timings)
        if timings is None and data.get("metrics") is not None:
            timings = read_vllm_metrics(data["metrics"])
        # vLLM before 0.11 and SGLang name it so, without "error" around it.
        error = data.get("error") or (data if data.get("object") == "error" else None)
        return Chunk(
            emissions=emissions,
            usage=usage,
            timings=timings,
            progress=read_progress(data.get("prompt_progress")),
            error=error_text(error) if error else None,
            error_kind=error_kind(error) if error else None,
            id=word(data.get("id")) or word(data.get("request_id")),
            model=word(data.get("model")),
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _plain(self, told_id: str | None, model: str | None, index: int, what: int, reason: str | None) -> Chunk:
        """A chunk of one choice with nothing in it but text: nearly all are."""
        if what != ABSENT:
            emission = Emission(index, None, bool(what & VISIBLE), bool(what & REASONING), reason)
        elif reason:
            emission = Emission(index, 0, False, False, reason)
        else:
            return Chunk(id=told_id, model=model)
        return Chunk((emission,), id=told_id, model=model)

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
            index = read_count(choice.get("index")) or 0
            # A finish chunk's total also counts tokens that came without a total before: it can't be used as a difference.
            final = choice.get("finish_reason") is not None
            running = total if lone and index == 0 and (not final or self._running.of(0)) else None
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
            # Token in, token out (vLLM's /inference/v1/generate): what a client sees are the ids.
            visible = bool(choice.get("text")) or ("text" not in choice and bool(choice.get("token_ids")))
            reasoning = False
        count = _listed(choice)
        difference = None if running is None else self._running.difference(0, running)
        if count is None:
            count = difference
        reason = word(choice.get("finish_reason"))
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
