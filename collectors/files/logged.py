"""Requests out of a log's mapped columns: times in any format, lengths of time added to them, statuses, cached tokens."""

from __future__ import annotations

import polars as pl

from hoptrace.collectors.files.base import Sink
from hoptrace.collectors.files.blocks import ROW
from hoptrace.collectors.files.checked import Batch, Requests
from hoptrace.collectors.files.mapping import COUNTS, TIMES, Field
from hoptrace.collectors.files.values import Read, Times, duration_ns, is_missing, whole
from hoptrace.errors import UsageError
from hoptrace.manifest import Server

__all__ = ["Logged"]

_ARRIVALS = ("intended", "sent", "received")
_PLAIN = ("request_id", "session", "model", "tenant", "adapter", "finish_reason", "error")
# Paths on which servers of this world generate: OpenAI's, Anthropic's, vLLM's, SGLang's, TGI's, llama.cpp's, Triton's.
_GENERATES = r"/(chat/completions|completions?|responses|messages|generate|generate_stream|infill)/?(\?.*)?$"
_MOST_SERVERS = 1_000
_UTC_FROM = 10**17
# Mapped columns that are no columns of `requests`.
_ASIDE = ("status", "server", "cached_tokens", "context_tokens")
_LONGER = "Requests longer than the context of their model, kept as they are: {n}."
_CACHED = "Requests with more cached tokens than their prompt has tokens (that value is left unknown): {n}."
_ENDED = "Requests that end before they arrive (their end is left unknown): {n}."
_OUTSIDE = "Requests whose {what} lies outside of their time (it is left unknown): {{n}}."
# In the order in which they happen.
_MOMENTS = {
    "queued_ns": "entry into the queue", "scheduled_ns": "scheduling", "first_token_ns": "first token",
    "last_token_ns": "last token", "finish_ns": "end",
}  # fmt: skip
# In the order in which they are believed.
_BELIEVED = ("first_token_ns", "last_token_ns", "queued_ns", "scheduled_ns")
_FAILED = "Requests with a status of 400 or more, or 0 (they failed, and a replay leaves them out): {n}."


