"""How often a real run lies within a what-if's 90 % interval.

    python benchmarks/interval_coverage.py                  # a server of known cost on a drifting machine; the captures here
    python benchmarks/interval_coverage.py --cells 200 --drift 0.15
    python benchmarks/interval_coverage.py A.trace:B.trace  # A's what-if of B's policy against B; A.trace alone: its own policy

A cell of the known server: a run under one policy is recorded, another policy is predicted from it, and run too, right after.
Printed: NAME: VALUE %, the share of cells whose run lies within; and how wide the intervals were (median of high ÷ low).
``own``: of the recorded run itself; ``what_if``: of the other run; ``pair``: of the ratio of the two; ``change`` (paired): of the
ratio on a machine in the very mood of the recorded run and without its steps' scatter, which only the known server can give.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

import hoptrace
from hoptrace.comparison import METRICS, STATISTICS, compare
from hoptrace.reader import Trace
from hoptrace.replay.prepare import Prepared, prepare
from hoptrace.replay.uncertainty import Intervals, intervals

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

from support.known_server import drift, ran, traffic  # noqa: E402

OWN = ("batching.max_sequences=8", "batching.max_batched_tokens=256")
OTHERS = (
    ("batching.max_sequences=4", "batching.max_batched_tokens=256"),
    ("batching.max_sequences=2", "batching.max_batched_tokens=256"),
    ("batching.max_sequences=8", "batching.max_batched_tokens=32"),
    ("batching.max_sequences=16", "batching.max_batched_tokens=256"),
)
SHOWN = [(m, s) for m in METRICS for s in STATISTICS] + [("throughput", "requests")]
CAPTURES = [
    "sample_traces/llamacpp-four-slots.trace", "sample_traces/llamacpp-one-slot.trace",
    "tests/data/vllm_traces/steady.trace", "tests/data/vllm_traces/preempted.trace",
]  # fmt: skip


def prepared(trace: Trace, settings: tuple[str, ...]) -> Prepared:
    """The what-if of ``settings`` on ``trace``."""
    from hoptrace.replay.policy import load_policy, with_settings

    return prepare(
        trace, with_settings(load_policy("as-recorded"), settings), cost=None, platform=None, model=None, recorded_on=None,
        seed=0, rate=1, arrivals=None, until=None, say=lambda _: None,
    )  # fmt: skip


Held = dict[tuple[str, str, str], list[tuple[bool, float]]]


def hold(held: Held, i: Intervals, a: Trace, b: Trace, same_mood: tuple[Trace, Trace] | None = None) -> None:
    """Whether what was observed lies within: ``a`` of the own policy, ``b`` of the other, their ratio, and that of the two of
    ``same_mood``."""
    both = compare(a, b)
    third = None if same_mood is None else compare(*same_mood)
    for m, s in SHOWN:
        d = both.get(m, s)
        values = {"own": d.observed, "what_if": d.predicted}
        if d.observed and d.predicted is not None:
            values["pair"] = d.predicted / d.observed
        if third is not None and (before := third.get(m, s).observed):
            values["change"] = (third.get(m, s).predicted or 0.0) / before
        for side, value in values.items():
            got = i.get(side, m, s)
            if got is not None and value is not None:
                held.setdefault((side, m, s), []).append((value in got, got.high / got.low if got.low > 0 else float("inf")))


def known(cells: int, sd: float, scatter: float, draws: int, n: int, seed: int, carry: bool) -> Iterator[Held]:
    """The cells of the known server, one after the other, with all so far."""
    held: Held = {}
    for cell in range(cells):
        rng = np.random.default_rng([seed, cell])
        asked = traffic(n, (3.0, 6.0, 9.0)[cell % 3], seed * 1000 + cell)
        first, second = drift(2, sd, rng)
        other = OTHERS[cell // 3 % len(OTHERS)]
        a, b = ran(asked, OWN, first, scatter, rng), ran(asked, other, second, scatter, rng)
        mood = ran(asked, OWN, first, 0.0, rng), ran(asked, other, first, 0.0, rng)
        hold(held, intervals(prepared(a, other), draws=draws, seed=cell, engine="plain", carry=carry), a, b, mood)
        yield held


def show(held: Held, title: str) -> None:
    """One line a figure."""
    print(f"# {title}")
    for side in ("own", "what_if", "pair", "change"):
        mine = {k: v for k, v in held.items() if k[0] == side}
        if not mine:
            continue
        for (_, m, s), rows in mine.items():
            share = 100 * sum(x for x, _ in rows) / len(rows)
            print(f"{side} {m} {s}: {share:.0f} % of {len(rows)}, high over low {median(w for _, w in rows):.2f}")
        every = [x for rows in mine.values() for x, _ in rows]
        print(f"{side} all figures: {100 * sum(every) / len(every):.0f} %")


def captures(pairs: list[str], draws: int) -> None:
    """Real ones."""
    from hoptrace.replay.against import against

    for pair in pairs:
        a, _, b = pair.partition(":")
        one = hoptrace.open(Path(a))
        other = hoptrace.open(Path(b)) if b else one
        p = against(one, other, work="b") if b else prepared(one, ())
        held: Held = {}
        hold(held, intervals(p, draws=draws), one, other)
        sides = ("own", "what_if", "pair") if b else ("own",)
        for side in sides:
            rows = {k: v for k, v in held.items() if k[0] == side}
            missed = [f"{m} {s}" for (_, m, s), v in rows.items() if not v[0][0]]
            width = median(v[0][1] for v in rows.values())
            print(f"{pair} {side}: {100 * (1 - len(missed) / len(rows)):.0f} % of {len(rows)} figures, high over low "
                  f"{width:.2f}, outside: {', '.join(missed) or 'none'}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="A.trace[:B.trace]")
    parser.add_argument("--cells", type=int, default=60)
    parser.add_argument("--drift", type=float, default=0.1, help="standard deviation of ln(speed)")
    parser.add_argument("--scatter", type=float, default=0.06, help="of each step's own")
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-carry", action="store_true", help="without what the own-policy interval missed")
    args = parser.parse_args()
    if args.traces:
        captures(args.traces, args.draws)
        return
    held: Held = {}
    cells = known(args.cells, args.drift, args.scatter, args.draws, args.requests, args.seed, not args.no_carry)
    for done, so_far in enumerate(cells):
        held = so_far
        print(f"\r{done + 1} of {args.cells}", end="", file=sys.stderr)
    print(file=sys.stderr)
    show(held, f"{args.cells} cells, drift {args.drift}, scatter {args.scatter}, {args.draws} draws, {args.requests} requests")
    captures([str(ROOT / c) for c in CAPTURES], args.draws)


if __name__ == "__main__":
    main()
