"""Names and values of a comparison's figures as people read them."""

from __future__ import annotations

from hoptrace.analysis.compare.diff_change import Change
from hoptrace.analysis.compare.diff_figures import LATENCIES
from hoptrace.analysis.latency.parts import CLASSES, PARTS
from hoptrace.analysis.text import bytes_text, count_text, duration_text

__all__ = ["label", "signed", "step", "value"]

_TITLE = {
    "ttft": "TTFT", "visible_ttft": "visible TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "end to end",
    "after_ttft": "after first token", "queue": "queue",
}  # fmt: skip
_PARTS = {p.name: p.label for p in PARTS}
_SHARES = {k.replace(" ", "_") + "_share": f"{k}, share" for k in CLASSES}


def label(name: str) -> str:
    """What a figure is called: queue_slots.mean → queue, no slot."""
    head, _, tail = name.partition(".")
    if name.startswith("bytes_per_token["):
        return name[len("bytes_per_token[") : -1]
    if head in _PARTS:
        return _PARTS[head] if tail == "mean" else f"{_PARTS[head]}, around {tail}"
    if head in _SHARES:
        return _SHARES[head] + (f", around {tail}" if tail else "")
    if head in LATENCIES:
        return f"{_TITLE[head]} {tail}"
    if head in ("queue_of", "service_of"):
        return f"{'queue' if head == 'queue_of' else 'service'} of {tail}"
    if head.startswith(("operations_per_token", "wait_ns_per_token")) and "." in tail:
        kind, _, basis = tail.rpartition(".")
        return f"{kind} {head.replace('wait_ns', 'wait').replace('_', ' ')} ({basis})"
    if head == "stays_per_answer":
        return "servers visited per answer"
    words = head.replace("wait_ns", "waiting").replace("_ns_", "_").replace("link_bytes", "bytes × links").replace("_", " ")
    return f"{words} ({tail})" if tail else words


def value(v: float | None, unit: str) -> str:
    """A value in its unit; an en dash if unknown."""
    if unit == "ns":
        return duration_text(v)
    if unit == "bytes":
        return bytes_text(v)
    if unit == "share":
        return "–" if v is None else f"{100 * v:.2g} %" if 0 < abs(v) < 0.0995 else f"{100 * v:.1f} %"
    return count_text(v)


def signed(v: float | None, unit: str) -> str:
    """A difference with its sign; of shares in percentage points."""
    if unit == "share":
        return "–" if v is None else f"{100 * v:+.2f} pp"
    text = value(v, unit)
    return f"+{text}" if v is not None and v > 0 else text


def step(c: Change) -> str:
    """A → B."""
    return f"{value(c.a, c.unit)} → {value(c.b, c.unit)}"
