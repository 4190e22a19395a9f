"""`hoptrace attach --scrape … --counters-file …` as a user runs it: pages and files stand in the trace, what is not there hurts
nothing."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import polars as pl
import pytest
from test_attach_cli import free_port, run, url
from test_hw_scraped import DATA, HEAD, Exporter, exporter

import hoptrace

__all__ = ["exporter", "url"]

_UCX = "vm:4711:\n  uct_ep-0x7f10:\n    bytes_zcopy: %d\n\n"


def _writes(path: Path, lines: list[str], done: threading.Event) -> None:
    for line in lines:
        if done.wait(0.2):
            return
        with path.open("a") as f:
            f.write(line)


@pytest.mark.parametrize("dies", [False, True])
def test_pages_and_files_stand_in_the_trace(url: str, exporter: Exporter, tmp_path: Path, dies: bool) -> None:
    exporter.body = (DATA / "dcgm_l4_kops.prom").read_bytes()
    pcm, ucx, out = tmp_path / "pcm.csv", tmp_path / "ucx.txt", tmp_path / "t.trace"
    pcm.write_text(HEAD)
    ucx.write_text("")
    done = threading.Event()
    writers = [
        threading.Thread(target=_writes, args=(pcm, [f"d,t,{n},2,3,4\n" for n in range(200)], done)),
        threading.Thread(target=_writes, args=(ucx, [_UCX % n for n in range(200)], done)),
    ]
    if dies:
        writers.append(threading.Timer(1.5, exporter.close))  # type: ignore[arg-type]
    for writer in writers:
        writer.start()
    nobody = f"127.0.0.1:{free_port()}"
    told = run(
        url, "--scrape", exporter.url, "--scrape", nobody, "--counters-file", str(pcm), "--counters-file", str(ucx),
        "--duration", "4s", "--json", "-o", str(out),
    )  # fmt: skip
    done.set()
    for writer in writers:
        writer.join()
    assert told.returncode == 0, told.stderr
    said = json.loads(told.stdout)
    assert said["trace"] == str(out)
    assert any(w.startswith(f"scrape {nobody}: nothing listens") for w in said["not_seen"]), "what was named has its reason"
    (none,) = [c for c in hoptrace.open(out).manifest.collectors if nobody in c.name]
    assert not none.available and f"nothing listens at {nobody}" in str(none.reason)
    counters = hoptrace.open(out).table("counters").collect()
    page = f"scrape 127.0.0.1:{exporter.port}"
    assert {page, "pcm pcm.csv", "ucx ucx.txt"} <= set(counters["source"].unique())
    link = counters.filter((pl.col("source") == page) & (pl.col("entity") == "pcie:0000:31:00.0"))
    assert ("raw_bytes_per_s", "tx", 112603.0) in link.select("name", "direction", "value_float").rows()
    moved = counters.filter(pl.col("entity") == "ucx:vm:4711/uct_ep-0x7f10")
    assert moved["name"].unique().to_list() == ["zero_copy_bytes"] and moved["value_int"].is_sorted() and len(moved) > 2
    assert counters.filter(pl.col("source") == "pcm pcm.csv")["unit"].drop_nulls().unique().to_list() == ["bytes/s"]
