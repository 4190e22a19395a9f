"""Alibaba's Qwen-Bailian traces (JSON lines): ``chat_id``, ``parent_chat_id`` (−1 for a first turn), ``timestamp`` (s),
``input_length``, ``output_length``, ``type``, ``turn``, ``hash_ids`` (one per 16 tokens). README of github
alibaba-edu/qwen-bailian-usagetraces-anon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.checked import Batch, Requests
from hoptrace.collectors.files.json_rows import json_frames, keys_of, note_unused
from hoptrace.collectors.files.prefix import Prefixes
from hoptrace.collectors.files.values import duration_ns, is_missing, whole

if TYPE_CHECKING:
    from hoptrace.collectors.files.idtable import ChatIds

__all__ = ["BLOCK_TOKENS", "IMPORTER", "Bailian"]

BLOCK_TOKENS = 16

_TEXTS = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length")
_ORPHANS = "Requests that continue a chat which does not come before them in the file (their parent is unknown): {n}."
_UNTIMED = "Requests without a timestamp (they arrive with the line before, in the file's order): {n}."


class Bailian(Importer):
    """Requests of a Qwen serving instance with their conversations and block hashes."""

    kind = "bailian"
    summary = "Qwen-Bailian traces (JSON lines): arrival, lengths, conversations, prefix hashes of 16-token blocks"

    def matches(self, path: Path, head: bytes) -> bool:
        keys = keys_of(head)
        line = head.split(b"\n", 1)[0]
        return b'"parent_chat_id"' in line if keys is None else {"parent_chat_id", "input_length"} <= keys.keys()

    def read(self, path: Path, sink: Sink) -> None:
        """One request a line; a conversation is a session, named by its first chat."""
        sink.epoch = "relative"
        sink.note("Times are seconds since the log's own start. When a turn ended is not in it, so think_ns is unknown.")
        note_unused(sink, (*_TEXTS, "hash_ids"))
        from hoptrace.collectors.files.idtable import ChatIds

        requests, prefixes, chats = Requests(sink), Prefixes(sink, BLOCK_TOKENS), ChatIds()
        last = 0
        for frame in json_frames(sink, _TEXTS, ("hash_ids",)):
            batch = Batch(frame)
            columns = {
                "prompt_tokens": batch.count("input_length", "tokens", least=1),
                "output_tokens": batch.count("output_length", "tokens", needed=False),
                "received_ns": batch.take("timestamp", duration_ns(frame["timestamp"], "s"), "a number of seconds"),
                "chat": batch.take("chat_id", whole(frame["chat_id"]), "a whole number"),
                "before": batch.take("parent_chat_id", whole(frame["parent_chat_id"]), "a whole number"),
            }
            if columns["chat"].null_count():
                batch.bad(is_missing(frame["chat_id"]), "it has no chat_id")
            batch.bad(columns["received_ns"] < 0, "timestamp is negative", frame["timestamp"])
            columns["prefix_blocks"] = prefixes.check(batch, frame["hash_ids"], columns["prompt_tokens"])
            rows = requests.number(batch.done(sink, columns))
            if not rows.height:
                continue
            rows = rows.with_columns(pl.col("received_ns").forward_fill().fill_null(last).alias("arrival_ns"))
            last = int(rows["arrival_ns"][-1])
            sink.tally(_UNTIMED, rows["received_ns"].null_count())
            rows = prefixes.columns(self._linked(sink, rows, chats)).drop("chat", "before")
            requests.write(
                rows.with_columns(pl.when(pl.col("received_ns").is_not_null()).then(pl.lit("received")).alias("arrival_of"))
            )

    @staticmethod
    def _linked(sink: Sink, rows: pl.DataFrame, chats: ChatIds) -> pl.DataFrame:
        before = rows["before"].fill_null(-1).to_numpy()
        parent, root = chats.link(rows["chat"].to_numpy(), np.ascontiguousarray(before), int(rows["request"][0]))
        sink.tally(_ORPHANS, int(((before >= 0) & (parent < 0)).sum()))
        return rows.with_columns(
            pl.Series("parent_request", parent).replace(-1, None),
            pl.Series("session", root).cast(pl.String),
            pl.col("chat").cast(pl.String).alias("request_id"),
        )


IMPORTER = Bailian()
