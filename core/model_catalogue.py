"""Models by name, or by their config.json, for a trace that does not say what it served."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from hoptrace.errors import InputError, UsageError
from hoptrace.hf_config import read_config
from hoptrace.manifest import Server
from hoptrace.model_shape import Shape

__all__ = ["ASSUMED_MODEL", "Model", "known_as", "load_model", "models"]

ASSUMED_MODEL = "llama-3.1-8b"
"""Taken, and said to be taken, where neither the trace nor the user names a model."""


@dataclass(frozen=True)
class Model:
    """A model: ``name`` here, ``model`` as its publisher calls it, the shape, and where each figure comes from.

    ``contexts``: names of models of this shape whose context is another."""

    name: str
    model: str
    shape: Shape
    aliases: tuple[str, ...] = ()
    contexts: Mapping[str, int] | None = None
    sources: Mapping[str, str] | None = None

    def on(self, server: Server) -> Server:
        """``server`` serving this model: what it is made of is the model's, the server's other configuration stays. How much KV
        it has room for is not known then."""
        found = self.shape.server_fields()
        kept = {k: v for k, v in server.config.items() if k not in _OF_A_MODEL}
        context = server.context_tokens or self.shape.context_tokens
        own = {"model": self.model, "context_tokens": context, "config": {**kept, **found["config"]}}
        return server.model_copy(update={**found, **own, "kv_capacity_tokens": None, "block_count": None})


_OF_A_MODEL = (
    "vocabulary", "active_parameters", "intermediate_size", "experts", "experts_per_token", "routed_bytes", "window_tokens",
    "window_layers", "mla", "kv_lora_latent_size", "kv_layers", "prefill_pair_flop", "decode_pair_flop",
)  # fmt: skip


@cache
def models() -> dict[str, Model]:
    """The models that come with hoptrace, by name."""
    found = {}
    for entry in sorted(files("hoptrace.models").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".toml"):
            data = tomllib.loads(entry.read_text(encoding="utf-8"))
            shape = {f.name: data[f.name] for f in fields(Shape) if f.name in data}
            if "latent" in shape:
                shape["latent"] = tuple(shape["latent"])
            name = str(data["name"])
            found[name] = Model(
                name, data["model"], Shape(**shape), tuple(data.get("aliases", ())), data.get("contexts"), data["sources"]
            )
    return found


def known_as(name: str) -> Model | None:
    """The model of that name: as here, as its publisher calls it with or without organisation, or by another name."""
    wanted = name.strip().lower()
    short = wanted.rsplit("/", 1)[-1]
    for model in models().values():
        if {wanted, short} & {model.name, model.model.lower(), model.model.lower().rsplit("/", 1)[-1], *model.aliases}:
            other = next((c for n, c in (model.contexts or {}).items() if n in (wanted, short)), None)
            return model if other is None else replace(model, shape=replace(model.shape, context_tokens=other))
    return None


def load_model(name_or_config: str) -> Model:
    """A model by its name, or from its config.json (or the folder that has it).

    Raises:
        UsageError: neither. InputError: the file is no config.json, or of a kind whose parameters can't be told from it.
    """
    model = known_as(name_or_config)
    if model is not None:
        return model
    path = Path(name_or_config)
    if name_or_config.strip() and _there(path):
        return _from_config(path)
    names = [*models(), *(m.model for m in models().values())]
    near = difflib.get_close_matches(name_or_config, names, n=1) or difflib.get_close_matches(name_or_config.lower(), names, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise UsageError(
        f"There is no model {name_or_config!r}.", hint=f"{hint}There are: {', '.join(models())}; or the path of a config.json."
    )


def _there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a name, or a null in it
        return False


# Architectures whose layers :class:`Shape` counts exactly (tests/test_model_catalogue.py, against published totals).
_SAME_AS: dict[str, dict[str, bool]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen3": {"head_norms": True},
    "qwen3_moe": {"head_norms": True},
    "deepseek_v3": {"router_bias": True},
    "gpt_oss": {"bias": True},
}


def _from_config(path: Path) -> Model:
    config = read_config(path)
    file = path / "config.json" if path.is_dir() else path
    data = json.loads(file.read_text("utf-8"))
    if config.model_type not in _SAME_AS:
        raise InputError(
            f"{file}: the parameters of a model of type {config.model_type!r} can't be told from its config.json.",
            hint=f"Types that can: {', '.join(_SAME_AS)}. Or name a like model: {', '.join(models())}.",
        )
    needed = {
        "layers": config.layers, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "heads": config.heads, "kv_heads": config.kv_heads, "head_size": config.head_size, "vocabulary": config.vocabulary,
    }  # fmt: skip
    missing = [k for k, v in needed.items() if v is None]
    if missing:
        raise InputError(f"{file} does not say {', '.join(missing)}.")

    if config.kv_heads and config.heads and config.heads % config.kv_heads:
        raise InputError(f"{file}: {config.heads} attention heads do not share {config.kv_heads} KV heads evenly.")
    if (
        data.get("decoder_sparse_step") not in (None, 1)
        or data.get("mlp_only_layers")
        or data.get("moe_layer_freq") not in (None, 1)
    ):
        raise InputError(
            f"{file}: layers with and without experts take turns (decoder_sparse_step, mlp_only_layers, moe_layer_freq), and "
            "their parameters can't be told from it.",
            hint=f"Name a like model: {', '.join(models())}.",
        )

    def count(name: str) -> int:
        value = data.get(name)
        return value if type(value) is int and value >= 0 else 0

    more: dict[str, Any] = dict(_SAME_AS[config.model_type])
    if config.experts:
        more |= {
            "experts": config.experts,
            "experts_per_token": config.experts_per_token or 0,
            "expert_intermediate_size": count("moe_intermediate_size") or config.intermediate_size,
            "shared_experts": count("n_shared_experts"),
            "dense_layers": count("first_k_dense_replace"),
        }
    if config.mla:
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if not all(count(n) for n in names):
            raise InputError(f"{file} does not say all of {', '.join(names)}.")
        more["latent"] = tuple(count(n) for n in names)
        needed["kv_heads"], needed["head_size"] = count("num_key_value_heads") or config.heads, count("v_head_dim")
    if config.window_tokens and config.window_layers:
        more |= {"window_tokens": config.window_tokens, "window_layers": config.window_layers}
    method = next(iter((config.quantisation or "").split()), None) or ("unnamed" if config.quantisation else None)
    if method == "mxfp4":
        more["expert_dtype"] = "mxfp4"
    elif method == "fp8":
        more["dtype"] = "fp8"
    elif method is not None:
        raise InputError(f"{file}: bytes of weights quantised by {config.quantisation!r} are not known here.")
    elif config.dtype is not None:
        more["dtype"] = config.dtype
    try:
        shape = Shape(tied=data.get("tie_word_embeddings") is True, context_tokens=config.context_tokens, **needed, **more)  # type: ignore[arg-type]
    except InputError as e:
        raise InputError(f"{file}: {e.message}", hint=e.hint) from None
    name = data.get("_name_or_path")
    return Model(path.stem if path.is_file() else path.name, name if isinstance(name, str) and name else str(path), shape,
                 sources={"shape": str(file)})  # fmt: skip
