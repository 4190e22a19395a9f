"""Keyed hashes of a prompt's leading blocks: enough to see which prompts share a prefix, not what they say.

Each block's hash covers all blocks before it (keyed BLAKE2b, 8 bytes, chained), so equal hashes mean equal prefixes. The key
belongs to a capture group and stays on this machine; without it a guess at a prompt cannot be checked against a trace.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

__all__ = [
    "CHARS_PER_BLOCK", "TOKENS_PER_BLOCK", "HashKey", "Prompt", "keyed", "load_key", "messages_of", "prefix_hashes",
    "prompt_of",
]  # fmt: skip

CHARS_PER_BLOCK = 64
TOKENS_PER_BLOCK = 16
_MAX_BLOCKS = 16_384


@dataclass(frozen=True, slots=True)
class HashKey:
    """A capture group's key. ``space`` names it in traces: the group and the key's fingerprint, which does not give it away."""

    group: str
    key: bytes

    @property
    def space(self) -> str:
        return f"{self.group}:{blake2b(self.key, digest_size=6, person=b'hoptrace-space').hexdigest()}"


def load_key(group: str = "default", folder: Path | None = None) -> HashKey:
    """The group's key from the user's data folder, made on first use (file mode 0600).

    Where the folder can't be written, a key for this run only, under a name of its own: its hashes match no other trace's.
    """
    from platformdirs import user_data_path

    path = (folder or user_data_path("hoptrace") / "groups") / f"{group}.key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            pass
        else:
            with os.fdopen(fd, "wb") as f:
                f.write(secrets.token_bytes(32))
        key = path.read_bytes()
        if len(key) == 32:
            return HashKey(group, key)
    except OSError:
        pass
    return HashKey(f"{group}-once", secrets.token_bytes(32))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it can be cut into blocks: text, or token ids."""

    text: str | None = None
    tokens: Sequence[int] | None = None

    @property
    def unit(self) -> str:
        return "characters" if self.tokens is None else "tokens"

    @property
    def block_size(self) -> int:
        return CHARS_PER_BLOCK if self.tokens is None else TOKENS_PER_BLOCK


def prompt_of(body: Mapping[str, Any]) -> Prompt | None:
    """The prompt in a request's body; null for several prompts in one request, and for content that is no text.

    Chat messages are serialised as role and content, each ended by a control character, so that no two lists read alike; tools
    and a system prompt beside the messages come before them, as chat templates put them.
    """
    for name in ("prompt", "inputs", "input_ids", "token_ids", "text"):
        prompt = body.get(name)
        if prompt is None:
            continue
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return Prompt(text=prompt)
        if isinstance(prompt, list) and prompt and all(type(t) is int and 0 <= t < 1 << 32 for t in prompt):
            return Prompt(tokens=prompt)
        if name == "prompt" and isinstance(prompt, list):
            return None
    messages = messages_of(body)
    return None if messages is None else Prompt(text="".join(messages))


def messages_of(body: Mapping[str, Any]) -> list[str] | None:
    """The messages of a chat one by one, as they are hashed, with what comes before them as the first; null for no chat, and for
    content that is no text (an image or audio: characters would not scale to tokens)."""
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str) and messages and "messages" not in body:
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        return None
    out = []
    before = [body.get(name) for name in ("tools", "system", "instructions")]
    if any(before):
        out.append("\x1e".join(p if isinstance(p, str) else _json(p) for p in before if p) + "\x1d")
    for message in messages:
        if not isinstance(message, Mapping):
            return None
        content = message.get("content")
        if isinstance(content, list):
            parts = [_part(p) for p in content]
            if None in parts:
                return None
            content = "\x1e".join(p for p in parts if p is not None)
        text = content if isinstance(content, str) else ""
        called = [message[k] for k in ("tool_calls", "arguments", "output") if message.get(k)]
        if called:
            text += "\x1e" + "\x1e".join(c if isinstance(c, str) else _json(c) for c in called)
        role = message.get("role") or message.get("type")
        out.append(f"{role}\x1f{text}\x1d")
    return out


_TEXT_PARTS = ("text", "thinking", "content", "input", "summary")


def _part(part: object) -> str | None:
    """One part of a message's content as text; null if it is none."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or any(w in str(part.get("type")) for w in ("image", "audio", "video", "file", "document")):
        return None
    for key in _TEXT_PARTS:
        value = part.get(key)
        if isinstance(value, str):
            return value
        if value is not None and key in ("content", "input", "summary"):
            return _json(value)
    return None


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def keyed(key: HashKey, kind: str, text: str) -> str:
    """A name for something that must not be stored: the same for the same text under the same key, and nothing else."""
    data = text.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=8, key=key.key, person=kind.encode()[:16]).hexdigest()


def prefix_hashes(prompt: Prompt, key: HashKey) -> Iterator[int]:
    """One signed 64-bit hash for each whole block; the part of the prompt after the last whole block has none."""
    size = prompt.block_size
    source: Sequence[Any] = prompt.text if prompt.text is not None else prompt.tokens or ()
    chain = prompt.unit.encode()
    for i in range(min(len(source) // size, _MAX_BLOCKS)):
        block = source[i * size : (i + 1) * size]
        data = (
            block.encode("utf-8", "surrogatepass") if isinstance(block, str) else b"".join(t.to_bytes(4, "little") for t in block)
        )
        chain = blake2b(chain + data, digest_size=8, key=key.key).digest()
        yield int.from_bytes(chain, "little", signed=True)
