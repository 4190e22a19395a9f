"""Random works and plans for the replay's engines, small and nasty: little KV, small budgets, odd blocks, ties in time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hoptrace.replay.plan import EngineSpec, Handover, LinkSpec, Order, Plan, Routing, Speculation, TierSpec, Way
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import StepCost, fixed
from hoptrace.stepcost_table import STALL

__all__ = ["FEATURES", "COSTS", "cases", "make_work", "plans", "works"]

FEATURES = ("batching", "routing", "split", "tiers")
"""What a plan may use: each takes those before it along, if it is in the draw."""

COSTS = (
    fixed(step_ns=1000, prefill_token_ns=10, decode_request_ns=5),
    fixed(
        step_ns=1_234.891, prefill_token_ns=3_210.7, prefill_attention_ns=11.3, decode_request_ns=99.9,
        decode_context_token_ns=1.17,
    ),
    StepCost({"step": 100}, "fixed"),  # rounds to nothing: a step lasts 1 ns at least
    fixed(any_prefill_ns=50, any_decode_ns=12),
    StepCost(
        {"step": 900_000}, "fitted",
        residuals={"decode": (0, 100_000, -100_000, STALL + 777, 5), "prefill": (200_000, 0), "mixed": (1, 300_000, 400_000)},
    ),
)  # fmt: skip
ROUTINGS = ("round_robin", "random", "least_load", "power_of_two", "prefix_aware", "kv_use", "session")


def make_work(rows: list[dict[str, Any]], block: int) -> Workload:
    """A work from rows: arrival_ns, prompt, output, ids, and (all or none) after, think_ns, floor, session."""
    ids = [b for r in rows for b in r["ids"]]
    ends = [min((j + 1) * block, r["prompt"]) for r in rows for j in range(len(r["ids"]))]
    least = np.full(max(ids, default=-1) + 1, block, dtype=np.int64)
    at = 0
    for r in rows:
        for j in range(len(r["ids"])):
            least[ids[at]] = min(least[ids[at]], ends[at] - j * block)
            at += 1
    more: dict[str, Any] = {}
    if rows and "after" in rows[0]:
        more = {
            "after": np.array([r["after"] for r in rows], dtype=np.int64),
            "think_ns": np.array([r["think_ns"] for r in rows], dtype=np.int64),
            "floor": np.array([r["floor"] for r in rows], dtype=np.bool_),
        }
    return Workload(
        request=np.arange(len(rows), dtype=np.int64),
        arrival_ns=np.array([r["arrival_ns"] for r in rows], dtype=np.int64),
        prompt_tokens=np.array([r["prompt"] for r in rows], dtype=np.int64),
        output_tokens=np.array([r["output"] for r in rows], dtype=np.int64),
        block_ptr=np.cumsum([0, *(len(r["ids"]) for r in rows)]).astype(np.int64),
        block_id=np.array(ids, dtype=np.int64),
        block_end=np.array(ends, dtype=np.int64),
        block_tokens=least,
        session_id=np.array([r.get("session", -1) for r in rows], dtype=np.int64),
        **more,
    )


@st.composite
def works(draw: st.DrawFn, most: int = 20) -> Workload:
    """Up to ``most`` small requests, some of which begin alike, come at once, or come after others."""
    block = draw(st.sampled_from([1, 3, 4, 5, 16]))
    partial = draw(st.booleans())
    related = draw(st.booleans())
    branches = draw(st.integers(1, 2))
    longest = draw(st.sampled_from([(8, 30), (16, 20), (30, 12), (30, 3)]))
    spread = draw(st.sampled_from([0, 30, 3000, 20_000]))
    rows: list[dict[str, Any]] = []
    known: dict[tuple[int, ...], int] = {}
    arrival = draw(st.sampled_from([0, 7, 1_796_037_144_642_778_320]))
    for i in range(draw(st.integers(1, most))):
        arrival += draw(st.integers(0, spread))
        prompt = draw(st.integers(1, longest[0]))
        n = -(-prompt // block) if partial else prompt // block
        n = draw(st.sampled_from([n, n, n, 0, n // 2]))
        # Chained: the id of a block depends on the way to it, and a partial one is another block than the full one.
        way: tuple[int, ...] = ()
        ids = []
        for j in range(n):
            way = (*way, draw(st.integers(1, branches)))
            size = min(block, prompt - j * block)
            ids.append(known.setdefault((*way, -size), len(known)))
        row: dict[str, Any] = {"arrival_ns": arrival, "prompt": prompt, "output": draw(st.integers(1, longest[1])), "ids": ids}
        if related:
            row["after"] = draw(st.integers(-1, i - 1))
            row["think_ns"] = draw(st.sampled_from([0, 1, 500]))
            row["floor"] = draw(st.booleans())
        row["session"] = draw(st.integers(-1, 2))
        rows.append(row)
    return make_work(rows, block)


@st.composite
def _engines(draw: st.DrawFn, role: str, n: int, *, slots: bool = False, pool: bool = False) -> list[EngineSpec]:
    """Engines of one role; most often alike."""
    cache = "pool" if pool else draw(st.sampled_from([None, "pool", "pool", *(["slot"] if slots else [])]))
    block = draw(st.sampled_from([1, 2, 4, 5, 16]))
    capacity = draw(st.sampled_from([None, 24, 40, 48, 48, 56, 64, 100]))
    spec: dict[str, Any] = {
        "cost": draw(st.integers(0, len(COSTS) - 1)),
        "gap_ns": draw(st.sampled_from([0, 0, 1, 700])),
        "max_sequences": draw(st.sampled_from([*([] if cache == "slot" else [None, None]), 1, 2, 3, 8])),
        "max_batched_tokens": draw(st.sampled_from([None, None, 2, 8, 33, 64])),
        "mode": draw(st.sampled_from(["mixed", "mixed", "prefill_first", "static", "prompts_first"])),
        "chunked_prefill": draw(st.sampled_from([True, True, False])),
        "capacity_tokens": None if cache == "slot" else capacity,
        "block_size_tokens": block,
        "context_tokens": draw(st.sampled_from([None, None, None, None, 45])),
        "watermark_tokens": draw(st.sampled_from([0, 0, block, 3 * block])),
        "cache": cache,
        "cache_capacity_tokens": draw(st.sampled_from([None, None, 8, 20])) if cache == "pool" else None,
    }
    out = []
    for i in range(n):
        more = {}
        if i and draw(st.integers(0, 3)) == 0:
            more = {"cost": draw(st.integers(0, len(COSTS) - 1)), "max_batched_tokens": draw(st.sampled_from([None, 5]))}
        out.append(EngineSpec(f"{role}-{i}", role=role, **(spec | more)))  # type: ignore[arg-type]
    return out


@st.composite
def _routing(draw: st.DrawFn) -> Routing:
    kind = draw(st.sampled_from(ROUTINGS))
    age = draw(st.sampled_from([0, 1, 1500, 60_000])) if kind == "kv_use" else 0
    return Routing(kind, age, draw(st.sampled_from([0, 1, 10])) if kind == "prefix_aware" else 0)  # type: ignore[arg-type]


@st.composite
def _ways(draw: st.DrawFn, links: int, n: int) -> list[Way]:
    out = []
    for _ in range(n):
        over = draw(st.lists(st.integers(0, links - 1), max_size=2, unique=True)) if links else []
        out.append(Way(tuple(over), draw(st.sampled_from([0, 0, 1, 400])), draw(st.sampled_from([0, 0, 3]))))
    return out


@st.composite
def plans(draw: st.DrawFn, n: int, features: frozenset[str] = frozenset(FEATURES)) -> Plan:
    """A plan for a work of ``n`` requests."""
    split = "split" in features and draw(st.booleans())
    tiered = "tiers" in features and draw(st.booleans())
    most = 3 if "routing" in features else 1
    if split:
        prefill = draw(_engines("prefill", draw(st.integers(1, most)), pool=tiered))
        decode = draw(_engines("decode", draw(st.integers(1, most))))
        both = draw(_engines("both", 1)) if most > 1 and draw(st.integers(0, 5)) == 0 else []
        engines = draw(st.permutations([*prefill, *decode, *both])) if most > 1 else [*prefill, *decode]
    else:
        engines = draw(_engines("both", draw(st.integers(1, most)), slots=not tiered, pool=tiered))
    links = [LinkSpec(f"link-{i}", draw(st.sampled_from([10**9, 10**10, 123_456_789]))) for i in range(draw(st.integers(0, 3)))]
    ways = draw(_ways(len(links), 4))
    handover = None
    if split:
        entry = sum(e.role != "decode" for e in engines)
        decoders = sum(e.role == "decode" for e in engines)
        handover = Handover(
            tuple(tuple(draw(st.integers(0, 3)) for _ in range(decoders)) for _ in range(entry)),
            draw(st.sampled_from(["pull", "push"])),  # type: ignore[arg-type]
            draw(st.sampled_from([1, 1, 2, 32])),
            draw(st.sampled_from(["handover", "recompute"])),  # type: ignore[arg-type]
            draw(st.sampled_from([0, 0, 50])),
            draw(st.sampled_from([0, 0, 10])),
        )
    tiers = []
    if tiered:
        levels = draw(st.integers(1, 3))
        for i in range(levels):
            way = tuple(draw(st.integers(0, 3)) for _ in engines)
            tiers.append(TierSpec(
                f"tier-{i}", "host", draw(st.sampled_from([None, 20, 60, 60])), draw(st.booleans()), way, tuple(reversed(way)),
                way if i < levels - 1 and draw(st.booleans()) else tuple(-1 for _ in engines),
                draw(st.sampled_from(["through", "back"])) if i == 0 else "back",  # type: ignore[arg-type]
            ))  # fmt: skip
    key = draw(st.none() | st.lists(st.integers(-3, 3), min_size=n, max_size=n))
    order = Order(None if key is None else np.array(key, dtype=np.int64), draw(st.booleans()), draw(st.booleans()))
    speculation = None
    if draw(st.integers(0, 2)) == 0:
        speculation = Speculation(
            draw(st.integers(1, 4)), draw(st.sampled_from([0, 500_000, 1_000_000])), draw(st.sampled_from([0, 9])),
            draw(st.sampled_from([None, 1, 2])),
        )  # fmt: skip
    return Plan(
        engines=tuple(engines), costs=COSTS, links=tuple(links), ways=tuple(ways), routing=draw(_routing()),
        decode_routing=draw(_routing()), order=order, handover=handover, tiers=tuple(tiers),
        reuse=draw(st.sampled_from(["always", "break_even"])), speculation=speculation,
        kv_token_bytes=draw(st.sampled_from([1, 1000])),
        before_ns=draw(st.sampled_from([0, 0, 11])), after_ns=draw(st.sampled_from([0, 0, 13])),
        horizon_ns=draw(st.sampled_from([None, None, None, None, 2000, 20_000])),
        clients=draw(st.sampled_from([None, None, None, 1, 3])), think_ns=draw(st.sampled_from([0, 100])),
        seed=draw(st.integers(0, 3)),
    )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn, features: frozenset[str] = frozenset(FEATURES)) -> tuple[Workload, Plan]:
    """A work and a plan for it; the horizon counts from the first arrival."""
    work = draw(works())
    plan = draw(plans(work.n, features))
    if plan.horizon_ns is not None:
        plan = replace(plan, horizon_ns=int(work.arrival_ns[0]) + plan.horizon_ns)
    return work, plan
