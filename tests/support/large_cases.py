"""Works of some hundred requests and plans for them, by number: what small ones do not reach (long queues, full caches)."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.plans import COSTS, ROUTINGS, make_work

from hoptrace.replay.plan import EngineSpec, Handover, LinkSpec, Order, Plan, Routing, Speculation, TierSpec, Way
from hoptrace.replay.workload import Workload

__all__ = ["large_case"]


def large_case(seed: int) -> tuple[Workload, Plan]:
    """The case of a number: 100 to 400 requests of six families, on up to seven engines."""
    g = np.random.default_rng(seed)
    work = _work(g)
    split, tiered = bool(g.random() < 0.5), bool(g.random() < 0.5)
    spec: dict[str, Any] = {
        "max_sequences": _one(g, 4, 16, 64), "max_batched_tokens": _one(g, 64, 256, 512),
        "mode": str(g.choice(["mixed", "mixed", "prefill_first", "static", "prompts_first"])),
        "capacity_tokens": _one(g, 600, 1200, 4000, 10**6), "block_size_tokens": _one(g, 16, 16, 5),
        "cache": "pool" if tiered or g.random() < 0.6 else None, "watermark_tokens": _one(g, 0, 32), "gap_ns": _one(g, 0, 300),
    }  # fmt: skip

    def engines(role: Any, n: int) -> list[EngineSpec]:
        return [EngineSpec(f"{role}-{i}", role=role, cost=int(g.integers(0, len(COSTS))), **spec) for i in range(n)]

    entry = int(g.integers(1, 5))
    decoders = int(g.integers(1, 4)) if split else 0
    all_engines = engines("prefill" if split else "both", entry) + engines("decode", decoders)

    def ways_of(n: int) -> tuple[int, ...]:
        return tuple(g.integers(0, 5, n).tolist())

    handover = None
    if split:
        handover = Handover(
            tuple(ways_of(decoders) for _ in range(entry)), str(g.choice(["pull", "push"])), _one(g, 1, 4),  # type: ignore[arg-type]
            str(g.choice(["handover", "recompute"])), _one(g, 0, 700), _one(g, 0, 50),  # type: ignore[arg-type]
        )  # fmt: skip
    n = len(all_engines)
    tiers = tuple(
        TierSpec(
            f"tier-{i}", "host", _one(g, 500, 3000, 20_000), bool(g.random() < 0.5), ways_of(n), ways_of(n),
            ways_of(n) if i == 0 else (-1,) * n, str(g.choice(["through", "back"])) if i == 0 else "back",  # type: ignore[arg-type]
        )
        for i in range(int(g.integers(1, 3)) if tiered else 0)
    )  # fmt: skip
    speculation = Speculation(int(g.integers(1, 4)), 600_000, 9, None if g.random() < 0.5 else 8) if g.random() < 0.3 else None
    plan = Plan(
        tuple(all_engines), COSTS, links=tuple(LinkSpec(f"link-{i}", _one(g, 10**9, 10**10, 3 * 10**8)) for i in range(3)),
        ways=tuple(
            Way(tuple(g.choice(3, int(g.integers(0, 3)), replace=False).tolist()), _one(g, 0, 500), _one(g, 0, 20))
            for _ in range(5)
        ),
        routing=_routing(g), decode_routing=_routing(g),
        order=Order(g.integers(-5, 5, work.n) if g.random() < 0.3 else None, bool(g.random() < 0.5), bool(g.random() < 0.5)),
        handover=handover, tiers=tiers, reuse=str(g.choice(["always", "break_even"])),  # type: ignore[arg-type]
        speculation=speculation, kv_token_bytes=1000, clients=_one(g, 3, 40) if g.random() < 0.25 else None,
        think_ns=1000, seed=seed,
    )  # fmt: skip
    return work, plan


def _one(g: np.random.Generator, *values: int) -> int:
    return int(g.choice(values))


def _routing(g: np.random.Generator) -> Routing:
    kind = str(g.choice(ROUTINGS))
    age = _one(g, 0, 5000) if kind == "kv_use" else 0
    return Routing(kind, age, _one(g, 0, 30) if kind == "prefix_aware" else 0)  # type: ignore[arg-type]


def _work(g: np.random.Generator) -> Workload:
    block, gap_ns, related = _one(g, 16, 32, 7), float(g.choice([5e3, 3e4, 2e5])), bool(g.random() < 0.4)
    known: dict[tuple[int, ...], int] = {}
    rows: list[dict[str, Any]] = []
    at = _one(g, 0, 1_796_037_144_642_778_320)
    for i in range(int(g.integers(100, 400))):
        at += int(g.exponential(gap_ns))
        prompt, family, shared = int(g.integers(1, 400)), int(g.integers(0, 6)), int(g.integers(1, 12))
        way: tuple[int, ...] = ()
        ids = []
        for j in range(prompt // block + bool(g.random() < 0.5 and prompt % block)):
            way = (*way, family if j < shared else int(g.integers(0, 3)))
            ids.append(known.setdefault((*way, -min(block, prompt - j * block)), len(known)))
        row: dict[str, Any] = {"arrival_ns": at, "prompt": prompt, "output": int(g.integers(1, 120)), "ids": ids}
        row["session"] = int(g.integers(-1, 8))
        if related:
            row["after"] = int(g.integers(-1, i)) if g.random() < 0.5 else -1
            row["think_ns"], row["floor"] = int(g.integers(0, 50_000)), bool(g.random() < 0.5)
        rows.append(row)
    return make_work(rows, block)
