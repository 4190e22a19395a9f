"""Which engine iteration each read of tokens came from. Iterations are told by one law of continuous batching: a request that
generates emits once in every iteration, and never twice in one."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["cluster", "hides_steps", "mixes", "typical_step_ns"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]

# A read belongs to the iteration that its request is due in if it comes at most this share of its own gap after that iteration's
# first token. Delays up to 0.6 ÷ 0.4 = 1.5 steps are so made up for; a token of the next iteration comes a whole gap late.
LATE = 0.6
# A request's first token joins the iteration whose first token came at most this share of a short step before. llama.cpp sends
# the tokens of one iteration 0.2 to 1 ms apart (it samples slot after slot), seldom 4 ms; its steps take 11 ms and more
# (SmolLM2-135M on one core).
TOGETHER = 0.35
_COMPILE_FROM = 50_000


def typical_step_ns(unit: _Ints, time: _Ints, count: _Ints) -> int:
    """A short step of this server: the 10 % quantile of the time per token between a request's reads; 2 ms where there is
    none."""
    same = unit[1:] == unit[:-1]
    gaps = (np.diff(time) / np.maximum(count[1:], 1))[same]
    return int(np.quantile(gaps, 0.1)) if len(gaps) else 2_000_000


def hides_steps(unit: _Ints, time: _Ints, count: _Ints) -> bool:
    """Whether a read of n tokens took the time of n reads of one (tokens held back: several steps), not that of one (accepted
    drafts)."""
    same = unit[1:] == unit[:-1]
    gap, n = np.diff(time)[same], count[1:][same]
    several = n > 1
    if not several.any():
        return False
    if several.all():
        return False
    return bool(np.median(gap[several] / n[several]) > 0.6 * np.median(gap[~several]))


def mixes(unit: _Ints, time: _Ints, step_ns: int) -> bool:
    """Whether the engine computes prompts in the iterations of its decoders, as the law supposes (llama.cpp, vLLM with chunked
    prefill): then first tokens come together with tokens of those who generate. False if most do not; ``unit`` and ``time``
    sorted by unit.
    """
    opening = np.concatenate(([True], unit[1:] != unit[:-1]))
    first, last = time[opening], time[np.concatenate((opening[1:], [True]))]
    others = np.sort(time[~opening])
    generating = np.searchsorted(np.sort(first), first, side="left") - np.searchsorted(np.sort(last), first, side="right")
    asked = first[generating > 0]
    if len(asked) < 5 or len(others) < 2:
        return True
    after = np.clip(np.searchsorted(others, asked), 1, len(others) - 1)
    nearest = np.minimum(np.abs(others[after] - asked), np.abs(asked - others[after - 1]))
    return bool((nearest <= 2 * TOGETHER * step_ns).mean() >= 0.5)


def cluster(
    unit: _Ints, time: _Ints, count: _Ints, units: int, *, hidden: bool, step_ns: int
) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """Number the iterations of one server.

    Args:
        unit, time, count: of each read, sorted by time; ``unit`` numbers the sequences 0 … ``units`` − 1.
        hidden: a read of n tokens stands for n iterations.
        step_ns: a typical short step.

    Returns:
        step of each read (its last one, if it stands for several); and of each step, the time of its first token, its
        end, and 1 if it was seen, 0 if it was put in between two others.
    """
    run: Any = _cluster
    if len(unit) >= _COMPILE_FROM:
        from hoptrace.compiling import cached_njit

        run = cached_njit(_cluster)
    most = int(count.sum()) if hidden else len(unit)
    together, late = int(TOGETHER * step_ns), int(LATE * step_ns)
    step, first, last, seen = run(unit, time, count, units, hidden, together, late, most)
    return step, first, _usual_end(first, last, np.bincount(step, minlength=len(first))), seen


def _usual_end(first: _Ints, last: _Ints, reads: _Ints) -> _Ints:
    """End of each step: its last token, but at most twice as long after its first as is usual for as many tokens. A token that
    comes later still was held up on its way (a busy proxy or client), and is no reason to take the time off the next step."""
    spread = last - first
    end = last.copy()
    for n in np.unique(reads[reads > 1]):
        rows = reads == n
        end[rows] = first[rows] + np.minimum(spread[rows], 2 * int(np.median(spread[rows])))
    return end


def _cluster(
    unit: _Ints, time: _Ints, count: _Ints, units: int, hidden: bool, together_ns: int, late_ns: int, most: int
) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    step = np.empty(len(unit), dtype=np.int64)
    last_step = np.full(units, -1, dtype=np.int64)
    last_time = np.zeros(units, dtype=np.int64)
    first = np.zeros(most + 1, dtype=np.int64)
    end = np.zeros(most + 1, dtype=np.int64)
    seen = np.ones(most + 1, dtype=np.int64)
    only_firsts = False  # nobody but requests with their first token is in the current iteration
    now = -1
    for i in range(len(unit)):
        u = unit[i]
        t = time[i]
        before = last_step[u]
        s = -1
        if before < 0:
            if now >= 0 and t - first[now] <= together_ns:
                s = now
            due = now + 1
        else:
            due = before + (count[i] if hidden else 1)
            own = t - last_time[u]
            if due <= now:
                if t - first[due] <= LATE * own:
                    s = due
                elif before < now and t - first[now] <= LATE * own:
                    # It sat out some iterations: the law does not hold for it (preempted, or a server of another kind).
                    s = now
                else:
                    if only_firsts and due == now and now > 0 and first[now] - first[now - 1] <= late_ns:
                        # It generates, and yet was not in the current iteration: that was no iteration, but a first token that
                        # was late for the one before.
                        j = i - 1
                        while j >= 0 and time[j] >= first[now]:
                            if step[j] == now:
                                step[j] = now - 1
                                last_step[unit[j]] = now - 1
                            j -= 1
                        end[now - 1] = max(end[now - 1], end[now])
                        now -= 1
                    due = now + 1
        if s < 0:
            only_firsts = before < 0
            # A new iteration, and before it those that nobody's token shows.
            new = max(due - now, 1) if now >= 0 else 1
            base = end[now] if now >= 0 else t
            for j in range(1, new + 1):
                now += 1
                first[now] = base + (t - base) * j // new
                end[now] = first[now]
                seen[now] = 1 if j == new else 0
            s = now
        elif s == now:
            only_firsts = only_firsts and before < 0
            end[now] = max(end[now], t)
        step[i] = s
        last_step[u] = s
        last_time[u] = t
    return step, first[: now + 1].copy(), end[: now + 1].copy(), seen[: now + 1].copy()
