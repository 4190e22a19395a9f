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

from hoptrace import schema
from hoptrace.kv import step_bytes
from hoptrace.manifest import Server
from hoptrace.metrics import arrivals_known
from hoptrace.reconstruct_cached import likely_cached
from hoptrace.reconstruct_confidence import confidence, signs
from hoptrace.reconstruct_hidden import blank, known_share, known_steps, unseen_requests
from hoptrace.reconstruct_observed import observed_residency
from hoptrace.reconstruct_prefill import Placed, Prompt, first_steps, place, step_starts
from hoptrace.reconstruct_queue import entry_delay_ns, guess_batch
from hoptrace.reconstruct_reads import number_reads, reads_of, tells_steps, units_of
from hoptrace.reconstruct_rows import lay_out, residency_rows, step_rows

if TYPE_CHECKING:
    from hoptrace.reader import Trace
    from hoptrace.writer import TraceWriter

__all__ = ["Steps", "noted", "reconstruct", "steps_of", "store_steps"]

SOURCE = "reconstruct"
_Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Steps:
    """``steps`` and ``residency`` with the columns of the schema, sorted; ``origin``: observed, reconstructed or replayed
    (several: joined by commas; "" if there is none); ``note``: what a reader has to know, or null; ``known``: by server, share of
    its output tokens that come from steps whose composition is known (null: not told); empty for steps that were not
    reconstructed. ``new_steps``, ``new_residency``: servers whose rows are not in the trace; of residency with the share of the
    reads that it covers (null: all)."""

    steps: pl.DataFrame
    residency: pl.DataFrame
    origin: str
    note: str | None = None
    known: Mapping[str, float | None] = field(default_factory=dict)
    new_steps: frozenset[str] = frozenset()
    new_residency: Mapping[str, float | None] = field(default_factory=dict)


def steps_of(trace: Trace) -> Steps:
    """The steps that the trace holds or, if it holds none, those that its tokens tell. Where observed steps come without
    residency, the tokens tell who was in them."""
    if not trace.has("steps"):
        return reconstruct(trace)
    steps = trace.table("steps").sort("server", "dp_rank", "step").collect()
    residency = trace.table("residency").sort("request", "first_step").collect()
    notes = noted(trace.manifest.notes)
    told = trace.table("coverage").filter((pl.col("table") == "steps") & (pl.col("source") == SOURCE)).sort("server").collect()
    known = dict(zip(told["server"].to_list(), told["fraction"].to_list(), strict=True))
    origin = ", ".join(sorted(steps["origin"].drop_nulls().unique().to_list()))
    shares: dict[str, float] = {}
    bare = steps.filter((pl.col("origin") == "observed") & ~pl.col("server").is_in(residency["server"].unique().to_list()))
    if bare.height and trace.has("tokens") and arrivals_known(trace):
        rows, shares, remarks = observed_residency(trace, bare)
        if rows.height:
            rows = _conform(rows.with_columns(pl.lit(SOURCE).alias("source")), "residency")
            residency = pl.concat([residency, rows]).sort("request", "first_step")
            notes.append(f"{_WHO} follows from token times." + "".join(f" {n}" for n in remarks))
    return Steps(steps, residency, origin, " ".join(notes) or None, known, new_residency=shares)


def store_steps(writer: TraceWriter, steps: Steps) -> None:
    """Write what was reconstructed into a trace that is being written, with the note and the coverage, whose fraction is
    :attr:`Steps.known`. What the trace holds already is not written again; nothing if that is all."""
    if not steps.new_steps and not steps.new_residency:
        return
    mine = steps.steps.filter(pl.col("server").is_in(sorted(steps.new_steps)))
    if mine.height:
        writer.append_arrow("steps", mine.to_arrow())
    writer.append_arrow("residency", steps.residency.filter(pl.col("server").is_in(sorted(steps.new_residency))).to_arrow())
    rows = []
    for (server,), s in steps.steps.group_by(["server"], maintain_order=True):
        span = {"server": server, "from_ns": s["start_ns"].min(), "to_ns": s["end_ns"].max(), "source": SOURCE}
        if server in steps.new_steps:
            columns = [c for c in s.columns if s[c].null_count() < s.height]
            rows.append({"table": "steps", "columns": columns, "fraction": steps.known.get(str(server)), **span})
        if server in steps.new_residency:
            rows.append({"table": "residency", "columns": None, "fraction": steps.new_residency[str(server)], **span})
    writer.append("coverage", rows)
    if steps.note:
        note = steps.note
        writer.update(lambda m: None if note in m.notes else m.notes.append(note))


_NO_ARRIVALS = "When requests were sent is not known, so which of their tokens left together is not, and no steps can be told."
_PREFIX = "Steps were reconstructed"
_WHO = "Who was in the observed steps"


def noted(notes: list[str]) -> list[str]:
    """Those of a manifest's notes that say how its steps were made."""
    return [n for n in notes if n.startswith((_PREFIX, _WHO))]


