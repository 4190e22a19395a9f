"""What a local GGUF file says of its model: geometry, parameters, size. Reads the header only; no tensor is loaded.

Follows the GGUF specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The `gguf` package's own reader builds
an object for every token of the vocabulary, which takes seconds; this skips what it does not need.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hoptrace.errors import InputError

__all__ = ["GgufModel", "read_gguf"]

_MAX_ITEMS = 1 << 26
_MAX_STRING = 1 << 24
_KEEP_STRING = 1 << 16
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
# Weights in a block and bytes of a block, by ggml's number of the tensor type (a test holds them against the `gguf` package).
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98),
    19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model as its file describes it; null is unknown. ``weight_bytes``: the tensors' bytes; ``file_bytes``: the whole file."""

    architecture: str | None
    name: str | None
    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_size: int | None
    hidden_size: int | None
    context_tokens: int | None
    parameters: int
    weight_bytes: int
    file_bytes: int


def read_gguf(path: Path | str) -> GgufModel:
    """Read a GGUF file's header (versions 2 and 3, little-endian). A file in several parts describes its own part only.

    Raises:
        InputError: no such file, or not a GGUF file.
    """
    file = Path(path)
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            return _read(f, size)
    except OSError as e:
        raise InputError(f"{file} cannot be read: {e.strerror}.") from None
    except (struct.error, ValueError, UnicodeDecodeError, KeyError, OverflowError) as e:
        raise InputError(f"{file} is no GGUF file that hoptrace can read ({e}).") from None


def _read(f: BinaryIO, file_bytes: int) -> GgufModel:
    if f.read(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = _number(f, "I")
    if version not in (2, 3):
        raise ValueError(f"version {version}")
    tensors, pairs = int(_number(f, "Q")), int(_number(f, "Q"))
    if tensors > _MAX_ITEMS or pairs > _MAX_ITEMS:
        raise ValueError("its header counts more entries than a file can hold")
    meta: dict[str, object] = {}
    for _ in range(pairs):
        key = _string(f)
        meta[key] = _value(f, int(_number(f, "I")), file_bytes)
    parameters, weight_bytes = _tensors(f, tensors)

    arch = meta.get("general.architecture")

    def whole(key: str) -> int | None:
        value = meta.get(f"{arch}.{key}")
        # Some models give one value per layer: then the largest stands for all.
        if isinstance(value, list):
            value = max(value, default=None)
        return value if isinstance(value, int) and value > 0 else None

    heads, hidden = whole("attention.head_count"), whole("embedding_length")
    head_size = whole("attention.key_length") or (hidden // heads if heads and hidden else None)
    name = meta.get("general.name")
    return GgufModel(
        architecture=arch if isinstance(arch, str) else None,
        name=name if isinstance(name, str) else None,
        layers=whole("block_count"),
        heads=heads,
        kv_heads=whole("attention.head_count_kv") or heads,
        head_size=head_size,
        hidden_size=hidden,
        context_tokens=whole("context_length"),
        parameters=parameters,
        weight_bytes=weight_bytes,
        file_bytes=file_bytes,
    )


def _tensors(f: BinaryIO, count: int) -> tuple[int, int]:
    parameters = weight_bytes = 0
    for _ in range(count):
        _string(f)
        dims = int(_number(f, "I"))
        if dims > 8:
            raise ValueError(f"a tensor of {dims} dimensions")
        elements = 1
        for _ in range(dims):
            elements *= int(_number(f, "Q"))
        kind = int(_number(f, "I"))
        if kind not in _BLOCKS:
            raise ValueError(f"tensors of type {kind} are not known")
        block, block_bytes = _BLOCKS[kind]
        _number(f, "Q")
        parameters += elements
        weight_bytes += elements // block * block_bytes
    return parameters, weight_bytes


def _number(f: BinaryIO, code: str) -> int | float | bool:
    value: int | float | bool = struct.unpack("<" + code, f.read(struct.calcsize("<" + code)))[0]
    return value


def _string(f: BinaryIO) -> str:
    length = int(_number(f, "Q"))
    if length > _MAX_STRING:
        raise ValueError(f"a string of {length} bytes")
    if length > _KEEP_STRING:
        f.seek(length, 1)
        return ""
    data = f.read(length)
    if len(data) < length:
        raise ValueError("it ends within a string")
    return data.decode("utf-8", "replace")


def _value(f: BinaryIO, kind: int, file_bytes: int) -> object:
    if kind == _STRING:
        return _string(f)
    if kind != _ARRAY:
        return _number(f, _SCALARS[kind])
    inner, count = int(_number(f, "I")), int(_number(f, "Q"))
    if count > min(_MAX_ITEMS, file_bytes):
        raise ValueError(f"an array of {count} items")
    if inner == _STRING:
        for _ in range(count):
            f.seek(int(_number(f, "Q")), 1)
        return None
    code = _SCALARS[inner]
    width = struct.calcsize("<" + code)
    if count > 4096:
        f.seek(count * width, 1)
        return None
    data = f.read(count * width)
    return list(struct.unpack(f"<{count}{code}", data))
