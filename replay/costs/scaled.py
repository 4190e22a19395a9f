"""A fitted step cost on another machine: the host's part kept, the device's scaled by the ratio of the two rooflines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from hoptrace.replay.costs.hostfree import host_free, host_share
from hoptrace.stepcost import FEATURES, StepCost

__all__ = ["on_platform"]

_ARITHMETIC = ("prefill_tokens", "prefill_attention")
"""Features that arithmetic bounds; all others are bound by memory: weights, and KV of contexts. A decoder's own token costs
little beside the weights that it shares a reading of, and a batch of decoders stays memory bound up to some hundred."""


def on_platform(
    cost: StepCost, steps: pl.DataFrame, recorded: Mapping[str, Any], asked: Mapping[str, Any], *, asynchronous: bool
) -> StepCost:
    """``cost``, fitted on ``recorded``, as it would be on ``asked``: name, ``flops_per_s``, ``memory_bytes_per_s`` of each.

    Residuals stay relative to the cost, and stalls as long as they were.
    """
    slower = {
        True: float(recorded["flops_per_s"]) / float(asked["flops_per_s"]),
        False: float(recorded["memory_bytes_per_s"]) / float(asked["memory_bytes_per_s"]),
    }
    free = host_free(cost, steps, asynchronous=asynchronous)
    device = free.cost.coefficients_ps if free.cost is not None else cost.coefficients_ps
    scaled = {}
    for name in FEATURES:
        whole, on_device = cost.coefficients_ps.get(name, 0), device.get(name, 0)
        value = whole - on_device + round(on_device * slower[name in _ARITHMETIC])
        if value:
            scaled[name] = value
    if free.cost is not None and free.share is not None:
        told = f"{100 * free.share:.0f} % of the steps' time, told by {free.told} of {free.steps} steps"
        host = f"Host time ({told}) is kept as recorded"
    else:
        host = f"Host time is not told apart ({free.why}), so it is scaled with the device's: right only where it is small"
    # A curve of decoders is as memory bound as they are.
    kept = host_share(cost, free.cost)
    pieces = tuple(p.scaled(kept + (1 - kept) * slower[False]) for p in cost.pieces)
    note = (
        f"Step cost scaled from {recorded['name']} to {asked['name']} by their rooflines: what memory bounds "
        f"× {slower[False]:.3f}, what arithmetic bounds × {slower[True]:.3f}. {host}. Not measured on {asked['name']}."
    )
    return replace(cost, coefficients_ps=scaled, pieces=pieces, covariance_ps2=None, notes=(note, *cost.notes))
