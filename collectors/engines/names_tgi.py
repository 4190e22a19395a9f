"""Text Generation Inference's metrics, from docs/source/reference/metrics.md of TGI 3 and a recorded page.

TGI has no running total of tokens: the sums of its per-request histograms grow when a request ends, not while it runs.
"""

from __future__ import annotations

from hoptrace.collectors.engines.names import Names, expand

__all__ = ["KNOWN", "RENAMED"]

NAMES: Names = {
    "tgi_queue_size": ("whole", "requests"),
    "tgi_batch_current_size": ("whole", "requests"),
    "tgi_batch_current_max_tokens": ("whole", "tokens"),
    "tgi_batch_next_size": ("histogram", "requests"),
    "tgi_batch_next_tokens": ("histogram", "tokens"),
    "tgi_batch_concat": ("counter", "batches"),
    "tgi_batch_inference_count": ("counter", "calls"),
    "tgi_batch_inference_success": ("counter", "calls"),
    "tgi_batch_inference_failure": ("counter", "calls"),
    "tgi_batch_inference_duration": ("histogram", "s"),
    "tgi_batch_forward_duration": ("histogram", "s"),
    "tgi_batch_decode_duration": ("histogram", "s"),
    "tgi_batch_filter_duration": ("histogram", "s"),
    "tgi_batch_concat_duration": ("histogram", "s"),
    "tgi_request_count": ("counter", "requests"),
    "tgi_request_success": ("counter", "requests"),
    "tgi_request_failure": ("counter", "requests"),
    "tgi_request_duration": ("histogram", "s"),
    "tgi_request_queue_duration": ("histogram", "s"),
    "tgi_request_inference_duration": ("histogram", "s"),
    "tgi_request_validation_duration": ("histogram", "s"),
    "tgi_request_mean_time_per_token_duration": ("histogram", "s"),
    "tgi_request_input_length": ("histogram", "tokens"),
    "tgi_request_max_new_tokens": ("histogram", "tokens"),
    "tgi_request_generated_tokens": ("histogram", "tokens"),
    "tgi_request_skipped_tokens": ("histogram", "tokens"),
}

KNOWN = expand(NAMES)

RENAMED: dict[str, str] = {}
"""TGI has renamed none of them."""
