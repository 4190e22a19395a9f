"""Kills and full disks: at any instant at most the last second goes, and what remains reads without repair."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hoptrace
from hoptrace import writer as writer_module
from hoptrace.compaction import compact
from hoptrace.errors import EnvironmentProblem
from hoptrace.manifest import Manifest
from hoptrace.schema import TABLES
from hoptrace.writer import TraceWriter


def token(index: int) -> dict[str, Any]:
    return {"request": index % 7, "sequence": 0, "index": index, "time_ns": index, "vantage": "proxy", "source": "test"}


def manifest() -> Manifest:
    return Manifest(origin="recorded")


def indices(path: Path) -> list[int]:
    """The rows that a trace holds."""
    return sorted(hoptrace.open(path).table("tokens").collect()["index"].to_list())


# -- kill -9 ----------------------------------------------------------------------------------------------------------

_CHILD = """
import os, sys, time
from hoptrace import writer
from hoptrace.manifest import Manifest
writer._PART_ROWS = int(sys.argv[2])
w = writer.TraceWriter(sys.argv[1], Manifest(origin="recorded"))
index = 0
while True:
    w.append("tokens", [{"request": index % 7, "index": index, "time_ns": index, "vantage": "proxy", "source": "t"}])
    w.append("requests", [{"request": index % 7, "arrival_ns": 1, "output_tokens": index, "source": "t"}])
    os.write(1, b"%d %d\\n" % (index, time.monotonic_ns()))
    index += 1
    time.sleep(0.001)
"""


@pytest.mark.parametrize("part_rows", [1_000_000, 100])
def test_kill_loses_at_most_the_last_second(tmp_path: Path, part_rows: int) -> None:
    """Several writers, killed at random instants; one kind rotates all the time."""
    random_ = random.Random(part_rows)
    children = []
    for i in range(3):
        path = tmp_path / f"{i}.trace"
        with (tmp_path / f"{i}.log").open("wb") as log:
            child = subprocess.Popen([sys.executable, "-c", _CHILD, str(path), str(part_rows)], stdout=log)
        children.append((path, child))
    try:
        killed = []
        while not all((tmp_path / f"{i}.log").stat().st_size for i in range(3)):
            assert all(c.poll() is None for _, c in children)
            time.sleep(0.05)
        time.sleep(1.2)
        for path, child in children:
            time.sleep(random_.uniform(0.3, 1.2))
            child.send_signal(signal.SIGKILL)
            killed.append((path, time.monotonic_ns()))
            child.wait()
    finally:
        for _, child in children:
            child.kill()
            child.wait()
    for path, at in killed:
        lines = [line.split() for line in path.with_suffix(".log").read_text().splitlines()]
        handed = [(int(line[0]), int(line[1])) for line in lines if len(line) == 2]
        found = indices(path)
        assert found == list(range(len(found)))
        due = [i for i, ns in handed if ns < at - 1_000_000_000]
        assert due
        assert len(found) >= len(due)
        trace = hoptrace.open(path)
        assert trace.manifest.closed is False
        requests = trace.table("requests").collect()
        assert sorted(requests["request"]) == list(range(min(7, len(requests))))
        assert requests["output_tokens"].to_list() and max(requests["output_tokens"]) >= len(due) - 1
        compact(path)
        assert indices(path) == found
        assert {p.suffix for p in path.rglob("*.*")} == {".json", ".parquet"}


class Crash(BaseException):
    """The process ends here."""


def _script(w: TraceWriter, done: list[int]) -> None:
    """Append, journal, rotate, twice; ``done`` holds what a reader must find from then on."""
    for start in (0, 10, 20, 30):
        w.append("tokens", [token(i) for i in range(start, start + 10)])
        w.flush(sync=True)
        if w._problem is not None:
            raise w._problem
        done.append(start + 10)
        if start in (10, 30):
            w._folder.seal(TABLES["tokens"], reopen=start == 10)
            w._folder.convert()
    w.close()


@pytest.mark.parametrize("what", ["replace", "fsync", "unlink"])
def test_crash_before_and_after_every_step_of_a_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Stop at the n-th rename, sync or deletion, before it or after: no row twice, none missing, with and without compaction."""
    owner: Any = Path if what == "unlink" else os
    real = getattr(owner, what)
    crashes = 0
    for step in range(1000):
        calls = iter(range(10**6))

        def stopping(*args: Any, step: int = step, calls: Iterator[int] = calls, **kwargs: Any) -> Any:
            call = next(calls)
            if call == step // 2 and step % 2 == 0:
                raise Crash
            result = real(*args, **kwargs)
            if call == step // 2:
                raise Crash
            return result

        path = tmp_path / f"{what}-{step}.trace"
        done: list[int] = [0]
        w = None
        monkeypatch.setattr(owner, what, stopping)
        try:
            w = TraceWriter(path, manifest(), background=False)
            _script(w, done)
            crashed = False
        except Crash:
            crashed = True
        finally:
            monkeypatch.setattr(owner, what, real)
        if not crashed:
            break
        crashes += 1
        if w is None:
            continue  # the trace had not begun
        if w._folder._lock_file is not None:
            w._folder._lock_file.close()  # what the end of a process does
        found = indices(path)
        assert found == list(range(len(found))), step
        assert len(found) >= done[-1], step
        compact(path)
        assert indices(path) == found, step
        assert all(p.kind == "parquet" for p in hoptrace.open(path).manifest.tables.get("tokens", []))
    else:
        pytest.fail("it never ends")
    assert crashes >= 4


