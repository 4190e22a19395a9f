"""What a request asks for, as far as the trace keeps it: never its text, never its keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hoptrace.collectors.engines.streams.hashing import HashKey, Prompt, keyed, messages_of, prompt_of

__all__ = ["Asked", "model_name", "read_body", "session_of", "tenant_of"]

_MAX = 1 << 53
_MOST_CHOICES = 10_000
_SESSION_HEADERS = ("x-session-id", "x-conversation-id", "x-chat-id", "x-openwebui-chat-id", "session-id")
_SESSION_FIELDS = ("session_id", "conversation_id", "conversation", "chat_id", "prompt_cache_key", "user")


@dataclass(slots=True)
class Asked:
    """``role``: what the server is to do for it, by vLLM's ``kv_transfer_params``. ``messages``: a chat's, one by one;
    ``speakers``: their roles; ``continues``: identifier of the answer that it continues (OpenAI Responses); ``choices``:
    sequences of each prompt."""

    model: str | None = None
    max_tokens: int | None = None
    priority: int | None = None
    adapter: str | None = None
    prompt: Prompt | None = None
    role: str = "both"
    request_id: str | None = None
    session: str | None = None
    continues: str | None = None
    choices: int = 1
    messages: list[str] = field(default_factory=list)

    def columns(self) -> dict[str, Any]:
        """Its columns in `requests`; null where it tells nothing."""
        prompt = self.prompt
        return {
            "model": self.model, "max_tokens": self.max_tokens, "priority": self.priority, "adapter": self.adapter,
            "prompt_chars": len(prompt.text) if prompt is not None and prompt.text is not None else None,
            "prompt_tokens": len(prompt.tokens) if prompt is not None and prompt.tokens is not None else None,
        }  # fmt: skip


def model_name(name: str) -> str:
    """llama.cpp names a model by its file: keep the file's name, not where it lies on the machine."""
    return (name.rsplit("/", 1)[-1] if name.startswith("/") else name)[:256]


def read_body(body: bytes) -> Asked | None:
    """Read it; null if it is no JSON object."""
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        try:
            asked = json.loads(body)  # lone surrogates, NaN: what most servers take
        except (ValueError, RecursionError):
            return None
    if not isinstance(asked, Mapping):
        return None
    model, priority, adapter = asked.get("model"), asked.get("priority"), asked.get("lora_path", asked.get("adapter_id"))
    request_id, continues = asked.get("request_id"), asked.get("previous_response_id")
    return Asked(
        model=model_name(model) if isinstance(model, str) and model else None,
        max_tokens=_limit(asked),
        priority=priority if type(priority) is int and abs(priority) < _MAX else None,
        adapter=model_name(adapter) if isinstance(adapter, str) and adapter else None,
        prompt=prompt_of(asked),
        role=_role(asked.get("kv_transfer_params")),
        request_id=request_id if isinstance(request_id, str) and request_id else None,
        session=_told(asked.get(name) for name in _SESSION_FIELDS),
        continues=continues if isinstance(continues, str) and continues else None,
        choices=n if type(n := asked.get("n")) is int and 1 < n <= _MOST_CHOICES else 1,
        messages=messages_of(asked) or [],
    )


def session_of(headers: Mapping[str, str]) -> str | None:
    """The conversation that a header names."""
    return _told(headers.get(name) for name in _SESSION_HEADERS)


def tenant_of(headers: Mapping[str, str], key: HashKey | None) -> str | None:
    """A keyed hash of the API key: who pays, without what they pay with."""
    told = headers.get("authorization") or headers.get("x-api-key") or headers.get("api-key")
    return keyed(key, "tenant", told.removeprefix("Bearer ")) if told and key is not None else None


def _told(values: Any) -> str | None:
    for value in values:
        if isinstance(value, Mapping):
            value = value.get("id")
        if isinstance(value, str) and value:
            return value
    return None


def _limit(asked: Mapping[str, Any]) -> int | None:
    places = (asked, asked.get("parameters"), asked.get("sampling_params"))  # TGI; SGLang and vLLM
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens", "max_new_tokens", "n_predict")
    found = (place.get(name) for place in places if isinstance(place, Mapping) for name in names)
    return next((n for n in found if type(n) is int and 0 <= n < _MAX), None)


def _role(told: object) -> str:
    if isinstance(told, Mapping):
        if told.get("do_remote_decode") is True:
            return "prefill"
        if told.get("do_remote_prefill") is True:
            return "decode"
    return "both"
