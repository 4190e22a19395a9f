"""Everything that `hoptrace explain` can explain: metrics, parts and classes of latency, and the figures of each section."""

from __future__ import annotations

import difflib

from hoptrace.analysis.arranging import coordination, hidden_terms
from hoptrace.analysis.compare import verdict_terms
from hoptrace.analysis.hardware import hardware_terms
from hoptrace.analysis.latency import accounting_terms
from hoptrace.analysis.latency.parts import CLASSES, PARTS
from hoptrace.analysis.layers import ceilings, layers_terms
from hoptrace.analysis.memory import reversibility_terms, stranding_terms
from hoptrace.analysis.moves import ledger_terms
from hoptrace.analysis.term import Term, sql_of
from hoptrace.errors import UsageError
from hoptrace.field_metrics import FIELD_METRICS
from hoptrace.metrics import METRICS

__all__ = ["Term", "find", "terms"]

_REUSE = sql_of("ledger_reuse")
_CACHE = (
    Term(
        "cached_token_rate",
        "metric",
        "Cached-token rate",
        "share of prompt tokens",
        "Σ cached_tokens ÷ Σ prompt_tokens, over stays that know both and do not only decode",
        "Prompt tokens that a cache gave, of all that were looked up, weighted by tokens. Own tokens that a preempted request "
        "finds again are no reuse: see resumed_tokens. Nor is KV that a decode server was handed over.",
        f"SELECT sum(cached_tokens) / nullif(sum(prompt_tokens), 0) AS value\nFROM (\n{_REUSE}\n)",
    ),
    Term(
        "prefix_hit_by_tier",
        "metric",
        "Prefix hits by tier",
        "tokens",
        "Σ cached_device_tokens, cached_host_tokens, cached_peer_tokens, cached_pool_tokens, cached_disk_tokens",
        "Which memory the cached tokens came from, where the engine tells. What it does not tell is in cached_tokens alone.",
        "SELECT "
        + ", ".join(f"sum({t})::BIGINT AS {t}" for t in ("device", "host", "peer", "pool", "disk"))
        + f"\nFROM (\n{_REUSE}\n)",
    ),
    Term(
        "resumed_tokens",
        "metric",
        "Tokens found again after a preemption",
        "tokens",
        "Σ resumed_tokens",
        "A request that lost its place looks up its own tokens when it gets one again. Engines may count that as prefix hits; "
        "here it is apart, since no other request's work is saved.",
        f"SELECT sum(resumed_tokens)::BIGINT AS value\nFROM (\n{_REUSE}\n)",
    ),
)


def terms() -> dict[str, Term]:
    """All terms by name, those of a kind together, in the order in which they are listed."""
    out = [Term(m.name, "metric", m.title, m.unit, m.formula, m.doc, m.sql) for m in (*METRICS.values(), *FIELD_METRICS.values())]
    out += _CACHE
    out += [
        Term(
            p.name,
            "part of latency",
            p.label,
            "ns",
            _part_formula(p.label, p.klass),
            p.doc + (f" Needs: {p.needs}." if p.needs else ""),
        )
        for p in PARTS
    ]
    for name, doc in CLASSES.items():
        if name == "unexplained":  # the part of that name says it
            continue
        members = ", ".join(p.name for p in PARTS if p.klass == name)
        out.append(Term(name.replace(" ", "_"), "class of latency", name, "ns", f"Σ {members}", doc))
    for module in (
        accounting_terms,
        coordination,
        hardware_terms,
        hidden_terms,
        ledger_terms,
        layers_terms,
        ceilings,
        stranding_terms,
        reversibility_terms,
        verdict_terms,
    ):
        out += module.TERMS
    kinds = list(dict.fromkeys(t.kind for t in out))
    return {t.name: t for t in sorted(out, key=lambda t: kinds.index(t.kind))}


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


def _part_formula(label: str, klass: str) -> str:
    return f"Σ of the time between arrival and finish that is “{label}” and no other part; class: {klass}"
