"""Reading: damaged files are named, newer traces refused or kept whole, tokens counted once, SQL locked in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import hoptrace
from hoptrace import reader as reader_module
from hoptrace import sqlview
from hoptrace.errors import InputError, UsageError
from hoptrace.journal import JournalRead, read_journal
from hoptrace.manifest import Manifest
from hoptrace.schema import TABLES
from hoptrace.sqlview import _source
from hoptrace.writer import TraceWriter


def make(path: Path, *, close: bool = True, **tables: list[dict[str, Any]]) -> Path:
    w = TraceWriter(path, Manifest(origin="recorded"), background=False)
    for name, rows in tables.items():
        w.append(name, rows)
    if close:
        w.close()
    else:
        w.flush()
        w._folder.release()
    return path


def edit_manifest(path: Path, **changes: Any) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


TOKENS = [{"request": 1, "index": i, "time_ns": 10 * i, "vantage": "proxy", "source": "t"} for i in range(5)]


# -- what is not a whole trace ----------------------------------------------------------------------------------------


def test_no_trace_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no trace at"):
        hoptrace.open(tmp_path / "none.trace")
    with pytest.raises(InputError, match="is not a trace: it has no manifest"):
        hoptrace.open(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file; a trace is a folder"):
        hoptrace.open(tmp_path / "file")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema_version": "x"}', '{"schema_version": "1.0"}', "\x00\x01"])
def test_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    path = make(tmp_path / "t.trace")
    (path / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=r"manifest\.json"):
        hoptrace.open(path)
    (path / "manifest.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(InputError, match=r"manifest\.json is damaged"):
        hoptrace.open(path)


def test_newer_major_is_refused_by_name(tmp_path: Path) -> None:
    path = make(tmp_path / "t.trace")
    edit_manifest(path, schema_version="2.0")
    with pytest.raises(InputError, match=r"schema 2\.0, newer than this hoptrace reads \(1\.") as caught:
        hoptrace.open(path)
    assert "pip install -U hoptrace" in str(caught.value)


def test_newer_minor_is_read_and_kept(tmp_path: Path) -> None:
    path = make(tmp_path / "t.trace", tokens=TOKENS)
    part = path / "tokens/00000.parquet"
    pq.write_table(pq.read_table(part).append_column("mood", pa.array(["good"] * 5)), part)
    edit_manifest(
        path,
        schema_version="1.99",
        colour="blue",
        tables={"tokens": [{"file": "tokens/00000.parquet", "speed": 3}], "dreams": []},
    )
    trace = hoptrace.open(path)
    frame = trace.table("tokens").collect()
    assert frame.columns == [*TABLES["tokens"].names, "mood"]
    assert trace.sql("SELECT DISTINCT mood FROM tokens").rows() == [("good",)]
    assert trace.manifest.model_extra == {"colour": "blue"}
    assert trace.manifest.tables["tokens"][0].model_extra == {"speed": 3}
    # A copy keeps it if it says so, and says no if it does not.
    with TraceWriter(tmp_path / "copy.trace", Manifest(origin="recorded"), background=False) as w:
        with pytest.raises(KeyError, match="mood"):
            w.append_arrow("tokens", frame.to_arrow())
        w.append_arrow("tokens", frame.to_arrow(), keep_unknown=True)
        w.append("tokens", [{"request": 2, "index": 0, "time_ns": 1, "vantage": "proxy", "source": "t"}])
    assert hoptrace.open(w.path).table("tokens").collect()["mood"].to_list() == ["good"] * 5 + [None]


def test_older_part_without_a_column_reads_as_null(tmp_path: Path) -> None:
    path = make(tmp_path / "t.trace", tokens=TOKENS)
    part = path / "tokens/00000.parquet"
    pq.write_table(pq.read_table(part).drop_columns(["coalesced", "vantage"]), part)
    trace = hoptrace.open(path)
    assert trace.table("tokens").collect()["coalesced"].to_list() == [None] * 5
    assert trace.sql("SELECT count(*), count(coalesced) FROM tokens").rows() == [(5, 0)]


def test_parquet_without_its_last_bytes_is_named(tmp_path: Path) -> None:
    path = make(tmp_path / "t.trace", tokens=TOKENS)
    part = path / "tokens/00000.parquet"
    whole = part.read_bytes()
    for cut in (1, 4, 8, 100, len(whole)):
        part.write_bytes(whole[:-cut])
        trace = hoptrace.open(path)
        with pytest.raises(InputError, match=r"tokens/00000\.parquet is damaged"):
            trace.table("tokens")
        with pytest.raises(InputError, match=r"tokens/00000\.parquet is damaged"):
            trace.sql("SELECT * FROM tokens")
    assert trace.rows("requests") == 0  # the others read


def test_missing_part_is_named(tmp_path: Path) -> None:
    path = make(tmp_path / "t.trace", tokens=TOKENS)
    (path / "tokens/00000.parquet").unlink()
    with pytest.raises(InputError, match=r"tokens/00000\.parquet is missing though the manifest names it"):
        hoptrace.open(path).table("tokens")
    path = make(tmp_path / "j.trace", close=False, tokens=TOKENS)
    (path / "tokens/00000.journal").unlink()
    with pytest.raises(InputError, match=r"tokens/00000\.journal is missing though the manifest names it"):
        hoptrace.open(path).table("tokens")


def test_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    path = make(tmp_path / "t.trace", tokens=TOKENS)
    secret = make(tmp_path / "secret.trace", tokens=TOKENS)
    for file in ("../secret.trace/tokens/00000.parquet", str(secret / "tokens/00000.parquet")):
        edit_manifest(path, tables={"tokens": [{"file": file}]})
        with pytest.raises(InputError, match="outside the trace"):
            hoptrace.open(path).table("tokens")


def test_files_that_the_manifest_does_not_name_are_not_read(tmp_path: Path) -> None:
    path = make(tmp_path / "t.trace", tokens=TOKENS)
    (path / "tokens/00001.parquet").write_bytes((path / "tokens/00000.parquet").read_bytes())
    assert hoptrace.open(path).rows("tokens") == 5


def test_unknown_table_is_a_key_error(tmp_path: Path) -> None:
    trace = hoptrace.open(make(tmp_path / "t.trace"))
    with pytest.raises(KeyError, match="no table 'token'"):
        trace.table("token")


def test_empty_trace_has_every_table_with_its_types(tmp_path: Path) -> None:
    trace = hoptrace.open(make(tmp_path / "t.trace"))
    for name, spec in TABLES.items():
        frame = trace.table(name).collect()
        assert frame.height == 0
        assert frame.columns == list(spec.names)
        assert frame.to_arrow().cast(spec.arrow).schema == spec.arrow
        assert not trace.has(name)


def test_name_of_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "t.trace")
    monkeypatch.chdir(path)
    assert hoptrace.open(".").name == "t"


def test_reader_beside_a_writer_that_moves_on_sees_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst moment: the next journal is named already, and the writer turns to it between two reads."""
    w = TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False)
    spec = TABLES["tokens"]

    def write(start: int) -> None:
        w.append("tokens", [{"request": 1, "index": i, "time_ns": i, "source": "t"} for i in range(start, start + 10)])
        w.flush()

    write(0)
    following = w._folder._new_journal(spec)
    w._folder.save()
    trace = hoptrace.open(w.path)
    reads = 0

    def read_then_write(path: Path) -> JournalRead:
        nonlocal reads
        found = read_journal(path)
        reads += 1
        if reads == 1:
            write(10)
            w._folder._journals["tokens"] = following
            write(20)
        return found

    monkeypatch.setattr(reader_module, "read_journal", read_then_write)
    seen = trace.table("tokens").collect()["index"].to_list()
    assert reads == 2
    assert len(seen) >= 10
    assert seen == list(range(len(seen)))
    w._folder.release()


