"""How well steps were reconstructed, against what the engine's own scheduler wrote down.

The truth is two frames. ``steps``: step, start_ns, end_ns. ``members``: step, request, tokens (scheduled), before (computed
before), made (put out), prompt_tokens. A request's n-th token tells which true step and which reconstructed step made it, so
the two sequences are matched by membership: a reconstructed step belongs to the true one that it shares most tokens with, one to
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

__all__ = ["Score", "made_by", "members_right", "reliability", "score"]

_BINS = (0.0, 0.5, 0.7, 0.9, 0.99)
_Makers = Mapping[int, Mapping[int, int]]


@dataclass(frozen=True)
class Score:
    """Figures of one run.

    ``emitting``: true steps that put out tokens. ``exact``: share of them whose makers (who put out how many tokens) are exactly
    those of the matched step. ``invented``: reconstructed emitting steps that match none. ``ends``: share of the emitting steps
    that end within max(2 ms, 5 % of the step) of the truth; ``ends_net``: the same after the median error, the time that tokens
    take to whoever saw them, is taken off. ``error_ms``: median of the signed error, 95 % and 99 % quantiles of the absolute one.
    ``silent``: true steps without a token; ``silent_found``, ``silent_invented``: of those that were inferred between the same
    emitting steps. ``chunks``: share of the emitting steps with prompt tokens that have the right number of them. ``good``: by
    reconstructed step, confidence and whether it is exact.
    """

    step_ms: float
    batch: float
    emitting: int
    exact: float
    invented: int
    ends: float
    ends_net: float
    error_ms: tuple[float, float, float]
    silent: int
    silent_found: int
    silent_invented: int
    chunks: float
    good: list[tuple[float, bool]]

    def line(self) -> str:
        """The figures in one line of a table."""
        median, p95, p99 = self.error_ms
        return (
            f"{self.step_ms:6.1f} ms | {self.batch:4.1f} | {self.emitting:5d} | {self.exact:7.2%} | {self.ends:6.1%} | "
            f"{self.ends_net:6.1%} | {median:+.2f}, {p95:.1f}, {p99:.1f} | {self.silent_found} of {self.silent}, "
            f"{self.silent_invented} invented | {self.chunks:6.1%}"
        )


def reliability(good: list[tuple[float, bool]]) -> list[tuple[float, int, float]]:
    """By confidence: (lower edge of the bin, steps, share of them that are exact)."""
    out = []
    for low, high in zip(_BINS, [*_BINS[1:], 2.0], strict=True):
        some = [right for sure, right in good if low <= sure < high]
        if some:
            out.append((low, len(some), sum(some) / len(some)))
    return out


def made_by(residency: pl.DataFrame, prompts: pl.DataFrame) -> pl.DataFrame:
    """Which step made each token, from rows of `residency`: request, index (of the first of them), step, tokens. ``prompts``:
    request, prompt_tokens, output_tokens."""
    runs = residency.with_columns(pl.int_ranges("first_step", pl.col("last_step") + 1).alias("step")).explode("step")
    done = (pl.col("step") - pl.col("first_step")) * pl.col("tokens_per_step")
    decode = (
        runs.filter(pl.col("phase") == "decode")
        .join(prompts, on="request")
        .with_columns(
            (pl.col("context_at_start") + done - pl.col("prompt_tokens") + 1).alias("index"),
            pl.col("tokens_per_step").alias("tokens"),
        )
    )
    first = (
        runs.filter(pl.col("phase") == "chunk")
        .group_by("request")
        .agg(pl.col("step").max())
        .join(prompts, on="request")
        .join(decode.group_by("request").agg(pl.col("index").min().alias("then")), on="request", how="left")
        .with_columns(pl.lit(0, pl.Int64).alias("index"), pl.coalesce("then", "output_tokens").alias("tokens"))
    )
    columns = ["request", "index", "step", "tokens"]
    return pl.concat([decode.select(columns), first.select(columns)]).sort("request", "index")


def _true_makers(members: pl.DataFrame) -> pl.DataFrame:
    made = members.filter(pl.col("made") > 0).sort("request", "step")
    before = pl.col("made").cum_sum().over("request") - pl.col("made")
    return made.select("request", before.alias("index"), "step", pl.col("made").alias("tokens"))


def _each(makers: pl.DataFrame, name: str) -> pl.DataFrame:
    """One row a token: request, index, and the step as ``name``."""
    return (
        makers.with_columns(pl.int_ranges(0, pl.col("tokens")).alias("j"))
        .explode("j")
        .select("request", pl.col("index") + pl.col("j"), pl.col("step").alias(name))
    )


def members_right(members: pl.DataFrame, residency: pl.DataFrame, prompts: pl.DataFrame) -> tuple[float, float]:
    """For residency of observed steps, where numbers need no matching: share of the tokens laid to the step that made them, and
    of the chunks of prompts with the right tokens in the right step."""
    both = _each(_true_makers(members), "true").join(
        _each(made_by(residency, prompts), "mine"), on=["request", "index"], how="left"
    )
    chunks = members.filter(pl.col("before") < pl.col("prompt_tokens"))
    told = (
        residency.filter(pl.col("phase") == "chunk")
        .with_columns(pl.int_ranges("first_step", pl.col("last_step") + 1).alias("step"))
        .explode("step")
        .select("request", "step", "tokens_per_step")
    )
    laid = chunks.join(told, on=["request", "step"], how="left")
    return (
        float((both["true"] == both["mine"]).fill_null(False).mean()),  # type: ignore[arg-type]
        float((laid["tokens"] == laid["tokens_per_step"]).fill_null(False).mean()),  # type: ignore[arg-type]
    )


def score(
    truth: pl.DataFrame, members: pl.DataFrame, steps: pl.DataFrame, residency: pl.DataFrame, prompts: pl.DataFrame
) -> Score:
    """Score ``steps`` and ``residency`` (as :func:`hoptrace.reconstruct.reconstruct` gives them) of one server against the
    truth."""
    true, mine = _true_makers(members), made_by(residency, prompts)
    shared = _each(true, "true").join(_each(mine, "mine"), on=["request", "index"]).group_by("true", "mine").len()
    match: dict[int, int] = {}
    used: set[int] = set()
    for t, m, _ in shared.sort(["len", "true", "mine"], descending=[True, False, False]).iter_rows():
        if t not in match and m not in used:
            match[t] = m
            used.add(m)
    makers, found = _by_step(true), _by_step(mine)
    sure = dict(zip(steps["step"].to_list(), steps["confidence"].to_list(), strict=True))
    right = {t: t in match and found[match[t]] == who for t, who in makers.items()}
    good = [(sure[m], right[t]) for t, m in match.items()] + [(sure[m], False) for m in found if m not in used]
    begin, stop = (dict(zip(truth["step"].to_list(), truth[c].to_list(), strict=True)) for c in ("start_ns", "end_ns"))
    end = dict(zip(steps["step"].to_list(), steps["end_ns"].to_list(), strict=True))
    error = np.array([end[m] - stop[t] for t, m in match.items()]) / 1e6
    allowed = np.maximum(2.0, 0.05 * np.array([stop[t] - begin[t] for t in match]) / 1e6)
    median = float(np.median(error))
    silent, silent_found, silent_invented = _silent(truth, makers, match, steps, found)
    return Score(
        step_ms=float((truth["end_ns"] - truth["start_ns"]).median()) / 1e6,  # type: ignore[arg-type]
        batch=members.height / truth.height,
        emitting=len(makers),
        exact=sum(right.values()) / len(makers),
        invented=sum(m not in used for m in found),
        ends=float((np.abs(error) <= allowed).sum()) / len(makers),
        ends_net=float((np.abs(error - median) <= allowed).sum()) / len(makers),
        error_ms=(median, *(float(q) for q in np.quantile(np.abs(error), [0.95, 0.99]))),
        silent=silent,
        silent_found=silent_found,
        silent_invented=silent_invented,
        chunks=_chunks(members, makers, match, steps),
        good=good,
    )


def _by_step(makers: pl.DataFrame) -> dict[int, dict[int, int]]:
    """By step: who put out how many tokens."""
    out: dict[int, dict[int, int]] = {}
    for request, step, tokens in makers.select("request", "step", "tokens").iter_rows():
        out.setdefault(step, {})[request] = tokens
    return out


def _silent(
    truth: pl.DataFrame, makers: _Makers, match: Mapping[int, int], steps: pl.DataFrame, found: _Makers
) -> tuple[int, int, int]:
    """Silent steps are matched between the emitting ones before and after them."""
    back = {m: t for t, m in match.items()}
    theirs = _between(truth, makers, {t: t for t in makers})
    ours = _between(steps, found, back)
    hit = sum(min(n, ours.get(k, 0)) for k, n in theirs.items())
    return sum(theirs.values()), hit, sum(ours.values()) - hit


def _between(steps: pl.DataFrame, emitting: _Makers, name: Mapping[int, int]) -> dict[int, int]:
    """How many silent steps follow each emitting one, by its true number."""
    out: dict[int, int] = {}
    last = -1
    for s in steps.sort("step")["step"].to_list():
        if s in emitting:
            last = name.get(s, last)
        else:
            out[last] = out.get(last, 0) + 1
    return out


def _chunks(members: pl.DataFrame, makers: _Makers, match: Mapping[int, int], steps: pl.DataFrame) -> float:
    prompt = members.filter(pl.col("before") < pl.col("prompt_tokens")).group_by("step").agg(pl.col("tokens").sum())
    told = dict(zip(steps["step"].to_list(), steps["prefill_tokens"].to_list(), strict=True))
    rows = [(t, n) for t, n in prompt.iter_rows() if t in makers]
    return sum(t in match and told[match[t]] == n for t, n in rows) / len(rows) if rows else 1.0
