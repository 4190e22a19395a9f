"""The writer: what goes in comes out, whatever the row, the thread, the disk or the instant of a kill."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.rows import in_any_order, plain, rows_of, stored

import hoptrace
from hoptrace import writer as writer_module
from hoptrace.clock import TraceClock
from hoptrace.compaction import compact
from hoptrace.errors import EnvironmentProblem, UsageError
from hoptrace.folder import being_written
from hoptrace.manifest import Manifest, Server
from hoptrace.schema import TABLES
from hoptrace.writer import TraceWriter

FOLDER_PER_TEST = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


def manifest() -> Manifest:
    return Manifest(origin="recorded")


def request(n: int, **more: Any) -> dict[str, Any]:
    return {"request": n, "arrival_ns": n, "source": "test", **more}


def token(n: int, index: int) -> dict[str, Any]:
    return {
        "request": n,
        "sequence": 0,
        "index": index,
        "time_ns": 1000 * index,
        "count": 1,
        "vantage": "proxy",
        "source": "test",
    }


_serial = iter(range(10**9))


def fresh(folder: Path) -> Path:
    return folder / f"{next(_serial)}.trace"


# -- what goes in comes out -------------------------------------------------------------------------------------------


@FOLDER_PER_TEST
@given(data=st.data(), name=st.sampled_from([t.name for t in TABLES.values() if not t.merge and t.name != "tokens"]))
@pytest.mark.parametrize("way", ["journal", "part", "parts", "compacted"])
def test_rows_come_back_as_they_went_in(tmp_path: Path, way: str, data: st.DataObject, name: str) -> None:
    spec = TABLES[name]
    # A null in a required column is kept too (validate reports it): the writer judges types, not sense.
    batches = data.draw(st.lists(st.lists(rows_of(spec), min_size=1, max_size=4), min_size=1, max_size=3))
    path = fresh(tmp_path)
    w = TraceWriter(path, manifest(), background=False)
    for rows in batches:
        w.append(name, rows)
        if way != "part":
            w.flush()
        if way == "parts":
            w._folder.seal(spec, reopen=False)
            w._folder.convert()
    if way in ("part", "parts"):
        w.close()
    if way == "compacted":
        w._folder.release()  # as a kill does
        compact(path)
    expected = [plain(spec, r) for rows in batches for r in rows]
    trace = hoptrace.open(path)
    assert in_any_order(stored(trace.table(name))) == in_any_order(expected)
    kinds = [p.kind for p in trace.manifest.tables[name]]
    assert (
        kinds == {"journal": ["journal"], "part": ["parquet"], "parts": ["parquet"] * len(batches), "compacted": ["parquet"]}[way]
    )
    assert trace.manifest.rows_dropped == trace.manifest.values_dropped == {}
    w._folder.release()


def merged_by_hand(rows: list[dict[str, Any]], key: tuple[str, ...], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """The last value that is not null, per key and column, in plain Python."""
    out: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        full = out.setdefault(tuple(row[k] for k in key), dict.fromkeys(names))
        full.update({k: v for k, v in row.items() if v is not None})
    return list(out.values())


@FOLDER_PER_TEST
@given(data=st.data(), name=st.sampled_from([t.name for t in TABLES.values() if t.merge]))
def test_partial_rows_merge_across_journal_and_parts(tmp_path: Path, data: st.DataObject, name: str) -> None:
    spec = TABLES[name]
    rows = data.draw(st.lists(rows_of(spec, keys=2), min_size=1, max_size=8))
    cuts = data.draw(st.lists(st.sampled_from(["nothing", "flush", "part"]), min_size=len(rows), max_size=len(rows)))
    w = TraceWriter(fresh(tmp_path), manifest(), background=False)
    for row, cut in zip(rows, cuts, strict=True):
        w.append(name, [row])
        if cut != "nothing":
            w.flush()
        if cut == "part":
            w._folder.seal(spec, reopen=False)
            w._folder.convert()
    w.flush()
    expected = in_any_order(merged_by_hand([plain(spec, r) for r in rows], spec.key, spec.names))
    assert in_any_order(stored(hoptrace.open(w.path).table(name))) == expected
    w.close()
    assert in_any_order(stored(hoptrace.open(w.path).table(name))) == expected


def test_empty_list_is_not_null(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", manifest(), background=False) as w:
        w.append("requests", [request(1, prefix_blocks=[]), request(2, prefix_blocks=None), request(3, prefix_blocks=[1, -1])])
    rows = hoptrace.open(w.path).table("requests").collect()
    assert rows["prefix_blocks"].to_list() == [[], None, [1, -1]]


def test_polars_and_arrow_types_come_back_as_the_schema_has_them(tmp_path: Path) -> None:
    frame = pl.DataFrame({"start_ns": [2, 1], "object": ["kv", None], "path": [["a", "b"], []], "bytes": [1.0, None]})
    frame = frame.with_columns(pl.col("object").cast(pl.Categorical))
    with TraceWriter(tmp_path / "t.trace", manifest(), background=False) as w:
        w.append_arrow("moves", frame.to_arrow())
        w.append_arrow("moves", pa.RecordBatch.from_pydict({"start_ns": pa.array([3], pa.uint32())}))
    rows = hoptrace.open(w.path).table("moves").collect()
    assert rows["start_ns"].to_list() == [1, 2, 3]  # sorted
    assert rows["path"].to_list() == [[], ["a", "b"], None]
    assert rows["object"].to_list() == [None, "kv", None]
    assert rows["bytes"].to_list() == [None, 1, None]
    assert rows.schema["bytes"] == pl.Int64
    assert rows.schema["object"] == pl.String


def test_the_same_rows_make_the_same_bytes(tmp_path: Path) -> None:
    files = []
    for name in ("a.trace", "b.trace"):
        with TraceWriter(tmp_path / name, manifest(), background=False) as w:
            w.append("moves", [{"start_ns": i % 3, "bytes": i, "source": "t"} for i in range(1000)])
        files.append((tmp_path / name / "moves/00000.parquet").read_bytes())
    assert files[0] == files[1]


# -- hostile rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value", "kept"),
    [
        ("max_tokens", 2**63, None),
        ("max_tokens", -(2**80), None),
        ("max_tokens", "many", None),
        ("max_tokens", True, None),
        ("max_tokens", 1.5, None),
        ("max_tokens", float("inf"), None),
        ("prefix_blocks", [1, 2**70], None),
        ("prefix_blocks", [0.5], None),
        ("model", 7, None),
    ],
)
def test_value_that_does_not_fit_is_lost_alone_and_counted(tmp_path: Path, column: str, value: object, kept: object) -> None:
    with TraceWriter(tmp_path / "t.trace", manifest(), background=False) as w:
        w.append("requests", [request(1, tenant="a"), request(2, tenant="b", **{column: value}), request(3)])
    trace = hoptrace.open(w.path)
    rows = trace.table("requests").collect()
    assert rows["request"].to_list() == [1, 2, 3]
    assert rows["tenant"].to_list() == ["a", "b", None]
    assert rows[column].to_list()[1] == kept
    assert trace.manifest.values_dropped == {f"requests.{column}: not {TABLES['requests'].column(column).type}": 1}


@pytest.mark.parametrize(
    ("column", "value", "kept"),
    [
        ("max_tokens", 4.0, 4),
        ("max_tokens", float("nan"), None),
        ("max_tokens", 2**63 - 1, 2**63 - 1),
        ("model", "a\ud800b", "a\ufffdb"),
        ("model", "\ud83d\ude00", "\U0001f600"),
        ("model", b"caf\xe9", "caf\ufffd"),
        ("model", "nul\0 and \U0001f600", "nul\0 and \U0001f600"),
        ("prefix_blocks", (1, 2), [1, 2]),
        ("prefix_blocks", [3.0], [3]),
    ],
)
def test_value_that_means_something_is_kept(tmp_path: Path, column: str, value: object, kept: object) -> None:
    with TraceWriter(tmp_path / "t.trace", manifest(), background=False) as w:
        w.append("requests", [request(1, **{column: value})])
    trace = hoptrace.open(w.path)
    assert trace.table("requests").collect()[column].to_list() == [kept]
    assert trace.manifest.values_dropped == {}


def test_large_integers_keep_every_digit_beside_floats(tmp_path: Path) -> None:
    """Inferring a type from ints and floats together would round ns times to multiples of 256."""
    exact = 1796028289107138469
    with TraceWriter(tmp_path / "t.trace", manifest(), background=False) as w:
        w.append("requests", [request(1, finish_ns=exact), request(2, finish_ns=5.0)])
    assert hoptrace.open(w.path).table("requests").collect()["finish_ns"].to_list() == [exact, 5]


def test_bad_value_in_a_required_column_takes_its_row(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", manifest(), background=False) as w:
        w.append("requests", [request(1), request(2**64), request(3)])
    trace = hoptrace.open(w.path)
    assert trace.table("requests").collect()["request"].to_list() == [1, 3]
    assert trace.manifest.rows_dropped == {"requests.request: not int64": 1}


def test_unknown_names_are_bugs_of_the_caller(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", manifest(), background=False) as w:
        with pytest.raises(KeyError, match="prompt_tokns"):
            w.append("requests", [request(1), request(2, prompt_tokns=3)])
        with pytest.raises(KeyError, match="no table 'request'"):
            w.append("request", [request(1)])
        with pytest.raises(KeyError, match="nonsense"):
            w.append_arrow("events", pa.table({"time_ns": [1], "nonsense": [1]}))
        with pytest.raises(pa.ArrowInvalid):
            w.append_arrow("events", pa.table({"time_ns": ["soon"]}))
    assert hoptrace.open(w.path).rows("requests") == 0


def test_rows_are_copied_when_handed_over(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", manifest(), background=False) as w:
        row = request(1)
        w.append("requests", [row])
        row["request"] = 2
        w.append("requests", [row])
    assert hoptrace.open(w.path).table("requests").collect()["request"].to_list() == [1, 2]


# -- life of a writer -------------------------------------------------------------------------------------------------


def test_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "t.trace").mkdir()
    (tmp_path / "t.trace" / "precious").write_text("x")
    with pytest.raises(UsageError, match="already there"):
        TraceWriter(tmp_path / "t.trace", manifest())
    assert [p.name for p in (tmp_path / "t.trace").iterdir()] == ["precious"]


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EnvironmentProblem, match="cannot be made"):
        TraceWriter(tmp_path / "file" / "t.trace", manifest())


def test_manifest_of_another_trace_is_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a.trace", manifest(), background=False) as w:
        w.append("requests", [request(1)])
    with pytest.raises(ValueError, match="another trace"):
        TraceWriter(tmp_path / "b.trace", hoptrace.open(w.path).manifest)
    assert not (tmp_path / "b.trace").exists()


def test_late_rows_are_counted_not_raised(tmp_path: Path) -> None:
    w = TraceWriter(tmp_path / "t.trace", manifest())
    w.close()
    w.append("requests", [request(1), request(2)])
    assert w.manifest.rows_dropped == {"handed over after close": 2}
    assert w.close() == w.path


def test_an_exception_closes_the_trace_as_not_clean(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), TraceWriter(tmp_path / "t.trace", manifest()) as w:
        w.append("requests", [request(1)])
        raise ZeroDivisionError
    trace = hoptrace.open(tmp_path / "t.trace")
    assert (trace.manifest.closed, trace.rows("requests")) == (False, 1)
    assert not being_written(trace.path)


def test_manifest_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", manifest(), background=False) as w:
        with pytest.raises(ZeroDivisionError):
            w.update(lambda m: (m.notes.append("half"), 1 / 0))
        with pytest.raises(Exception, match="serialize"):
            w.update(lambda m: m.platform.update(strange=object()))
        w.update(lambda m: m.servers.append(Server(name="a\ud800", config={"nan": float("nan")})))
    m = hoptrace.open(w.path).manifest
    assert (m.notes, m.platform, len(m.servers), m.closed) == ([], {}, 1, True)


def test_every_row_of_many_threads_is_stored_or_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads append while the writer flushes, rotates and closes. Not one row may vanish."""
    monkeypatch.setattr(writer_module, "_FLUSH_S", 0.002)
    monkeypatch.setattr(writer_module, "_PART_ROWS", 40)
    w = TraceWriter(tmp_path / "t.trace", manifest())
    stop = threading.Event()
    handed = [0] * 4

    def work(thread: int) -> None:
        while not stop.wait(0.001):
            w.append("tokens", [token(thread, handed[thread])])
            handed[thread] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    reads = 0
    for _ in range(20):
        trace = hoptrace.open(w.path)
        seen = trace.table("tokens").collect()
        assert seen.select(pl.struct("request", "index").is_duplicated().any()).item() is False
        for thread in range(4):
            of_thread = seen.filter(request=thread)["index"]
            assert sorted(of_thread) == list(range(len(of_thread)))  # no gap: a prefix of what was handed over
        reads += seen.height
    w.close()
    stop.set()
    for t in threads:
        t.join()
    trace = hoptrace.open(w.path)
    late = w.manifest.rows_dropped.get("handed over after close", 0)
    assert trace.rows("tokens") + late == sum(handed)
    assert reads > 0
    assert len(trace.manifest.tables["tokens"]) > 1  # it did rotate
    assert sorted(p.name for p in trace.path.rglob("*") if p.suffix != ".parquet") == ["manifest.json", "tokens"]


