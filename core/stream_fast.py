"""The usual chunk, read fast: one choice, text or plain reasoning, nothing else. It is the work of every token.

msgspec decodes only the named fields, several times faster than building all objects. Whatever is not of this plain kind is left
to the general reader, which a test holds to say the same.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

__all__ = ["ABSENT", "REASONING", "VISIBLE", "read_plain"]

ABSENT, VISIBLE, REASONING = 0, 1, 2
_NONE = Raw()
_EMPTY = (b"", b"null")
_RARE_NONE = (_NONE,) * 8


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: Raw = _NONE
    function_call: Raw = _NONE
    reasoning_details: Raw = _NONE
    thinking_blocks: Raw = _NONE


class _Choice(msgspec.Struct, gc=False):
    index: int | None = None
    text: str | None = None
    delta: _Delta | None = None
    message: Raw = _NONE
    finish_reason: str | None = None
    token_ids: Raw = _NONE
    logprobs: Raw = _NONE


class _Chunk(msgspec.Struct, gc=False):
    choices: tuple[_Choice]
    id: str | None = None
    model: str | None = None
    request_id: Raw = _NONE
    usage: Raw = _NONE
    timings: Raw = _NONE
    metrics: Raw = _NONE
    error: Raw = _NONE
    prompt_progress: Raw = _NONE


_decode = msgspec.json.Decoder(_Chunk).decode


def read_plain(data: str) -> tuple[str | None, str | None, int, int, str | None] | None:
    """(id, model, index, which of VISIBLE and REASONING, finish reason); null if the chunk is not of the plain kind."""
    try:
        chunk = _decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    choice = chunk.choices[0]
    # Identity first: it costs next to nothing, and these fields are hardly ever there.
    rare = (
        chunk.usage, chunk.timings, chunk.error, chunk.metrics, chunk.prompt_progress, choice.logprobs, choice.token_ids,
        choice.message,
    )  # fmt: skip
    if rare != _RARE_NONE and any(bytes(v) not in _EMPTY for v in rare):
        return None
    index = choice.index or 0
    told_id, model, reason = chunk.id or None, chunk.model or None, choice.finish_reason or None
    if index < 0 or (told_id is None and chunk.request_id is not _NONE) or (reason is None and choice.finish_reason is not None):
        return None
    for text in (told_id, model, reason):
        if text is not None and len(text) > 256:
            return None
    delta = choice.delta
    if delta is None:
        return told_id, model, index, VISIBLE if choice.text else ABSENT, reason
    if delta.reasoning_details is not _NONE or delta.thinking_blocks is not _NONE or delta.function_call is not _NONE:
        return None
    if delta.tool_calls is not _NONE and bytes(delta.tool_calls) not in (b"null", b"[]"):
        return None
    what = VISIBLE if delta.content or delta.refusal else ABSENT
    if delta.reasoning or delta.reasoning_content:
        what |= REASONING
    return told_id, model, index, what, reason
