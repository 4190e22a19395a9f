"""`hoptrace sweep`: the product, the table, resuming after a kill, points that fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner

from hoptrace.cli import cli
from hoptrace.errors import InputError, UsageError
from hoptrace.replay.sweep import sweep
from hoptrace.replay.sweep.grid import Grid, load_grid, parse_grid
from hoptrace.samples import sample

GRID = """
[base]
cost = "fixed:50,12"
[axes]
policy = ["one-slot", "four-slots"]
rate = ["1x", "2x"]
[axes.batching]
max_batched_tokens = [64, 512]
"""


@pytest.fixture
def trace() -> Path:
    return Path(sample("llamacpp-four-slots"))


def _sweep(trace: Path, grid: str, out: Path, *more: str) -> dict[str, object]:
    path = out.with_suffix(".toml")
    path.write_text(grid, encoding="utf-8")
    done = CliRunner().invoke(cli, ["sweep", str(trace), "--grid", str(path), "-o", str(out), "--json", *more])
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(done.output)
    return found


def test_the_product_in_the_order_of_the_file() -> None:
    grid = parse_grid(GRID)
    assert grid.size == 8
    points = list(grid.points())
    assert [p.values["policy"] for p in points] == ["one-slot"] * 4 + ["four-slots"] * 4
    assert [p.values["batching.max_batched_tokens"] for p in points] == [64, 512] * 4
    assert points[3].options == {"cost": "fixed:50,12", "rate": "2x"}
    assert points[3].settings == ("batching.max_batched_tokens=512",)
    assert points[3].resolved().batching.max_batched_tokens == 512


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("axes = 3", "needs a table [axes]"),
        ("[base]\nrate='1x'", "needs a table [axes]"),
        ("[axes]\nrate = []", "the axis rate must be a list of values"),
        ("[axes]\nrate = '2x'", "the axis rate must be a list of values"),
        ("[axes]\nrats = ['2x']", "there is no axis or option 'rats'"),
        ("[axis]\nrate = ['2x']", "'axis' is no part of a grid"),
        ("[axes]\nseed = [1, 1]", "the axis seed has the same value twice"),
        ("[axes\nseed = [1]", "is not TOML"),
        ("[axes]\n" + "\n".join(f"'batching.k{i}' = [1,2,3,4,5,6,7,8,9,10]" for i in range(6)), "1,000,000 points"),
    ],
)
def test_what_is_no_grid_is_said(text: str, said: str) -> None:
    with pytest.raises(InputError) as e:
        parse_grid(text)
    assert said in str(e.value)


def test_a_grid_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_grid(tmp_path / "none.toml")


def test_identity_follows_the_content_of_a_policy_file(tmp_path: Path) -> None:
    policy = tmp_path / "mine.toml"
    policy.write_text("[batching]\nmax_sequences = 2\n")

    def identity(grid: Grid) -> str:
        return next(iter(grid.points())).identity("trace", "1")

    grid = parse_grid(f'[base]\npolicy = "{policy}"\n[axes]\nseed = [0]')
    before = identity(grid)
    assert before == identity(grid)
    policy.write_text("[batching]\nmax_sequences = 3\n")
    assert identity(grid) != before
    assert identity(parse_grid(f'[base]\npolicy = "{policy}"\n[axes]\nseed = [1]')) != identity(grid)


def test_a_sweep_and_what_it_says(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    told = _sweep(trace, GRID, out, "--jobs", "2", "--slo", "ttft=2s")
    assert (told["points"], told["kept"], told["failed"]) == (8, 0, 0)
    table = pl.read_parquet(out)
    assert table["point"].to_list() == list(range(8))
    assert table["batching.max_batched_tokens"].dtype == pl.Int64
    assert table["finished"].n_unique() == 1
    assert table["goodput_share"].null_count() == 0
    slots = table.filter((pl.col("rate") == "1x") & (pl.col("batching.max_batched_tokens") == 512)).sort("policy")
    assert slots["e2e_mean_ns"][0] < slots["e2e_mean_ns"][1]  # four slots before one slot
    assert not (tmp_path / "s.parquet.points").exists()
    again = _sweep(trace, GRID, out, "--jobs", "1", "--slo", "ttft=2s")
    assert again["kept"] == 8
    alone = tmp_path / "alone.parquet"
    _sweep(trace, GRID, alone, "--jobs", "1", "--slo", "ttft=2s")
    assert pl.read_parquet(alone).equals(table)


def test_a_grid_that_grew_does_only_what_is_new(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    _sweep(trace, '[base]\ncost = "fixed:50,12"\n[axes]\n"batching.max_sequences" = [1, 2]', out)
    more = _sweep(trace, '[base]\ncost = "fixed:50,12"\n[axes]\n"batching.max_sequences" = [1, 2, 3]', out)
    assert (more["points"], more["kept"]) == (3, 2)
    assert pl.read_parquet(out)["batching.max_sequences"].to_list() == [1, 2, 3]


def test_a_point_that_fails_is_a_row(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    grid = '[base]\ncost = "fixed:50,12"\n[axes]\npolicy = ["one-slot", "no-such-policy"]\n"batching.max_sequences" = [2, -1]'
    told = _sweep(trace, grid, out)
    assert told["failed"] == 3
    table = pl.read_parquet(out)
    assert table["status"].to_list() == ["ok", "failed", "failed", "failed"]
    assert "batching.max_sequences" in table["error"][1]
    assert "There is no policy 'no-such-policy'" in table["error"][2]
    assert table["ttft_mean_ns"].null_count() == 3
    assert _sweep(trace, grid, out)["kept"] == 4
    assert _sweep(trace, grid, out, "--retry-failed")["kept"] == 1


def test_after_a_kill_it_goes_on(trace: Path, tmp_path: Path) -> None:
    out, grid = tmp_path / "s.parquet", tmp_path / "s.toml"
    grid.write_text('[base]\ncost = "fixed:50,12"\n[axes]\nseed = [' + ", ".join(map(str, range(24))) + "]")
    command = [sys.executable, "-m", "hoptrace", "sweep", str(trace), "--grid", str(grid), "--jobs", "1", "-q", "-o", str(out)]
    running = subprocess.Popen(command, start_new_session=True)
    folder = tmp_path / "s.parquet.points"
    deadline = time.monotonic() + 120
    while len(list(folder.glob("*.json"))) < 3 and running.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    done = len(list(folder.glob("*.json")))
    assert 3 <= done < 24
    (folder / "damaged.json").write_text("{")
    told = json.loads(
        subprocess.run([c for c in command if c != "-q"] + ["--json"], check=True, capture_output=True, text=True).stdout
    )
    assert (told["points"], told["kept"], told["failed"]) == (24, done, 0)
    assert pl.read_parquet(out).height == 24


def test_what_is_no_table_of_a_sweep_stays(trace: Path, tmp_path: Path) -> None:
    out, grid = tmp_path / "s.parquet", tmp_path / "s.toml"
    pl.DataFrame({"a": [1]}).write_parquet(out)
    grid.write_text("[axes]\nseed = [1]")
    done = CliRunner().invoke(cli, ["sweep", str(trace), "--grid", str(grid), "-o", str(out)])
    assert isinstance(done.exception, UsageError)
    assert "no sweep's table" in str(done.exception)
    assert pl.read_parquet(out).columns == ["a"]


def test_two_at_once_both_end(trace: Path, tmp_path: Path) -> None:
    """The other run ends between two points of this one, and takes the folder of points away."""
    grid = tmp_path / "g.toml"
    grid.write_text('[base]\ncost = "fixed:50,12"\n[axes]\nrate = ["1x", "2x"]\n', encoding="utf-8")
    out = tmp_path / "s.parquet"

    def told(done: int, of: int, what: str) -> None:
        if done == 1:
            shutil.rmtree(out.with_name("s.parquet.points"))

    swept = sweep(trace, load_grid(grid), out, jobs=1, told=told)
    assert swept.table["status"].to_list() == ["ok", "ok"]
    assert out.is_file() and not out.with_name("s.parquet.points").exists()


def test_intervals_where_they_are_asked_for(trace: Path, tmp_path: Path) -> None:
    def swept(draws: int, cost: str, name: str) -> dict[str, Any]:
        grid = parse_grid(f'[base]\ncost = "{cost}"\n[axes]\n"batching.max_sequences" = [2]\n')
        return sweep(trace, grid, tmp_path / name, jobs=1, draws=draws).table.row(0, named=True)

    row = swept(3, "fitted", "a.parquet")
    assert row["status"] == "ok" and row["intervals_note"] is None
    for name in ("ttft_p50", "itl_p99", "e2e_mean", "queue_p95"):
        assert row[f"{name}_low_ns"] <= row[f"{name}_ns"] + 1 and row[f"{name}_ns"] <= row[f"{name}_high_ns"] + 1
    assert row["output_tokens_per_s_low"] <= row["output_tokens_per_s"] <= row["output_tokens_per_s_high"]
    none = swept(3, "fixed:50,12", "b.parquet")
    assert none["e2e_p50_low_ns"] is None and none["intervals_note"].startswith("No intervals")
    assert "e2e_p50_low_ns" not in swept(0, "fixed:50,12", "c.parquet")
