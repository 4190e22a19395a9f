"""The times of what the older kernel served, for the ceilings."""

from __future__ import annotations

import polars as pl

from hoptrace.replay.engine import Served
from hoptrace.replay.overheads import Overheads

__all__ = ["times"]


def times(served: Served, oh: Overheads) -> pl.DataFrame:
    """One row per served request: its times, ns on the trace's clock."""
    end = served.steps["end_ns"].to_numpy()
    first = end[served.token_step[served.token_ptr[:-1]]]
    last = end[served.token_step[served.token_ptr[1:] - 1]]
    w = served.work
    received = w.arrival_ns + oh.arrival_to_received_ns
    return pl.DataFrame(
        {
            "request": w.request,
            "arrival_ns": w.arrival_ns,
            "sent_ns": w.arrival_ns + oh.arrival_to_sent_ns,
            "received_ns": received,
            "queued_ns": received + oh.received_to_enqueued_ns,
            "scheduled_ns": served.of_request["scheduled_ns"].to_numpy(),
            "engine_first_token_ns": first,
            "engine_last_token_ns": last,
            "first_token_ns": first + oh.step_to_token_ns,
            "last_token_ns": last + oh.step_to_token_ns,
            "finish_ns": last + oh.step_to_token_ns + oh.last_token_to_finish_ns,
        }
    )
