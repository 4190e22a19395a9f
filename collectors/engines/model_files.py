"""A server's model as its files on this machine describe it: geometry, size, quantisation."""

from __future__ import annotations

import os
from pathlib import Path

from hoptrace.collectors.context import Context
from hoptrace.errors import InputError
from hoptrace.hf_config import ModelConfig, find_config, read_config, weights_of
from hoptrace.kv import DTYPE_BYTES
from hoptrace.manifest import Server

__all__ = ["fill_from_model", "places_of"]

_VARIABLES = (b"HF_HUB_CACHE", b"HUGGINGFACE_HUB_CACHE", b"HF_HOME", b"XDG_CACHE_HOME", b"HOME")


def places_of(pid: int) -> tuple[Path, Path | None, Path | None]:
    """(root, home, Hugging Face hub cache) of a process. Of its environment these five variables are read, and nothing else."""
    told: dict[bytes, Path] = {}
    try:
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name in _VARIABLES and value:
                told[name] = Path(os.fsdecode(value))
    except OSError:
        pass
    cache = told.get(b"HF_HUB_CACHE") or told.get(b"HUGGINGFACE_HUB_CACHE")
    if cache is None and b"HF_HOME" in told:
        cache = told[b"HF_HOME"] / "hub"
    if cache is None and b"XDG_CACHE_HOME" in told:
        cache = told[b"XDG_CACHE_HOME"] / "huggingface/hub"
    root = Path(f"/proc/{pid}/root")
    try:
        root = Path("/") if root.samefile("/") else root
    except OSError:
        root = Path("/")
    return root, told.get(b"HOME"), cache


def fill_from_model(ctx: Context, name: str | None) -> list[str]:
    """Fill the server's geometry from the model ``name`` (path or ``org/model``), as its process sees it; gives notes.

    Only for a server whose process is on this machine: elsewhere the same name may be another model. What the server itself told
    stays as it told it.
    """
    server = ctx.server
    if name is None:
        return [f"{server.name}: layers and heads are not known: the server does not tell its model's path."]
    pid = ctx.find().pid if ctx.find is not None else None
    if pid is None:
        return [
            f"{server.name}: layers and heads are not known: the server's process, and so its model's files, are not seen here."
        ]
    root, home, cache = places_of(pid)
    if not name.startswith("/"):
        try:
            beside = Path(f"/proc/{pid}/cwd") / name
            if (beside / "config.json").is_file():
                return _fill(server, beside)
        except OSError:
            pass
    folder = find_config(name, root=root, home=home, cache=cache)
    if folder is None:
        return [f"{server.name}: layers and heads are not known: {name} has no config.json that can be read here."]
    return _fill(server, folder)


def _fill(server: Server, folder: Path) -> list[str]:
    try:
        config = read_config(folder)
    except InputError as e:
        return [f"{server.name}: layers and heads are not known: {e.message}"]
    for name, value in _geometry(config).items():
        if value is not None and getattr(server, name) is None:
            setattr(server, name, value)
    for name in (
        "architecture", "quantisation", "experts", "experts_per_token", "window_tokens", "window_layers", "kv_layers",
        "vocabulary", "mla",
    ):  # fmt: skip
        if (value := getattr(config, name)) and name not in server.config:
            server.config[name] = value
    notes = []
    if config.dtype and server.config.get("dtype") in (None, "auto"):
        if config.dtype in ("float32", "float"):
            # vLLM and SGLang serve such a model in 16 bits unless they are told --dtype float32 (or the platform has none).
            notes.append(f"{server.name}: the model's files are float32; what it is served in is not known (--dtype tells).")
        else:
            server.config["dtype"] = config.dtype
    dtype, method = server.config.get("dtype"), server.config.get("quantization")
    held = DTYPE_BYTES.get(str(dtype).lower())
    found = weights_of(folder, None if held is None else int(held))
    if found is None:
        return notes
    parameters, size = found
    if server.parameters is None:
        server.parameters = parameters
    if method not in (None, "", "None", "none") and config.quantisation is None:
        notes.append(f"{server.name}: the weights are quantised on loading ({method}): their bytes in memory are not known.")
    elif server.weight_bytes is None and (held is not None or config.quantisation is not None):
        server.weight_bytes = size
    return notes


def _geometry(config: ModelConfig) -> dict[str, int | None]:
    return {n: getattr(config, n) for n in ("layers", "heads", "kv_heads", "head_size", "hidden_size")}
