"""Service level objectives: ``ttft=500ms,tpot=50ms,itl_p99=200ms,e2e=10s`` read, and which requests met them (goodput)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.errors import UsageError

__all__ = ["ITL_LIMITS", "LIMITS", "Goodput", "goodput", "limits_text", "parse_slo"]

LIMITS = ("ttft", "visible_ttft", "tpot", "e2e", "queue", "itl_mean", "itl_p50", "itl_p95", "itl_p99", "itl_max")
"""What a limit can be set on; each is one figure per request. ``itl_…``: over the request's own inter-token latencies."""

ITL_LIMITS = tuple(x for x in LIMITS if x.startswith("itl_"))

_UNITS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "min": 6e10}
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(ns|us|µs|ms|s|min)\s*")
_HINT = "For example: --slo ttft=500ms,tpot=50ms. Limits: " + ", ".join(LIMITS) + "."


def parse_slo(text: str) -> dict[str, int]:
    """Limits in ns by name, in the order given.

    Raises:
        UsageError: it is not a list of NAME=TIME, a name is unknown or named twice, a time is not above 0.
    """
    out: dict[str, int] = {}
    for item in text.split(","):
        name, is_, value = item.partition("=")
        name = name.strip().lower().replace("-", "_")
        if not is_ or not name:
            raise UsageError(f"{item.strip() or text!r} is no limit.", hint=_HINT)
        if name == "itl":
            raise UsageError(
                "A request has many ITLs: say which of them the limit is on.", hint="itl_p99=…, or itl_max=… for all."
            )
        if name not in LIMITS:
            raise UsageError(f"No limit can be set on {name!r}.", hint=_HINT)
        if name in out:
            raise UsageError(f"{name} has two limits.", hint=_HINT)
        found = _TIME.fullmatch(value)
        if found is None:
            raise UsageError(f"{value.strip() or 'Nothing'} is no time with a unit (ns, us, ms, s, min).", hint=_HINT)
        limit = round(float(found[1]) * _UNITS[found[2]])
        if not 0 < limit < 1 << 62:
            raise UsageError(f"{name}={value.strip()}: a limit lies above 0 and below 146 years.", hint=_HINT)
        out[name] = limit
    return out


def limits_text(slo: Mapping[str, int]) -> str:
    """The limits as ``parse_slo`` reads them."""
    parts = []
    for name, ns in slo.items():
        unit, size = next((u, s) for u, s in (("s", 10**9), ("ms", 10**6), ("us", 10**3), ("ns", 1)) if ns % s == 0)
        parts.append(f"{name}={ns // size}{unit}")
    return ",".join(parts)


@dataclass(frozen=True)
class Goodput:
    """How many of the requests that arrived met every limit.

    ``arrived`` counts all requests: failed and unfinished ones met nothing. ``unknown``: finished ones that broke no known limit,
    but of which a figure that a limit is on was not recorded; while there are any, ``share`` and ``per_s`` are null and only
    their lower bounds are known. ``broke``: finished requests over each limit (one may break several). ``duration_ns``: that of
    the throughputs.
    """

    slo: dict[str, int]
    arrived: int
    met: int
    unknown: int
    broke: dict[str, int]
    not_recorded: dict[str, int]
    duration_ns: int | None

    @property
    def share(self) -> float | None:
        return None if self.unknown or not self.arrived else self.met / self.arrived

    @property
    def share_at_least(self) -> float | None:
        return self.met / self.arrived if self.arrived else None

    @property
    def per_s(self) -> float | None:
        return None if self.unknown else self.per_s_at_least

    @property
    def per_s_at_least(self) -> float | None:
        return self.met * 1e9 / self.duration_ns if self.duration_ns and self.duration_ns > 0 else None

    def as_dict(self) -> dict[str, Any]:
        def rounded(x: float | None) -> float | None:
            return None if x is None else round(x, 6)

        return {
            "slo_ns": dict(self.slo),
            "arrived": self.arrived,
            "met": self.met,
            "unknown": self.unknown,
            "broke": dict(self.broke),
            "not_recorded": dict(self.not_recorded),
            "share": rounded(self.share),
            "share_at_least": rounded(self.share_at_least),
            "per_s": rounded(self.per_s),
            "per_s_at_least": rounded(self.per_s_at_least),
        }


def goodput(figures: pl.DataFrame, slo: Mapping[str, int], *, arrived: int, duration_ns: int | None) -> Goodput:
    """Hold finished requests against limits.

    Args:
        figures: one row per finished request: output_tokens and, for each limit, a column of its name in ns (null: not recorded).
            A request of one output token has no time between tokens, so limits on tpot and itl are met by it.
        slo: limits in ns, as :func:`parse_slo` gives them.
        arrived: all requests of the trace.
    """
    no_gap = (pl.col("output_tokens") <= 1).fill_null(False)
    checks = []
    for name, limit in slo.items():
        fine = pl.col(name) <= limit
        checks.append((pl.when(no_gap).then(True).otherwise(fine) if name == "tpot" or name in ITL_LIMITS else fine).alias(name))
    held = figures.select(checks)
    broken = held.select(pl.any_horizontal((~pl.col(n)).fill_null(False) for n in slo)).to_series()
    met = held.select(pl.all_horizontal(pl.col(n).fill_null(False) for n in slo)).to_series()
    return Goodput(
        slo=dict(slo),
        arrived=arrived,
        met=int(met.sum()),
        unknown=figures.height - int(met.sum()) - int(broken.sum()),
        broke={n: int((~held[n]).sum()) for n in slo},
        not_recorded={n: held[n].null_count() for n in slo},
        duration_ns=duration_ns,
    )