def test_reader_follows_a_journal_that_became_a_part(tmp_path: Path) -> None:
    w = TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False)
    w.append("tokens", TOKENS)
    w.append("requests", [{"request": 1, "arrival_ns": 1, "source": "t"}])
    w.flush()
    before = hoptrace.open(w.path)
    w.close()
    assert before.rows("tokens") == 5
    assert before.sql("SELECT count(*) FROM tokens JOIN requests USING (request)").item() == 5


# -- one vantage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_tokens_seen_twice_count_once(tmp_path: Path, close: bool, split: bool) -> None:
    rows = [
        {"request": request, "index": i, "time_ns": i, "vantage": vantage, "source": vantage or "t"}
        for request, vantages in {1: ("engine", "proxy", "client"), 2: ("engine", "client"), 3: ("engine",), 4: (None,)}.items()
        for vantage in vantages
        for i in range(3)
    ]
    w = TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False)
    for vantage in {r["vantage"] for r in rows} if split else {""}:
        w.append("tokens", [r for r in rows if not split or r["vantage"] == vantage])
        w.flush()
        w._folder.seal(TABLES["tokens"], reopen=False)
    if close:
        w.close()
    trace = hoptrace.open(w.path)
    seen = trace.table("tokens").select("request", "vantage").unique().sort("request").collect().rows()
    assert seen == [(1, "proxy"), (2, "client"), (3, "engine"), (4, None)]
    assert trace.rows("tokens") == trace.sql("SELECT count(*) FROM tokens").item() == 12
    w._folder.release()


