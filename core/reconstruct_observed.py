"""Who was in the steps that an engine told of: residency for a trace with observed steps (vLLM's plug-in, log lines) that say how
many requests and tokens they held, but not which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from hoptrace.reconstruct_reads import Numbered, number_reads, reads_of, tells_steps, units_of
from hoptrace.reconstruct_rows import Lines, residency_rows

if TYPE_CHECKING:
    from hoptrace.reader import Trace

__all__ = ["observed_residency"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]

# A token is never seen before its step has ended; clocks of one host that were read twice may differ by this much.
_EARLY_NS = 200_000
# How many steps before the last one that had ended a step's tokens may come from (they are held up on their way).
_BACK = 64


def observed_residency(trace: Trace, steps: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, float], list[str]]:
    """Residency of the sequences with token times in ``steps``, which are of servers without residency.

    Tokens tell which sequences share a step and in what order the steps came (as in reconstruction); each such step is laid to
    the observed one with as many decoders that ended before its first token, in order. The chunks of the prompts fill the steps'
    own prompt tokens.

    Returns:
        rows of `residency` without ``source``; by server the share of its reads that were laid to an observed step; notes.
    """
    units = units_of(trace)
    reads = reads_of(trace, units)
    rows, shares, notes = [], {}, []
    for (name,), observed in steps.group_by(["server"], maintain_order=True):
        part, mine = reads.filter(pl.col("server") == name), units.filter(pl.col("server") == name)
        if part.is_empty():
            continue
        if observed["dp_rank"].fill_null(0).n_unique() > 1:
            notes.append(f"{name} has several ranks; on which of them a request was is not known, nor who was in its steps.")
            continue
        if not tells_steps(part):
            notes.append(f"{name} computes prompts in iterations of their own: its tokens do not tell who was in its steps.")
            continue
        one = observed.filter(pl.col("pp_rank").fill_null(0) == 0).sort("step")
        runs, share = _one_server(one, mine, number_reads(mine, part))
        rank = one["dp_rank"][0]
        rows.append(runs.with_columns(pl.lit(name).alias("server"), pl.lit(rank, pl.Int64).alias("dp_rank")))
        shares[str(name)] = share
        if share < 1:
            notes.append(f"{name}: {1 - share:.1%} of the reads fit no observed step; their requests' share of it is not known.")
    return (pl.concat(rows) if rows else pl.DataFrame()), shares, notes


def _one_server(observed: pl.DataFrame, units: pl.DataFrame, n: Numbered) -> tuple[pl.DataFrame, float]:
    start, end, step = (observed[c].to_numpy() for c in ("start_ns", "end_ns", "step"))
    decoders = observed["decode_requests"].fill_null(-1).to_numpy()
    # Tokens that came with those of later steps were shown with these.
    shown = np.where(n.seen == 1, n.first, np.iinfo(np.int64).max)
    at = _match(np.minimum.accumulate(shown[::-1])[::-1], n.decoding, end, decoders)
    laid = at.copy()
    # A read of several steps that was taken for one of accepted drafts holds more than its step computed: it is left out.
    held = np.zeros(len(at), dtype=np.int64)
    np.add.at(held, n.shares["step"], n.shares["tokens"])
    most = observed["decode_tokens"].fill_null(np.iinfo(np.int64).max).to_numpy()
    laid[(at >= 0) & (held > most[np.maximum(at, 0)])] = -1
    kept = laid[n.shares["step"]] >= 0
    shares = {k: v[kept] for k, v in n.shares.items()}
    chunks = _chunks(units, at[n.last], start, observed["prefill_tokens"].fill_null(0).to_numpy())
    number = np.where(laid >= 0, step[np.maximum(laid, 0)], -1)
    frame = pl.DataFrame(
        [(u, int(step[k]), tokens, context) for u, k, tokens, context in chunks],
        schema={"unit": pl.Int64, "step": pl.Int64, "tokens": pl.Int64, "context": pl.Int64}, orient="row",
    ).sort("unit", "step")  # fmt: skip
    runs = residency_rows(Lines(start, end, number, frame, {}), shares, units)
    return runs, float((laid[n.step] >= 0).mean())


def _match(first: _Ints, decoding: _Ints, end: _Ints, decoders: _Ints) -> _Ints:
    """Index of the observed step of each told one, −1 where none fits. Ascending.

    Of the steps that come after the one before and ended before the first token, at most 64 of them, the earliest with as many
    decoders is taken if somebody decodes in it: whoever generates is in every step. Where only first tokens came, it is the
    latest without a decoder: those before it put out nothing. Where no count fits (not all requests were seen, or counts are not
    told), it is the latest that has at least as many.
    """
    out = np.full(len(first), -1, dtype=np.int64)
    ended = np.searchsorted(end, first + _EARLY_NS, side="right") - 1
    before = -1
    for k in range(len(first)):
        high = int(ended[k])
        low = max(before + 1, high - _BACK)
        if low > high:
            continue
        there = decoders[low : high + 1]
        same = np.flatnonzero(there == decoding[k])
        if len(same):
            found = low + int(same[0] if decoding[k] else same[-1])
        else:
            more = np.flatnonzero((there > decoding[k]) | (there < 0))
            if not len(more):
                continue
            found = low + int(more[-1])
        out[k] = before = found
    return out


def _chunks(units: pl.DataFrame, last: _Ints, start: _Ints, free: _Ints) -> list[tuple[int, int, int, int]]:
    """Chunks (unit, index of the step, tokens, context before) of the prompts whose last step is known: each takes what is free
    of the steps' prompt tokens from the moment it had come, such that it ends in that step. What it lacks was cached."""
    free = free.copy()
    seen: set[int] = set()
    out = []
    rows = units.select("unit", "request", "prompt_tokens", "cached_tokens", "available_ns").rows()
    for u, request, prompt, cached, available in sorted(rows, key=lambda r: (last[r[0]], r[4] or 0, r[0])):
        k = int(last[u])
        if request in seen or prompt is None or k < 0:
            continue
        seen.add(request)
        want = max(prompt - (cached or 0), 1)
        begin = k if available is None else min(int(np.searchsorted(start, available, side="left")), k)
        while begin < k and int(free[begin:k].sum()) >= want:
            begin += 1
        got = min(want, int(free[begin : k + 1].sum()))
        context = prompt - got
        for j in range(begin, k + 1):
            n = min(got, int(free[j]))
            if n > 0:
                out.append((u, j, n, context))
                free[j] -= n
                got -= n
                context += n
    return out
