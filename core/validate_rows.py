"""Checks of rows against the schema, and of requests, stages, tokens, moves, waits and counters against each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import polars as pl

from hoptrace.reader import Trace
from hoptrace.schema import MINOR, TABLES, Table
from hoptrace.validate import Finding, check

__all__: list[str] = []

# Sizes are never negative; hashes, priorities and clock offsets may be.
_SIZES = ("tokens", "bytes", "characters", "bits")
_ORDER = ("arrival_ns", "scheduled_ns", "first_token_ns", "last_token_ns", "finish_ns")
_VISIBLE = ("first_token_ns", "first_visible_ns", "last_token_ns")
_STAY = ("enqueued_ns", "scheduled_ns", "end_ns")
# What these say of themselves needs no coverage: they are not samples of something larger.
_UNCOVERED = ("coverage", "events", "clock_sync")


def some(frame: pl.DataFrame, column: str, most: int = 3) -> str:
    """A few values of a column, to look at: "request 3, 7, 9 …"."""
    values = frame[column].unique(maintain_order=True)
    shown = ", ".join(str(v) for v in values.head(most))
    return f"{column} {shown}{' …' if len(values) > most else ''}"


def _per_table(spec: Table) -> None:
    """Register the schema's own checks of one table."""

    def schema_kept(trace: Trace) -> Iterator[Finding]:
        if not trace.manifest.tables.get(spec.name):
            return
        frame = trace.table(spec.name)
        names = frame.collect_schema().names()
        newer = int(trace.manifest.schema_version.split(".")[1]) > MINOR
        for name in names:
            if name not in spec.names and not newer:
                yield Finding("warning", "schema_kept", f"Column {name!r} is not in the schema.", spec.name)
        counts: dict[str, pl.Expr] = {}
        for c in spec.columns:
            column = pl.col(c.name)
            if c.required:
                counts[f"{c.name}\0is null, but every row must have it"] = column.is_null().sum()
            if c.values:
                counts[f"{c.name}\0holds a value that the schema does not list"] = (~column.is_in(c.values)).sum()
            if c.unit in _SIZES:
                counts[f"{c.name}\0is negative"] = (column < 0).sum()
        found = frame.select(e.cast(pl.Int64).alias(k) for k, e in counts.items()).collect().row(0, named=True) if counts else {}
        for key, n in found.items():
            if n:
                column_name, what = key.split("\0")
                level = "warning" if newer and "list" in what else "error"
                yield Finding(level, "schema_kept", f"{column_name} {what}: {n:,} rows.", spec.name, n)  # type: ignore[arg-type]
        if spec.key and not spec.merge:
            doubled = frame.group_by(spec.key).len().filter(pl.col("len") > 1).collect().sort(spec.key)
            if doubled.height:
                which = ", ".join(f"{k} {v}" for k, v in zip(spec.key, doubled.row(0), strict=False))
                message = f"{doubled.height:,} keys occur more than once (first: {which})."
                yield Finding("error", "schema_kept", message, spec.name, doubled.height)

    check(spec.name)(schema_kept)


for _table in TABLES.values():
    _per_table(_table)


def _ordered(frame: pl.LazyFrame, columns: tuple[str, ...], table: str, name: str) -> Iterator[Finding]:
    """Each of the times, where it is known, is not before any earlier one."""
    for before, after in combinations(columns, 2):
        wrong = frame.filter(pl.col(before) > pl.col(after)).select("request").collect().sort("request")
        if wrong.height:
            message = f"{after} is before {before} in {wrong.height:,} rows ({some(wrong, 'request')})."
            yield Finding("error", name, message, table, wrong.height)


@check("requests")
def requests_ordered(trace: Trace) -> Iterator[Finding]:
    """arrival ≤ scheduled ≤ first token ≤ last token ≤ finish."""
    frame = trace.table("requests")
    yield from _ordered(frame, _ORDER, "requests", "requests_ordered")
    yield from _ordered(frame, _VISIBLE[:2], "requests", "requests_ordered")
    yield from _ordered(frame, _VISIBLE[1:], "requests", "requests_ordered")


@check("requests")
def arrival_is_earliest(trace: Trace) -> Iterator[Finding]:
    """arrival_ns is the earliest of intended, sent and received, and arrival_of says which."""
    seen = [pl.col(f"{n}_ns") for n in ("intended", "sent", "received")]
    wrong = (
        trace.table("requests")
        .filter(pl.any_horizontal(c.is_not_null() for c in seen) & (pl.col("arrival_ns") != pl.min_horizontal(seen)))
        .select("request")
        .collect()
    )
    if wrong.height:
        message = f"arrival_ns is not the earliest of intended, sent and received ({some(wrong, 'request')})."
        yield Finding("error", "arrival_is_earliest", message, "requests", wrong.height)


@check("stages")
def stages_ordered(trace: Trace) -> Iterator[Finding]:
    """enqueued ≤ scheduled ≤ end."""
    yield from _ordered(trace.table("stages"), _STAY, "stages", "stages_ordered")


@check("requests", "stages")
def cached_within_prompt(trace: Trace) -> Iterator[Finding]:
    """No more tokens came from caches than the prompt has (a server that says so is believed in neither)."""
    whole = trace.table("requests").select("request", pl.col("prompt_tokens").alias("_whole"))
    prompt = pl.coalesce("prompt_tokens", "_whole")
    wrong = (
        trace.table("stages")
        .join(whole, on="request", how="left")
        .filter(pl.col("cached_tokens") > prompt)
        .select("request")
        .collect()
        .sort("request")
    )
    if wrong.height:
        n = "1 stay has" if wrong.height == 1 else f"{wrong.height:,} stays have"
        message = f"{n} more cached_tokens than the prompt has tokens ({some(wrong, 'request')})."
        yield Finding("warning", "cached_within_prompt", message, "stages", wrong.height)


