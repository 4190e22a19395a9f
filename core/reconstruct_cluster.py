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
# With so many neighbours, and over so many reads ahead, a read of doubtful place is compared.
COMPARED = 4
AHEAD = 8
FAR = 1 << 62
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
    # Requests that begin within this reach of each other begin in one iteration (a burst): none of them generated before it.
    reach = int(2 * TOGETHER * step_ns)
    long = last - first > reach
    began = np.searchsorted(np.sort(first[long]), first - reach, side="left")
    generating = began - np.searchsorted(np.sort(last[long]), first, side="right")
    asked = first[generating > 0]
    if len(asked) < 5 or len(others) < 2:
        return True
    after = np.clip(np.searchsorted(others, asked), 1, len(others) - 1)
    nearest = np.minimum(np.abs(others[after] - asked), np.abs(asked - others[after - 1]))
    return bool((nearest <= reach).mean() >= 0.5)


def cluster(
    unit: _Ints, time: _Ints, count: _Ints, units: int, *, hidden: bool, step_ns: int
) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """Number the iterations of one server.

    Args:
        unit, time, count: of each read, sorted by time; ``unit`` numbers the sequences 0 … ``units`` − 1.
        hidden: a read of n tokens stands for n iterations.
        step_ns: a typical short step.

    Returns:
        step of each read (its last one, if it stands for several); and of each step, the time of its first token, the time of
        its last one that was not late, and 1 if it was seen, 0 if it was put in between two others.
    """
    most = int(count.sum()) if hidden else len(unit)
    together, late = int(TOGETHER * step_ns), int(LATE * step_ns)
    order = np.lexsort((time, unit))
    begin = np.searchsorted(unit[order], np.arange(units + 1))
    made = np.cumsum(count[order] if hidden else np.ones(len(unit), dtype=np.int64))
    given = [unit, time, count, time[order], made, begin]
    # What the loop fills: by read its step; by unit its last step, its time, its next read; by step first token, end, seen.
    sizes, fill = [len(unit), units, units, most + 1, most + 1, most + 1], [0, -1, 0, 0, 0, 1]
    room = [np.full(n, v, dtype=np.int64) for n, v in zip(sizes, fill, strict=True)]
    others, cost = np.zeros(COMPARED, dtype=np.int64), np.zeros(3, dtype=np.int64)
    arrays: list[Any] = [*given, *room, begin[:units].copy(), others, cost]
    run: Any = _cluster
    if len(unit) >= _COMPILE_FROM:
        from hoptrace.compiling import cached_njit

        run = cached_njit(_cluster)
    else:
        arrays = [a.tolist() for a in arrays]  # Python reads lists three times as fast
    now = run(*arrays, hidden, together, late)
    step, _, _, first, end, seen = (np.asarray(a, dtype=np.int64) for a in arrays[6:12])
    return step, first[: now + 1].copy(), end[: now + 1].copy(), seen[: now + 1].copy()


def _cluster(
    unit: _Ints, time: _Ints, count: _Ints, own_time: _Ints, made: _Ints, begin: _Ints, step: _Ints, last_step: _Ints,
    last_time: _Ints, first: _Ints, end: _Ints, seen: _Ints, place: _Ints, others: _Ints, cost: _Ints, hidden: bool,
    together_ns: int, late_ns: int,
) -> int:  # fmt: skip
    """Fills ``step`` (by read), ``first``, ``end`` and ``seen`` (by step); gives the last step's number. ``own_time`` and
    ``made`` (running sum of the steps that reads stand for) are sorted by unit; ``begin``: each unit's first of them; ``place``:
    its next one."""
    only_firsts = False  # nobody but requests with their first token is in the current iteration
    now = -1
    for i in range(len(unit)):
        u = unit[i]
        t = time[i]
        before = last_step[u]
        s = -1
        due = now + 1 if before < 0 else before + (count[i] if hidden else 1)
        if before >= 0 and due <= now and t - first[due] <= LATE * (t - last_time[u]):
            s = due
        elif now >= 0 and due <= now + (before < 0):
            # It may belong to this iteration or that: those who run beside it tell which one. A request that generates is in
            # every iteration, so if it is put in the right one, all its later tokens come beside theirs too.
            found = 0
            j = i - 1
            while j >= 0 and i - j <= 4 * COMPARED and found < COMPARED:
                v = unit[j]
                if last_step[v] < now - 1:
                    break
                if v != u and place[v] < begin[v + 1]:
                    known = False
                    for k in range(found):
                        known = known or others[k] == v
                    if not known:
                        others[found] = v
                        found += 1
                j -= 1
            low = max(now - 1, 0) if before < 0 else due
            compared = 0
            for c in range(3):
                cost[c] = FAR
                if low + c > now + 1:
                    continue
                total = 0
                n = 0
                for q in range(place[u], begin[u + 1] if begin[u + 1] < place[u] + AHEAD else place[u] + AHEAD):
                    at = low + c + made[q] - made[place[u]]
                    least = FAR
                    for k in range(found):
                        v = others[k]
                        p = place[v]
                        # Where v's read of that iteration is, if it has one of its own.
                        want = made[p - 1] + at - last_step[v]
                        w = p - 1
                        while w > begin[v] and made[w] > want:
                            w -= 1
                        while w + 1 < begin[v + 1] and made[w] < want:
                            w += 1
                        if made[w] == want:
                            apart = abs(own_time[w] - own_time[q])
                            if apart < least:
                                least = apart
                    if least < FAR:
                        # One that is far off says no more than one that is off.
                        total += least if least < late_ns else late_ns
                        n += 1
                if n >= 2:
                    cost[c] = total // n
                    compared += 1
            if compared >= 2:
                best = 0
                for c in range(1, 3):
                    if cost[c] < cost[best]:
                        best = c
                if cost[best] < late_ns:
                    due = low + best
                    if due <= now:
                        s = due
                    if before >= 0 and best == 0:
                        s = due
                    compared = -1
            if compared >= 0:
                # Too little runs beside it: by its own time.
                due = now + 1 if before < 0 else due
                if before < 0:
                    if t - first[now] <= together_ns:
                        s = now
                else:
                    if not seen[due]:
                        s = due  # nobody's token has shown that iteration yet: no reason to doubt the law
                    elif before < now and t - first[now] <= LATE * (t - last_time[u]):
                        # It sat out some iterations: the law does not hold for it (preempted, or a server of another kind).
                        s = now
                    else:
                        if only_firsts and due == now and now > 0 and first[now] - first[now - 1] <= late_ns:
                            # It generates, and yet was not in the current iteration: that was no iteration, but a first token
                            # that was late for the one before.
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
        place[u] += 1
    return now
