"""Mooncake request traces (JSON lines): timestamp in ms, lengths in tokens, one hash per 512-token block of the prompt."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import polars as pl

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.errors import InputError

__all__ = ["BLOCK_TOKENS", "IMPORTER", "Mooncake"]

# README of the Mooncake FAST'25 traces: "512-token blocks".
BLOCK_TOKENS = 512


class Mooncake(Importer):
    """Mooncake's and AIPerf's JSON lines."""

    kind = "mooncake"
    summary = "Mooncake traces (JSON lines): arrival, lengths, prefix block hashes"

    def matches(self, path: Path, head: bytes) -> bool:
        line = head.split(b"\n", 1)[0].lstrip()
        return line.startswith(b"{") and b'"input_length"' in line

    def read(self, path: Path, sink: Sink) -> None:
        """One request a line.

        Raises:
            InputError: a line is not JSON, a length is missing, or a block hash stands
                for blocks of two lengths (names both lines).
        """
        rows: list[dict[str, Any]] = []
        lengths: dict[int, tuple[int, int]] = {}
        digest = hashlib.sha256()
        missing: set[str] = set()
        with path.open("rb") as f:
            for number, raw in enumerate(f, 1):
                digest.update(raw)
                if raw.strip():
                    rows.append(self._row(path, number, raw, lengths, missing))
        notes = ["Times are ms since the log's own start."]
        if "timestamp" in missing:
            notes.append("Lines without a timestamp: their requests arrive with the line before, in the file's order.")
        if "output_length" in missing:
            notes.append("Lines without output_length: their output length is unknown, and a replay leaves them out.")
        space = f"mooncake:{digest.hexdigest()[:16]}"
        schema: dict[str, pl.DataType | type[pl.DataType]] = {
            "received_ns": pl.Int64, "prompt_tokens": pl.Int64, "output_tokens": pl.Int64,
            "prefix_blocks": pl.List(pl.Int64), "session": pl.String,
        }  # fmt: skip
        last = 0
        for r in rows:
            last = r["received_ns"] = last if r["received_ns"] is None else r["received_ns"]
        requests = (
            pl.DataFrame(rows, schema=schema)
            .sort("received_ns", maintain_order=True)
            .with_columns(
                pl.col("received_ns").alias("arrival_ns"),
                pl.lit("received").alias("arrival_of"),
                pl.col("output_tokens").alias("max_tokens"),
                pl.lit(BLOCK_TOKENS, dtype=pl.Int64).alias("block_size"),
                pl.lit("tokens").alias("block_unit"),
                pl.lit(space).alias("hash_space"),
                pl.lit(f"import:{self.kind}").alias("source"),
            )
        )
        sink.epoch = "relative"
        sink.count(requests.height)
        for note in notes:
            sink.note(note)
        sink.write("requests", requests.with_row_index("request"))

    @staticmethod
    def _row(path: Path, number: int, raw: bytes, lengths: dict[int, tuple[int, int]], missing: set[str]) -> dict[str, Any]:
        where = f"{path}, line {number}"
        try:
            data = json.loads(raw)
            prompt = data["input_length"]
        except (ValueError, TypeError):
            raise InputError(f"{where} is not JSON.", hint="Mend or remove the line.") from None
        except KeyError:
            raise InputError(f"{where} has no input_length.", hint="Mend or remove the line.") from None
        for name in ("timestamp", "output_length", "hash_ids"):
            if data.get(name) is None:
                missing.add(name)
        output, stamp, blocks = data.get("output_length"), data.get("timestamp"), data.get("hash_ids")
        numbers = [n for n in (prompt, output, stamp) if n is not None]
        if any(isinstance(n, bool) or not isinstance(n, int | float) or not 0 <= n < 2**53 for n in numbers) or prompt < 1:
            raise InputError(f"{where}: timestamp and lengths must be numbers, not negative.", hint="Mend or remove the line.")
        if blocks is not None:
            if not isinstance(blocks, list) or any(type(b) is not int or abs(b) >= 2**63 for b in blocks):
                raise InputError(f"{where}: hash_ids must be a list of integers.", hint="Mend or remove the line.")
            for i, block in enumerate(blocks):
                size = min(BLOCK_TOKENS, max(0, int(prompt) - i * BLOCK_TOKENS))
                before = lengths.setdefault(block, (size, number))
                if before[0] != size:
                    raise InputError(
                        f"{path}: block hash {block} stands for {before[0]} tokens in line {before[1]} "
                        f"and for {size} in line {number}.",
                        hint="One hash must mean one text: give the partial block another hash.",
                    )
        session = data.get("session_id")
        return {
            "received_ns": None if stamp is None else round(stamp * 1_000_000),
            "prompt_tokens": int(prompt),
            "output_tokens": None if output is None else int(output),
            "prefix_blocks": blocks,
            "session": None if session is None else str(session),
        }


IMPORTER = Mooncake()
