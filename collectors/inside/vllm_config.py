"""A vLLM configuration as plain values, by attribute: what a version of vLLM does not have is left out, never guessed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

__all__ = ["config_of_vllm", "dp_rank_of"]


def look(value: Any, path: str) -> Any:
    """``a.b.c`` of an object; null where anything on the way is missing."""
    for name in path.split("."):
        value = getattr(value, name, None)
        if value is None:
            return None
    return value


def _plain(value: Any) -> Any:
    """A value that JSON can say: numbers and short text; a torch type or an enumeration by its name."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value.removeprefix("torch.")[:512]
    return str(getattr(value, "value", value)).removeprefix("torch.")[:128]


# Names on the left are those of hoptrace's manifest (Server) where it has one.
_FIELDS = {
    "model_path": "model_config.model",
    "context_tokens": "model_config.max_model_len",
    "dtype": "model_config.dtype",
    "quantization": "model_config.quantization",
    "layers": "model_config.hf_text_config.num_hidden_layers",
    "heads": "model_config.hf_text_config.num_attention_heads",
    "vocabulary": "model_config.hf_text_config.vocab_size",
    "block_size_tokens": "cache_config.block_size",
    "prefix_caching": "cache_config.enable_prefix_caching",
    "gpu_memory_utilization": "cache_config.gpu_memory_utilization",
    "max_sequences": "scheduler_config.max_num_seqs",
    "max_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "long_prefill_token_threshold": "scheduler_config.long_prefill_token_threshold",
    "scheduling_policy": "scheduler_config.policy",
    "async_scheduling": "scheduler_config.async_scheduling",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
    "data_parallel_size": "parallel_config.data_parallel_size",
    "data_parallel_size_local": "parallel_config.data_parallel_size_local",
    "expert_parallel": "parallel_config.enable_expert_parallel",
    "speculation": "speculative_config.method",
    "speculative_tokens": "speculative_config.num_speculative_tokens",
    "kv_connector": "kv_transfer_config.kv_connector",
    "kv_role": "kv_transfer_config.kv_role",
    "kv_engine_id": "kv_transfer_config.engine_id",
    "kv_events_endpoint": "kv_events_config.endpoint",
    "ec_connector": "ec_transfer_config.ec_connector",
    "device": "device_config.device_type",
    "iteration_details": "observability_config.enable_logging_iteration_details",
}

_METHODS = {"kv_heads": "get_total_num_kv_heads", "head_size": "get_head_size", "hidden_size": "get_hidden_size"}


def config_of_vllm(vllm_config: Any, *, kv_cache_config: Any = None) -> dict[str, Any]:
    """The configuration as plain values; keys are missing where this vLLM does not say.

    ``kv_cache_config`` is what the scheduler gets: it knows one engine's number of blocks. The API server's own number is the sum
    over its data-parallel engines, and is divided.
    """
    found: dict[str, Any] = {}
    for name, path in _FIELDS.items():
        value = _plain(look(vllm_config, path))
        if value is not None:
            found[name] = value
    served = look(vllm_config, "model_config.served_model_name")
    served = served[0] if isinstance(served, list) and served else served
    if isinstance(served, str):
        found["model"] = served[:256]
    for name, method in _METHODS.items():
        value = _try(getattr(look(vllm_config, "model_config"), method, None))
        if isinstance(value, int):
            found[name] = value
    cache = look(vllm_config, "cache_config.cache_dtype")
    if isinstance(cache, str):
        found["kv_dtype"] = found.get("dtype", cache) if cache == "auto" else cache
    blocks = look(kv_cache_config, "num_blocks")
    if not isinstance(blocks, int):
        blocks = look(vllm_config, "cache_config.num_gpu_blocks")
        engines = found.get("data_parallel_size", 1)
        blocks = blocks // engines if isinstance(blocks, int) and engines > 0 and blocks % engines == 0 else None
    if blocks:
        # One block is never handed out (the null block, vllm/v1/core/block_pool.py).
        found["block_count"] = blocks - 1
    capacity = look(vllm_config, "cache_config.kv_cache_size_tokens")
    groups = look(kv_cache_config, "kv_cache_groups")
    found["kv_groups"] = len(groups) if isinstance(groups, list) else None
    if blocks and isinstance(size := found.get("block_size_tokens"), int) and found["kv_groups"] in (None, 1):
        plain = (blocks - 1) * size
        # vLLM's own figure counts the null block too; where groups share the blocks only its figure is right.
        capacity = plain if not isinstance(capacity, int) or capacity == blocks * size else capacity
    if isinstance(capacity, int):
        found["kv_capacity_tokens"] = capacity
    try:
        import vllm

        found["version"] = str(vllm.__version__)
    except Exception:
        found.pop("version", None)
    if transports := os.environ.get("UCX_TLS"):
        found["ucx_tls"] = transports[:256]
    return {k: v for k, v in found.items() if v is not None}


def dp_rank_of(vllm_config: Any) -> int:
    """Data-parallel rank of the engine that this configuration is for. 0 where there is one."""
    for path in ("parallel_config.data_parallel_index", "parallel_config.data_parallel_rank"):
        rank = look(vllm_config, path)
        if isinstance(rank, int):
            return rank
    return 0


def _try(call: Callable[[], Any] | None) -> Any:
    if call is None:
        return None
    try:
        return call()
    except Exception:
        return None