class Logged:
    """Writes frames of text columns as `requests` and, where a server or cached tokens are mapped, `stages`."""

    def __init__(self, sink: Sink, fields: list[Field], *, hint: str | None = None) -> None:
        """Raises UsageError if the fields tell no arrival; ``hint`` says what would."""
        self._sink = sink
        self._of = {f.target: f for f in fields}
        given = self._of.keys()
        if not given & {"arrival", "received", "sent", "intended"} and not {"finish", "duration"} <= given:
            raise UsageError(
                f"When a request of {sink.path} arrived is not told.",
                hint=hint or "Map arrival, or finish with duration_s (or _ms, _us, _ns).",
            )
        if {"arrival", "received"} <= given:
            raise UsageError("--map names both arrival and received, which are one.", hint="Leave one of them out.")
        sink.hint = hint
        self._clocks = {t: Times(f.column, f.form) for t, f in self._of.items() if t in TIMES}
        self._requests = Requests(sink)
        self._servers: dict[str, None] = {}
        self._losses: list[tuple[str, pl.Series]] = []
        self._earliest: int | None = None

    def write(self, frame: pl.DataFrame) -> None:
        """One batch: columns of the log as text, with ROW and BAD."""
        batch = Batch(frame)
        self._losses.clear()
        times = {t: self._time(batch, t) for t in self._clocks}
        lengths = {t: self._length(batch, t) for t in ("duration", "ttft", "think") if t in self._of}
        columns: dict[str, pl.Series] = {f"t_{t}": s for t, s in times.items()} | {f"d_{t}": s for t, s in lengths.items()}
        for target, what in COUNTS.items():
            if target in self._of:
                name = self._of[target].column
                if target == "priority":
                    columns[target] = batch.take(name, whole(frame[name]), "a whole number")
                else:
                    columns[target] = batch.count(name, what, needed=False)
        for target in (*_PLAIN, "server"):
            if target in self._of:
                text = frame[self._of[target].column]
                columns[target] = text.set(is_missing(text), None)
        if "status" in self._of:
            name = self._of["status"].column
            columns["status"] = batch.take(name, whole(frame[name]), "a status number")
        if "path" in self._of:
            path = frame[self._of["path"].column].str.strip_chars().str.replace(r"^[A-Z]+ ", "").str.replace(r" HTTP/[\d.]+$", "")
            batch.bad(~path.str.contains(_GENERATES).fill_null(False), "its path is none that generates tokens", path)
        self._arrived(batch, columns)
        for what, where in self._losses:
            self._sink.lost(what, int((where & batch.good).sum()))
        rows = batch.done(self._sink, columns)
        if rows.height:
            self._store(self._requests.number(rows.drop(ROW)))

    def tell(self) -> None:
        """What has to be said at the end."""
        self._sink.epoch = None if self._earliest is None else "utc" if self._earliest >= _UTC_FROM else "relative"
        for target, clock in self._clocks.items():
            if clock.guessed:
                self._sink.note(f"{clock.column} ({target}) was read as {_said(clock.format)}, by its looks.")
            if clock.format == "iso8601" and not clock.zoned:
                self._sink.note(f"{clock.column} states no time zone; it is taken as UTC.")
            elif clock.format and "%" in clock.format and "%z" not in clock.format:
                self._sink.note(f"{clock.column} is read without a time zone; it is taken as UTC.")
            elif clock.format == "nginx":
                self._sink.note(f"{clock.column} is in whole seconds: no time that is made from it is more exact.")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _time(self, batch: Batch, target: str) -> pl.Series:
        name = self._of[target].column
        return self._kept(name, self._clocks[target].read(batch.frame[name]), TIMES[target], "not a time")

    def _length(self, batch: Batch, target: str) -> pl.Series:
        field = self._of[target]
        assert field.form is not None
        read = duration_ns(batch.frame[field.column], field.form)
        value = self._kept(field.column, read, target, "not a length of time")
        negative = (value < 0).fill_null(False)
        self._losses.append((f"requests.{target}: negative", negative))
        return value.set(negative, None)

    def _kept(self, column: str, read: Read, target: str, why: str) -> pl.Series:
        """What cannot be read is null, and counted unless :meth:`_arrived` rejects the record for want of it."""
        if read.bad is not None:
            self._losses.append((f"requests.{target}: {column} is {why}", read.bad))
        return read.value

    def _arrived(self, batch: Batch, columns: dict[str, pl.Series]) -> None:
        """`received`, `arrival` and `finish` from what is mapped."""
        arrival = columns.get("t_arrival", columns.get("t_received"))
        finish, duration = columns.get("t_finish"), columns.get("d_duration")
        if arrival is None and finish is not None and duration is not None:
            arrival = finish - duration
            # Beyond what 64 bits hold, the difference comes out on the wrong side.
            arrival = arrival.set((arrival > finish).fill_null(False), None)
        seen = {"received": arrival, "sent": columns.get("t_sent"), "intended": columns.get("t_intended")}
        known = pl.DataFrame({n: s for n in _ARRIVALS if (s := seen[n]) is not None})
        columns["arrival_ns"] = known.select(pl.min_horizontal(pl.all())).to_series()
        first = pl.coalesce(*(pl.when(pl.col(n) == pl.min_horizontal(pl.all())).then(pl.lit(n)) for n in known.columns))
        columns["arrival_of"] = known.select(first).to_series()
        if arrival is not None:
            columns["received_ns"] = arrival
        names = [self._of[t].column for t in ("arrival", "received", "sent", "intended", "finish", "duration") if t in self._of]
        text = batch.frame[names[0]]
        batch.bad(columns["arrival_ns"].is_null(), "when it arrived cannot be told (" + ", ".join(names) + ")", text)
        if finish is None and duration is not None:
            finish = columns["arrival_ns"] + duration
        if finish is not None:
            columns["finish_ns"] = finish

    def _store(self, rows: pl.DataFrame) -> None:
        sink = self._sink
        least = int(rows["arrival_ns"].min())  # type: ignore[arg-type]
        self._earliest = least if self._earliest is None else min(self._earliest, least)
        for target, name in TIMES.items():
            if f"t_{target}" in rows.columns and name not in rows.columns:
                rows = rows.with_columns(pl.col(f"t_{target}").alias(name))
        if "d_ttft" in rows.columns and "first_token_ns" not in rows.columns:
            rows = rows.with_columns((pl.col("arrival_ns") + pl.col("d_ttft")).alias("first_token_ns"))
        if "d_think" in rows.columns:
            rows = rows.with_columns(pl.col("d_think").alias("think_ns"))
        rows = self._unlike(rows, "finish_ns", pl.col("finish_ns") < pl.col("arrival_ns"), _ENDED)
        rows = self._in_order(rows)
        if "status" in rows.columns:
            failed = (pl.col("status") >= 400) | (pl.col("status") < 100)
            sink.tally(_FAILED, int(rows.select(failed.sum()).item() or 0))
            said = pl.when(failed).then(pl.format("The log says status {}.", "status"))
            rows = rows.with_columns((pl.coalesce("error", said) if "error" in rows.columns else said).alias("error"))
        if "context_tokens" in rows.columns:
            both = pl.sum_horizontal(c for c in ("prompt_tokens", "output_tokens") if c in rows.columns)
            sink.tally(_LONGER, int(rows.select((both > pl.col("context_tokens")).sum()).item() or 0))
        self._stages(rows)
        drop = [c for c in rows.columns if c.startswith(("t_", "d_")) or c in _ASIDE]
        self._requests.write(rows.drop(drop))

    def _in_order(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Each moment lies between those before and after it that were believed."""
        places = ["arrival_ns", *_MOMENTS]
        kept: list[str] = [n for n in ("arrival_ns", "finish_ns") if n in rows.columns]
        for name in (n for n in _BELIEVED if n in rows.columns):
            at = places.index(name)
            wrong = pl.any_horizontal(
                *((pl.col(name) < pl.col(n)).fill_null(False) for n in kept if places.index(n) < at),
                *((pl.col(name) > pl.col(n)).fill_null(False) for n in kept if places.index(n) > at),
            )
            rows = self._unlike(rows, name, wrong, _OUTSIDE.format(what=_MOMENTS[name]))
            kept.append(name)
        return rows

    def _unlike(self, rows: pl.DataFrame, column: str, wrong: pl.Expr, said: str) -> pl.DataFrame:
        """A value that contradicts the others is left unknown, and counted."""
        if column not in rows.columns:
            return rows
        n = int(rows.select(wrong.fill_null(False).sum()).item())
        if not n:
            return rows
        self._sink.tally(said, n)
        self._sink.lost(f"requests.{column}: contradicts other times", n)
        return rows.with_columns(pl.when(~wrong.fill_null(False)).then(pl.col(column)).alias(column))

    def _stages(self, rows: pl.DataFrame) -> None:
        if "cached_tokens" not in rows.columns and "server" not in rows.columns:
            return
        stages = rows.select(
            "request",
            pl.lit(0, dtype=pl.Int64).alias("sequence"),
            pl.lit(0, dtype=pl.Int64).alias("attempt"),
            pl.lit(0, dtype=pl.Int64).alias("stage"),
            *(c for c in ("server", "cached_tokens", "prompt_tokens") if c in rows.columns),
        )
        if "cached_tokens" in stages.columns and "prompt_tokens" in stages.columns:
            more = (pl.col("cached_tokens") > pl.col("prompt_tokens")).fill_null(False)
            n = int(stages.select(more.sum()).item())
            self._sink.tally(_CACHED, n)
            self._sink.lost("stages.cached_tokens: more than the prompt", n)
            stages = stages.with_columns(pl.when(~more).then(pl.col("cached_tokens")).alias("cached_tokens"))
        if "server" in stages.columns:
            for name in stages["server"].drop_nulls().unique(maintain_order=True).to_list():
                if name not in self._servers and len(self._servers) < _MOST_SERVERS:
                    self._servers[name] = None
                    self._sink.manifest.servers.append(Server(name=name))
        self._sink.write("stages", stages.drop("prompt_tokens", strict=False))


def _said(form: str | None) -> str:
    return {"s": "Unix seconds", "ms": "Unix ms", "us": "Unix µs", "ns": "Unix ns", "nginx": "nginx's $time_local"}.get(
        form or "", str(form)
    )
