"""Dynamo's metrics: its frontend's, its router's and its workers'.

From lib/runtime/src/metrics/prometheus_names.rs of 2026, checked against a recorded page of a frontend. A worker's page has its
engine's metrics too, under the engine's own names.
"""

from __future__ import annotations

from hoptrace.collectors.engines import names_sglang, names_trtllm, names_vllm
from hoptrace.collectors.engines.names import Names, expand

__all__ = ["KNOWN", "RENAMED"]

_F, _C, _R = "dynamo_frontend_", "dynamo_component_", "dynamo_router_"

NAMES: Names = {
    f"{_F}requests": ("counter", "requests"),
    f"{_F}request_success_count": ("counter", "requests"),
    f"{_F}queued_requests": ("whole", "requests"),
    f"{_F}inflight_requests": ("whole", "requests"),
    f"{_F}active_requests": ("whole", "requests"),
    f"{_F}stage_requests": ("whole", "requests"),
    # Grows like a counter, yet Dynamo declares it a gauge and says that it can fall.
    f"{_F}disconnected_clients": ("whole", "clients"),
    f"{_F}request_duration_seconds": ("histogram", "s"),
    f"{_F}input_sequence_tokens": ("histogram", "tokens"),
    f"{_F}output_sequence_tokens": ("histogram", "tokens"),
    f"{_F}cached_tokens": ("histogram", "tokens"),
    f"{_F}kv_hit_rate": ("histogram", "ratio"),
    f"{_F}tokenizer_latency_ms": ("histogram", "ms"),
    f"{_F}output_tokens": ("counter", "tokens"),
    f"{_F}time_to_first_token_seconds": ("histogram", "s"),
    f"{_F}inter_token_latency_seconds": ("histogram", "s"),
    f"{_F}model_total_kv_blocks": ("whole", "blocks"),
    f"{_F}model_max_num_seqs": ("whole", "requests"),
    f"{_F}model_max_num_batched_tokens": ("whole", "tokens"),
    f"{_F}model_context_length": ("whole", "tokens"),
    f"{_F}model_kv_cache_block_size": ("whole", "tokens"),
    f"{_F}model_migration_limit": ("whole", "migrations"),
    f"{_F}model_migration": ("counter", "migrations"),
    f"{_F}worker_active_decode_blocks": ("whole", "blocks"),
    f"{_F}worker_active_prefill_tokens": ("whole", "tokens"),
    f"{_F}worker_last_time_to_first_token_seconds": ("gauge", "s"),
    f"{_F}worker_last_input_sequence_tokens": ("whole", "tokens"),
    f"{_F}worker_last_inter_token_latency_seconds": ("gauge", "s"),
    f"{_F}router_queue_pending_requests": ("whole", "requests"),
    f"{_F}stage_duration_seconds": ("histogram", "s"),
    f"{_F}tokenize_seconds": ("histogram", "s"),
    f"{_F}template_seconds": ("histogram", "s"),
    f"{_F}detokenize_per_token_us": ("histogram", "us"),
    f"{_F}event_loop_delay_seconds": ("histogram", "s"),
    f"{_F}event_loop_stall": ("counter", "stalls"),
    f"{_C}requests": ("counter", "requests"),
    f"{_C}request_bytes": ("counter", "bytes"),
    f"{_C}response_bytes": ("counter", "bytes"),
    f"{_C}inflight_requests": ("whole", "requests"),
    f"{_C}request_duration_seconds": ("histogram", "s"),
    f"{_C}errors": ("counter", "errors"),
    f"{_C}network_transit_seconds": ("histogram", "s"),
    f"{_C}time_to_first_response_seconds": ("histogram", "s"),
    f"{_C}uptime_seconds": ("gauge", "s"),
    f"{_C}total_blocks": ("whole", "blocks"),
    # "percent", yet 1 is full
    f"{_C}gpu_cache_usage_percent": ("gauge", "ratio"),
    f"{_C}model_load_time_seconds": ("gauge", "s"),
    f"{_C}kv_publisher_engines_dropped_events": ("counter", "events"),
    f"{_C}router_requests": ("counter", "requests"),
    f"{_C}router_time_to_first_token_seconds": ("histogram", "s"),
    f"{_C}router_inter_token_latency_seconds": ("histogram", "s"),
    f"{_C}router_input_sequence_tokens": ("histogram", "tokens"),
    f"{_C}router_output_sequence_tokens": ("histogram", "tokens"),
    f"{_C}router_kv_hit_rate": ("histogram", "ratio"),
    f"{_R}overhead_block_hashing_ms": ("histogram", "ms"),
    f"{_R}overhead_indexer_find_matches_ms": ("histogram", "ms"),
    f"{_R}overhead_seq_hashing_ms": ("histogram", "ms"),
    f"{_R}overhead_scheduling_ms": ("histogram", "ms"),
    f"{_R}overhead_total_ms": ("histogram", "ms"),
    "dynamo_request_plane_queue_seconds": ("histogram", "s"),
    "dynamo_request_plane_send_seconds": ("histogram", "s"),
    "dynamo_request_plane_roundtrip_ttft_seconds": ("histogram", "s"),
    "dynamo_request_plane_inflight": ("whole", "requests"),
    "dynamo_transport_tcp_bytes_sent": ("counter", "bytes"),
    "dynamo_transport_tcp_bytes_received": ("counter", "bytes"),
    "dynamo_transport_tcp_errors": ("counter", "errors"),
    "dynamo_transport_tcp_pool_active": ("whole", "connections"),
    "dynamo_transport_tcp_pool_idle": ("whole", "connections"),
    "dynamo_transport_tcp_server_queue_depth": ("whole", "requests"),
    "dynamo_transport_nats_errors": ("counter", "errors"),
}

KNOWN = names_vllm.KNOWN | names_sglang.KNOWN | names_trtllm.KNOWN | expand(NAMES)

RENAMED = names_vllm.RENAMED | names_sglang.RENAMED | {f"{_F}inflight_requests": f"{_F}active_requests"}
"""What a vanished metric is called now."""
