"""The inner loop of the accounting: one pass over the line on which the requests lie, from cut to cut, adding up parts.

A cut is where an interval of the outline, of an idle or a working run, of a recorded wait or of repeated work begins or ends,
where a request begins, and its first token. What lies between two cuts has one label, which says what its time is made of.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from hoptrace.compiling import cached_njit

__all__ = ["sweep"]

_njit = partial(cached_njit, nogil=True)
_LAST = np.int64(np.iinfo(np.int64).max)


@_njit
def _next(start, end, i, x):  # type: ignore[no-untyped-def]
    """(pointer to the first interval that ends after x, the first cut of these intervals after x)."""
    while i < len(start) and end[i] <= x:
        i += 1
    if i == len(start):
        return i, _LAST
    return i, start[i] if start[i] > x else end[i]


@_njit
def _before(start, end, total, low, high, t):  # type: ignore[no-untyped-def]
    """How much of the intervals ``low … high`` lies before t; and the one that began last (−1: none)."""
    a, b = low, high
    while a < b:
        m = (a + b) >> 1
        if start[m] <= t:
            a = m + 1
        else:
            b = m
    j = a - 1
    if j < low:
        return np.int64(0), np.int64(-1)
    return total[j] + min(max(t, start[j]), end[j]) - start[j], j


@_njit
def _part_of_step(start, end, j, t):  # type: ignore[no-untyped-def]
    length = end[j] - start[j]
    if length <= 0:
        return 1.0
    return (min(max(t, start[j]), end[j]) - start[j]) / length


@_njit
def sweep(axis, cut, plan, idle, recorded, working, again, code, column, flag, some_steps, step, felt, full, repeat, total,  # type: ignore[no-untyped-def]
          first_total, error, spans):  # fmt: skip
    """Fill ``total`` (int64[parts, requests]), ``first_total`` (the same up to the first token, or with no rows), ``error``
    (float64[2, requests, width]) and ``spans`` (int64[5, segments]: position, start, end, label, server; or with no columns).
    Returns how many segments are in ``spans``.

    ``axis``: (arrival, e2e, base). ``cut``: (first token on the line or −1, when the prompt was computed). Covers, each
    ascending and disjoint on the line: ``plan`` and ``idle``: (start, end, label, server); ``recorded``: (start, end, label);
    ``working``: (start, end, label, server, run); ``again``: (start, end). ``code``: labels, ``column``: parts, then labels of
    parts, as :mod:`hoptrace.analysis.latency.evaluate` lists them. ``flag``, by label: whether it is a cause of being full,
    hand-over, arranging; and the part that all of its time is (−1: it is evaluated). ``some_steps``: by server, whether its
    steps are known; the last is none. ``step``, all servers' steps one after the other: (where each server's begin, start, end,
    total before), when they were recorded: (int64[2, servers] from … to, −1: nobody says; start, end, total), and where steps
    are missing: (where each server's begin, start, end, total). ``felt``:
    (known by server, ns[2, steps], total[2, steps], mixed before each step, one more for each server; rows of ``sums`` at which
    (phase, server) begins; sums). ``full``: (where each begins, start, end, total): five by server, room known and the causes.
    ``repeat``: (tokens, repeated) of runs.
    """
    arrival, e2e, base = axis
    first, computed = cut
    plan_start, plan_end, plan_label, plan_line = plan
    idle_start, idle_end, idle_label, idle_line = idle
    wait_start, wait_end, wait_label = recorded
    work_start, work_end, work_label, work_line, work_run = working
    again_start, again_end = again
    (l_between, l_between_prefill, l_between_decode, l_prefill, l_decode, l_delivery, l_proxy, l_preempted, l_recompute,
     l_queue, l_arranging,
     l_prefill_steps, _l_decode_steps) = code  # fmt: skip
    is_full, is_over, is_arranging, plain = flag
    step_at, step_start, step_end, step_total, seen_at, seen_start, seen_end, seen_total = step[:8]
    gone_at, gone_start, gone_end, gone_total = step[8:]
    felt_known, felt_ns, felt_total, felt_mixed, sums_at, sums = felt
    full_at, full_start, full_end, full_total = full
    run_tokens, run_repeated = repeat
    (p_prefill, p_prefill_i, p_decode, p_decode_i, p_gap, p_skipped, p_unexplained, p_room, p_handover, p_unknown, p_delivery,
     p_recompute) = column[:12]  # fmt: skip
    causes = column[12:16]
    what_label = column[16:]  # labels of queue_room, handover, the causes, queue_unknown, skipped, host_gap, unexplained
    width = sums.shape[1]
    some_repeated = False
    for v in run_repeated:
        some_repeated = some_repeated or v > 0
    to_first, with_spans = first_total.shape[0] > 0, spans.shape[1] > 0
    cols, vals = np.zeros(12, dtype=np.int64), np.zeros(12, dtype=np.int64)
    taken = np.zeros(4, dtype=np.int64)
    n_spans = 0
    p = i = w = r = g = 0
    for q in range(len(base)):
        x, stop = base[q], base[q] + e2e[q]
        shift = arrival[q] - base[q]
        while x < stop:
            p, c0 = _next(plan_start, plan_end, p, x)
            i, c1 = _next(idle_start, idle_end, i, x)
            w, c2 = _next(wait_start, wait_end, w, x)
            r, c3 = _next(work_start, work_end, r, x)
            g, c4 = _next(again_start, again_end, g, x)
            y = min(min(min(c0, c1), min(c2, c3)), min(c4, stop))
            if x < first[q] < y:
                y = first[q]
            if p == len(plan_start) or plan_start[p] > x:
                x = y
                continue
            label, line = plan_label[p], plan_line[p]
            if label in (l_between_prefill, l_between_decode):
                label = l_between if some_steps[line] else (l_prefill if label == l_between_prefill else l_decode)
            # Idle runs lie over the outline, waits over both, working runs over all.
            if i < len(idle_start) and idle_start[i] <= x:
                label, line = idle_label[i], idle_line[i]
            if w < len(wait_start) and wait_start[w] <= x:
                wait = wait_label[w]
                # A place that was lost is waited for because the server is full: `preempted` says more. Between a stay's end
                # and the next one's first work, what is arranged is the hand-over, whatever it was for.
                if not (
                    (label == l_delivery and wait == l_proxy)
                    or (label == l_preempted and is_full[wait])
                    or (is_over[label] and is_arranging[wait])
                ):
                    label = wait
            run = np.int64(-1)
            if r < len(work_start) and work_start[r] <= x:
                label, line, run = work_label[r], work_line[r], work_run[r]
                if g < len(again_start) and again_start[g] <= x:
                    label = l_recompute
            length, t0, t1 = y - x, x + shift, y + shift
            m = 0
            said = label
            if plain[label] >= 0:
                cols[0], vals[0] = plain[label], length
                m = 1
            elif label in (l_queue, l_arranging):
                if line < 0:
                    cols[0], vals[0] = p_unknown, length
                    m = 1
                    said = what_label[6]
                else:
                    at = line * 5
                    known = (
                        _before(full_start, full_end, full_total, full_at[at], full_at[at + 1], t1)[0]
                        - _before(full_start, full_end, full_total, full_at[at], full_at[at + 1], t0)[0]
                    )
                    room = known
                    for k in range(4):
                        a, b = full_at[at + k + 1], full_at[at + k + 2]
                        taken[k] = 0
                        if a < b:
                            taken[k] = (
                                _before(full_start, full_end, full_total, a, b, t1)[0]
                                - _before(full_start, full_end, full_total, a, b, t0)[0]
                            )
                        room -= taken[k]
                    cols[0], vals[0] = (p_room if label == l_queue else p_handover), room
                    best, said = room, (what_label[0] if label == l_queue else what_label[1])
                    for k in range(4):
                        cols[1 + k], vals[1 + k] = causes[k], taken[k]
                        if taken[k] > best:
                            best, said = taken[k], what_label[2 + k]
                    cols[5], vals[5] = p_unknown, length - known
                    if length - known > best:
                        said = what_label[6]
                    m = 6
            elif line < 0 or not some_steps[line]:
                cols[0], vals[0] = p_unexplained, length
                m = 1
                if label == l_between:
                    said = what_label[9]
            else:
                a, b = step_at[line], step_at[line + 1]
                before0, j0 = _before(step_start, step_end, step_total, a, b, t0)
                before1, j1 = _before(step_start, step_end, step_total, a, b, t1)
                inside = before1 - before0
                if label == l_between:
                    seen = length
                    if seen_at[0, line] >= 0:
                        u, v = seen_at[0, line], seen_at[1, line]
                        seen = (
                            _before(seen_start, seen_end, seen_total, u, v, t1)[0]
                            - _before(seen_start, seen_end, seen_total, u, v, t0)[0]
                        )
                    # Where nobody recorded steps, no step seen does not mean that none ran.
                    cols[0], vals[0] = p_skipped, inside
                    cols[1], vals[1] = p_gap, seen - inside
                    cols[2], vals[2] = p_unexplained, length - seen
                    m = 3
                    best, said = inside, what_label[7]
                    if seen - inside > best:
                        best, said = seen - inside, what_label[8]
                    if length - seen > best:
                        said = what_label[9]
                else:
                    phase = 0 if label == l_prefill_steps else 1
                    shared = np.int64(0)
                    if felt_known[line]:
                        ns0 = ns1 = np.int64(0)
                        f0 = f1 = 0.0
                        a0 = b0 = a1 = b1 = np.int64(-1)
                        if j0 >= 0:
                            f0 = _part_of_step(step_start, step_end, j0, t0)
                            ns0 = felt_total[phase, j0] + np.int64(np.floor(felt_ns[phase, j0] * f0))
                            a0 = sums_at[phase, line] + felt_mixed[j0 + line]
                            b0 = sums_at[phase, line] + felt_mixed[j0 + line + 1]
                        if j1 >= 0:
                            f1 = _part_of_step(step_start, step_end, j1, t1)
                            ns1 = felt_total[phase, j1] + np.int64(np.floor(felt_ns[phase, j1] * f1))
                            a1 = sums_at[phase, line] + felt_mixed[j1 + line]
                            b1 = sums_at[phase, line] + felt_mixed[j1 + line + 1]
                        for k in range(width):
                            e0 = sums[a0, k] + (sums[b0, k] - sums[a0, k]) * f0 if a0 >= 0 else 0.0
                            e1 = sums[a1, k] + (sums[b1, k] - sums[a1, k]) * f1 if a1 >= 0 else 0.0
                            error[phase, q, k] += e1 - e0
                        shared = min(max(ns1 - ns0, np.int64(0)), inside)
                    blank = np.int64(0)
                    u, v = gone_at[line], gone_at[line + 1]
                    if u < v:
                        blank = (
                            _before(gone_start, gone_end, gone_total, u, v, t1)[0]
                            - _before(gone_start, gone_end, gone_total, u, v, t0)[0]
                        )
                    cols[0], vals[0] = p_gap, length - inside - blank
                    cols[1], vals[1] = (p_prefill_i if phase == 0 else p_decode_i), shared
                    cols[2], vals[2] = (p_prefill if phase == 0 else p_decode), inside - shared
                    cols[3], vals[3] = p_unexplained, blank
                    m = 4
            if run >= 0 and some_repeated:
                # Prefill of tokens that had been computed before is repeated work, in proportion to the tokens of its run.
                share = run_repeated[run] / max(run_tokens[run], np.int64(1))
                for k in range(m):
                    if cols[k] == p_prefill:
                        part = min(np.int64(np.floor(vals[k] * share)), vals[k])
                        vals[k] -= part
                        cols[m], vals[m] = p_recompute, part
                        m += 1
                        break
            for k in range(m):
                total[cols[k], q] += vals[k]
            if to_first and y <= first[q]:
                # Once the prompt is computed the token is on its way, whatever else goes on.
                gone = x >= computed[q]
                for k in range(m):
                    c = cols[k]
                    if gone and c in (p_decode, p_decode_i, p_gap, p_skipped):
                        c = p_delivery
                    first_total[c, q] += vals[k]
            if with_spans:
                spans[0, n_spans], spans[1, n_spans], spans[2, n_spans] = q, t0, t1
                spans[3, n_spans], spans[4, n_spans] = said, line
                n_spans += 1
            x = y
    return n_spans
