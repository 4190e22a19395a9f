"""Requests one by one: the table of all of them with their parts, and one request in detail with those that ran beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.analysis.latency.accounting import Accounting
from hoptrace.analysis.latency.parts import PARTS
from hoptrace.errors import InputError
from hoptrace.metrics import reads, request_metrics
from hoptrace.reader import Trace

__all__ = ["NEIGHBOURS", "STATUSES", "Detail", "detail", "request_table", "thinned"]

NEIGHBOURS = 12
STATUSES = ("finished", "failed", "unfinished")
_MOST_TOKENS = 4000
_MOST_SPANS = 2000
_CLASS_OF = {p.name: p.klass for p in PARTS}
_LABEL_OF = {p.name: p.label for p in PARTS}
_REQUEST_COLUMNS = (
    "request", "request_id", "session", "tenant", "model", "arrival_ns", "finish_ns",
    "prompt_tokens", "output_tokens", "max_tokens", "finish_reason", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Detail:
    """One request.

    Attributes:
        row: its row of :func:`request_table`.
        parts: its parts in ns by name, null where unseen; empty if it is not accounted for (failed, unfinished).
        spans: start_ns, end_ns, label, class, server: its time as an ordered sequence, each span named by the part that takes
            most of it; ``parts`` has the exact split.
        tokens: time_ns, index, count, doubted: what arrived in one read, as :func:`hoptrace.metrics.reads` has it (the first
            timed by its first emission, as TTFT is, the others by their last); at most 4,000 of them. Where the counts do not
            add up to the server's total they are doubted, and index and count null.
        tokens_left_out: reads beyond those.
        neighbours: request, start_ns, end_ns, label, class: the spans of the requests that share most time with it, cut to its
            life.
        neighbours_all: how many requests share any time with it.
    """

    row: dict[str, Any]
    parts: dict[str, int | None]
    spans: pl.DataFrame
    tokens: pl.DataFrame
    tokens_left_out: int
    neighbours: pl.DataFrame
    neighbours_all: int

    @property
    def shares(self) -> dict[str, float | None]:
        """Share of each part in its end-to-end time, 0 … 1; null where unseen, 0 where it took no time at all."""
        e2e = self.row["e2e_ns"]
        return {name: None if ns is None else (ns / e2e if e2e else 0.0) for name, ns in self.parts.items()}


def request_table(trace: Trace, accounting: Accounting) -> pl.DataFrame:
    """One row per request, whatever became of it, sorted by ``request``.

    Columns: identity and lengths as in `requests`; ``status`` (finished, failed, unfinished); ttft_ns, e2e_ns, tpot_ns, queue_ns,
    cached_tokens as in :mod:`hoptrace.metrics` and the parts as in ``accounting`` (null for requests that they leave out);
    ``largest_part`` (label) and ``largest_class``.
    """
    metrics = request_metrics(trace).select("request", "ttft_ns", "e2e_ns", "tpot_ns", "queue_ns", "cached_tokens")
    columns = [p.column for p in PARTS]
    largest = pl.concat_list(pl.col(c).fill_null(-1) for c in columns).list.arg_max()
    known = accounting.parts.select("request", *columns).with_columns(
        pl.when(pl.max_horizontal(columns) > 0).then(largest).alias("_largest")
    )
    status = (
        pl.when(pl.col("error").is_not_null())
        .then(pl.lit(STATUSES[1]))
        .when(pl.col("finish_ns").is_null())
        .then(pl.lit(STATUSES[2]))
        .otherwise(pl.lit(STATUSES[0]))
    )
    numbers = list(range(len(PARTS)))
    return (
        trace.table("requests")
        .select(_REQUEST_COLUMNS)
        .with_columns(status.alias("status"))
        .collect()
        .join(metrics, on="request", how="left")
        .join(known, on="request", how="left")
        .with_columns(
            pl.col("_largest").replace_strict(numbers, [p.label for p in PARTS], default=None).alias("largest_part"),
            pl.col("_largest").replace_strict(numbers, [p.klass for p in PARTS], default=None).alias("largest_class"),
        )
        .drop("_largest")
        .sort("request")
    )


def thinned(table: pl.DataFrame, by: str, most: int) -> pl.DataFrame:
    """At most ``most`` rows: the greatest tenth by ``by`` whole (half of ``most`` at the most), and of the others every k-th."""
    if table.height <= most:
        return table
    ranked = table.sort(by, "request", descending=[True, False], nulls_last=True)
    top = min(max(1, table.height // 10), most // 2)
    rest = ranked.slice(top)
    every = -(-rest.height // (most - top))
    return pl.concat([ranked.head(top), rest.gather_every(every)])


def detail(trace: Trace, accounting: Accounting, table: pl.DataFrame, request: int) -> Detail:
    """One request in detail. ``table`` is the trace's :func:`request_table`.

    Raises:
        InputError: there is no such request.
    """
    found = table.filter(pl.col("request") == request)
    if found.is_empty():
        raise InputError(f"The trace has no request {request}.")
    row = found.row(0, named=True)
    parts = {p.name: row[p.column] for p in PARTS} if row["request"] in accounting.parts["request"] else {}
    tokens = (
        reads(trace.table("tokens").filter(pl.col("request") == request), trace.table("requests"))
        .sort("sequence", "index")
        .with_columns(
            pl.when(pl.int_range(pl.len()).over("sequence") == 0).then("begin_ns").otherwise("time_ns").alias("time_ns"),
            pl.when(~pl.col("doubted")).then("index").alias("index"),
        )
        .sort("time_ns", "sequence", maintain_order=True)
        .select("time_ns", "index", "count", "doubted")
        .collect()
    )
    beside, total = _neighbours(table, row)
    spans = _classed(accounting.spans.filter(pl.col("request") == request))
    others = _classed(accounting.spans.filter(pl.col("request").is_in(beside)))
    end = row["finish_ns"]
    inside = others.with_columns(pl.col("start_ns").clip(lower_bound=row["arrival_ns"]), pl.col("end_ns").clip(upper_bound=end))
    return Detail(
        row=row,
        parts=parts,
        spans=spans.drop("request").head(_MOST_SPANS),
        tokens=tokens.head(_MOST_TOKENS),
        tokens_left_out=max(0, tokens.height - _MOST_TOKENS),
        neighbours=inside.filter(pl.col("end_ns") > pl.col("start_ns")).sort("request", "start_ns").head(_MOST_SPANS),
        neighbours_all=total,
    )


def _neighbours(table: pl.DataFrame, row: dict[str, Any]) -> tuple[list[int], int]:
    """The requests that share most time with it, and how many share any."""
    if row["finish_ns"] is None:
        return [], 0
    begin = pl.max_horizontal(pl.col("arrival_ns"), pl.lit(row["arrival_ns"]))
    end = pl.min_horizontal(pl.col("finish_ns"), pl.lit(row["finish_ns"]))
    shared = (
        table.filter((pl.col("request") != row["request"]) & pl.col("finish_ns").is_not_null())
        .with_columns((end - begin).alias("shared_ns"))
        .filter(pl.col("shared_ns") > 0)
        .sort("shared_ns", "request", descending=[True, False])
    )
    return shared["request"].head(NEIGHBOURS).to_list(), shared.height


def _classed(spans: pl.DataFrame) -> pl.DataFrame:
    """Spans with the class of each, and labels as people read them."""
    kind = pl.col("label").replace_strict(_CLASS_OF, default="unexplained")
    return spans.with_columns(kind.alias("class"), pl.col("label").replace(_LABEL_OF).alias("label")).sort("request", "start_ns")