def reconstruct(trace: Trace) -> Steps:
    """Reconstruct the steps of every server from tokens, stages and requests. Empty, with a note, if there are no tokens, or if
    it is not known when requests came (each one's times count from its own start: which tokens left together is lost)."""
    if not arrivals_known(trace):
        return Steps(_empty("steps"), _empty("residency"), "", _NO_ARRIVALS)
    units = units_of(trace)
    reads = reads_of(trace, units)
    if reads.is_empty():
        return Steps(_empty("steps"), _empty("residency"), "", "No token times were recorded, so no steps can be told.")
    all_steps, all_runs, notes, known = [], [], [], {}
    for (name,), mine in units.group_by(["server"], maintain_order=True):
        server = trace.manifest.server(str(name)) or Server.model_validate({"name": str(name)})
        part = reads.filter(pl.col("server") == name)
        if part.is_empty():
            continue
        if not tells_steps(part):
            notes.append(
                f"{name} computes prompts in iterations of their own: its tokens do not tell its steps, so none are given."
            )
            continue
        cached = likely_cached(trace, server, mine)
        if cached is not None:
            notes.append(f"{server.name} did not tell what it found cached: what an earlier prompt has in common was taken.")
            mine = mine.with_columns(cached)
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
    note = f"{_PREFIX} from token times: a step ends when its tokens were seen, less what held them up." + "".join(
        f" {n}" for n in notes
    )
    return Steps(
        pl.concat(all_steps).sort("server", "step"),
        pl.concat(all_runs).sort("request", "sequence", "first_step"),
        "reconstructed",
        note,
        known,
        frozenset(known),
        dict.fromkeys(known),
    )


def _one_server(server: Server, units: pl.DataFrame, reads: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, _Ints, list[str]]:
    """Steps, residency, the tokens that came from each step, remarks; as if all that the server did had been seen."""
    n = number_reads(units, reads)
    end, decoding, last = n.end, n.decoding, n.last
    told = units["scheduled_ns"]
    available = units["available_ns"]
    ordered = _prompts(units, last)
    delay = entry_delay_ns(ordered, end, decoding)
    picked_up = told.fill_null(available + delay).fill_null(_NEVER).to_numpy()
    start = step_starts(end, decoding, last, picked_up)
    batch = server.max_batched_tokens or guess_batch(ordered, start, n.taken, delay)
    placed = place(ordered, start, end - start, n.taken, batch, first_steps(start, last, told, available + delay // 2))
    lines = lay_out(start, end, decoding, placed, batch)
    sure = confidence(signs(n.unit, n.step, n.time, n.stands_for, n.first, n.seen), lines.number, len(lines.start))
    steps = step_rows(lines, n.shares, units, n.unit, n.step).with_columns(pl.Series("confidence", sure))
    runs = residency_rows(lines, n.shares, units)
    named = [pl.lit(server.name).alias("server"), pl.lit(0, pl.Int64).alias("dp_rank"), pl.lit(SOURCE).alias("source")]
    steps = _conform(
        steps.with_columns(*named, pl.lit(0, pl.Int64).alias("pp_rank"), pl.lit("reconstructed").alias("origin")), "steps"
    )
    made = np.zeros(steps.height, dtype=np.int64)
    np.add.at(made, lines.number[n.shares["step"]], n.shares["tokens"])
    np.add.at(made, lines.number[last], n.with_first)
    remarks = _remarks(n.seen, placed, reads, units, n.with_first, batch if server.max_batched_tokens is None else None)
    return steps, _conform(runs.with_columns(*named), "residency"), made, remarks


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


def _prompts(units: pl.DataFrame, last: _Ints) -> list[Prompt]:
    """The prompts in the order of their first token; a request's further sequences share the first one's and have none."""
    out = []
    rows = units.select("unit", "request", "prompt_tokens", "cached_tokens", "available_ns")
    seen: set[int] = set()
    for u, request, prompt, cached, available in rows.iter_rows():
        if request in seen:
            continue
        seen.add(request)
        # Even of a prompt that is wholly cached the last token is computed: its logits are the first answer.
        tokens = None if prompt is None else max(prompt - (cached or 0), 1)
        context = 0 if prompt is None or tokens is None else prompt - tokens
        out.append(Prompt(u, int(last[u]), available, tokens, context))
    keys = dict(
        zip(units["unit"].to_list(), units["scheduled_ns"].fill_null(units["available_ns"]).fill_null(0).to_list(), strict=True)
    )
    return sorted(out, key=lambda p: (p.last, keys[p.unit], p.unit))


def _remarks(
    seen: _Ints, placed: Placed, reads: pl.DataFrame, units: pl.DataFrame, with_first: _Ints, guessed: int | None
) -> list[str]:
    notes = []
    if n := int((seen == 0).sum()):
        notes.append(f"{n} steps lie between two tokens that came together; their time is an even share.")
    if n := sum(placed.extra.values()):
        notes.append(f"{n} steps without a token were inferred from prompts longer than the batch.")
    if n := int((with_first - 1).sum()):
        notes.append(f"{n} tokens came along with a request's first one; the steps that made them are not told.")
    if guessed is not None:
        notes.append(f"That a step takes {guessed} tokens was inferred from how many steps prompts took.")
    if placed.over:
        notes.append(f"{placed.over} prompts exceed the batch.")
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
