"""UCX statistics in the form of its source (serialization.c): nobody here has a UCX that was built to write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.watched import Watched

import hoptrace
from hoptrace.collectors.hardware.network import ucx
from hoptrace.collectors.hardware.network.ucx import UcxSource, looks_like_ucx
from hoptrace.collectors.hardware.network.ucx_text import is_report, report_of
from hoptrace.collectors.hardware.sink import AGAIN_NS

FULL = """vm:4711:
  runtime: 812345
  ucp_worker-0x55d0:
    rx_eager_msg: 3
    uct_ep-0x7f10:
      am: 12
      bytes_short: 960
      bytes_zcopy: 1048576
      no_res: 2
    uct_ep-0x7f20:
      bytes_zcopy: 5
  uct_iface-0x6000:
    rx_am: 9
    rx_am_bytes: 720

"""
SUMMARY = "vm:4711:uct_ep:{am:12 bytes_zcopy:1048576 } uct_iface:{rx_am:9 rx_am_bytes:720 } \n"


def test_a_tree() -> None:
    found, odd = report_of(FULL.splitlines()[:-1])
    assert odd == 0 and len(found) == 9
    assert found["vm:4711", "runtime"] == 812345
    assert found["vm:4711/ucp_worker-0x55d0/uct_ep-0x7f10", "bytes_zcopy"] == 1 << 20
    assert found["vm:4711/ucp_worker-0x55d0/uct_ep-0x7f20", "bytes_zcopy"] == 5
    assert found["vm:4711/uct_iface-0x6000", "rx_am_bytes"] == 720


def test_a_summary() -> None:
    assert report_of([SUMMARY.rstrip("\n")]) == (
        {("vm:4711/uct_ep", "am"): 12, ("vm:4711/uct_ep", "bytes_zcopy"): 1 << 20, ("vm:4711/uct_iface", "rx_am"): 9,
         ("vm:4711/uct_iface", "rx_am_bytes"): 720},
        0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "found", "odd"),
    [
        ("vm:1:\n  a*:\n    n: 5\n  a*:\n    n: 7", {("vm:1/a*", "n"): 5, ("vm:1/a*#2", "n"): 7}, 0),
        ("vm:1:\n      n: 5", {}, 1), ("vm:1:\n   n: 5", {}, 1), ("vm:1:\n  n: -5\n  m: five\n  o: 1.5", {}, 3),
        ("vm:1:\n  a:\n    b:\n  n: 1", {("vm:1", "n"): 1}, 0), ("no root", {}, 1), ("vm:1:", {}, 0),
        ("vm:1:a:{n:1 {m:2} ", {}, 0),
    ],
)  # fmt: skip
def test_texts_of_other_forms(text: str, found: dict[tuple[str, str], int], odd: int) -> None:
    assert report_of(text.splitlines()) == (found, odd)


@given(st.lists(st.text(alphabet="vm:1 ab{}\t#-5", max_size=20), max_size=20))
def test_any_lines_are_read_without_raising(lines: list[str]) -> None:
    found, odd = report_of(["vm:1:", *lines])
    assert odd <= len(lines) and all(v >= 0 for v in found.values())


def test_what_stood_in_the_file_before_is_not_of_this_capture(tmp_path: Path) -> None:
    path = tmp_path / "ucx_4711.txt"
    path.write_text(FULL + FULL[:40])
    w = Watched(UcxSource(path), tmp_path / "t.trace")
    assert w.probe().available
    w.sample()
    with path.open("a") as f:
        f.write(FULL[40:] + FULL.replace("am: 12", "am: 15")[:100])
    w.sample()
    assert not w.sink.series_count, "the rest of a report whose beginning was not seen"
    with path.open("a") as f:
        f.write(FULL.replace("am: 12", "am: 15")[100:] + FULL.replace("am: 12", "am: 16").replace("bytes_short: 960\n", ""))
    w.sample()
    entity = "ucx:vm:4711/ucp_worker-0x55d0/uct_ep-0x7f10"
    assert w.values(entity, "messages") == [15, 16]
    row = next(r for r in w.rows() if (r["entity"], r["name"]) == (entity, "zero_copy_bytes"))
    assert (row["unit"], row["semantics"], row["direction"], row["value_int"]) == ("bytes", "cumulative", None, 1 << 20)
    assert 0 < row["uncertainty_ns"] < AGAIN_NS, "written between two looks"


def test_an_endpoint_that_closes_and_a_process_that_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "ucx.txt"
    path.write_text("")
    w = Watched(UcxSource(path), tmp_path / "t.trace")
    assert w.probe().reason == "nothing has been written yet"
    w.sample()
    path.write_text(FULL)
    w.sample()
    with path.open("a") as f:
        f.write("vm:4711:\n  runtime: 900000\n\n" + FULL[:30] + "\nvm:4711:\n  runtime: 900001\n\n")
    w.sample()
    path.write_text("vm:4712:\n  runtime: 5\n\n")
    w.sample()
    assert w.values("ucx:vm:4711/uct_iface-0x6000", "message_bytes") == [720, "absent"]
    assert w.values("ucx:vm:4711", "runtime") == [812345, 900000, 900001], "one that was cut short is left out"
    assert w.values("ucx:vm:4712", "runtime") == [5]
    assert w.events() == [("gap", "ucx.txt was begun anew")]


def test_a_summary_is_followed_too_and_other_files_are_not(tmp_path: Path) -> None:
    path = tmp_path / "stats"
    path.write_text(SUMMARY)
    assert looks_like_ucx(path) and is_report(FULL) and not is_report("Date,Time,System")
    w = Watched(UcxSource(path), tmp_path / "t.trace")
    w.sample()
    with path.open("a") as f:
        f.write(SUMMARY)
    w.sample()
    assert w.values("ucx:vm:4711/uct_ep", "zero_copy_bytes") == [1 << 20]
    path.write_bytes(b"\x01\x00\x00\x00\x00\x00\x00\x00")
    assert not looks_like_ucx(path) and UcxSource(path).probe().status == "unsupported"
    assert looks_like_ucx(tmp_path / "UCX_not_yet.txt") and not looks_like_ucx(tmp_path / "pcm.csv")
    found = UcxSource(tmp_path / "ucx_not_yet").probe()
    assert found.status == "absent" and "--enable-stats" in str(found.remedy)


def test_numbers_without_end_and_reports_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, odd = report_of(["vm:1:", f"  n: {'9' * 5000}", f"  m: {(1 << 64) - 1}"])
    assert found == {("vm:1", "m"): (1 << 64) - 1} and odd == 1
    monkeypatch.setattr(ucx, "MAX_SERIES", 3)
    path = tmp_path / "ucx.txt"
    path.write_text("")
    w = Watched(UcxSource(path), tmp_path / "t.trace")
    w.sample()
    with path.open("a") as f:
        f.write("vm:1:\n" + "".join(f"  n{i}: {i}\n" for i in range(5)) + "\n")
        f.write("vm:1:\n" + "  n0: 1\n" * 70 + "\n" + "vm:1:\n  n0: 9\n\nvm:1:\n  n0: 10\nvm:1:\n  n0: 11\n   odd\n\n")
    w.sample()
    assert w.values("ucx:vm:1", "n0") == [0, 9, 11]
    dropped = {k.split(": ", 1)[1]: n for k, n in hoptrace.open(w.writer.path).manifest.rows_dropped.items()}
    assert dropped == {
        "counters beyond those that are kept": 2, "reports of too many lines": 1, "reports that were cut short": 1,
        "lines of no known form": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["2026-12-01,10:00:00.1,1\n", "10:00:00,5\n", "a:1:b\n", "http://x:80/\n", "vm:x:\n", "{a}:1:\n"]
)
def test_what_looks_like_a_report_and_is_none(text: str) -> None:
    assert not is_report(text)


def test_a_file_that_goes_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "ucx.txt"
    path.write_text("")
    w = Watched(UcxSource(path), tmp_path / "t.trace")
    w.sample()
    with path.open("a") as f:
        f.write("vm:1:\n  n: 5\n\n")
    w.sample()
    path.rename(tmp_path / "elsewhere")
    w.sample(2)
    path.write_text("vm:2:\n  n: 1\n\n")
    w.sample()
    assert w.values("ucx:vm:1", "n") == [5, "absent"] and w.values("ucx:vm:2", "n") == [1]
    assert [k for k, _ in w.events()] == ["metrics vanished", "gap", "metrics"]
