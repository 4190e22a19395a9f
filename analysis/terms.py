"""Everything that `hoptrace explain` can explain: metrics, parts and classes of latency, figures of ledger and coordination."""

from __future__ import annotations

import difflib

from hoptrace.analysis.parts import CLASSES, PARTS
from hoptrace.analysis.term import Term, sql_of
from hoptrace.errors import UsageError
from hoptrace.metrics import METRICS

__all__ = ["Term", "find", "terms"]


_COORDINATION = [
    Term(
        "coordination_share",
        "coordination",
        "coordination share",
        "share of e2e",
        "Σ coordination ÷ Σ e2e",
        "How much of what users waited for was arranging. An overloaded server shows capacity, not coordination. At a "
        "percentile: over the requests around it by end-to-end time.",
    ),
    Term(
        "operations_per_token",
        "coordination",
        "operations per token",
        "operations/token",
        "Σ count of waits of a kind ÷ output tokens",
        "Recorded waits of coordination kinds, whether a request or a step waited. Transfer, recompute, queue and capacity "
        "belong to other figures.",
        sql_of("coordination_waits"),
    ),
    Term(
        "semantic_density",
        "coordination",
        "semantic density",
        "bytes/operation",
        "payload bytes ÷ control operations",
        "How much is carried for each operation that only arranges. Over the moves that know both; counted and assumed apart.",
        sql_of("coordination_density"),
    ),
    Term(
        "run_delay",
        "coordination",
        "run-queue delay",
        "ns",
        "Σ increase of run_delay_ns of the server's processes",
        "Time in which a thread of the server wanted a CPU and had none. Its share: delay ÷ (delay + CPU time).",
        sql_of("counter_totals"),
    ),
]

_LEDGER = [
    Term(
        "moves",
        "ledger",
        "moves",
        "bytes, transfers, hops",
        "sums of `moves` by object, way, mechanism and basis",
        "What went from one place to another. Hops and control operations are those of a transfer's access path, times the "
        "transfers. Counted, derived and assumed figures are never added up. Memory → compute comes from `steps`: weight_bytes, "
        "kv_read_bytes, kv_write_bytes.",
        sql_of("ledger_moves"),
    ),
    Term(
        "amplification",
        "ledger",
        "amplification",
        "×",
        "bytes moved for an object over all links ÷ its size, counted once",
        "How often an object was carried: 1 would be each byte once over one link. Given where the size is known: weights "
        "(manifest), KV (as written), tokens (4 bytes an id, assumed), prompts (1 byte a character, assumed).",
    ),
    Term(
        "reuse",
        "ledger",
        "reuse",
        "share of prompt tokens",
        "Σ cached_tokens ÷ Σ prompt_tokens, over stays that know both",
        "Prompt tokens that a cache gave, by tier where the engine tells it. Own tokens found again after a preemption "
        "(resumed_tokens) are no reuse and are counted apart.",
    ),
]


def terms() -> dict[str, Term]:
    """All terms by name, in the order in which they are listed."""
    out = [Term(m.name, "metric", m.title, m.unit, m.formula, m.doc, m.sql) for m in METRICS.values()]
    out += [
        Term(
            p.name,
            "part of latency",
            p.label,
            "ns",
            _part_formula(p.name, p.klass),
            p.doc + (f" Needs: {p.needs}." if p.needs else ""),
        )
        for p in PARTS
    ]
    for name, doc in CLASSES.items():
        if name == "unexplained":  # the part of that name says it
            continue
        members = ", ".join(p.name for p in PARTS if p.klass == name)
        out.append(Term(name.replace(" ", "_"), "class of latency", name, "ns", f"Σ {members}", doc))
    out += _COORDINATION + _LEDGER
    return {t.name: t for t in out}


def find(name: str) -> Term:
    """The term of that name; the unit ``_ns``, case, spaces and hyphens don't matter.

    Raises:
        UsageError: there is none; names the nearest.
    """
    known = terms()
    key = name.strip().lower().replace(" ", "_").replace("-", "_")
    for candidate in (key, key.removesuffix("_ns")):
        if candidate in known:
            return known[candidate]
    by_title = {t.title.lower().replace(" ", "_"): t for t in known.values()}
    if key in by_title:
        return by_title[key]
    near = difflib.get_close_matches(key, [*known, *by_title], n=1, cutoff=0.5)
    raise UsageError(
        f"There is nothing named {name!r} to explain.",
        hint=f"Did you mean {near[0]!r}?" if near else "Run `hoptrace explain` for the list.",
    )


def _part_formula(name: str, klass: str) -> str:
    return f"Σ of the time between arrival and finish that is {name.replace('_', ' ')}; class: {klass}"