# -- SQL --------------------------------------------------------------------------------------------------------------


def test_sql_joins_tables_and_gives_plain_types(tmp_path: Path) -> None:
    path = make(
        tmp_path / "t.trace", tokens=TOKENS, requests=[{"request": 1, "arrival_ns": 2**62, "source": "t", "prefix_blocks": [5]}]
    )
    got = hoptrace.open(path).sql(
        "SELECT request, sum(time_ns) AS total, sum(NULL::BIGINT) AS nothing, avg(time_ns) AS mean, 1.25 AS dec, "
        "any_value(arrival_ns) AS a, any_value(prefix_blocks) AS p FROM Tokens JOIN requests USING (request) GROUP BY request"
    )
    assert got.to_dicts() == [{"request": 1, "total": 100, "nothing": None, "mean": 20.0, "dec": 1.25, "a": 2**62, "p": [5]}]
    assert got.schema["total"] == pl.Int64
    assert got.schema["dec"] == pl.Float64


def test_sql_beyond_int64_is_a_float_not_a_wrong_integer(tmp_path: Path) -> None:
    rows = [{"request": 1, "index": i, "time_ns": 2**62, "source": "t"} for i in range(4)]
    got = hoptrace.open(make(tmp_path / "t.trace", tokens=rows)).sql("SELECT sum(time_ns) AS s FROM tokens")
    assert got["s"].to_list() == [float(2**64)]


