"""(c) Unlike work forced into one batch: what requests lose to others' prompts and answers in their steps, and how unlike those
are."""

from __future__ import annotations

import math

import polars as pl

from hoptrace.analysis.arranging.hidden_view import Figure, Seen, View, sentence
from hoptrace.analysis.text import count_text, duration_text, percent

__all__ = ["unlike"]

_TITLE = "unlike work forced into one batch"
_PARTS = ("prefill_interference", "decode_interference")


def unlike(seen: Seen) -> View:
    """Interference as the accounting models it, mixed steps, decoders held by prompts, spread of lengths, short against long."""
    lost = seen.sum_ns(*_PARTS)
    decode = seen.sum_ns("decode_interference")
    rows = seen.totals.select(
        "server", "origin", "steps", "known_steps", "mixed_steps", "decoders", "held_decoders", "decoder_ns", "held_decoder_ns"
    )
    quarters = _quarters(seen)
    figures = [*_lost(seen, lost, decode), *_steps(seen), *_spread(seen), *_short(quarters)]
    unseen = []
    if lost is None:
        unseen.append(
            "Interference is not modelled for this trace (no step cost that tells the phases apart), so its time is unknown."
        )
    if not seen.steps:
        unseen.append("No steps are known: who was in a batch with whom is unknown.")
    elif seen.step_sum("batched_decoders") is None:
        unseen.append("The steps do not say how lengths spread in them (decode_context_variance).")
    return View(
        "unlike",
        _TITLE,
        figures,
        _sentence({f.name: f for f in figures}),
        rows,
        lost,
        "derived",
        "parts prefill, shared and decode, shared of the finished requests (modelled)" if lost is not None else "",
        seen.share_of(lost),
        unseen,
    )


def _lost(seen: Seen, lost: int | None, decode: int | None) -> list[Figure]:
    why = None if lost is not None else "would need steps of several mixtures, to fit a step cost"
    basis = "derived"
    source = "parts prefill_interference and decode_interference"
    per = None if lost is None or not seen.finished_tokens else lost / seen.finished_tokens
    no_tokens = why or (None if per is not None else "would need the output tokens of all finished requests")
    decode_per = None if decode is None or not seen.finished_tokens else decode / seen.finished_tokens
    return [
        Figure("lost_ns", "time that requests lost to others' phase in their steps", lost, "ns", basis, source, why=why),
        Figure("lost_ns_per_token", "of it per output token", per, "ns/token", basis, source, why=no_tokens),
        Figure(
            "decode_lost_ns_per_token",
            "of decoders alone, per output token",
            decode_per,
            "ns/token",
            "derived",
            "part decode_interference",
            why=no_tokens or "decode interference is not told apart",
        ),
        Figure("lost_share", "share of latency", seen.share_of(lost), "share", basis, source, why=why),
    ]


def _steps(seen: Seen) -> list[Figure]:
    basis = seen.steps_basis if seen.steps else None
    known, mixed = seen.step_sum("known_steps") or 0, seen.step_sum("mixed_steps")
    share = mixed / known if known and mixed is not None else None
    held, decoders = seen.step_sum("held_decoders"), seen.step_sum("decoders")
    held_ns, decoder_ns = seen.step_sum("held_decoder_ns"), seen.step_sum("decoder_ns")
    rate = (held or 0) / decoders if decoders else None
    time = (held_ns or 0) / decoder_ns if decoder_ns else None
    why = "would need `steps` that say what is in them"
    source = "steps.prefill_tokens, decode_requests"
    partial = known < seen.steps
    return [
        Figure("mixed_steps", "share of steps with prompt tokens and decoders", share, "share", basis, source, partial, why),
        Figure("held_decoders", "share of decoders' steps that hold a prompt", rate, "share", basis, source, partial, why),
        Figure(
            "held_decoder_time",
            "share of decoders' time in such steps",
            time,
            "share",
            basis,
            f"{source}; start_ns, end_ns",
            partial,
            why,
        ),
    ]


