"""A cell's work as a trace: requests drawn with a seed, or taken from another trace."""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path
from typing import Any

import polars as pl
from harness.recipe import Lengths, Work

import hoptrace
from hoptrace.errors import InputError
from hoptrace.manifest import Manifest
from hoptrace.reader import Trace
from hoptrace.replay.workload import parse_rate, workload
from hoptrace.samples import sample
from hoptrace.writer import TraceWriter

__all__ = ["drawn", "write"]

_BLOCK_TOKENS = 16  # as the recorder hashes prompts of token ids


def write(work: Work, path: Path, beside: Path) -> Trace:
    """Write the work as a trace at ``path``, anew. ``beside``: the recipe's folder, where a trace's relative path begins.

    Raises:
        InputError: the trace is not there, or nothing in it can be sent.
    """
    frame = drawn(work) if work.trace is None else _taken(work, beside)
    shutil.rmtree(path, ignore_errors=True)
    with TraceWriter(path, Manifest(origin="imported"), background=False) as w:
        w.append_arrow("requests", frame.to_arrow())
    return hoptrace.open(path)


def drawn(work: Work) -> pl.DataFrame:
    """Rows of `requests`: Poisson arrivals, log-normal lengths; shared prefixes as hashes of whole blocks of 16 tokens."""
    assert work.requests and work.rate_per_s and work.prompt and work.output
    rng = random.Random(work.seed)
    rows: list[dict[str, Any]] = []
    at = 0.0
    for i in range(work.requests):
        at += rng.expovariate(work.rate_per_s)
        prompt, output = _length(rng, work.prompt), _length(rng, work.output)
        blocks = None
        if work.prefixes is not None and rng.random() < work.prefixes.share:
            group = rng.randrange(work.prefixes.groups)
            whole = work.prefixes.tokens // _BLOCK_TOKENS
            blocks = [1_000_000 * (group + 1) + j for j in range(whole)]
            prompt += whole * _BLOCK_TOKENS
        rows.append(_row(i, round(at * 1e9), prompt, output) | {"prefix_blocks": blocks, "priority": _priority(rng, work)})
    space = pl.when(pl.col("prefix_blocks").is_not_null())
    types: dict[str, Any] = {"prefix_blocks": pl.List(pl.Int64), "priority": pl.Int64}
    return pl.DataFrame(rows, schema_overrides=types).with_columns(
        space.then(pl.lit("drawn")).alias("hash_space"), space.then(_BLOCK_TOKENS).alias("block_size"),
        space.then(pl.lit("tokens")).alias("block_unit"),
    )  # fmt: skip


def _taken(work: Work, beside: Path) -> pl.DataFrame:
    """The first ``limit`` requests of a trace, ``rate`` times as fast, their lengths capped; without its prefixes."""
    assert work.trace
    path = beside / work.trace
    trace = hoptrace.open(path if path.exists() else sample(work.trace))
    found = workload(trace).at_rate(parse_rate(str(work.rate)))
    n = min(found.n, work.limit or found.n)
    if n < 2:
        raise InputError(f"{work.trace} has fewer than two requests that can be sent.")
    rng = random.Random(work.seed)
    rows = []
    for i in range(n):
        prompt = min(int(found.prompt_tokens[i]), work.max_prompt_tokens or math.inf)
        output = min(int(found.output_tokens[i]), work.max_output_tokens or math.inf)
        at = int(found.arrival_ns[i] - found.arrival_ns[0])
        rows.append(_row(i, at, int(prompt), int(output)) | {"priority": _priority(rng, work)})
    return pl.DataFrame(rows, schema_overrides={"priority": pl.Int64})


def _row(i: int, at_ns: int, prompt: int, output: int) -> dict[str, Any]:
    return {
        "request": i, "arrival_ns": at_ns, "received_ns": at_ns, "arrival_of": "received", "prompt_tokens": prompt,
        "output_tokens": output, "source": "fidelity",
    }  # fmt: skip


def _priority(rng: random.Random, work: Work) -> int | None:
    return rng.choice(work.priorities) if work.priorities else None


def _length(rng: random.Random, lengths: Lengths) -> int:
    drawn = round(rng.lognormvariate(math.log(lengths.median), lengths.sigma))
    return min(max(drawn, lengths.least), lengths.most)
