"""One side of a comparison: everything that is computed from one trace, once."""

from __future__ import annotations

from functools import cached_property

import polars as pl

from hoptrace.analysis.arranging.coordination import Coordination, coordination
from hoptrace.analysis.compare.diff_pairs import finished
from hoptrace.analysis.compare.diff_work import Work, work_of
from hoptrace.analysis.latency.accounting import Accounting, account
from hoptrace.analysis.moves.ledger import Ledger, ledger
from hoptrace.analysis.query import query
from hoptrace.metrics import Summary, itl_ns, request_metrics, summary
from hoptrace.platform import Graph, graph_of
from hoptrace.reader import Trace
from hoptrace.step_source import StepSource, step_source

__all__ = ["Side"]


class Side:
    """A trace and what is known of it, computed when it is asked for and kept."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.name = trace.name

    @cached_property
    def done(self) -> pl.DataFrame:
        """The finished requests: :func:`hoptrace.analysis.compare.diff_pairs.finished`."""
        return finished(self.trace)

    @cached_property
    def work(self) -> Work:
        return work_of(self.trace, self.done)

    @cached_property
    def rows(self) -> pl.DataFrame:
        """One row per finished request: :func:`hoptrace.metrics.request_metrics`, with ``after_ttft_ns`` (e2e − TTFT)."""
        return request_metrics(self.trace).with_columns((pl.col("e2e_ns") - pl.col("ttft_ns")).alias("after_ttft_ns"))

    @cached_property
    def steps(self) -> StepSource:
        return step_source(self.trace)

    @cached_property
    def summary(self) -> Summary:
        return summary(self.trace)

    @cached_property
    def accounting(self) -> Accounting:
        return account(self.trace, steps=self.steps)

    @cached_property
    def ledger(self) -> Ledger:
        return ledger(self.trace, steps=self.steps)

    @cached_property
    def coordination(self) -> Coordination:
        return coordination(self.trace, accounting=self.accounting, moved=self.ledger, steps=self.steps)

    @cached_property
    def graph(self) -> Graph:
        return graph_of(self.trace.manifest)

    @cached_property
    def servers(self) -> pl.DataFrame:
        """By server: stays, answers, queue_ns, queue_unknown, service_ns, service_unknown; over finished requests."""
        return query(self.trace, "diff_servers")

    @cached_property
    def reuse(self) -> pl.DataFrame:
        """Of each finished request with a stay, by request: prompt tokens looked up, found by tier, resumed, recomputed,
        output tokens; null where no stay says."""
        return query(self.trace, "diff_reuse")

    def moved_by(self, requests: pl.Series) -> pl.DataFrame:
        """What some requests moved (own memory apart), by request and basis: transfers, bytes, link_bytes, payload_hops,
        control_ops, null where one of the moves does not say."""
        times = pl.coalesce("transfers", pl.lit(1))
        links = pl.max_horizontal(pl.coalesce(pl.col("path").list.len().cast(pl.Int64), pl.lit(1)), pl.lit(1))
        columns = {
            "transfers": pl.col("transfers"), "bytes": pl.col("bytes"), "link_bytes": pl.col("bytes") * links,
            "payload_hops": pl.col("payload_hops") * times, "control_ops": pl.col("control_ops") * times,
        }  # fmt: skip
        memory = pl.any_horizontal(
            pl.col(a).str.starts_with("memory:") & pl.col(b).str.starts_with("compute:")
            for a, b in (("src", "dst"), ("dst", "src"))
        )
        return (
            self.trace.table("moves")
            .filter(~memory)
            .join(requests.rename("request").to_frame().lazy(), on="request", how="semi")
            .select("request", "basis", *(e.cast(pl.Float64).alias(n) for n, e in columns.items()))
            .group_by("request", "basis")
            .agg(pl.when(pl.col(n).null_count() == 0).then(pl.col(n).sum()).alias(n) for n in columns)
            .collect(engine="streaming")
        )

    @cached_property
    def decode_tokens_per_step(self) -> float | None:
        """Tokens decoded per step that decodes: how many share a reading of the weights; null where steps do not say."""
        decoding = pl.col("decode_tokens") > 0
        known = pl.col("decode_tokens").count() == pl.len()
        row = self.steps.steps.select(
            pl.when(known & (decoding.sum() > 0)).then(pl.col("decode_tokens").sum() / decoding.sum())
        ).collect(engine="streaming")
        return None if row.item() is None else float(row.item())

    def itl_of(self, requests: pl.Series | None) -> pl.DataFrame:
        """Inter-token latencies of some requests (null: of all): :func:`hoptrace.metrics.itl_ns`."""
        return itl_ns(self.trace if requests is None else _Only(self.trace, requests))


class _Only(Trace):
    """A trace with some of its requests only, in the tables that tell latencies."""

    def __init__(self, whole: Trace, requests: pl.Series) -> None:
        super().__init__(whole.path, whole.manifest)
        self._whole = whole
        self._requests = requests.rename("request").to_frame().lazy()

    def table(self, name: str) -> pl.LazyFrame:
        frame = self._whole.table(name)
        return frame.join(self._requests, on="request", how="semi") if name in ("requests", "stages", "tokens") else frame

    def has(self, name: str) -> bool:
        return self._whole.has(name)

    def files(self, name: str) -> None:
        return None
