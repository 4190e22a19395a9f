"""What a request's body asks for, as far as the trace keeps it: never its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hoptrace.collectors.engines.hashing import Prompt, prompt_of

__all__ = ["Asked", "model_name", "read_body"]

_MAX = 1 << 53


@dataclass(slots=True)
class Asked:
    """``role``: what the server is to do for it, by vLLM's ``kv_transfer_params``."""

    model: str | None
    max_tokens: int | None
    priority: int | None
    prompt: Prompt | None
    role: str = "both"

    def columns(self) -> dict[str, Any]:
        """Its columns in `requests`; null where it tells nothing."""
        prompt = self.prompt
        return {
            "model": self.model, "max_tokens": self.max_tokens, "priority": self.priority,
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
        return None
    if not isinstance(asked, Mapping):
        return None
    model, priority = asked.get("model"), asked.get("priority")
    limits = (asked.get(name) for name in ("max_completion_tokens", "max_tokens", "n_predict"))
    return Asked(
        model=model_name(model) if isinstance(model, str) and model else None,
        max_tokens=next((n for n in limits if type(n) is int and 0 <= n < _MAX), None),
        priority=priority if type(priority) is int and abs(priority) < _MAX else None,
        prompt=prompt_of(asked),
        role=_role(asked.get("kv_transfer_params")),
    )


def _role(told: object) -> str:
    if isinstance(told, Mapping):
        if told.get("do_remote_decode") is True:
            return "prefill"
        if told.get("do_remote_prefill") is True:
            return "decode"
    return "both"