def test_journal_that_the_manifest_could_not_name_is_taken_in_by_compact(tmp_path: Path) -> None:
    w = TraceWriter(tmp_path / "t.trace", manifest(), background=False)
    before = (w.path / "manifest.json").read_bytes()
    w.append("tokens", [token(0)])
    w.flush()
    (w.path / "manifest.json").write_bytes(before)
    w._folder.release()
    assert compact(w.path).rows == 1
    assert indices(w.path) == [0]


# -- full disks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of half a megabyte."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if os.getuid() or not shutil.which("mount"):
        pytest.skip("needs root to mount a small disk")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(mount)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("this machine lets nobody mount")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def _fill(disk: Path, leave: int) -> Path:
    filler = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    filler.write_bytes(b"x" * max(0, free - leave))
    return filler


def test_full_disk_drops_counts_and_goes_on_when_there_is_room(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_FLUSH_S", 3600)  # the test flushes
    w = TraceWriter(small_disk / "t.trace", manifest())
    w.append("tokens", [token(i) for i in range(100)])
    w.flush()
    filler = _fill(small_disk, leave=8192)
    w.append("tokens", [token(i) for i in range(100, 20_000)])
    w.flush()
    lost = w.manifest.rows_dropped["disk: No space left on device"]
    assert lost > 0
    kept = indices(w.path)
    assert len(kept) == 20_000 - lost
    assert kept[:100] == list(range(100))
    filler.unlink()
    w.append("tokens", [token(i) for i in range(20_000, 20_100)])
    w.flush()
    with pytest.raises(EnvironmentProblem, match=rf"No space left on device\): {lost} rows") as caught:
        w.close()
    assert "compact" not in str(caught.value)  # all that was kept is in parts already
    assert indices(w.path) == kept + list(range(20_000, 20_100))
    trace = hoptrace.open(w.path)
    assert trace.manifest.closed is True
    assert trace.manifest.rows_dropped == {"disk: No space left on device": lost}
    assert w.close() == w.path


def test_disk_that_stays_full_leaves_a_readable_trace(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_FLUSH_S", 3600)
    w = TraceWriter(small_disk / "t.trace", manifest())
    w.append("tokens", [token(i) for i in range(5000)])
    w.append("requests", [{"request": 1, "arrival_ns": 1, "source": "t"}])
    w.flush()
    filler = _fill(small_disk, leave=0)
    with pytest.raises(EnvironmentProblem, match=r"compact .*t\.trace"):
        w.close()
    assert indices(w.path) == list(range(5000))
    assert hoptrace.open(w.path).rows("requests") == 1
    assert not list(w.path.rglob("*.tmp"))
    filler.unlink()
    w.close()  # a second try finishes it
    trace = hoptrace.open(w.path)
    assert indices(w.path) == list(range(5000))
    assert [p.kind for ps in trace.manifest.tables.values() for p in ps] == ["parquet", "parquet"]


def test_a_full_disk_says_so_in_the_manifest_each_time(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_FLUSH_S", 3600)
    w = TraceWriter(small_disk / "t.trace", manifest())
    w.flush()
    _fill(small_disk, leave=0)
    for round_ in range(1, 6):
        w.append("tokens", [token(i) for i in range(20_000)])
        w.flush()
        w._folder.save()
        dropped = hoptrace.open(w.path).manifest.rows_dropped
        assert dropped == {"disk: No space left on device": w.manifest.rows_dropped["disk: No space left on device"]}
        assert dropped["disk: No space left on device"] >= (round_ - 1) * 20_000
    with pytest.raises(EnvironmentProblem, match="No space left"):
        w.close()


def test_import_onto_a_full_disk_raises_at_once(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_PART_ROWS", 1000)
    random_ = random.Random(1)
    handed = 0
    with (
        pytest.raises(EnvironmentProblem, match="No space left on device"),
        TraceWriter(small_disk / "t.trace", manifest(), background=False) as w,
    ):
        for _ in range(1000):
            w.append("blocks", [{"time_ns": random_.getrandbits(62), "hash": random_.getrandbits(63)} for _ in range(1000)])
            handed += 1000
    assert 0 < handed < 1_000_000
    trace = hoptrace.open(small_disk / "t.trace")
    assert trace.manifest.closed is False
    assert trace.rows("blocks") == handed  # the batch that raised is not among them


_LIMITED = """
import resource, signal, sys
from hoptrace import writer
from hoptrace.errors import EnvironmentProblem
from hoptrace.manifest import Manifest
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
w = writer.TraceWriter(sys.argv[1], Manifest(origin="recorded"))
for start in range(0, 100_000, 1000):
    w.append("blocks", [{"time_ns": i, "hash": (i * 0x9E3779B97F4A7C15) % 2**63} for i in range(start, start + 1000)])
    w.flush()
try:
    w.close()
except EnvironmentProblem as e:
    print(e)
    sys.exit(e.exit_code)
"""


def test_limit_on_file_size_is_a_full_disk_too(tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    done = subprocess.run([sys.executable, "-c", _LIMITED, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4, done.stderr
    assert "File too large" in done.stdout
    assert "Traceback" not in done.stderr
    trace = hoptrace.open(path)
    kept = trace.rows("blocks")
    assert kept > 0
    assert kept + trace.manifest.rows_dropped["disk: File too large"] == 100_000