@check("requests", "stages", "tokens", "residency", "moves", "waits")
def requests_known(trace: Trace) -> Iterator[Finding]:
    """Rows about a request are about one that is in `requests`."""
    known = trace.table("requests").select("request")
    for name in ("stages", "tokens", "residency", "moves", "waits"):
        if not trace.manifest.tables.get(name):
            continue
        strange = (
            trace.table(name).filter(pl.col("request").is_not_null()).join(known, on="request", how="anti").select("request")
        )
        wrong = strange.collect().sort("request")
        if wrong.height:
            message = f"{wrong.height:,} rows are about requests that `requests` does not have ({some(wrong, 'request')})."
            lost = sum(trace.manifest.rows_dropped.values())
            # Rows that the trace says it lost explain it.
            yield Finding("warning" if lost else "error", "requests_known", message, name, wrong.height)


@check("tokens")
def tokens_ordered(trace: Trace) -> Iterator[Finding]:
    """Within a sequence time does not run backwards, and the indices continue where the one before ended."""
    within = ["request", "sequence"]
    frame = trace.table("tokens").sort([*within, "index"])
    before = pl.col("time_ns").shift(1).over(within)
    expected = (pl.col("index") + pl.col("count")).shift(1).over(within)
    late = frame.filter(pl.col("time_ns") < before).select("request").collect()
    if late.height:
        message = f"{late.height:,} tokens are seen before the one ahead of them ({some(late, 'request')})."
        yield Finding("error", "tokens_ordered", message, "tokens", late.height)
    gaps = frame.filter(expected.is_not_null() & (pl.col("index") != expected)).select("request").collect()
    if gaps.height:
        message = f"{gaps.height:,} emissions do not continue at the index where the one before ended ({some(gaps, 'request')})."
        yield Finding("warning", "tokens_ordered", message, "tokens", gaps.height)


@check("requests", "tokens")
def tokens_match_requests(trace: Trace) -> Iterator[Finding]:
    """As many tokens as the request says it got, the first and the last at its times."""
    if not trace.manifest.tables.get("tokens"):
        return
    sums = trace.table("tokens").group_by("request").agg(
        total=pl.when(pl.col("count").is_null().any()).then(None).otherwise(pl.col("count").sum()),
        first=pl.col("time_ns").min(),
        last=pl.col("time_ns").max(),
    )  # fmt: skip
    both = trace.table("requests").filter(pl.col("error").is_null()).join(sums, on="request").sort("request").collect()
    # A stop token is computed, and so counted by the server, but not sent: one fewer per request is right.
    short = pl.col("output_tokens") - pl.col("total")
    differ = both.filter((short < 0) | (short > 1))
    if differ.height:
        message = f"tokens and output_tokens differ in {differ.height:,} requests ({some(differ, 'request')})."
        yield Finding("warning", "tokens_match_requests", message, "tokens", differ.height)
    for ours, theirs in (("first", "first_token_ns"), ("last", "last_token_ns")):
        wrong = both.filter(pl.col(ours) != pl.col(theirs))
        if wrong.height:
            message = f"{theirs} is not the time of the {ours} token in {wrong.height:,} requests ({some(wrong, 'request')})."
            yield Finding("error", "tokens_match_requests", message, "requests", wrong.height)


@check("moves", "waits")
def intervals_forward(trace: Trace) -> Iterator[Finding]:
    """Moves and waits do not end before they start."""
    for name in ("moves", "waits"):
        wrong = trace.table(name).filter(pl.col("end_ns") < pl.col("start_ns")).collect()
        if wrong.height:
            yield Finding("error", "intervals_forward", f"{wrong.height:,} {name} end before they start.", name, wrong.height)


@check("counters")
def counters_have_values(trace: Trace) -> Iterator[Finding]:
    """A sample that is ok has exactly one value; a cumulative counter does not fall within an incarnation."""
    frame = trace.table("counters")
    fine = pl.col("status").fill_null("ok") == "ok"
    values = pl.col("value_int").is_not_null().cast(pl.Int8) + pl.col("value_float").is_not_null().cast(pl.Int8)
    wrong = frame.filter(fine & (values != 1)).select("name").collect().sort("name")
    if wrong.height:
        message = f"{wrong.height:,} samples are ok but have no value or two ({some(wrong, 'name')})."
        yield Finding("error", "counters_have_values", message, "counters", wrong.height)
    series = ["host", "entity", "incarnation", "name", "direction", "source"]
    value = pl.coalesce(pl.col("value_int").cast(pl.Float64), pl.col("value_float"))
    fell = (
        frame.filter((pl.col("semantics") == "cumulative") & fine)
        .sort([*series, "time_ns"])
        .filter(value < value.shift(1).over(series))
        .select("name")
        .collect()
    )
    if fell.height:
        message = f"Cumulative counters fall {fell.height:,} times within one incarnation ({some(fell, 'name')})."
        yield Finding("warning", "counters_have_values", message, "counters", fell.height)


@check("coverage")
def coverage_present(trace: Trace) -> Iterator[Finding]:
    """Each table that holds rows says when and by whom it was recorded: else nobody can tell 'none' from 'not recorded'."""
    covered = set(trace.table("coverage").select("table").collect()["table"].to_list())
    for name in TABLES:
        if name not in _UNCOVERED and name not in covered and trace.has(name):
            yield Finding("warning", "coverage_present", f"No row of `coverage` says when `{name}` was recorded.", name)
    for name in sorted(n for n in covered if n is not None and n not in TABLES):
        yield Finding("warning", "coverage_present", f"`coverage` speaks of {name!r}, which is no table.", "coverage")
