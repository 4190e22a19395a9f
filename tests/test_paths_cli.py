"""`hoptrace paths`, and what the docs show of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hoptrace.cli.paths import command
from hoptrace.errors import InputError, UsageError
from hoptrace.paths_example import READS, startup
from hoptrace.paths_hops import PLACES
from hoptrace.paths_mechanisms import MECHANISMS

DOCS = (Path(__file__).parents[1] / "docs" / "access-paths.md").read_text(encoding="utf-8")


def run(*args: str) -> Result:
    return CliRunner().invoke(command, args, catch_exceptions=False)


def test_the_list() -> None:
    text = run().output
    assert all(name in text for name in MECHANISMS) and all(p in text for p in PLACES)
    found = {m["name"]: m for m in json.loads(run("--json").output)}
    assert list(found) == list(MECHANISMS)
    rdma = found["rdma_write"]
    assert (rdma["payload_hops"], rdma["control_ops"], rdma["mechanism"]) == (3, 5, "rdma")
    assert rdma["needs"] == ["rdma_request_ns", "rdma_write_ns"] and len(rdma["hops"]) == 8
    assert all(h["who"] for m in found.values() for h in m["hops"])


def test_one_path() -> None:
    text = run("--mechanism", "rdma", "--bytes", "16384", "--platform", "h100-sxm-80gb").output
    assert "rdma_write from hbm to remote_hbm" in text and "Total:     2,387 ns" in text
    figures = json.loads(run("-m", "rdma", "--json").output)
    # 1,210 + 2 x 400, a request of 3.03, 16 KiB at 44 GB/s.
    assert (figures["base_ns"], figures["per_block_ns"], figures["total_ns"]) == (2010, 4, 2010 + 4 + 373)
    assert [h["fixed_ns"] for h in figures["hops"]][:3] == [3.03, 1210, None] and figures["extras"][0]["charged"] == 2
    assert figures["links"][-1]["end"] == "dst" and figures["sources"] and figures["notes"]


def test_places_choose_the_usual_mechanism() -> None:
    assert json.loads(run("--from", "remote_dram", "--to", "hbm", "--json").output)["name"] == "rdma_read"
    assert json.loads(run("-m", "rdma", "--from", "remote_dram", "--json").output)["name"] == "rdma_read"
    figures = json.loads(
        run("--from", "hbm", "--to", "dram", "--bytes", "2097152", "--pieces", "64", "--blocks", "2", "--json").output
    )
    assert figures["total_ns"] == 2 * 416_000 + 76_261 and figures["descriptors"] == 64


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("-m", "rmda"), "There is no mechanism 'rmda'"),
        (("-m", "rdma", "--from", "nvme"), "rdma does not lead from nvme to anywhere"),
        (("-m", "copy_engine", "--platform", "h101"), "There is no platform 'h101'"),
        (("--from", "core", "--to", "nvme"), "No mechanism joins core and nvme"),
    ],
)
def test_wrong_use(args: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError) as e:
        run(*args)
    assert says in str(e.value)
    assert run("--from", "hbm").exit_code == 2


def test_a_figure_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"interrupt_ns \(interrupt and wake-up"):
        run("-m", "dma_interrupt")
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "h100-sxm-80gb"\n[constants]\ninterrupt_ns = 5000\n', encoding="utf-8")
    polled, waited = (
        json.loads(run("-m", m, "--platform", str(mine), "--json").output)["total_ns"] for m in ("dma", "dma_interrupt")
    )
    assert waited - polled == 5000 - 78, "an interrupt in place of a poll"


def test_the_worked_example() -> None:
    """Seconds become tens of minutes, by hops and by time, and no bandwidth changes."""
    rows = {r.memory: r for r in startup()}
    dram, expander, pool, uncached, copied = (
        rows[k]
        for k in (
            "local DRAM, cached", "CXL.mem expander, cached", "CXL.mem pool behind a switch, cached",
            "device memory on PCIe, uncacheable", "the same, copied whole by DMA first",
        )
    )  # fmt: skip
    # 2 x 10^9 reads, eight to a line.
    assert dram.seconds == READS / 8 * 78e-9 == 19.5
    assert (expander.seconds, expander.low_s, expander.high_s) == (68.75, 35.0, 102.5)
    assert pool.seconds == READS / 8 * 750e-9 == 187.5
    assert uncached.seconds == READS * 741e-9 == 1482 and 20 * 60 < uncached.seconds < 60 * 60 and dram.seconds < 60
    assert (dram.hops, dram.crossings) == (READS // 8, READS // 8)
    assert (uncached.hops, uncached.crossings) == (2 * READS, READS)
    # The link is the same: the bytes alone take a third of a second, and copied first they do.
    assert uncached.bandwidth_s == copied.bandwidth_s == pytest.approx(16e9 / 55e9)
    assert copied.seconds == pytest.approx(dram.seconds + copied.bandwidth_s + 6.5e-6) and copied.hops == dram.hops + 7


def test_the_docs_show_what_is_printed() -> None:
    assert run("--example").output.rstrip() in DOCS
    assert run("--mechanism", "rdma", "--bytes", "16384", "--platform", "h100-sxm-80gb").output.rstrip() in DOCS
    assert "rdma_gpu_ns: To a GPU's memory" in run("-m", "rdma", "--sources").output
    assert len(json.loads(run("--example", "--json").output)) == len(startup())
