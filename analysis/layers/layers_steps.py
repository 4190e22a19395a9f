"""The layers of each step: at most its roofline time is compute or state, recorded host and collective time is scheduling, and
what is left is unexplained. All are whole ns that add up to the step's length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.manifest import Manifest
from hoptrace.roofline import Roofline
from hoptrace.step_source import StepSource

__all__ = ["HOST_COLUMNS", "PIECES", "ServerSteps", "host_ns", "server_steps"]

PIECES = ("compute", "state", "scheduling", "unexplained", "undivided")
HOST_COLUMNS = ("schedule_ns", "launch_ns", "update_ns", "collective_ns", "device_ns")
_COMPOSITION = (
    "prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_tokens", "decode_context_tokens",
    "weight_bytes", "kv_read_bytes",
)  # fmt: skip
_MOST_NS = 1 << 53  # 104 days: no step
# A step may be this much faster than its roofline before it contradicts it: clocks of two processes, rounding.
_TOLERANCE = 0.02
# With more of the time in such steps, the platform or the model's sizes are wrong, and nothing is split by them.
_MOST_FASTER = 0.05
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ServerSteps:
    """The steps of one (server, rank), in the order of their numbers.

    Attributes:
        number: of each step. ``sums`` [5, steps + 1]: running sums of PIECES, in ns.
        by_kind: one row per kind (decode, prefill, mixed, unknown): kind, steps, took_ns, divided_ns (of the steps whose roofline
            holds), roofline_ns (of these), the five PIECES, host_ns, device_ns, and between_ns (from the step before until these
            began, while decoders waited).
        bins: bin, the five PIECES, between_ns.
        faster: steps that are faster than their roofline, ``faster_ns`` their time, ``fastest`` the least length ÷ roofline.
        withheld: more of the time than can be noise was faster than the roofline, so no step is divided.
        recorded: which of HOST_COLUMNS any step tells.
        hidden_host: host time is recorded but may have run beside the device (asynchronous scheduling), so it shows nothing.
    """

    server: str
    dp_rank: int
    number: Ints
    sums: Ints
    by_kind: pl.DataFrame
    bins: pl.DataFrame
    faster: int
    faster_ns: int
    fastest: float | None
    withheld: bool
    recorded: frozenset[str]
    hidden_host: bool

    def between(self, first: Ints, last: Ints) -> Ints:
        """[5, rows]: Σ of each piece over the steps ``first`` … ``last`` (numbers, included) of each row."""
        low = np.searchsorted(self.number, first, side="left")
        high = np.maximum(np.searchsorted(self.number, last, side="right"), low)
        return self.sums[:, high] - self.sums[:, low]


def host_ns(asynchronous: bool, *, collectives: bool = True) -> pl.Expr:
    """What shows that a step's time was the host's or a collective's, Float64 ns; null where nothing was recorded.

    Where the device's time is known, the rest of the step is the host's; else choosing the batch, launching and bookkeeping are,
    unless scheduling is asynchronous: then they may have run beside the device. Collectives run on the device.
    """
    took = pl.col("end_ns").cast(pl.Float64) - pl.col("start_ns").cast(pl.Float64)
    device = _known("device_ns")
    host = [] if asynchronous else [_known(c) for c in ("schedule_ns", "launch_ns", "update_ns")]
    told = pl.sum_horizontal(c.fill_null(0) for c in host) if host else pl.lit(0.0)
    any_told = pl.any_horizontal(c.is_not_null() for c in host) if host else pl.lit(False)
    idle = pl.when(device.is_not_null()).then((took - device).clip(0)).when(any_told).then(told)
    if not collectives:
        return idle
    collective = _known("collective_ns")
    any_of = idle.is_not_null() | collective.is_not_null()
    return pl.when(any_of).then(idle.fill_null(0) + collective.fill_null(0))


def _known(column: str) -> pl.Expr:
    return pl.when(pl.col(column) >= 0).then(pl.col(column).cast(pl.Float64))


def server_steps(
    source: StepSource, manifest: Manifest, rooflines: Mapping[str, Roofline], bin_start_ns: int, bin_ns: int, bins: int
) -> list[ServerSteps]:
    """The steps of each (server, rank), sorted. ``rooflines`` by server; a server that is not in it is not divided.

    Holds 48 bytes a step, and one server's steps at a time besides.
    """
    lazy = source.steps.with_columns(pl.col("dp_rank").fill_null(0), pl.col("pp_rank").fill_null(0))
    keys = (
        lazy.group_by("server", "dp_rank")
        .agg(
            pl.len().alias("rows"),
            pl.col("step").n_unique().alias("steps"),
            *(_known(c).is_not_null().any().alias(c) for c in HOST_COLUMNS),
        )
        .sort("server", "dp_rank")
        .collect(engine="streaming")
    )
    found = []
    for key in keys.iter_rows(named=True):
        server = manifest.server(key["server"])
        asynchronous = server is not None and server.config.get("async_scheduling") is True
        mine = lazy.filter((pl.col("server") == key["server"]) & (pl.col("dp_rank") == key["dp_rank"]))
        if key["rows"] > key["steps"]:
            mine = _one_row_a_step(mine)
        roofline = rooflines.get(key["server"])
        frame = _divide(mine, roofline, asynchronous)
        faster = frame.filter(pl.col("faster"))
        faster_ns = int(faster["took_ns"].sum())
        least = (faster["took_ns"] / faster["roofline_ns"]).min()
        withheld = faster_ns > _MOST_FASTER * int(frame["took_ns"].sum())
        if withheld:
            frame = _undivided(frame)
        recorded = frozenset(c for c in HOST_COLUMNS if key[c])
        hidden = asynchronous and bool(recorded & {"schedule_ns", "launch_ns", "update_ns"}) and "device_ns" not in recorded
        found.append(
            ServerSteps(
                server=str(key["server"]),
                dp_rank=int(key["dp_rank"]),
                number=frame["step"].to_numpy(),
                sums=_running(frame),
                by_kind=_by_kind(frame),
                bins=_bins(frame, bin_start_ns, bin_ns, bins),
                faster=faster.height,
                faster_ns=faster_ns,
                fastest=float(least) if isinstance(least, float) else None,
                withheld=withheld,
                recorded=recorded,
                hidden_host=hidden,
            )
        )
    return found


def _one_row_a_step(steps: pl.LazyFrame) -> pl.LazyFrame:
    """Pipeline ranks of a step as one: they work one after another, so what each spent adds up. Rows given twice count once."""
    added = (*HOST_COLUMNS, "weight_bytes", "kv_read_bytes")
    shared = [c for c in _COMPOSITION if c not in added]

    def total(column: str) -> pl.Expr:
        # A sum of which a part is unknown is unknown.
        return pl.when(pl.col(column).null_count() == 0).then(pl.col(column).sum()).alias(column)

    return (
        steps.unique(subset=["pp_rank", "step"], keep="first")
        .group_by("step")
        .agg(
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
            *(pl.col(c).sort_by("pp_rank").first() for c in shared),
            *(total(c) for c in added),
        )
    )


def _divide(steps: pl.LazyFrame, roofline: Roofline | None, asynchronous: bool) -> pl.DataFrame:
    """step, start_ns, took_ns, kind, waiting (decoders in it), roofline_ns, faster, host_ns, device_ns and PIECES (`X_ns`)."""
    rough = pl.col("end_ns").cast(pl.Float64) - pl.col("start_ns").cast(pl.Float64)
    null = pl.lit(None, dtype=pl.Float64)
    arithmetic, memory = roofline.sides() if roofline is not None else (null, null)
    prefill, decode = pl.col("prefill_tokens") > 0, pl.col("decode_requests") > 0
    kind = (
        pl.when((prefill | decode).is_null()).then(pl.lit("unknown"))
        .when(prefill & decode).then(pl.lit("mixed"))
        .when(prefill).then(pl.lit("prefill"))
        .when(decode).then(pl.lit("decode"))
        .otherwise(pl.lit("empty"))
    )  # fmt: skip
    frame = (
        steps.filter((rough >= 0) & (rough < _MOST_NS))
        .select(
            "step",
            "start_ns",
            (pl.col("end_ns") - pl.col("start_ns")).alias("took_ns"),
            kind.alias("kind"),
            decode.fill_null(False).alias("waiting"),
            arithmetic.alias("arithmetic"),
            memory.alias("memory"),
            host_ns(asynchronous).alias("host"),
            _known("device_ns").alias("device"),
        )
        .sort("step", "start_ns")
        .collect(engine="streaming")
    )
    took = pl.col("took_ns").cast(pl.Float64)
    least = pl.max_horizontal("arithmetic", "memory")
    known = pl.col("arithmetic").is_not_null() & pl.col("memory").is_not_null()
    frame = frame.with_columns(
        pl.when(known).then(least).alias("roofline_ns"),
        (known & (took < least * (1 - _TOLERANCE))).alias("faster"),
    ).with_columns((known & ~pl.col("faster")).alias("told"))
    # A cast of the smaller of the two never exceeds the length.
    bound = pl.min_horizontal(pl.min_horizontal(pl.col("roofline_ns"), took).cast(pl.Int64), "took_ns")
    larger = pl.col("arithmetic") >= pl.col("memory")
    frame = frame.with_columns(
        pl.when(pl.col("told") & larger).then(bound).otherwise(0).alias("compute_ns"),
        pl.when(pl.col("told") & ~larger).then(bound).otherwise(0).alias("state_ns"),
    )
    rest = pl.col("took_ns") - pl.col("compute_ns") - pl.col("state_ns")
    shown = pl.min_horizontal(pl.col("host").fill_null(0.0), rest.cast(pl.Float64)).cast(pl.Int64)
    frame = frame.with_columns(pl.min_horizontal(shown, rest).alias("scheduling_ns"))
    left = rest - pl.col("scheduling_ns")
    before = pl.col("start_ns").shift(1) + pl.col("took_ns").shift(1)
    return frame.select(
        "step",
        "start_ns",
        "took_ns",
        "kind",
        "told",
        "faster",
        "roofline_ns",
        pl.when(pl.col("host").is_not_null()).then(pl.min_horizontal("host", took)).alias("host_ns"),
        pl.col("device").alias("device_ns"),
        "compute_ns",
        "state_ns",
        "scheduling_ns",
        pl.when("told").then(left).otherwise(0).alias("unexplained_ns"),
        pl.when("told").then(0).otherwise(left).alias("undivided_ns"),
        pl.when(pl.col("waiting") & (pl.col("start_ns") > before))
        .then(pl.col("start_ns") - before)
        .otherwise(0)
        .alias("between_ns"),
    )


def _undivided(frame: pl.DataFrame) -> pl.DataFrame:
    """The same steps as if their roofline were not known."""
    host = pl.min_horizontal(pl.col("host_ns").fill_null(0.0).cast(pl.Int64), "took_ns")
    none = pl.lit(0, dtype=pl.Int64)
    return frame.with_columns(
        pl.lit(False).alias("told"),
        none.alias("compute_ns"),
        none.alias("state_ns"),
        host.alias("scheduling_ns"),
        none.alias("unexplained_ns"),
        (pl.col("took_ns") - host).alias("undivided_ns"),
    )


def _running(frame: pl.DataFrame) -> Ints:
    sums = np.zeros((len(PIECES), frame.height + 1), dtype=np.int64)
    for i, piece in enumerate(PIECES):
        np.cumsum(frame[piece + "_ns"].to_numpy(), out=sums[i, 1:])
    return sums


def _by_kind(frame: pl.DataFrame) -> pl.DataFrame:
    told = pl.col("told")
    return (
        frame.group_by("kind")
        .agg(
            pl.len().alias("steps"),
            told.sum().alias("divided_steps"),
            pl.col("took_ns").sum(),
            pl.col("took_ns").filter(told).sum().alias("divided_ns"),
            pl.col("roofline_ns").filter(told).sum(),
            *(pl.col(p + "_ns").sum() for p in PIECES),
            pl.col("host_ns").is_not_null().sum().alias("host_steps"),
            pl.col("host_ns").sum(),
            pl.col("device_ns").is_not_null().sum().alias("device_steps"),
            pl.col("device_ns").sum(),
            (pl.col("took_ns") + pl.col("between_ns")).filter(pl.col("device_ns").is_not_null()).sum().alias("device_span_ns"),
            pl.col("between_ns").sum(),
        )
        .sort("kind")
    )


def _bins(frame: pl.DataFrame, start_ns: int, width_ns: int, bins: int) -> pl.DataFrame:
    """Each step whole in the bin that it began in; what lies outside all bins in the nearest."""
    at = (pl.col("start_ns").cast(pl.Float64) - start_ns) / width_ns
    which = at.floor().clip(0, bins - 1).cast(pl.Int64).alias("bin")
    return frame.group_by(which).agg(*(pl.col(p + "_ns").sum() for p in PIECES), pl.col("between_ns").sum()).sort("bin")
