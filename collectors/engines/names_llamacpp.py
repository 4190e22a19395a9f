"""llama.cpp's metrics. From tools/server of llama.cpp b11549, checked against a page of a real one."""

from __future__ import annotations

from hoptrace.collectors.engines.names import Names, expand

__all__ = ["KNOWN", "RENAMED"]

NAMES: Names = {
    # Of prompts without what the cache served, since 2025.
    "llamacpp:prompt_tokens": ("counter", "tokens"),
    "llamacpp:prompt_tokens_cached": ("counter", "tokens"),
    "llamacpp:prompt_seconds": ("seconds", "s"),
    "llamacpp:tokens_predicted": ("counter", "tokens"),
    "llamacpp:tokens_predicted_seconds": ("seconds", "s"),
    "llamacpp:n_decode": ("counter", "calls"),
    # Declared a counter, but it is a high-water mark.
    "llamacpp:n_tokens_max": ("whole", "tokens"),
    "llamacpp:spec_decode_num_draft_tokens": ("counter", "tokens"),
    "llamacpp:spec_decode_num_accepted_tokens": ("counter", "tokens"),
    "llamacpp:spec_decode_num_accepted_tokens_per_pos": ("counter", "tokens"),
    "llamacpp:spec_decode_num_drafts": ("counter", "drafts"),
    # Averages since the server's start, not rates of now.
    "llamacpp:prompt_tokens_seconds": ("gauge", "tokens/s"),
    "llamacpp:predicted_tokens_seconds": ("gauge", "tokens/s"),
    "llamacpp:n_busy_slots_per_decode": ("gauge", "slots"),
    "llamacpp:requests_processing": ("whole", "requests"),
    "llamacpp:requests_deferred": ("whole", "requests"),
    # Of earlier versions.
    "llamacpp:kv_cache_usage_ratio": ("gauge", "ratio"),
    "llamacpp:kv_cache_tokens": ("whole", "tokens"),
}

KNOWN = expand(NAMES)

RENAMED: dict[str, str] = {}
"""None known."""
