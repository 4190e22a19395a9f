"""SGLang's log: the line of each prefill batch and of every ``--decode-log-interval`` decode batches, into `counters`.

Format: srt/managers/scheduler_components/metrics_reporter.py of 0.5.23. The lines tell a batch's size and no length, so they make
no steps: forward-pass metrics do (``--enable-forward-pass-metrics``).
"""

from __future__ import annotations

import re

from hoptrace.collectors.engines.log_source import LogSource

__all__ = ["SglangLog", "batch_of"]

_LINE = re.compile(r"(?:\[[^\]]*?(?: DP(\d+))?(?: TP\d+)?(?: PP\d+)?(?: EP\d+)?\] )?(Prefill|Decode) batch(?: \[\d+\])?, (.*)$")
_PAIR = re.compile(r"(#?[A-Za-z][A-Za-z0-9 _./()-]*?): (-?[\d.]+)(?=,|$)")
_NAMES = {
    "#new-seq": ("new_requests", "requests"), "#new-token": ("new_tokens", "tokens"),
    "#cached-token": ("cached_tokens", "tokens"), "#running-req": ("running", "requests"), "#queue-req": ("waiting", "requests"),
    "#pending-token": ("pending_tokens", "tokens"), "#token": ("kv_tokens", "tokens"), "token usage": ("kv_usage", "ratio"),
    "full token usage": ("kv_usage", "ratio"), "swa token usage": ("kv_usage_sliding", "ratio"),
    "mamba usage": ("state_usage", "ratio"), "accept len": ("accept_length", "tokens"), "accept rate": ("accept_rate", "ratio"),
    "gen throughput (token/s)": ("generation_tokens_per_s", "tokens/s"),
    "input throughput (token/s)": ("prompt_tokens_per_s", "tokens/s"),
    "#retracted-req": ("retracted", "requests"), "#prealloc-req": ("preallocating", "requests"),
    "#transfer-req": ("transferring", "requests"), "#bootstrap-req": ("bootstrapping", "requests"),
    "#inflight-req": ("in_flight", "requests"), "pre-allocated usage": ("preallocated_usage", "ratio"),
}  # fmt: skip


def batch_of(line: str) -> tuple[int, list[tuple[str, float, str]]] | None:
    """(data-parallel rank, (name, value, unit) …) of a batch's line; null for another."""
    m = _LINE.search(line)
    if m is None:
        return None
    kind = m[2].lower()
    figures = []
    for name, value in _PAIR.findall(m[3]):
        known = _NAMES.get(name.strip())
        if known is None:
            continue
        try:
            figures.append((f"log:{kind}:{known[0]}", float(value), known[1]))
        except ValueError:
            continue
    return int(m[1] or 0), figures


class SglangLog(LogSource):
    """Follows SGLang's log."""

    name = "sglang-log"
    order = (2, 1)

    def _line(self, line: str, now: int) -> int:
        if " batch" not in line or (found := batch_of(line)) is None:
            return 0
        rank, figures = found
        return self._counters(figures, now, f"/rank:{rank}" if rank else "")
