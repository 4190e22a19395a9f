"""A trace that is written whole or not at all; parts in their order; what is sorted is not sorted again."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoptrace.bulk import BulkWriter
from hoptrace.errors import EnvironmentProblem, UsageError
from hoptrace.manifest import Manifest
from hoptrace.parts import _in_order
from hoptrace.reader import open_trace
from hoptrace.schema import TABLES
from hoptrace.validate import validate


def tokens(request: int, n: int = 4) -> pa.Table:
    spec = TABLES["tokens"]
    values = {
        "request": np.full(n, request), "sequence": np.zeros(n, dtype=np.int64), "index": np.arange(n), "time_ns": np.arange(n),
        "count": np.ones(n, dtype=np.int64), "coalesced": [False] * n, "vantage": ["engine"] * n, "source": ["t"] * n,
    }  # fmt: skip
    return pa.table(values).select(spec.names).cast(spec.arrow)


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_parts_stand_in_the_order_of_the_calls(tmp_path: Path) -> None:
    out = tmp_path / "t.trace"
    with BulkWriter(out, Manifest(origin="imported")) as w:
        for i in range(20):
            # The first ones take longest.
            w.submit("tokens", lambda i=i: (time.sleep(0.02 if i < 4 else 0), tokens(i))[1])
        w.submit("tokens", lambda: tokens(99, 0))
    t = open_trace(out)
    assert t.manifest.closed and left(tmp_path) == ["t.trace"]
    assert t.table("tokens").collect()["request"].to_list() == [i for i in range(20) for _ in range(4)]
    assert [p.rows for p in t.manifest.tables["tokens"]] == [4] * 20
    assert [f for f in validate(t) if f.check == "file_whole"] == []


def test_it_can_be_read_before_it_has_its_name(tmp_path: Path) -> None:
    out = tmp_path / "t.trace"
    with BulkWriter(out, Manifest(origin="imported")) as w:
        w.submit("tokens", lambda: tokens(3))
        at = w.settle()
        assert not out.exists()
        from hoptrace.reader import Trace

        assert Trace(at, w.manifest).table("tokens").collect().height == 4
    assert out.exists()


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    for stop in (ValueError("no"), KeyboardInterrupt()):
        with pytest.raises(type(stop)), BulkWriter(tmp_path / "t.trace", Manifest(origin="imported")) as w:
            w.submit("tokens", lambda: tokens(0))
            raise stop
        assert left(tmp_path) == []


def test_what_a_part_raises_is_raised(tmp_path: Path) -> None:
    def bad() -> pa.Table:
        raise KeyError("no such engine")

    with pytest.raises(KeyError, match="no such engine"), BulkWriter(tmp_path / "t.trace", Manifest(origin="imported")) as w:
        w.submit("tokens", bad)
    assert left(tmp_path) == []


def test_a_full_disk_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch("hoptrace.folder.write_part", side_effect=full),
        pytest.raises(EnvironmentProblem, match=r"t\.trace cannot be written: the disk is full\. Nothing of it is left\."),
        BulkWriter(tmp_path / "t.trace", Manifest(origin="imported")) as w,
    ):
        for i in range(50):
            w.submit("tokens", lambda i=i: tokens(i))
    assert left(tmp_path) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "t.trace").mkdir()
    with pytest.raises(UsageError, match="already there"):
        BulkWriter(tmp_path / "t.trace", Manifest(origin="imported"))
    # A name that comes to be meanwhile is not overwritten either.
    w = BulkWriter(tmp_path / "u.trace", Manifest(origin="imported"))
    (tmp_path / "u.trace").write_text("mine")
    with pytest.raises(UsageError, match="meanwhile"):
        w.close()
    assert (tmp_path / "u.trace").read_text() == "mine" and left(tmp_path) == ["t.trace", "u.trace"]


def test_two_writers_of_one_name(tmp_path: Path) -> None:
    with BulkWriter(tmp_path / "t.trace", Manifest(origin="imported")) as w:
        w.submit("tokens", lambda: tokens(0))
        with pytest.raises(UsageError, match="being written by another"):
            BulkWriter(tmp_path / "t.trace", Manifest(origin="imported"))
    assert open_trace(tmp_path / "t.trace").rows("tokens") == 4


def test_a_kill_leaves_no_trace_of_that_name_and_the_next_one_clears_up(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from hoptrace.bulk import BulkWriter\n"
        "from hoptrace.manifest import Manifest\n"
        "w = BulkWriter(sys.argv[1], Manifest(origin='imported'))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    out = tmp_path / "t.trace"
    child = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert left(tmp_path) == [".t.trace.writing"]
    with BulkWriter(out, Manifest(origin="imported")) as w:
        w.submit("tokens", lambda: tokens(1))
    assert left(tmp_path) == ["t.trace"] and open_trace(out).rows("tokens") == 4


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), max_size=6), st.booleans())
def test_order_is_seen_as_python_sees_it(keys: list[tuple[int, int, int]], ascending: bool) -> None:
    keys = sorted(keys) if ascending else keys
    spec = TABLES["tokens"]
    columns = {name: [k[i] for k in keys] for i, name in enumerate(spec.sort)}
    data = pa.table({n: pa.array(v, type=pa.int64()) for n, v in columns.items()})
    assert _in_order(data, spec) == (keys == sorted(keys))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6))
def test_a_table_that_merges_needs_one_row_per_key(keys: list[tuple[int, int]]) -> None:
    spec = TABLES["stages"]
    data = pa.table({n: pa.array([k[i] for k in keys], type=pa.int64()) for i, n in enumerate(("request", "stage"))})
    # Equal keys may be of different sequences: they are looked at in full.
    assert _in_order(data, spec) == (keys == sorted(set(keys)))
