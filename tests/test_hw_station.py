"""The front of the hardware sources: what is put comes out, at its time; no source harms another; what it costs is written."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hoptrace
from hoptrace.collectors.hardware import station as station_module
from hoptrace.collectors.hardware.clocks import ClocksSource
from hoptrace.collectors.hardware.file import KeptFile, read_int, read_text
from hoptrace.collectors.hardware.sink import AGAIN_NS, ALL_ONES, Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, found_by_error, status_of
from hoptrace.collectors.hardware.station import Station
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TraceWriter]:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False) as w:
        yield w


def rows(writer: TraceWriter, table: str = "counters") -> list[dict[str, Any]]:
    writer.close()
    return hoptrace.open(writer.path).table(table).collect().to_dicts()


def short(writer: TraceWriter, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(r[n] for n in names) for r in sorted(rows(writer), key=lambda r: r["time_ns"])]


# -- sink ------------------------------------------------------------------------------------------------------------------


def test_a_value_that_stands_still_is_written_when_it_moves(writer: TraceWriter) -> None:
    sink = Sink(writer, "h", "s")
    one = sink.series("e", "x_bytes", "bytes", "cumulative", direction="tx", incarnation="boot", width_bits=64)
    assert sink.series("e", "x_bytes", "bytes", "cumulative", direction="tx", incarnation="boot", width_bits=64) == one
    for t, value in ((100, 5), (200, 5), (300, 5), (400, 6), (500, 6)):
        sink.at(t - 4, t + 4)
        sink.put(one, value)
    sink.settle()
    sink.flush()
    got = short(
        writer, "time_ns", "uncertainty_ns", "value_int", "status", "entity", "direction", "incarnation", "width_bits", "source"
    )
    tail = ("ok", "e", "tx", "boot", 64, "s")
    assert got == [(100, 4, 5, *tail), (300, 4, 5, *tail), (400, 4, 6, *tail), (500, 4, 6, *tail)]


def test_a_value_that_stands_still_for_long_is_written_now_and_then(writer: TraceWriter) -> None:
    sink = Sink(writer, "h", "s")
    one = sink.series("e", "x", "1", "gauge")
    for t in (0, AGAIN_NS - 1, AGAIN_NS, AGAIN_NS + 1):
        sink.at(t, t)
        sink.put(one, 7)
    sink.flush()
    assert short(writer, "time_ns", "value_int") == [(0, 7), (AGAIN_NS - 1, 7), (AGAIN_NS, 7)]


def test_rates_and_differences_are_written_each_time(writer: TraceWriter) -> None:
    sink = Sink(writer, "h", "s")
    for semantics in ("rate", "delta"):
        number = sink.series("e", semantics, "bytes/s", semantics, window_ns=20_000_000)  # type: ignore[arg-type]
        for t in (1, 2, 3):
            sink.at(t, t)
            sink.put(number, 9.5)
    sink.flush()
    assert short(writer, "value_float", "value_int", "window_ns") == [(9.5, None, 20_000_000)] * 6


def test_what_is_no_value_is_never_a_number(writer: TraceWriter) -> None:
    sink = Sink(writer, "h", "s")
    names = [sink.series("e", f"n{i}", "bytes", "cumulative") for i in range(4)]
    sink.at(1, 1)
    sink.put(names[0], ALL_ONES)
    sink.put(names[1], 0)
    sink.put(names[2], None, "denied")
    sink.put(names[3], ALL_ONES - 7)
    sink.flush()
    got = {r["name"]: (r["value_int"], r["value_float"], r["status"]) for r in rows(writer)}
    assert got == {
        "n0": (None, None, "unsupported"), "n1": (0, None, "ok"), "n2": (None, None, "denied"),
        "n3": (None, float(ALL_ONES - 7), "ok"),
    }  # fmt: skip
    assert hoptrace.open(writer.path).manifest.rows_dropped == {"s: all ones (no value)": 1}


@given(st.lists(st.tuples(st.integers(1, 5 * 10**9), st.integers(0, 3)), min_size=1, max_size=40))
def test_no_line_between_two_rows_is_a_lie(readings: list[tuple[int, int]]) -> None:
    """At the time of each reading, the straight line between the rows around it gives what was read."""

    class Kept:
        clock = None

        def __init__(self) -> None:
            self.rows: list[tuple[int, int]] = []

        def append_arrow(self, name: str, table: Any) -> None:
            self.rows += list(zip(table["time_ns"].to_pylist(), table["value_int"].to_pylist(), strict=True))

        def drop(self, reason: str, n: int) -> None:
            raise AssertionError(reason)

    kept = Kept()
    sink = Sink(kept, "h", "s")  # type: ignore[arg-type]
    number = sink.series("e", "x", "1", "cumulative")
    now, told = 0, []
    for step, value in readings:
        now += step
        sink.at(now, now)
        sink.put(number, value)
        told.append((now, value))
    sink.settle()
    sink.flush()
    assert kept.rows == sorted(kept.rows)
    for t, value in told:
        before = max(r for r in kept.rows if r[0] <= t)
        after = min(r for r in kept.rows if r[0] >= t)
        assert before[1] == value == after[1] or t in (before[0], after[0])
        if t not in (before[0], after[0]):
            assert before[1] == after[1] == value


def test_nothing_is_lost_between_a_thread_that_puts_and_one_that_flushes(writer: TraceWriter) -> None:
    sink = Sink(writer, "h", "s")
    number = sink.series("e", "x", "1", "cumulative")
    n = 20_000

    def put() -> None:
        for i in range(n):
            sink.at(i, i)
            sink.put(number, i)

    thread = threading.Thread(target=put)
    thread.start()
    while thread.is_alive():
        sink.flush()
    sink.flush()
    assert [v for (v,) in short(writer, "value_int")] == list(range(n))


# -- files -----------------------------------------------------------------------------------------------------------------


def test_a_kept_file_grows_shrinks_and_vanishes(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    file = KeptFile(path)
    with pytest.raises(FileNotFoundError) as e:
        file.read()
    assert e.value.filename == str(path) and status_of(e.value) == "absent"
    path.write_bytes(b"a" * 10_000)
    assert file.read() == b"a" * 10_000
    path.write_bytes(b"b")
    assert file.read() == b"b"
    path.write_bytes(b"")
    assert file.read() == b""
    file.close()
    file.close()
    assert file.read() == b""


def test_an_error_of_a_kept_file_names_it_and_the_next_read_opens_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "energy"
    path.write_text("17\n")
    file, real = KeptFile(path), os.pread

    def broken(fd: int, n: int, at: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert file.read() == b"17\n"
    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(OSError, match="energy") as e:
        file.read()
    assert status_of(e.value) == "error" and found_by_error(e.value).reason == f"{path}: Input/output error"
    monkeypatch.setattr(os, "pread", real)
    assert file.read() == b"17\n"


def test_small_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(" 0x20\n")
    (tmp_path / "b").write_text("Unavailable\n")
    assert read_int(tmp_path / "a") == 32 and read_int(tmp_path / "b") is None and read_int(tmp_path / "c") is None
    assert read_text(tmp_path / "b") == "Unavailable" and read_text(tmp_path / "c") is None


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.ENOENT, "absent"), (errno.EACCES, "denied"), (errno.EPERM, "denied"), (errno.ENODEV, "lost"), (errno.ESRCH, "lost"),
     (errno.EOPNOTSUPP, "unsupported"), (errno.EIO, "error"), (errno.EBUSY, "error")],
)  # fmt: skip
def test_errors_are_statuses(number: int, status: str) -> None:
    assert status_of(OSError(number, "x")) == status


# -- station ---------------------------------------------------------------------------------------------------------------


class Toy:
    """A source that does what it is told to."""

    answers = "nothing"

    def __init__(
        self, name: str, pace: Pace = "fast", work: Callable[[], None] = lambda: None, every_s: float | None = None
    ) -> None:
        self.name, self.pace, self.every_s, self.work = name, pace, every_s, work
        self.samples = 0
        self.closed = False
        self.found = Found("ok")

    def probe(self) -> Found:
        return self.found

    def open(self, out: Sink) -> None:
        self.number = out.series(f"toy:{self.name}", "samples", "samples", "cumulative")

    def sample(self, out: Sink) -> None:
        self.work()
        self.samples += 1
        now = out.now_ns()
        out.at(now, now)
        out.put(self.number, self.samples)

    def close(self) -> None:
        self.closed = True


def until(what: Callable[[], bool]) -> None:
    for _ in range(2000):
        if what():
            return
        time.sleep(0.005)
    raise AssertionError("it never came to pass")


def run(writer: TraceWriter, *sources: Any, **options: Any) -> Station:
    station = Station(writer, "h", sources, options.pop("every_s", 0.01), options.pop("max_overhead", None), **options)
    station.probe()
    station.start()
    return station


def test_a_source_that_blocks_delays_no_other_and_is_left_behind_at_the_end(
    writer: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(station_module, "_PATIENCE_S", 0.1)
    for_ever, told = threading.Event(), []
    fast, slow, hung = Toy("fast"), Toy("slow", "slow"), Toy("hung", "own", for_ever.wait)
    station = run(writer, fast, slow, hung, recorded=told.append)
    until(lambda: fast.samples > 20)
    assert hung.samples == 0 and not hung.closed
    station.close()
    assert fast.closed and slow.closed and slow.samples >= 1
    assert sorted(told) == ["fast", "slow"]
    found = rows(writer)
    assert max(r["value_int"] for r in found if r["entity"] == "toy:fast") == fast.samples
    cost = {r["entity"]: r["value_int"] for r in found if r["name"] == "samples" and r["entity"].startswith("collector:")}
    assert cost["collector:fast"] == fast.samples and "collector:hung" not in cost
    assert {r["name"] for r in found if r["entity"] == "collector:fast"} == {"cpu_ns", "samples", "missed", "late_ns", "every_ns"}
    for_ever.set()


def test_a_source_that_hangs_is_told_and_those_that_shared_its_thread_go_on(
    writer: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_HANGS_S", 0.2), ("_FLUSH_S", 0.05), ("_SLOW_S", 0.01)):
        monkeypatch.setattr(station_module, name, value)
    go, told, lost = threading.Event(), [], []
    hang = False

    def work() -> None:
        if hang:
            go.wait()

    first, bad, last = Toy("first", "slow"), Toy("bad", "slow", work), Toy("last", "slow")
    station = run(writer, first, bad, last, recorded=told.append, lost=lost.append)
    until(lambda: last.samples > 3)
    hang = True
    until(lambda: lost == ["bad"])
    seen = first.samples, last.samples
    until(lambda: first.samples > seen[0] + 5 and last.samples > seen[1] + 5)
    hang = False
    go.set()
    until(lambda: told.count("bad") == 2)
    before = bad.samples
    until(lambda: bad.samples > before + 5)
    station.close()
    assert first.closed and bad.closed and last.closed
    details = [r["detail"] for r in rows(writer, "events")]
    assert len(details) == 2 and details[0].startswith("bad has not answered for ") and details[1] == "bad answers again"


def test_looking_for_a_source_has_an_end(writer: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(station_module, "_HANGS_S", 0.1)
    go = threading.Event()
    bad, good = Toy("bad"), Toy("good")
    monkeypatch.setattr(bad, "probe", lambda: go.wait() and Found("ok"))
    station = Station(writer, "h", [bad, good], 0.01, None)
    found = station.probe()
    assert found["good"].available and found["bad"] == Found("error", "looking for it did not end within 0.1 s")
    station._look_again(station.running[0])
    assert station.running[0].found == Found("error", "looking for it has not ended yet"), "no second thread for it"
    go.set()
    until(lambda: not station.running[0].asking.is_alive())  # type: ignore[union-attr]
    station._look_again(station.running[0])
    assert station.running[0].found == Found("ok")
    station.close()


def test_a_source_that_fails_is_counted_told_once_and_tried_again(writer: TraceWriter) -> None:
    broken = True

    def work() -> None:
        if broken:
            raise RuntimeError("the driver says no")

    bad, good = Toy("bad", work=work), Toy("good")
    station = run(writer, bad, good, every_s=0.001)
    until(lambda: station.running[0].faults >= 3)
    broken = False
    until(lambda: bad.samples > 2 and good.samples > 20)
    station.close()
    events = [(r["kind"], r["detail"]) for r in rows(writer, "events")]
    assert events == [
        ("source", "bad could not be read: RuntimeError: the driver says no"), ("source", "bad can be read again")
    ]  # fmt: skip
    dropped = hoptrace.open(writer.path).manifest.rows_dropped
    assert set(dropped) == {"bad: samples that failed (RuntimeError)"} and dropped.popitem()[1] >= 3


def test_a_source_that_comes_is_recorded_from_then_on(writer: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(station_module, "_LOOK_S", 0.02)
    late, there = Toy("late"), Toy("there")
    late.found = Found("absent", "no module", "modprobe it")
    station = run(writer, late, there)
    until(lambda: there.samples > 5)
    assert late.samples == 0
    late.found = Found("ok")
    until(lambda: late.samples > 2)
    station.close()
    assert [r["detail"] for r in rows(writer, "events")] == ["late is there now"]


def test_a_probe_that_raises_is_a_finding(writer: TraceWriter) -> None:
    def probe() -> Found:
        raise KeyError("libamd_smi.so")

    bad = Toy("bad")
    bad.probe = probe  # type: ignore[method-assign]
    assert Station(writer, "h", [bad]).probe() == {"bad": Found("error", "looking for it failed (KeyError: 'libamd_smi.so')")}


def test_what_costs_too_much_is_asked_half_as_often(writer: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(station_module, "_WEIGH_S", 0.05)

    def burn() -> None:
        until_ns = time.thread_time_ns() + 3_000_000
        while time.thread_time_ns() < until_ns:
            pass

    dear, cheap = Toy("dear", work=burn), Toy("cheap")
    station = run(writer, dear, cheap, max_overhead=0.05)
    until(lambda: station.running[0].every_s >= 0.04)
    station.close()
    assert station.running[1].every_s == 0.01
    told = [r["detail"] for r in rows(writer, "events") if r["kind"] == "overhead"]
    assert told and told[0].startswith("dear took ") and told[0].endswith("it is read every 0.02 s from here on")
    beats = {r["value_int"] for r in rows(writer) if r["entity"] == "collector:dear" and r["name"] == "every_ns"}
    assert max(beats) >= 40_000_000


def test_a_source_has_a_rate_of_its_own(writer: TraceWriter) -> None:
    rare, slow, fast = Toy("rare", every_s=60.0), Toy("slow", "slow"), Toy("fast")
    station = run(writer, rare, slow, fast)
    until(lambda: fast.samples > 10)
    assert [r.every_s for r in station.running] == [60.0, 1.0, 0.01]
    station.close()
    assert rare.samples == 2  # at the begin and at the end


# -- clocks ----------------------------------------------------------------------------------------------------------------


def test_clocks_are_bracketed_and_a_step_of_the_wall_clock_is_an_event(writer: TraceWriter) -> None:
    mono, step = 1_000_000, 0

    def read(clock: int) -> int:
        nonlocal mono
        if clock == time.CLOCK_MONOTONIC:
            mono += 100
            return mono
        base = {time.CLOCK_REALTIME: 5_000_000_000 + step, time.CLOCK_BOOTTIME: 777, time.CLOCK_MONOTONIC_RAW: -33}
        return mono + 50 + base[clock]

    source, sink = ClocksSource(Roots(), read), Sink(writer, "h", "clocks")
    assert source.probe().available
    for step in (0, 1_000, -2_000_000_000):  # noqa: B007 — `read` sees it
        source.sample(sink)
    assert [r["detail"] for r in rows(writer, "events")] == ["the wall clock was set by -2.000 s; rows keep the trace clock"]
    offset = writer.clock.utc_offset_ns
    got = [(r["clock"], r["offset_ns"] + offset, r["uncertainty_ns"]) for r in rows(writer, "clock_sync")]
    assert got[:3] == [("utc", 5_000_000_000, 50), ("boottime", 777, 50), ("monotonic_raw", -33, 50)]
    assert [o for name, o, _ in got if name == "utc"] == [5_000_000_000, 5_000_001_000, 3_000_000_000]


def test_all_ones_in_another_unit_are_no_value_either(writer: TraceWriter) -> None:
    sink = Sink(writer, "h", "s")
    number = sink.series("block:a", "data_bytes", "bytes", "cumulative", width_bits=64)
    for i, value in enumerate((5 * 512, ((1 << 64) - 1) * 512, float((1 << 64) - 1) * 1024, (1 << 64) - 2, 7 * 512)):
        sink.at(i, i)
        sink.put(number, value)
    sink.flush()
    writer.flush()
    told = hoptrace.open(writer.path).table("counters").sort("time_ns").collect()
    assert told["status"].to_list() == ["ok", "unsupported", "unsupported", "ok", "ok"]
    assert told["value_int"].to_list() == [2560, None, None, None, 3584]
    assert hoptrace.open(writer.path).manifest.rows_dropped == {"s: all ones (no value)": 2}
