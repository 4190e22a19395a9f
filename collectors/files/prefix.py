"""Block hashes of a batch of prompts: their block size, whether they fit the prompts, and the columns that they become."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from hoptrace.collectors.files.base import Sink
from hoptrace.collectors.files.checked import Batch

if TYPE_CHECKING:
    from hoptrace.collectors.files.idtable import BlockIds

__all__ = ["Prefixes"]

_SIZES = (512, 16, 32, 64, 128, 256, 1024, 2048)
_FEW = "Requests with fewer block hashes than their prompt has blocks (what no hash covers counts as unlike any other text): {n}."
_MANY = "Requests with more block hashes than their prompt has blocks (the surplus was left out): {n}."
_MOVED = "Requests whose block hashes also stand behind other blocks (they were replaced by hashes of the whole prefix): {n}."
_FULL = "There are more different block hashes than are kept in memory: whether late ones stand for one length was not checked."
_TWO = "a block hash stands for blocks of two lengths"


class Prefixes:
    """Block hashes of one file."""

    def __init__(self, sink: Sink, default: int) -> None:
        """``default``: tokens of a block if neither the user nor the file tells."""
        self._sink = sink
        self._default = default
        self._size = sink.options.block_tokens
        self._ids: BlockIds | None = None
        self._space = f"{sink.kind}:{sink.sha256[:16]}"

    def check(self, batch: Batch, hashes: pl.Series, prompt: pl.Series) -> pl.Series:
        """The hashes as they are to be written; records whose hashes contradict others are rejected."""
        if hashes.null_count() == hashes.len():
            return hashes
        usable = batch.good & hashes.is_not_null() & prompt.is_not_null()
        if hashes.drop_nulls().explode(empty_as_null=False).null_count():
            nulls = hashes.list.eval(pl.element().is_null().any()).list.first().fill_null(False)
            batch.bad(nulls, f"{hashes.name} is not a list of whole numbers")
            usable &= ~nulls
        size = self._block(hashes.filter(usable), prompt.filter(usable))
        need = (prompt + (size - 1)) // size
        length = hashes.list.len().cast(pl.Int64)
        self._sink.tally(_FEW, int((usable & (length < need)).sum()))
        more = usable & (length > need)
        if more.any():
            self._sink.tally(_MANY, int(more.sum()))
            hashes = pl.DataFrame({"h": hashes, "n": need}).select(pl.col("h").list.head(pl.col("n"))).to_series()
        mine = hashes.filter(usable)
        flat = mine.explode(empty_as_null=False).to_numpy()
        starts = np.concatenate([[0], np.cumsum(mine.list.len().to_numpy())]).astype(np.int64)
        rows = batch.rows.filter(usable).to_numpy()
        if self._ids is None:
            # Compiled code is loaded only for files that have hashes.
            from hoptrace.collectors.files.idtable import BlockIds

            self._ids = BlockIds()
        found = self._ids.scan(
            np.ascontiguousarray(flat, dtype=np.int64), starts, prompt.filter(usable).to_numpy(), rows, size
        )  # fmt: skip
        self._sink.tally(_MOVED, int(found.moved.sum()))
        if self._ids.full:
            self._sink.note(_FULL)
        if found.conflicts:
            at = np.flatnonzero(usable.to_numpy())
            where = np.zeros(hashes.len(), dtype=np.bool_)
            value: list[str | None] = [None] * hashes.len()
            for r, key, here, line, there in found.conflicts:
                where[at[r]] = True
                value[at[r]] = f"{key}: {there} tokens in row {line}, {here} here"
            batch.bad(pl.Series(where), _TWO, pl.Series(value, dtype=pl.String))
        if not found.moved.any():
            return hashes
        lists = pl.Series(found.ids).reshape((-1,)).to_frame("id").with_columns(
            pl.Series(np.repeat(np.arange(len(starts) - 1), np.diff(starts))).alias("r")
        ).group_by("r", maintain_order=True).agg("id")  # fmt: skip
        out = pl.DataFrame({"h": hashes, "r": pl.select(usable.cum_sum().cast(pl.Int64) - 1).to_series(), "u": usable})
        joined = out.join(lists, on="r", how="left", maintain_order="left")
        return joined.select(pl.when(pl.col("u") & pl.col("id").is_not_null()).then("id").otherwise("h")).to_series()

    def columns(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows, with the columns that say what the hashes are where there are any."""
        if self._size is None or "prefix_blocks" not in rows.columns:
            return rows
        has = pl.col("prefix_blocks").is_not_null()
        return rows.with_columns(
            pl.when(has).then(pl.lit(self._size, dtype=pl.Int64)).alias("block_size"),
            pl.when(has).then(pl.lit("tokens")).alias("block_unit"),
            pl.when(has).then(pl.lit(self._space)).alias("hash_space"),
        )

    def _block(self, hashes: pl.Series, prompt: pl.Series) -> int:
        """Tokens of a block: what the user said, or the usual size that fits every prompt of the first batch, or the default."""
        if self._size is None:
            length = hashes.list.len().cast(pl.Int64)
            fits = (s for s in (self._default, *_SIZES) if ((prompt + (s - 1)) // s == length).all())
            found = next(fits, None) if length.len() else None
            self._size = found or self._default
            if found is not None and found != self._default:
                self._sink.note(f"A hash stands for {found} tokens: so many hashes does each of the first prompts have.")
        return self._size