def test_full_buffer_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_MAX_BUFFERED_ROWS", 10)
    monkeypatch.setattr(writer_module, "_FLUSH_S", 3600)
    with TraceWriter(tmp_path / "t.trace", manifest()) as w:
        for i in range(4):
            w.append("tokens", [token(i, j) for j in range(4)])
        w.append_arrow("steps", pa.table({"step": list(range(50))}))  # whole, into an empty buffer
        w.append("steps", [{"step": 50}])
    trace = hoptrace.open(w.path)
    assert trace.rows("tokens") == 8
    assert trace.rows("steps") == 50
    assert trace.manifest.rows_dropped == {"tokens: buffer full": 8, "steps: buffer full": 1}


def test_writers_that_are_not_live_drop_nothing_and_leave_parts_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_PART_ROWS", 100)
    monkeypatch.setattr(writer_module, "_MAX_BUFFERED_ROWS", 10)
    with TraceWriter(tmp_path / "t.trace", manifest(), background=False) as w:
        for i in range(50):
            w.append("tokens", [token(i, j) for j in range(7)])
        w.append_arrow("tokens", pa.table({"request": [50] * 250, "index": list(range(250))}))
    trace = hoptrace.open(w.path)
    assert trace.rows("tokens") == 600
    assert max(p.rows or 0 for p in trace.manifest.tables["tokens"]) <= 106
    assert all(p.kind == "parquet" for p in trace.manifest.tables["tokens"])


def test_second_writer_and_compact_keep_off_a_live_trace(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", manifest()) as w:
        w.append("requests", [request(1)])
        w.flush()
        assert being_written(w.path)
        with pytest.raises(UsageError, match="still being written"):
            compact(w.path)
    assert not being_written(w.path)
    assert compact(w.path).journals == 0


# -- clock ------------------------------------------------------------------------------------------------------------


def test_utc_offset_is_in_the_manifest(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", manifest(), clock=TraceClock(42), background=False) as w:
        pass
    assert json.loads((w.path / "manifest.json").read_text())["utc_offset_ns"] == 42
