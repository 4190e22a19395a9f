"""How far the own policy's replay is from what was observed: what no comparison of two replays shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hoptrace.comparison import STATISTICS, values
from hoptrace.metrics import request_metrics, stat
from hoptrace.replay.prepare import Prepared
from hoptrace.replay.simulation import Engine, simulation
from hoptrace.replay.uncertainty.figures import Lens, statistics

__all__ = ["OwnError", "own_error"]


@dataclass(frozen=True)
class OwnError:
    """Relative errors of the own policy's replay (predicted ÷ observed − 1) by metric and statistic."""

    of: Mapping[tuple[str, str], float]

    def as_dict(self) -> dict[str, float]:
        """Plain values."""
        return {f"{m} {s}": round(v, 6) for (m, s), v in self.of.items()}


def own_error(p: Prepared, lens: Lens, engine: Engine) -> OwnError | None:
    """The error under the trace's own policy and arrivals; null where no latencies were observed."""
    if not p.observed:
        return None
    watch = lens.watch(p.own.plan)
    more = {} if p.own.parts is None else {"parts": p.own.parts}
    outcome = simulation("plain" if p.own.parts is not None else engine)(p.own_work, p.own.plan, watch, **more)
    predicted = statistics(lens.look(watch, outcome, p.own.overheads))
    trace = p.parent.trace
    metrics = request_metrics(trace)
    metrics = metrics.filter(metrics["request"].is_in(p.own_work.request.tolist()))
    found = {}
    for m in ("ttft", "itl", "tpot", "e2e"):
        known = values(m, trace, metrics)
        seen = stat(known.join(metrics.select("request"), on="request", how="semi")["value"])
        for s in STATISTICS:
            observed = getattr(seen, f"{s}_ns")
            if observed and (m, s) in predicted:
                found[(m, s)] = predicted[(m, s)] / observed - 1
    return OwnError(found) if found else None
