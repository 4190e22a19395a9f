"""Steps and residency of a trace: as recorded, or reconstructed from token times where the engine tells nothing of its
iterations.

The reconstruction rests on how continuous batching works (llama.cpp's loop, and in this like vLLM's): an iteration takes one
token of every sequence that generates, then prompt tokens up to the batch; its tokens are sent together when it is done; new
requests are picked up between iterations. What it cannot see is said in :attr:`Steps.note`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from hoptrace import metrics, schema
from hoptrace.kv import step_bytes
from hoptrace.manifest import Server
from hoptrace.reconstruct_cluster import cluster, hides_steps, mixes, typical_step_ns
from hoptrace.reconstruct_hidden import blank, known_share, known_steps, unseen_requests
from hoptrace.reconstruct_prefill import Placed, Prompt, first_steps, place, step_starts
from hoptrace.reconstruct_rows import decode_shares, lay_out, residency_rows, step_rows

if TYPE_CHECKING:
    from hoptrace.reader import Trace
    from hoptrace.writer import TraceWriter

__all__ = ["Steps", "reconstruct", "steps_of", "store_steps"]

SOURCE = "reconstruct"
_Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Steps:
    """``steps`` and ``residency`` with the columns of the schema, sorted; ``origin``: observed, reconstructed or replayed
    (several: joined by commas; "" if there is none); ``note``: what a reader has to know, or null; ``known``: by server, share of
    its output tokens that come from steps whose composition is known (null: not told); empty for steps that were not
    reconstructed."""

    steps: pl.DataFrame
    residency: pl.DataFrame
    origin: str
    note: str | None = None
    known: Mapping[str, float | None] = field(default_factory=dict)


def steps_of(trace: Trace) -> Steps:
    """The steps that the trace holds or, if it holds none, those that its tokens tell."""
    if not trace.has("steps"):
        return reconstruct(trace)
    steps = trace.table("steps").sort("server", "dp_rank", "step").collect()
    residency = trace.table("residency").sort("request", "first_step").collect()
    notes = [n for n in trace.manifest.notes if n.startswith(_PREFIX)]
    told = trace.table("coverage").filter((pl.col("table") == "steps") & (pl.col("source") == SOURCE)).sort("server").collect()
    known = dict(zip(told["server"].to_list(), told["fraction"].to_list(), strict=True))
    origin = ", ".join(sorted(steps["origin"].drop_nulls().unique().to_list()))
    return Steps(steps, residency, origin, " ".join(notes) or None, known)


def store_steps(writer: TraceWriter, steps: Steps) -> None:
    """Write reconstructed steps into a trace that is being written, with the note and their coverage, whose fraction is
    :attr:`Steps.known`. Nothing if there are none."""
    if steps.steps.is_empty():
        return
    writer.append_arrow("steps", steps.steps.to_arrow())
    writer.append_arrow("residency", steps.residency.to_arrow())
    rows = []
    for (server,), s in steps.steps.group_by(["server"], maintain_order=True):
        span = {"server": server, "from_ns": s["start_ns"].min(), "to_ns": s["end_ns"].max(), "source": SOURCE}
        columns = [c for c in s.columns if s[c].null_count() < s.height]
        rows.append({"table": "steps", "columns": columns, "fraction": steps.known.get(str(server)), **span})
        rows.append({"table": "residency", "columns": None, **span})
    writer.append("coverage", rows)
    if steps.note:
        note = steps.note
        writer.update(lambda m: None if note in m.notes else m.notes.append(note))


_PREFIX = "Steps were reconstructed"
_NO_ARRIVALS = "When requests were sent is not known, so which of their tokens left together is not, and no steps can be told."


def reconstruct(trace: Trace) -> Steps:
    """Reconstruct the steps of every server from tokens, stages and requests. Empty, with a note, if there are no tokens, or if
    it is not known when requests came (each one's times count from its own start: which tokens left together is lost)."""
    if not metrics.arrivals_known(trace):
        return Steps(_empty("steps"), _empty("residency"), "", _NO_ARRIVALS)
    units = _units(trace)
    reads = (
        metrics.reads(trace.table("tokens"), trace.table("requests"))
        .collect()
        .join(units.select("request", "sequence", "unit", "server"), on=["request", "sequence"])
    )
    if reads.is_empty():
        return Steps(_empty("steps"), _empty("residency"), "", "No token times were recorded, so no steps can be told.")
    all_steps, all_runs, notes, known = [], [], [], {}
    for (name,), mine in units.group_by(["server"], maintain_order=True):
        server = trace.manifest.server(str(name)) or Server.model_validate({"name": str(name)})
        part = reads.filter(pl.col("server") == name).sort("unit", "index")
        part = part.with_columns(pl.coalesce("count", "emissions").alias("tokens"))
        if part.is_empty():
            continue
        if not _mixes(part):
            notes.append(
                f"{name} computes prompts in iterations of their own: its tokens do not tell its steps, so none are given."
            )
            continue
        steps, runs, made, remarks = _one_server(server, mine, part)
        unseen, when = unseen_requests(trace, server.name, units)
        doubted = _doubted(part)
        before = known_steps(steps)
        steps = blank(step_bytes(steps, server), when, doubted["begin"].to_numpy(), doubted["end"].to_numpy())
        after = known_steps(steps)
        known[server.name] = known_share(made, after, _output_tokens(trace, part), unseen)
        if n := int((before & ~after).sum()):
            beside = when.beside(steps) + doubted["request"].n_unique()
            notes.append(
                f"Beside {n} of {steps.height} steps ran {beside} requests whose tokens' times are not known, so what these "
                "steps computed is not known either."
            )
        runs = _undoubted(runs, doubted)
        all_steps.append(steps)
        all_runs.append(runs)
        notes += remarks
    if not all_steps:
        return Steps(_empty("steps"), _empty("residency"), "", " ".join(notes) or None)
    note = f"{_PREFIX} from token times: a step ends when its last token was seen." + "".join(f" {n}" for n in notes)
    return Steps(
        pl.concat(all_steps).sort("server", "step"),
        pl.concat(all_runs).sort("request", "sequence", "first_step"),
        "reconstructed",
        note,
        known,
    )


def _mixes(reads: pl.DataFrame) -> bool:
    unit, time, count = (reads[c].to_numpy() for c in ("unit", "time_ns", "tokens"))
    return mixes(unit, time, typical_step_ns(unit, time, count))


def _units(trace: Trace) -> pl.DataFrame:
    """One row per sequence that emitted, sorted: unit, request, sequence, server, prompt_tokens, cached_tokens, scheduled_ns,
    available_ns."""
    stays = (
        trace.table("stages")
        .filter(~pl.col("role").is_in(["route", "encode", "prefill"]).fill_null(False))
        .sort("request", "attempt", "stage", nulls_last=False)
        .group_by("request")
        .agg(pl.col("server", "scheduled_ns", "enqueued_ns", "cached_tokens").last())
        .rename({"scheduled_ns": "stay_scheduled_ns"})
    )
    only = trace.manifest.server(None)
    return (
        trace.table("tokens")
        .select("request", pl.col("sequence").fill_null(0))
        .unique()
        .join(
            trace.table("requests").select("request", "prompt_tokens", "scheduled_ns", "queued_ns", "received_ns", "arrival_ns"),
            on="request",
            how="left",
        )
        .join(stays, on="request", how="left")
        .select(
            "request",
            "sequence",
            pl.col("server").fill_null(only.name if only else "server"),
            "prompt_tokens",
            "cached_tokens",
            pl.coalesce("stay_scheduled_ns", "scheduled_ns").alias("scheduled_ns"),
            pl.coalesce("enqueued_ns", "queued_ns", "received_ns", "arrival_ns").alias("available_ns"),
        )
        .sort("server", "request", "sequence")
        .with_columns(pl.int_range(pl.len()).over("server").alias("unit"))
        .collect()
    )


def _one_server(server: Server, units: pl.DataFrame, reads: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, _Ints, list[str]]:
    """Steps, residency, the tokens that came from each step, remarks; as if all that the server did had been seen."""
    unit, time, count = (reads[c].to_numpy() for c in ("unit", "time_ns", "tokens"))
    hidden = hides_steps(unit, time, count)
    order = np.lexsort((unit, time))
    step_by_time, _, end, seen = cluster(
        unit[order], time[order], count[order], units.height, hidden=hidden, step_ns=typical_step_ns(unit, time, count)
    )
    step = np.empty_like(step_by_time)
    step[order] = step_by_time
    opening = np.concatenate(([True], unit[1:] != unit[:-1]))
    last = step[opening]  # by unit: the step of the first token

    shares = decode_shares(unit, step, count, reads["index"].to_numpy(), opening, units["prompt_tokens"], hidden=hidden)
    decoding = np.bincount(shares["step"], minlength=len(end)).astype(np.int64)
    picked_up = units["scheduled_ns"].fill_null(units["available_ns"]).fill_null(_NEVER).to_numpy()
    start = step_starts(end, decoding, last, picked_up)
    prompts = _prompts(units, last, first_steps(start, last, picked_up))
    placed = place(prompts, start, end - start, decoding, server.max_batched_tokens)
    lines = lay_out(start, end, decoding, placed, server.max_batched_tokens)
    steps = step_rows(lines, shares, units, unit, step)
    runs = residency_rows(lines, shares, units)
    named = [pl.lit(server.name).alias("server"), pl.lit(0, pl.Int64).alias("dp_rank"), pl.lit(SOURCE).alias("source")]
    steps = _conform(
        steps.with_columns(*named, pl.lit(0, pl.Int64).alias("pp_rank"), pl.lit("reconstructed").alias("origin")), "steps"
    )
    made = np.zeros(steps.height, dtype=np.int64)
    np.add.at(made, lines.number[shares["step"]], shares["tokens"])
    np.add.at(made, lines.number[last], count[opening])
    return steps, _conform(runs.with_columns(*named), "residency"), made, _remarks(seen, placed, reads, units)


def _doubted(reads: pl.DataFrame) -> pl.DataFrame:
    """The sequences of unknown or doubted counts: request, sequence, begin, end (first and last read, ns)."""
    return (
        reads.group_by("request", "sequence", maintain_order=True)
        .agg(pl.col("time_ns").first().alias("begin"), pl.col("time_ns").last().alias("end"), pl.col("count").is_null().any())
        .filter("count")
        .drop("count")
    )


def _undoubted(runs: pl.DataFrame, doubted: pl.DataFrame) -> pl.DataFrame:
    """``runs`` without token counts where these are doubted: that a sequence generated is known, not how much in each step."""
    theirs = runs.join(
        doubted.with_columns(pl.lit(True).alias("d")), on=["request", "sequence"], how="left", maintain_order="left"
    )
    unknown = pl.lit(theirs["d"].fill_null(False)) & (pl.col("phase") == "decode")
    return runs.with_columns(
        pl.when(unknown).then(None).otherwise(pl.col(c)).alias(c) for c in ("tokens_per_step", "context_at_start")
    )


def _output_tokens(trace: Trace, reads: pl.DataFrame) -> pl.Series:
    """Output tokens of each request with reads: the server's total or, where it told none, those that were counted."""
    total = trace.table("requests").select("request", "output_tokens").collect()
    seen = reads.group_by("request", maintain_order=True).agg(pl.col("tokens").sum())
    return seen.join(total, on="request", how="left").select(pl.coalesce("output_tokens", "tokens")).to_series()


_NEVER = np.iinfo(np.int64).min


def _prompts(units: pl.DataFrame, last: _Ints, first: _Ints) -> list[Prompt]:
    """The prompts in the order of their first token; a request's further sequences share the first one's and have none."""
    out = []
    rows = units.select("unit", "request", "sequence", "prompt_tokens", "cached_tokens", "scheduled_ns", "available_ns")
    seen: set[int] = set()
    for u, request, _, prompt, cached, scheduled, available in rows.iter_rows():
        if request in seen:
            continue
        seen.add(request)
        # Even of a prompt that is wholly cached the last token is computed: its logits are the first answer.
        tokens = None if prompt is None else max(prompt - (cached or 0), 1)
        context = 0 if prompt is None or tokens is None else prompt - tokens
        out.append(Prompt(u, int(last[u]), None if scheduled is None else int(first[u]), available, tokens, context))
    keys = dict(
        zip(units["unit"].to_list(), units["scheduled_ns"].fill_null(units["available_ns"]).fill_null(0).to_list(), strict=True)
    )
    return sorted(out, key=lambda p: (p.last, keys[p.unit], p.unit))


def _remarks(seen: _Ints, placed: Placed, reads: pl.DataFrame, units: pl.DataFrame) -> list[str]:
    notes = []
    if n := int((seen == 0).sum()):
        notes.append(f"{n} steps lie between two tokens that came together; their time is an even share.")
    if n := sum(placed.extra.values()):
        notes.append(f"{n} steps without a token were inferred from prompts longer than the batch.")
    if n := int((reads.group_by("unit", maintain_order=True).first()["tokens"] - 1).sum()):
        notes.append(f"{n} tokens came along with a request's first one; the steps that made them are not told.")
    if placed.over:
        notes.append(f"{placed.over} prompts exceed the batch that the manifest states.")
    if n := reads["count"].null_count():
        notes.append(f"{n} reads do not say how many tokens they hold; one for each of their chunks was taken.")
    if n := reads.filter("doubted")["unit"].n_unique():
        notes.append(f"For {n} sequences that is because their chunks' counts do not add up to the server's total.")
    if n := units["scheduled_ns"].null_count():
        notes.append(f"Of {n} of {units.height} requests the server did not tell when it began; it was inferred.")
    if n := units["cached_tokens"].null_count():
        notes.append(f"Of {n} of {units.height} requests the cached part of the prompt is unknown; none was taken.")
    if n := units["prompt_tokens"].null_count():
        notes.append(f"Of {n} requests the prompt's length is unknown; their steps have no token counts.")
    return notes


def _conform(frame: pl.DataFrame, table: str) -> pl.DataFrame:
    empty = _empty(table)
    return frame.select(
        pl.col(n).cast(t) if n in frame.columns else pl.lit(None, dtype=t).alias(n) for n, t in empty.schema.items()
    )


def _empty(table: str) -> pl.DataFrame:
    frame = pl.from_arrow(schema.table(table).arrow.empty_table())
    assert isinstance(frame, pl.DataFrame)
    return frame