def test_closed_tables_are_scanned_not_copied(tmp_path: Path) -> None:
    trace = hoptrace.open(make(tmp_path / "t.trace", tokens=TOKENS, requests=[{"request": 1, "arrival_ns": 1, "source": "t"}]))
    assert isinstance(_source(trace, "tokens"), ds.Dataset)
    assert isinstance(_source(trace, "requests"), ds.Dataset)  # one part: merged when it was written
    trace = hoptrace.open(make(tmp_path / "j.trace", close=False, tokens=TOKENS))
    assert isinstance(_source(trace, "tokens"), pa.Table)
    assert trace.sql("SELECT count(*) FROM tokens").item() == 5


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('{secret}')",
        "SELECT content FROM read_text('{secret}')",
        "SELECT * FROM '{secret}'",
        "SELECT * FROM glob('{folder}/*')",
        "COPY tokens TO '{folder}/out.csv'",
        "COPY tokens FROM '{secret}'",
        "ATTACH '{folder}/out.db'",
        "EXPORT DATABASE '{folder}/out'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "SET python_enable_replacements = true",
        "SELECT * FROM secret",
    ],
)
def test_sql_reaches_nothing_but_the_tables(tmp_path: Path, query: str) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    trace = hoptrace.open(make(tmp_path / "t.trace", tokens=TOKENS))
    with pytest.raises(UsageError):
        trace.sql("SELECT 1 FROM tokens; " + query.format(secret=secret, folder=tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["secret.csv", "t.trace"]


def test_wrong_sql_says_what_and_which_tables_there_are(tmp_path: Path) -> None:
    trace = hoptrace.open(make(tmp_path / "t.trace"))
    with pytest.raises(UsageError, match=r"There is no table token\. Did you mean tokens\? Tables: requests, stages"):
        trace.sql("SELECT * FROM token")
    with pytest.raises(UsageError, match="Parser Error"):
        trace.sql("SELEC 1")
    with pytest.raises(UsageError, match=r"several columns named index, request\."):
        trace.sql("SELECT a.*, b.request, b.index FROM tokens a JOIN tokens b USING (time_ns)")
    assert trace.sql("CREATE TABLE x AS SELECT 1 AS a; SELECT a FROM x").item() == 1


def test_damage_inside_a_part_is_an_input_error_in_sql(tmp_path: Path) -> None:
    rows = [{"request": i, "index": 0, "time_ns": (i * 0x9E3779B97F4A7C15) % 2**62, "source": "t"} for i in range(5000)]
    path = make(tmp_path / "t.trace", tokens=rows)
    part = path / "tokens/00000.parquet"
    data = bytearray(part.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 400] = b"\xff" * 400
    part.write_bytes(data)
    with pytest.raises(InputError, match="hoptrace validate"):
        hoptrace.open(path).sql("SELECT max(time_ns) FROM tokens")


def test_a_query_larger_than_the_memory_it_may_take_spills_into_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sqlview._CONFIG, "memory_limit", "60MB")
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False) as w:
        n = 2_000_000
        request = np.arange(n) % 1000
        frame = pl.DataFrame({"request": request, "index": np.arange(n), "time_ns": (np.arange(n) * 7919) % 1_000_003})
        w.append_arrow("tokens", frame.with_columns(pl.lit("t").alias("source")).to_arrow())
    trace = hoptrace.open(tmp_path / "t.trace")
    text = "SELECT sum(r) AS s FROM (SELECT row_number() OVER (PARTITION BY request ORDER BY time_ns) AS r FROM tokens)"
    assert trace.sql(text)["s"].item() == 1000 * 2000 * 2001 // 2
    with pytest.raises(UsageError, match="disabled by configuration"):
        trace.sql(f"COPY (SELECT 1) TO '{tmp_path / 'x.csv'}'")
    assert not (tmp_path / "x.csv").exists()


def test_parts_whose_requests_are_apart_need_no_merging(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False, part_rows=2) as w:
        for r in range(6):
            w.append("stages", [{"request": r, "sequence": 0, "attempt": 0, "stage": 0, "source": "t"}])
    trace = hoptrace.open(tmp_path / "t.trace")
    assert len(trace.manifest.tables["stages"]) == 3
    assert trace.files("stages") is not None and "AGGREGATE" not in trace.table("stages").explain()
    with TraceWriter(tmp_path / "u.trace", Manifest(origin="recorded"), background=False, part_rows=1) as w:
        for server in ("a", None):
            w.append("stages", [{"request": 0, "sequence": 0, "attempt": 0, "stage": 0, "server": server, "source": "t"}])
    trace = hoptrace.open(tmp_path / "u.trace")
    assert trace.files("stages") is None and trace.table("stages").collect()["server"].to_list() == ["a"]


def test_requests_of_a_range_are_merged_like_all(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False, part_rows=3) as w:
        for r in (3, 1, 2):
            w.append("requests", [{"request": r, "arrival_ns": 10 * r, "source": "t"}])
        for r in (1, 2, 3):
            w.append("requests", [{"request": r, "arrival_ns": 10 * r, "finish_ns": r, "source": "t"}])
    trace = hoptrace.open(tmp_path / "t.trace")
    whole = trace.table("requests").sort("request").collect()
    assert trace.of_requests("requests", 2, 3).collect().equals(whole.filter(pl.col("request") == 2))
    assert trace.of_requests("requests", -5, 99).sort("request").collect().equals(whole)
    with pytest.raises(KeyError):
        trace.of_requests("steps", 0, 1)
