"""A model's geometry from its Hugging Face ``config.json``, and its size from the headers of its safetensors files.

Field names: transformers' configuration classes. Models that pack a text model beside others (``text_config``, ``llm_config``)
are read there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hoptrace.errors import InputError

__all__ = ["ModelConfig", "find_config", "read_config", "weights_of"]

_LIMIT_BYTES = 4 << 20
_HEADER_BYTES = 64 << 20
_FILES = 1000


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What config.json says; null is not said. ``head_size`` is of one KV head (of the latent cache for MLA: ``kv_lora_rank`` +
    ``qk_rope_head_dim``, with one KV head); ``window_tokens`` of sliding attention; ``quantisation`` names the method.

    ``kv_layers``: layers that keep KV, where not all do (hybrids with Mamba or linear attention); ``window_layers``: those of
    them whose attention slides."""

    architecture: str | None = None
    model_type: str | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    vocabulary: int | None = None
    context_tokens: int | None = None
    dtype: str | None = None
    quantisation: str | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    window_tokens: int | None = None
    mla: bool = False
    kv_layers: int | None = None
    window_layers: int | None = None


def read_config(path: Path) -> ModelConfig:
    """``path`` is config.json or its folder. InputError names the file and what is wrong."""
    file = path / "config.json" if path.is_dir() else path
    try:
        if file.stat().st_size > _LIMIT_BYTES:
            raise InputError(f"{file} is no model's config.json: it is longer than 4 MiB.")
        data = json.loads(file.read_text("utf-8"))
    except OSError as e:
        raise InputError(f"{file} can't be read: {e.strerror}.") from None
    except (ValueError, RecursionError) as e:
        raise InputError(f"{file} is no JSON ({type(e).__name__}).") from None
    if not isinstance(data, Mapping):
        raise InputError(f"{file} is no model's config.json: it holds no object.")
    return _config(data)


def _config(data: Mapping[str, Any]) -> ModelConfig:
    text: Mapping[str, Any] = data
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = text.get(name)
        if isinstance(inner, Mapping):
            text = inner

    def first(*names: str) -> int | None:
        for source in (text, data):
            for name in names:
                value = source.get(name)
                if type(value) is int and 0 < value < 1 << 40:
                    return value
        return None

    heads, hidden = first("num_attention_heads", "n_head", "num_heads"), first("hidden_size", "n_embd", "d_model")
    kv_heads, head_size = first("num_key_value_heads", "num_kv_heads", "n_head_kv"), first("head_dim")
    if kv_heads is None and text.get("multi_query") is True:
        kv_heads = 1
    if head_size is None and heads and hidden and hidden % heads == 0:
        head_size = hidden // heads
    rank, rope = first("kv_lora_rank"), first("qk_rope_head_dim")
    mla = rank is not None and rope is not None
    if mla:
        assert rank is not None and rope is not None
        kv_heads, head_size = 1, rank + rope
    dtype = text.get("dtype") or text.get("torch_dtype") or data.get("dtype") or data.get("torch_dtype")
    names = data.get("architectures")
    type_ = data.get("model_type")
    window = first("sliding_window", "attention_chunk_size") if text.get("use_sliding_window", True) is not False else None
    layers = first("num_hidden_layers", "n_layer", "num_layers")
    kv_layers, window_layers = _layer_kinds(text, layers, window)
    return ModelConfig(
        architecture=names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None,
        model_type=type_ if isinstance(type_, str) else None,
        layers=layers,
        heads=heads,
        # Without a number of its own every head has one.
        kv_heads=kv_heads or heads,
        head_size=head_size,
        hidden_size=hidden,
        intermediate_size=first("intermediate_size", "n_inner", "ffn_dim"),
        vocabulary=first("vocab_size"),
        context_tokens=first("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"),
        dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        quantisation=_quantisation(data, text),
        experts=first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        experts_per_token=first("num_experts_per_tok", "moe_top_k", "experts_per_token", "top_k_experts"),
        window_tokens=window,
        mla=mla,
        kv_layers=kv_layers,
        window_layers=window_layers,
    )


# Kinds of `layer_types` (transformers, configuration_utils.ALLOWED_LAYER_TYPES) by what they keep of each position.
_SLIDES = ("sliding_attention", "chunked_attention")
_KEEPS_ALL = ("full_attention", "attention", "global_attention", "sparse", "hybrid")


