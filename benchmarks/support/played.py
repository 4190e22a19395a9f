"""Works made by hand, run through the compiled engine, and their latencies: for benchmarks/published.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hoptrace.replay.compiled import simulate
from hoptrace.replay.outcome import DONE, REQUEST, RUN, STEP, Kept
from hoptrace.replay.plan import Plan
from hoptrace.replay.workload import Workload

__all__ = ["Played", "lengths", "play", "poisson", "work"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]


def poisson(n: int, rate_per_s: float, seed: int = 0) -> _Ints:
    """Arrivals of ``n`` requests in ns, the first at 0."""
    gaps = np.random.default_rng(seed).exponential(1e9 / rate_per_s, n)
    gaps[0] = 0
    return np.rint(np.cumsum(gaps)).astype(np.int64)


def lengths(n: int, mean: float, sd: float, seed: int, low: int = 1, high: int = 1 << 30) -> _Ints:
    """Normal lengths, cut off at ``low`` and ``high``."""
    return np.clip(np.rint(np.random.default_rng(seed).normal(mean, sd, n)), low, high).astype(np.int64)


def work(
    arrival_ns: _Ints, prompt: _Ints | int, output: _Ints | int, blocks: Sequence[Sequence[int]] | None = None, block: int = 16
) -> Workload:
    """A workload. ``blocks``: the prompts' leading blocks of ``block`` tokens, equal numbers for equal text."""
    n = len(arrival_ns)
    prompt, output = (np.broadcast_to(np.asarray(x, dtype=np.int64), n).copy() for x in (prompt, output))
    rows = [list(b) for b in blocks] if blocks is not None else [[] for _ in range(n)]
    ptr = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    flat = np.array([b for r in rows for b in r], dtype=np.int64)
    ends = np.array([(j + 1) * block for r in rows for j in range(len(r))], dtype=np.int64)
    distinct = int(flat.max()) + 1 if flat.size else 0
    return Workload(
        request=np.arange(n, dtype=np.int64), arrival_ns=arrival_ns.astype(np.int64), prompt_tokens=prompt, output_tokens=output,
        block_ptr=ptr, block_id=flat, block_end=ends, block_tokens=np.full(distinct, block, dtype=np.int64),
    )  # fmt: skip


@dataclass(frozen=True)
class Played:
    """``ttft_ns``, ``e2e_ns``: of the requests that are done; ``itl_ns``: all gaps between tokens."""

    ttft_ns: _Ints
    e2e_ns: _Ints
    itl_ns: _Ints
    steps: _Ints
    moves: _Ints
    requests: _Ints

    def column(self, name: str) -> _Ints:
        """A column of the requests."""
        found: _Ints = self.requests[:, REQUEST.index(name)]
        return found

    @property
    def duration_s(self) -> float:
        """First arrival to last token."""
        return float(self.column("last_token_ns").max() - self.column("arrival_ns").min()) / 1e9

    @property
    def output_tokens_per_s(self) -> float:
        return float(self.column("generated_tokens").sum()) / self.duration_s


def play(asked: Workload, plan: Plan) -> Played:
    """Run it."""
    sink = Kept()
    outcome = simulate(asked, plan, sink)
    steps, runs, r = sink.rows("step"), sink.rows("run"), outcome.requests
    c = {name: i for i, name in enumerate(REQUEST)}
    done = r[r[:, c["status"]] == DONE]
    times, whose = _token_times(steps, runs)
    order = np.lexsort((times, whose))
    times, whose = times[order], whose[order]
    gaps = np.diff(times)[np.diff(whose) == 0]
    arrival = done[:, c["arrival_ns"]]
    return Played(
        ttft_ns=done[:, c["first_token_ns"]] - arrival, e2e_ns=done[:, c["last_token_ns"]] - arrival, itl_ns=gaps, steps=steps,
        moves=sink.rows("move"), requests=r,
    )  # fmt: skip


def _token_times(steps: _Ints, runs: _Ints) -> tuple[_Ints, _Ints]:
    s, c = {n: i for i, n in enumerate(STEP)}, {n: i for i, n in enumerate(RUN)}
    ends = {int(e): None for e in np.unique(steps[:, s["engine"]])}
    for e in ends:
        mine = steps[steps[:, s["engine"]] == e]
        table = np.zeros(int(mine[:, s["step"]].max()) + 1, dtype=np.int64)
        table[mine[:, s["step"]]] = mine[:, s["end_ns"]]
        ends[e] = table  # type: ignore[assignment]
    runs = runs[runs[:, c["emitted_per_step"]] > 0]
    chunk = runs[:, c["phase"]] == 0
    first = np.where(chunk, runs[:, c["last_step"]], runs[:, c["first_step"]])
    count = runs[:, c["last_step"]] - first + 1
    each = np.repeat(np.arange(len(runs)), count)
    step = first[each] + np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    engine = runs[each, c["engine"]]
    time = np.zeros(len(each), dtype=np.int64)
    for e, table in ends.items():
        mine = engine == e
        time[mine] = table[step[mine]]  # type: ignore[index]
    emitted = runs[each, c["emitted_per_step"]]
    return np.repeat(time, emitted), np.repeat(runs[each, c["request"]], emitted)
