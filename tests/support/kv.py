"""KV events as vLLM 0.32 encodes them."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["batch", "removed", "stored"]

_pack = msgspec.msgpack.encode


def stored(hashes: list[Any], parent: Any = None, size: int = 32, medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    """As vLLM 0.32 encodes it: a map; ``omit_defaults`` leaves out what is null from ``extra_keys`` on."""
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
            "token_ids": list(range(size * len(hashes))), "block_size": size, "lora_id": None, "medium": medium,
            "lora_name": None, **more}  # fmt: skip


def removed(hashes: list[Any], medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **more}


def batch(*happened: Any, at: float = 1_700_000_000.0, rank: int | None = 0) -> bytes:
    return _pack([at, list(happened), rank])