def _layer_kinds(text: Mapping[str, Any], layers: int | None, window: int | None) -> tuple[int | None, int | None]:
    """(layers that keep KV, where not all do; those of them with a window): from the list of kinds, or from the rules by which
    transformers makes it for configurations older than the list."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds and all(isinstance(k, str) for k in kinds):
        slides, full = sum(k in _SLIDES for k in kinds), sum(k in _KEEPS_ALL for k in kinds)
        keeps = slides + full
        return (keeps if keeps and keeps != len(kinds) else None), (slides or None) if window else None
    pattern = text.get("hybrid_override_pattern")  # Nemotron-H: * attention, M Mamba, - feed-forward
    if isinstance(pattern, str) and "*" in pattern:
        return pattern.count("*"), None
    if not layers:
        return None, None
    if (every := _positive(text, "full_attention_interval")) is not None:  # Qwen3-Next: every nth layer is attention
        return layers // every or None, None
    if (period := _positive(text, "attn_layer_period")) is not None:  # Jamba
        offset = text.get("attn_layer_offset")
        return len(range(offset if type(offset) is int and 0 <= offset < period else 0, layers, period)), None
    if window is None:
        return None, None
    if (every := _positive(text, "sliding_window_pattern", "_sliding_window_pattern")) is not None:  # Gemma 3, Cohere 2
        return None, layers - layers // every
    if text.get("model_type") in ("gemma2", "gpt_oss"):  # every second layer, from the first
        return None, (layers + 1) // 2
    if (upto := _positive(text, "max_window_layers")) is not None and "use_sliding_window" in text:  # Qwen 2: from that layer on
        return None, max(0, layers - upto) or None
    return None, layers


def _positive(text: Mapping[str, Any], *names: str) -> int | None:
    return next((v for n in names if type(v := text.get(n)) is int and v > 0), None)


def _quantisation(data: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    for source in (data, text):
        for name in ("quantization_config", "compression_config"):
            told = source.get(name)
            if isinstance(told, Mapping):
                method = told.get("quant_method") or told.get("quant_algo") or told.get("format")
                bits = told.get("bits") or told.get("w_bit")
                if isinstance(method, str):
                    return f"{method} {bits} bit" if type(bits) is int else method
                return "unnamed"
    return None


def find_config(name: str, *, root: Path = Path("/"), home: Path | None = None, cache: Path | None = None) -> Path | None:
    """The folder of the model ``name`` (a path, or ``org/model`` in the Hugging Face cache) as a process sees it, or null.

    ``root`` is the process's root (``/proc/PID/root``), ``home`` its home directory, ``cache`` its ``HF_HUB_CACHE``; the latter
    two within its root. Layout of the cache: ``models--org--model/refs/REVISION`` names the folder in ``snapshots/``.
    """
    folder = _inside(root, Path(name)) if name.startswith("/") else None
    if folder is not None:
        return folder if (folder / "config.json").is_file() else None
    if name.count("/") > 1 or name.startswith((".", "~", "-")) or "\\" in name:
        return None
    places = [cache] if cache is not None else []
    if home is not None:
        places.append(home / ".cache/huggingface/hub")
    for place in places:
        repository = _inside(root, place) / f"models--{name.replace('/', '--')}"
        snapshots = repository / "snapshots"
        try:
            revision = (repository / "refs/main").read_text("ascii", "replace").strip()
            if (snapshots / revision / "config.json").is_file():
                return snapshots / revision
            found = sorted(s for s in snapshots.iterdir() if (s / "config.json").is_file())
        except OSError:
            continue
        if len(found) == 1:
            return found[0]
    return None


def _inside(root: Path, path: Path) -> Path:
    """``path`` of a process whose root is ``root``, as seen from here."""
    return path if root == Path("/") else root / str(path).lstrip("/")


def weights_of(folder: Path, held_bytes: int | None = None) -> tuple[int | None, int] | None:
    """(parameters, bytes) of a model's safetensors files, from their headers alone; null if there are none or one can't be read.

    Format: 8 bytes little-endian length of the header, the header in JSON, the data (https://github.com/huggingface/safetensors).
    Parameters are null where tensors are packed (integer types): their elements are no weights. ``held_bytes``: bytes that the
    server keeps of each element of a plain floating type, where that is known; a model on the disk is often wider or narrower.
    Files with packed or 8-bit tensors keep their size: what such a method does with its scales is its own.
    """
    files = sorted(folder.glob("*.safetensors"))[:_FILES]
    # Some repositories hold the same weights twice; the shards of the index are the model.
    shards = [f for f in files if "-of-" in f.name]
    chosen = shards if shards and len(shards) < len(files) else files
    if not chosen:
        return None
    parameters, size, packed, plain = 0, 0, False, True
    for file in chosen:
        try:
            with file.open("rb") as f:
                length = int.from_bytes(f.read(8), "little")
                if not 2 <= length <= _HEADER_BYTES:
                    return None
                header = json.loads(f.read(length))
            data, end = file.stat().st_size - 8 - length, 0
            size += data
            for name, tensor in header.items():
                if name == "__metadata__":
                    continue
                end = max(end, int(tensor["data_offsets"][1]))
                parameters += math.prod(int(n) for n in tensor["shape"])
                packed |= tensor["dtype"] in ("I8", "U8", "I16", "I32", "U32", "I64")
                plain &= tensor["dtype"] in ("F64", "F32", "F16", "BF16")
            if end != data:
                return None  # the file is cut, or none
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
    return (None if packed else parameters), (parameters * held_bytes if plain and held_bytes is not None else size)
