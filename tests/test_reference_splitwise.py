"""Both engines against splitwise-sim's aggregated server: prompts first, whole, with the decoders in what the budget leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from support.vllm_reference import ENGINES, work_of

from hoptrace.replay.costs.table import read_table
from hoptrace.replay.outcome import REQUEST, Kept
from hoptrace.replay.plan import EngineSpec, Plan

DATA = Path(__file__).parent / "data"
TABLE = f"{DATA / 'costs' / 'splitwise_perf_model.csv'},model=llama2-70b,hardware=h100-80gb,tensor_parallel=8,beyond=line"


@pytest.mark.parametrize("engine", ENGINES)
def test_every_request_is_splitwise_sims(engine: str) -> None:
    rows = pl.read_parquet(DATA / "reference" / "splitwise" / "one_server_1k.parquet")
    asked = [
        {"arrival_ns": round(at * 1e9), "prompt": prompt, "output": output}
        for at, prompt, output in rows.select("arrival_s", "prompt_tokens", "output_tokens").iter_rows()
    ]
    # Beyond the table's ends it goes on in the line of the last two points.
    cost = read_table(TABLE, None)
    rules = EngineSpec("e", mode="prompts_first", chunked_prefill=False, max_sequences=512, max_batched_tokens=2048)
    found = ENGINES[engine](work_of(asked, 1), Plan((rules,), (cost,)), Kept()).requests

    def ms(column: str) -> np.ndarray[Any, Any]:
        return (found[:, REQUEST.index(column)] - found[:, REQUEST.index("arrival_ns")]) / 1e6

    for ours, theirs in ((ms("first_token_ns"), rows["ttft_s"]), (ms("last_token_ns"), rows["response_s"])):
        assert np.abs(ours - 1e3 * theirs.to_numpy()).max() <= 0.1
    # What its authors' figures are made of.
    assert [round(float(np.percentile(ms("first_token_ns"), q)), 2) for q in (50, 90, 99)] == [122.64, 377.94, 649.60]
    assert float(ms("last_token_ns").mean()) == pytest.approx(10454.16, abs=0.01)
