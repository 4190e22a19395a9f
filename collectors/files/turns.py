"""Which request of the same session came before, for files whose sessions run one turn after another."""

from __future__ import annotations

import polars as pl

__all__ = ["Turns"]


class Turns:
    """Sessions of one file; their latest turns are kept (one entry a session)."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int | None]] = {}

    def link(self, rows: pl.DataFrame, session: str) -> pl.DataFrame:
        """Rows (in the file's order) with `parent_request`, and with `think_ns` where the parent's `finish_ns` is known and not
        after the arrival. ``session``: the column that names the session."""
        key = rows[session]
        if key.null_count() == rows.height:
            return rows
        finish = pl.col("finish_ns") if "finish_ns" in rows.columns else pl.lit(None, dtype=pl.Int64)
        frame = rows.with_columns(
            pl.col("request").shift(1).over(session).alias("_parent"), finish.shift(1).over(session).alias("_end"),
            finish.alias("_finish"),
        )  # fmt: skip
        opening = frame["_parent"].is_null() & key.is_not_null()
        known = [self._last.get(k, (None, None)) if o else (None, None) for k, o in zip(key, opening, strict=True)]
        frame = frame.with_columns(
            pl.coalesce("_parent", pl.Series([p for p, _ in known], dtype=pl.Int64)).alias("_parent"),
            pl.coalesce("_end", pl.Series([e for _, e in known], dtype=pl.Int64)).alias("_end"),
        )
        latest = frame.filter(key.is_not_null()).group_by(session).agg(pl.col("request").last(), pl.col("_finish").last())
        self._last.update({k: (r, f) for k, r, f in latest.iter_rows()})
        has = pl.col(session).is_not_null()
        pause = pl.col("arrival_ns") - pl.col("_end")
        think: pl.Expr = pl.when(has & (pause >= 0)).then(pause)
        if "think_ns" in rows.columns:
            think = pl.coalesce("think_ns", think)
        return frame.with_columns(
            pl.when(has).then(pl.col("_parent")).alias("parent_request"), think.cast(pl.Int64).alias("think_ns")
        ).drop("_parent", "_end", "_finish")
