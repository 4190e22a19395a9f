"""Lazy steps are the steps in memory, whatever the trace holds of them."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from support.synthetic import synthetic_trace

import hoptrace
from hoptrace.reader import Trace
from hoptrace.reconstruct import steps_of
from hoptrace.samples import samples
from hoptrace.step_source import step_source

DATA = Path(__file__).parent / "data"
RECORDED = [*sorted((DATA / "vllm_traces").glob("*.trace")), *samples()]


def same(trace: Trace) -> None:
    lazy, held = step_source(trace), steps_of(trace)
    assert (lazy.origin, lazy.note) == (held.origin, held.note)
    for a, b in ((lazy.steps, held.steps), (lazy.residency, held.residency)):
        keys = (
            ["server", "dp_rank", "pp_rank", "step"] if "step" in b.columns else ["request", "sequence", "server", "first_step"]
        )
        order = [*keys, *(c for c in b.columns if c not in keys)]
        assert a.collect().select(b.columns).sort(order).equals(b.sort(order))


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.name)
def test_of_recorded_traces(path: Path) -> None:
    same(hoptrace.open(path))


@pytest.mark.parametrize("stored", [True, False])
def test_of_a_synthetic_engine(tmp_path: Path, stored: bool) -> None:
    trace = synthetic_trace(tmp_path / "t.trace", requests=12, store_steps=stored).trace
    same(trace)
    assert step_source(trace).stored == stored


def test_stored_steps_are_not_read_until_asked(tmp_path: Path) -> None:
    source = step_source(synthetic_trace(tmp_path / "t.trace", requests=5, store_steps=True).trace)
    assert "PARQUET" in source.steps.explain().upper()
    assert source.steps.select(pl.len()).collect().item() > 0
