"""TensorRT-LLM's Prometheus metrics (``/prometheus/metrics``; ``/metrics`` is JSON).

From its source of 2026 (tensorrt_llm/metrics/collector.py) and, for those that Dynamo's worker adds, Dynamo's
(lib/runtime/src/metrics/prometheus_names.rs).
"""

from __future__ import annotations

from hoptrace.collectors.engines.names import Names, expand

__all__ = ["KNOWN", "RENAMED"]

NAMES: Names = {
    "trtllm_request_success": ("counter", "requests"),
    "trtllm_request_error": ("counter", "requests"),
    "trtllm_e2e_request_latency_seconds": ("histogram", "s"),
    "trtllm_time_to_first_token_seconds": ("histogram", "s"),
    "trtllm_time_per_output_token_seconds": ("histogram", "s"),
    "trtllm_request_queue_time_seconds": ("histogram", "s"),
    "trtllm_request_prefill_time_seconds": ("histogram", "s"),
    "trtllm_request_decode_time_seconds": ("histogram", "s"),
    "trtllm_request_inference_time_seconds": ("histogram", "s"),
    "trtllm_prompt_tokens": ("counter", "tokens"),
    "trtllm_generation_tokens": ("counter", "tokens"),
    "trtllm_prompt_cached_tokens": ("counter", "tokens"),
    "trtllm_prompt_cache_hit_tokens": ("counter", "tokens"),
    "trtllm_prompt_cached_tokens_per_request": ("histogram", "tokens"),
    "trtllm_spec_decode_drafted_tokens": ("counter", "tokens"),
    "trtllm_spec_decode_accepted_tokens": ("counter", "tokens"),
    "trtllm_spec_decode_num_draft_tokens": ("counter", "tokens"),
    "trtllm_spec_decode_num_accepted_tokens": ("counter", "tokens"),
    "trtllm_spec_decode_acceptance_length": ("gauge", "tokens"),
    "trtllm_spec_decode_draft_overhead": ("gauge", "ratio"),
    "trtllm_prefill_perplexity": ("histogram", "1"),
    "trtllm_generation_perplexity": ("histogram", "1"),
    "trtllm_scheduled_batch_size": ("histogram", "requests"),
    "trtllm_kv_cache_hit_rate": ("gauge", "ratio"),
    "trtllm_kv_cache_utilization": ("gauge", "ratio"),
    "trtllm_kv_cache_host_utilization": ("gauge", "ratio"),
    "trtllm_kv_cache_iter_reuse_rate": ("gauge", "ratio"),
    "trtllm_kv_cache_reused_blocks": ("counter", "blocks"),
    "trtllm_kv_cache_missed_blocks": ("counter", "blocks"),
    "trtllm_kv_cache_iter_reused_blocks": ("counter", "blocks"),
    "trtllm_kv_cache_iter_full_reused_blocks": ("counter", "blocks"),
    "trtllm_kv_cache_iter_partial_reused_blocks": ("counter", "blocks"),
    "trtllm_kv_cache_iter_missed_blocks": ("counter", "blocks"),
    "trtllm_kv_cache_gen_alloc_blocks": ("counter", "blocks"),
    "trtllm_kv_cache_onboard_bytes": ("counter", "bytes"),
    "trtllm_kv_cache_offload_bytes": ("counter", "bytes"),
    "trtllm_kv_cache_disk_prefetch_blocks": ("counter", "blocks"),
    "trtllm_kv_cache_intra_device_copy_bytes": ("counter", "bytes"),
    "trtllm_kv_cache_max_blocks": ("whole", "blocks"),
    "trtllm_kv_cache_free_blocks": ("whole", "blocks"),
    "trtllm_kv_cache_used_blocks": ("whole", "blocks"),
    "trtllm_kv_cache_tokens_per_block": ("whole", "tokens"),
    "trtllm_num_requests_running": ("whole", "requests"),
    "trtllm_num_requests_waiting": ("whole", "requests"),
    "trtllm_num_requests_completed": ("counter", "requests"),
    "trtllm_max_num_active_requests": ("whole", "requests"),
    # Of the last iteration when it was asked, not a mean.
    "trtllm_iteration_latency_seconds": ("gauge", "s"),
    "trtllm_gpu_memory_usage_bytes": ("whole", "bytes"),
    "trtllm_cpu_memory_usage_bytes": ("whole", "bytes"),
    "trtllm_pinned_memory_usage_bytes": ("whole", "bytes"),
    "trtllm_max_batch_size_static": ("whole", "requests"),
    "trtllm_max_batch_size_runtime": ("whole", "requests"),
    "trtllm_max_num_tokens_runtime": ("whole", "tokens"),
    "trtllm_num_context_requests": ("whole", "requests"),
    "trtllm_num_generation_requests": ("whole", "requests"),
    "trtllm_num_paused_requests": ("whole", "requests"),
    "trtllm_num_scheduled_requests": ("whole", "requests"),
    # Of one iteration, whatever its name says.
    "trtllm_total_context_tokens": ("whole", "tokens"),
    "trtllm_avg_decoded_tokens_per_iter": ("gauge", "tokens"),
    "trtllm_prefill_batch_occupancy": ("gauge", "ratio"),
    "trtllm_prefill_batch_tokens": ("histogram", "tokens"),
    "trtllm_model_config_info": ("whole", "1"),
    "trtllm_parallel_config_info": ("whole", "1"),
    "trtllm_speculative_config_info": ("whole", "1"),
    "trtllm_kv_cache_config_info": ("whole", "1"),
    # Dynamo's worker adds these.
    "trtllm_num_aborted_requests": ("counter", "requests"),
    "trtllm_request_type_image": ("counter", "requests"),
    "trtllm_request_type_structured_output": ("counter", "requests"),
    "trtllm_kv_transfer_success": ("counter", "transfers"),
    "trtllm_kv_transfer_latency_seconds": ("histogram", "s"),
    "trtllm_kv_transfer_bytes": ("histogram", "bytes"),
    "trtllm_kv_transfer_speed_gb_s": ("histogram", "GB/s"),
}

KNOWN = expand(NAMES)

RENAMED: dict[str, str] = {}
"""None known."""
