"""All figures of one trace that a comparison compares, by the names that rules use."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hoptrace.analysis.compare.bootstrap import STATS
from hoptrace.analysis.compare.diff_figure import Figure, per_token
from hoptrace.analysis.compare.diff_ledger import BASES, MOVED, TIERS, ledger_figures, reuse_of
from hoptrace.analysis.compare.diff_side import Side
from hoptrace.analysis.latency.parts import CLASSES, PARTS
from hoptrace.metrics import stat

__all__ = ["LATENCIES", "SECTIONS", "around", "could_be", "figures", "share_name"]

LATENCIES = ("ttft", "visible_ttft", "itl", "tpot", "after_ttft", "e2e", "queue")
SECTIONS = ("metrics", "parts", "shares", "servers", "ledger", "coordination")
_NAMES = {"mean": "all", "p50": "p50", "p95": "p95", "p99": "p99"}


def around(name: str) -> str:
    """The composition of a statistic: mean → all."""
    return _NAMES[name]


def share_name(klass: str) -> str:
    """repeated work → repeated_work_share."""
    return klass.replace(" ", "_") + "_share"


def could_be(name: str) -> bool:
    """Whether some trace has a figure of that name, though these two may not."""
    head, _, tail = name.partition(".")
    if head in LATENCIES or any(p.name == head for p in PARTS):
        return tail in STATS
    if any(share_name(k) == head for k in CLASSES):
        return tail in ("", *STATS[1:])
    families = (
        rf"({'|'.join(MOVED)}|memory_bytes|weight_bytes|kv_bytes|kv_moved_bytes|kv_transfers)_per_token\.({'|'.join(BASES)})",
        rf"(operations|wait_ns)_per_token(\.\w+)?\.({'|'.join(BASES)})",
        rf"bytes_per_operation\.({'|'.join(BASES)})",
        rf"cached_share(\.({'|'.join(TIERS)}))?",
        r"(amplification|queue_of|service_of)\.\S+",
        r"bytes_per_token\[.+\]",
        rf"byte_latency_per_token\.({'|'.join(BASES)})",
        r"recomputed_tokens_per_token|resumed_tokens_per_token|computed_prompt_tokens_per_token",
        r"output_tokens_per_s|requests_per_s|decode_tokens_per_step|stays_per_answer",
        r"run_delay_share|run_delay_ns_per_token|cpu_ns_per_token|switches_per_token",
    )
    return any(re.fullmatch(f, name) for f in families)


def figures(side: Side) -> dict[str, Figure]:
    """Every figure of a trace. Names are the same in every trace; those of servers, nodes and ways name what the trace has."""
    return dict(_all(side))


def _all(side: Side) -> Iterator[tuple[str, Figure]]:
    yield from _metrics(side)
    yield from _parts(side)
    yield from _servers(side)
    yield from ledger_figures(side)
    yield from reuse_of(side)
    yield from _coordination(side)


def _metrics(side: Side) -> Iterator[tuple[str, Figure]]:
    s = side.summary
    for name in LATENCIES:
        found = s[name] if name in s else stat(side.rows[name + "_ns"])
        for q in STATS:
            yield f"{name}.{q}", Figure(getattr(found, q + "_ns"), "ns", "metrics", True)
    yield "output_tokens_per_s", Figure(s.output_tokens_per_s, "tokens/s", "metrics", False)
    yield "requests_per_s", Figure(s.requests_per_s, "requests/s", "metrics", False)


def _parts(side: Side) -> Iterator[tuple[str, Figure]]:
    """Mean ns of each part over all requests and around each percentile of end-to-end time; shares of the classes."""
    found = side.accounting.compositions
    for q in STATS:
        c = found.get(around(q))
        for p in PARTS:
            v = None if c is None else c.parts[p.name]
            yield f"{p.name}.{q}", Figure(None if v is None else round(v), "ns", "parts", True)
        for klass in CLASSES:
            name = share_name(klass) + ("" if q == "mean" else f".{q}")
            yield name, Figure(None if c is None else c.class_shares[klass], "share", "shares")


def _servers(side: Side) -> Iterator[tuple[str, Figure]]:
    """Time per finished request in each server's queue and in its hands; null where a stay does not know its times."""
    n = side.work.finished
    for r in side.servers.to_dicts():
        for what in ("queue", "service"):
            known = n and not r[f"{what}_unknown"] and r[f"{what}_ns"] is not None
            yield f"{what}_of.{r['server']}", Figure(r[f"{what}_ns"] / n if known else None, "ns", "servers", True)


def _coordination(side: Side) -> Iterator[tuple[str, Figure]]:
    """Operations per output token by kind; what is only known as 'at least so many' is no figure to compare."""
    found = side.coordination
    rows = found.operations.to_dicts()
    for kind, basis in sorted({(r["kind"], r["basis"]) for r in rows}):
        mine = [r for r in rows if (r["kind"], r["basis"]) == (kind, basis)]
        known = not any(r.get("at_least") or r["per_output_token"] is None for r in mine)
        value = sum(r["per_output_token"] for r in mine) if known else None
        yield f"operations_per_token.{kind}.{basis}", Figure(value, "1", "coordination", None, basis)
    for basis in sorted({r["basis"] for r in rows}):
        timed = [r["wait_ns"] for r in rows if r["basis"] == basis and r["wait_ns"] is not None]
        value = per_token(float(sum(timed)), side.ledger.output_tokens or None) if timed else None
        yield f"wait_ns_per_token.{basis}", Figure(value, "ns", "coordination", True, basis)
    for basis in sorted({d.basis for d in found.density}):
        mine_d = [d for d in found.density if d.basis == basis]
        ops = sum(d.control_ops for d in mine_d)
        value = sum(d.payload_bytes for d in mine_d) / ops if ops else None
        yield f"bytes_per_operation.{basis}", Figure(value, "bytes", "coordination", False, basis)
    os = found.os
    if os is not None:
        switches = [n for n in (os.voluntary_switches, os.involuntary_switches) if n is not None]
        yield "run_delay_share", Figure(os.run_delay_share, "share", "coordination", None, "counted")
        yield "run_delay_ns_per_token", Figure(os.per_token(os.run_delay_ns), "ns", "coordination", True, "counted")
        yield "cpu_ns_per_token", Figure(os.per_token(os.cpu_ns), "ns", "coordination", True, "counted")
        yield (
            "switches_per_token",
            Figure(os.per_token(sum(switches)) if len(switches) == 2 else None, "1", "coordination", None, "counted"),
        )