def _spread(seen: Seen) -> list[Figure]:
    """Pooled over steps with at least two: √(Σ n · variance ÷ Σ n), of decoders' contexts also ÷ Σ context ÷ Σ n."""
    n, square, context = (seen.step_sum(c) for c in ("batched_decoders", "batched_square", "batched_context"))
    spread = math.sqrt(square / n) if n and square is not None and square >= 0 else None
    relative = spread / (context / n) if spread is not None and n and context else None
    m, prompts = (seen.step_sum(c) for c in ("batched_prompts", "batched_prompt_square"))
    several = math.sqrt(prompts / m) if m and prompts is not None and prompts >= 0 else None
    basis = seen.steps_basis
    why = "would need steps.decode_context_variance of steps with two decoders or more"
    return [
        Figure(
            "context_spread",
            "standard deviation of contexts that decode in one step",
            spread,
            "tokens",
            basis,
            "steps.decode_context_variance",
            why=why,
        ),
        Figure(
            "context_spread_relative",
            "of it ÷ the mean context",
            relative,
            "×",
            basis,
            "steps.decode_context_variance, decode_context_tokens",
            why=why,
        ),
        Figure(
            "prompt_spread",
            "standard deviation of prompts' lengths in one step",
            several,
            "tokens",
            basis,
            "steps.prefill_length_variance",
            why="would need steps.prefill_length_variance of steps with two prompts or more",
        ),
    ]


def _quarters(seen: Seen) -> pl.DataFrame | None:
    """Interference ÷ e2e of the shortest and the longest quarter of the finished requests by prompt and output tokens."""
    columns = [f"{p}_ns" for p in _PARTS]
    parts = seen.accounting.parts.lazy()
    if seen.sum_ns(*_PARTS) is None:
        return None
    lengths = seen.trace.table("requests").select("request", (pl.col("prompt_tokens") + pl.col("output_tokens")).alias("length"))
    joined = (
        parts.select("request", "e2e_ns", *columns).join(lengths.drop_nulls("length"), on="request").collect(engine="streaming")
    )
    if joined.height < 8:
        return None
    low, high = joined["length"].quantile(0.25, "nearest"), joined["length"].quantile(0.75, "nearest")
    if low is None or high is None or low >= high:
        return None
    lost = pl.sum_horizontal(pl.col(c).fill_null(0).cast(pl.Float64) for c in columns)
    groups = [("short", pl.col("length") <= low), ("long", pl.col("length") >= high)]
    return pl.concat(
        joined.filter(where).select(
            pl.lit(name).alias("quarter"),
            pl.len().alias("requests"),
            pl.col("length").mean().alias("mean_tokens"),
            (lost.sum() / pl.col("e2e_ns").cast(pl.Float64).sum()).alias("share"),
        )
        for name, where in groups
    )


def _short(quarters: pl.DataFrame | None) -> list[Figure]:
    said = {} if quarters is None else {r["quarter"]: r["share"] for r in quarters.to_dicts()}
    why = "would need interference and the lengths of at least eight requests, not all alike"
    out = []
    for name, words in (("short", "shortest"), ("long", "longest")):
        value = said.get(name)
        value = value if value is not None and math.isfinite(value) else None
        out.append(
            Figure(
                f"{name}_lost_share",
                f"share of latency that the {words} quarter of requests loses",
                value,
                "share",
                "derived",
                "parts of interference; prompt_tokens + output_tokens",
                why=why,
            )
        )
    return out


def _sentence(f: dict[str, Figure]) -> str:
    said = []
    if (share := f["lost_share"].value) is not None:
        per = f["lost_ns_per_token"].value
        each = "" if per is None else f", {duration_text(float(per))} per output token"
        said.append(f"others' work in the same steps takes {percent(float(share))} of latency (modelled){each}")
        short, long = f["short_lost_share"].value, f["long_lost_share"].value
        if short is not None and long is not None:
            said.append(f"the shortest quarter of requests loses {percent(float(short))}, the longest {percent(float(long))}")
    if (held := f["held_decoder_time"].value) is not None:
        mixed = f["mixed_steps"].value
        said.append(
            f"decoders spend {percent(float(held))} of their time in steps that hold a prompt "
            f"({percent(None if mixed is None else float(mixed))} of the steps)"
        )
    if (spread := f["context_spread_relative"].value) is not None:
        said.append(f"contexts in one step differ by {count_text(round(float(spread), 2))} of their mean")
    return sentence(said, "Not known: no steps say what was in them.")
