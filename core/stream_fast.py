"""The usual chunk, read fast: one choice, text or plain reasoning, nothing else. It is the work of every token.

msgspec decodes only the named fields, several times faster than building all objects. Whatever is not of this plain kind is left
to the general reader, which a test holds to say the same.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["ABSENT", "REASONING", "VISIBLE", "read_plain"]

ABSENT, VISIBLE, REASONING = 0, 1, 2
_Word = Annotated[str, msgspec.Meta(max_length=256)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


# A field of type None is one that must be null or absent: anything else in it fails the decoding, and the general reader has it.
class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[None] | None = None
    function_call: None = None
    reasoning_details: None = None
    thinking_blocks: None = None


class _Choice(msgspec.Struct, gc=False):
    index: _Index | None = None
    text: str | None = None
    delta: _Delta | None = None
    message: None = None
    finish_reason: _Word | None = None
    token_ids: None = None
    logprobs: None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: tuple[_Choice]
    id: _Word | None = None
    model: _Word | None = None
    request_id: None = None
    usage: None = None
    timings: None = None
    metrics: None = None
    error: None = None
    prompt_progress: None = None


_decode = msgspec.json.Decoder(_Chunk).decode
_FAILURES = (msgspec.DecodeError, UnicodeError, RecursionError)


def read_plain(data: str) -> tuple[str | None, str | None, int, int, str | None] | None:
    """(id, model, index, which of VISIBLE and REASONING, finish reason); null if the chunk is not of the plain kind."""
    try:
        chunk = _decode(data)
    except _FAILURES:
        return None
    choice = chunk.choices[0]
    delta = choice.delta
    if delta is None:
        what = VISIBLE if choice.text else ABSENT
    elif delta.tool_calls:
        return None
    else:
        what = VISIBLE if delta.content or delta.refusal else ABSENT
        if delta.reasoning or delta.reasoning_content:
            what |= REASONING
    return chunk.id or None, chunk.model or None, choice.index or 0, what, choice.finish_reason or None
