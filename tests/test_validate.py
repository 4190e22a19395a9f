"""validate: a whole trace has no findings, and each planted fault is found by the check that is for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import hoptrace
from hoptrace.cli.compact import command as compact_command
from hoptrace.cli.sql import command as sql_command
from hoptrace.cli.validate import command
from hoptrace.errors import GateFailed, UsageError
from hoptrace.manifest import Manifest, ReplayInfo, Server
from hoptrace.validate import Finding, validate
from hoptrace.writer import TraceWriter

Tables = dict[str, list[dict[str, Any]]]


def whole() -> Tables:
    """Two requests, three steps: request 1 is prefilled in step 0 and decodes in 1 and 2; request 2 is prefilled in step 1."""
    request = {"arrival_of": "received", "source": "t", "prompt_tokens": 8}
    step = {"server": "s", "source": "t", "origin": "observed"}
    resident = {"server": "s", "source": "t"}
    return {
        "requests": [
            request | {"request": 1, "received_ns": 100, "arrival_ns": 100, "scheduled_ns": 110, "first_token_ns": 120,
                       "first_visible_ns": 120, "last_token_ns": 140, "finish_ns": 150, "output_tokens": 3},
            request | {"request": 2, "received_ns": 105, "arrival_ns": 105, "scheduled_ns": 120, "first_token_ns": 130,
                       "last_token_ns": 140, "finish_ns": 150, "output_tokens": 2},
        ],
        "tokens": [
            {"request": r, "sequence": 0, "index": i, "time_ns": t, "count": 1, "vantage": "proxy", "source": "t"}
            for r, times in ((1, (120, 130, 140)), (2, (130, 140)))
            for i, t in enumerate(times)
        ],
        "steps": [
            step | {"step": 0, "start_ns": 110, "end_ns": 120, "prefill_tokens": 8, "decode_tokens": 0},
            step | {"step": 1, "start_ns": 120, "end_ns": 130, "prefill_tokens": 8, "decode_tokens": 1},
            step | {"step": 2, "start_ns": 130, "end_ns": 140, "prefill_tokens": 0, "decode_tokens": 2},
        ],
        "residency": [
            resident | {"request": 1, "first_step": 0, "last_step": 0, "phase": "chunk", "tokens_per_step": 8},
            resident | {"request": 1, "first_step": 1, "last_step": 2, "phase": "decode", "tokens_per_step": 1},
            resident | {"request": 2, "first_step": 1, "last_step": 1, "phase": "chunk", "tokens_per_step": 8},
            resident | {"request": 2, "first_step": 2, "last_step": 2, "phase": "decode", "tokens_per_step": 1},
        ],
        "moves": [
            {"start_ns": 100, "end_ns": 101, "request": 1, "object": "prompt", "src": "a", "dst": "b", "bytes": 5, "source": "t"}
        ],
        "waits": [{"start_ns": 100, "end_ns": 110, "request": 1, "kind": "queue", "source": "t"}],
        "counters": [
            {"time_ns": t, "entity": "cpu", "name": "n", "value_int": t, "semantics": "cumulative", "status": "ok", "source": "t"}
            for t in (1, 2)
        ],
        "coverage": [
            {"table": name, "from_ns": 0, "source": "t"}
            for name in ("requests", "tokens", "steps", "residency", "moves", "waits", "counters")
        ],
    }  # fmt: skip


def write(path: Path, tables: Tables, manifest: Manifest | None = None) -> Path:
    with TraceWriter(path, manifest or Manifest(origin="recorded"), background=False) as w:
        for name, rows in tables.items():
            w.append(name, rows)
    return path


def findings(path: Path) -> list[Finding]:
    return validate(hoptrace.open(path))


def test_whole_trace_has_no_findings(tmp_path: Path) -> None:
    assert findings(write(tmp_path / "t.trace", whole())) == []


def test_empty_trace_has_no_findings(tmp_path: Path) -> None:
    assert findings(write(tmp_path / "t.trace", {})) == []


def _set(table: str, at: int, /, **values: Any) -> Callable[[Tables], None]:
    return lambda tables: tables[table][at].update(values)


def _drop(table: str, at: int) -> Callable[[Tables], None]:
    return lambda tables: tables[table].pop(at) and None


FAULTS: list[tuple[Callable[[Tables], None], str, str, str, str]] = [
    (_set("moves", 0, src=None), "error", "schema_kept", "moves", "src is null"),
    (_set("waits", 0, kind="boredom"), "error", "schema_kept", "waits", "kind holds a value"),
    (_set("moves", 0, bytes=-1), "error", "schema_kept", "moves", "bytes is negative"),
    (_set("steps", 2, step=1), "error", "schema_kept", "steps", "1 keys occur more than once (first: server s"),
    (_set("tokens", 1, index=0), "error", "schema_kept", "tokens", "keys occur more than once"),
    (_set("requests", 0, scheduled_ns=99), "error", "requests_ordered", "requests", "arrival_ns in 1 rows (request 1)"),
    (_set("requests", 0, scheduled_ns=None, first_token_ns=99), "error", "requests_ordered", "requests", "first_token_ns is b"),
    (_set("requests", 1, finish_ns=139), "error", "requests_ordered", "requests", "finish_ns is before last"),
    (_set("requests", 0, first_visible_ns=141), "error", "requests_ordered", "requests", "last_token_ns is before"),
    (_set("requests", 0, sent_ns=90), "error", "arrival_is_earliest", "requests", "not the earliest"),
    (lambda t: t.update(stages=[{"request": 1, "stage": 0, "enqueued_ns": 5, "end_ns": 4, "source": "t"}]),
     "error", "stages_ordered", "stages", "end_ns is before enqueued_ns"),
    (lambda t: t.update(stages=[{"request": r, "stage": 0, "cached_tokens": r + 7, "source": "t"} for r in (1, 2)]),
     "warning", "cached_within_prompt", "stages", "1 stay has more cached_tokens than the prompt has tokens (request 2)"),
    (_drop("requests", 1), "error", "requests_known", "tokens", "2 rows are about requests"),
    (_drop("requests", 1), "error", "requests_known", "residency", "(request 2)"),
    (_set("tokens", 1, time_ns=119), "error", "tokens_ordered", "tokens", "1 tokens are seen before"),
    (_set("tokens", 1, index=7), "warning", "tokens_ordered", "tokens", "do not continue"),
    (_set("requests", 0, output_tokens=5), "warning", "tokens_match_requests", "tokens", "differ in 1 requests (request 1)"),
    (_set("requests", 0, output_tokens=2), "warning", "tokens_match_requests", "tokens", "differ in 1 requests (request 1)"),
    (_set("requests", 1, first_token_ns=131), "error", "tokens_match_requests", "requests", "first_token_ns is not"),
    (_set("requests", 1, last_token_ns=141), "error", "tokens_match_requests", "requests", "last_token_ns is not"),
    (_set("steps", 1, end_ns=131), "error", "steps_do_not_overlap", "steps", "(first: s step 2)"),
    (_set("steps", 2, end_ns=129), "error", "steps_do_not_overlap", "steps", "end before they start"),
    (_set("steps", 0, step=9), "error", "steps_do_not_overlap", "steps", "do not ascend"),
    (_drop("steps", 2), "error", "residency_refers_to_steps", "residency", "2 runs have a last_step"),
    (_set("residency", 1, last_step=0), "error", "residency_refers_to_steps", "residency", "end at a step before their first"),
    (_set("steps", 1, prefill_tokens=7), "error", "residency_fits_steps", "residency", "(first: s step 1: 8 against 7)"),
    (_set("steps", 2, decode_tokens=3), "warning", "residency_fits_steps", "residency", "computed more decode_tokens"),
    (_drop("residency", 1), "warning", "residency_fits_steps", "residency", "2 steps computed more decode_tokens"),
    (_set("moves", 0, end_ns=99), "error", "intervals_forward", "moves", "1 moves end before they start"),
    (_set("waits", 0, end_ns=99), "error", "intervals_forward", "waits", "1 waits end before they start"),
    (_set("counters", 0, value_int=None), "error", "counters_have_values", "counters", "no value or two"),
    (_set("counters", 0, value_float=1.0), "error", "counters_have_values", "counters", "no value or two"),
    (_set("counters", 1, value_int=0), "warning", "counters_have_values", "counters", "fall 1 times"),
    (_drop("coverage", 1), "warning", "coverage_present", "tokens", "when `tokens` was recorded"),
    (_set("coverage", 0, table="dreams"), "warning", "coverage_present", "coverage", "speaks of 'dreams'"),
    (_set("requests", 0, max_tokens=2**70), "warning", "nothing_dropped", "requests", "1 values did not fit"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f[2]}-{f[3]}-{f[4][:24]}")
def test_planted_fault_is_found(tmp_path: Path, fault: tuple[Callable[[Tables], None], str, str, str, str]) -> None:
    plant, level, check, table, words = fault
    tables = whole()
    plant(tables)
    found = findings(write(tmp_path / "t.trace", tables))
    assert [f for f in found if (f.level, f.check, f.table) == (level, check, table) and words in f.message], found


@pytest.mark.parametrize(
    "fine",
    [
        _set("requests", 0, scheduled_ns=None),
        _set("requests", 0, output_tokens=4),  # a stop token is counted and not sent
        _set("requests", 0, output_tokens=None),
        _set("tokens", 1, count=None),
        _set("counters", 0, value_int=None, status="denied"),
        _set("steps", 0, prefill_tokens=None),
        _set("requests", 1, priority=-5),
    ],
)
def test_unknown_is_no_fault(tmp_path: Path, fine: Callable[[Tables], None]) -> None:
    tables = whole()
    fine(tables)
    assert findings(write(tmp_path / "t.trace", tables)) == []


def test_pipeline_ranks_may_overlap(tmp_path: Path) -> None:
    tables = whole()
    tables["steps"] += [s | {"pp_rank": 1, "start_ns": s["start_ns"] + 5, "end_ns": s["end_ns"] + 5} for s in tables["steps"]]
    tables["steps"] = [{"pp_rank": 0} | s for s in tables["steps"]]
    assert findings(write(tmp_path / "t.trace", tables)) == []


def test_rows_that_the_trace_says_it_lost_are_no_error(tmp_path: Path) -> None:
    tables = whole()
    _drop("requests", 1)(tables)
    path = write(tmp_path / "t.trace", tables)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["rows_dropped"] = {"disk: No space left on device": 1}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert {f.level for f in findings(path) if f.check == "requests_known"} == {"warning"}


# -- files and manifest -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["first", "pages", "footer", "last"])
def test_flipped_bit_is_found(tmp_path: Path, where: str) -> None:
    path = write(tmp_path / "t.trace", whole())
    part = path / "steps/00000.parquet"
    data = bytearray(part.read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    at = {"first": 0, "pages": footer // 2, "footer": footer + 50, "last": len(data) - 1}[where]
    data[at] ^= 1
    part.write_bytes(data)
    (found,) = [f for f in findings(path) if f.level == "error"]
    assert (found.check, found.table) == ("file_whole", "steps")
    assert found.message == "steps/00000.parquet is damaged (its checksum differs)."


def test_flipped_page_is_found_without_a_checksum_in_the_manifest(tmp_path: Path) -> None:
    path = write(tmp_path / "t.trace", whole())
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["tables"]["steps"][0]["crc32"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert findings(path) == []
    part = path / "steps/00000.parquet"
    data = bytearray(part.read_bytes())
    meta = pq.read_metadata(part)
    at = meta.row_group(0).column(0).data_page_offset + meta.row_group(0).column(0).total_compressed_size - 2
    data[at] ^= 1
    part.write_bytes(data)
    (found,) = [f for f in findings(path) if f.level == "error"]
    assert "steps/00000.parquet is damaged (" in found.message


def test_truncated_missing_and_miscounted_files_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "t.trace", whole())
    part = path / "moves/00000.parquet"
    part.write_bytes(part.read_bytes()[:-1])
    (path / "waits/00000.parquet").unlink()
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["tables"]["tokens"][0]["rows"] = 4
    manifest["tables"]["dreams"] = []
    (path / "manifest.json").write_text(json.dumps(manifest))
    messages = {(f.table, f.message) for f in findings(path) if f.check in ("file_whole", "known_table")}
    assert {t for t, _ in messages} == {"moves", "waits", "tokens", "dreams"}
    assert ("tokens", "tokens/00000.parquet holds 5 rows, the manifest says 4.") in messages
    assert ("waits", "waits/00000.parquet is missing though the manifest names it.") in messages


def test_killed_writer_and_damaged_journal_are_told_apart(tmp_path: Path) -> None:
    w = TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False)
    for row in whole()["tokens"]:
        w.append("tokens", [row])
        w.flush()
    assert [f.message for f in findings(w.path) if f.check == "closed_cleanly"] == ["The trace is still being written."]
    w._folder.release()
    journal = w.path / "tokens/00000.journal"
    data = journal.read_bytes()
    journal.write_bytes(data[:-1])
    levels = {f.check: f.level for f in findings(w.path) if f.table == "tokens" or f.table is None}
    assert levels["file_whole"] == levels["closed_cleanly"] == "warning"
    journal.write_bytes(bytes([*data[:100], data[100] ^ 1, *data[101:]]))
    (damaged,) = [f for f in findings(w.path) if f.check == "file_whole"]
    assert (damaged.level, damaged.count) == ("error", 1)


def test_dropped_rows_are_reported(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False) as w:
        w.drop("queue full", 1200)
    assert [(f.level, f.message) for f in findings(w.path)] == [("warning", "1,200 rows were dropped (queue full).")]


@pytest.mark.parametrize(
    ("manifest", "level", "words"),
    [
        (Manifest(origin="replayed"), "error", "but not of what"),
        (
            Manifest(origin="replayed", replay=ReplayInfo(parent="a", policy={}, cost_model={"x": 1}, error={"e": 1})),
            "error",
            "policy",
        ),
        (
            Manifest(origin="replayed", replay=ReplayInfo(parent="a", policy={"x": 1}, cost_model={}, error={"e": 1})),
            "error",
            "cost model",
        ),
        (
            Manifest(origin="replayed", replay=ReplayInfo(parent="a", policy={"x": 1}, cost_model={"x": 1})),
            "warning",
            "How wrong",
        ),
        (Manifest(origin="imported"), "warning", "which files were imported"),
        (Manifest(origin="recorded", servers=[Server(name="s"), Server(name="s")]), "error", "Two servers"),
    ],
)
def test_incomplete_manifest_is_found(tmp_path: Path, manifest: Manifest, level: str, words: str) -> None:
    (found,) = findings(write(tmp_path / "t.trace", {}, manifest))
    assert (found.level, found.check) == (level, "manifest_complete")
    assert words in found.message


# -- the command line -------------------------------------------------------------------------------------------------


def test_command_passes_warnings_and_fails_errors(tmp_path: Path) -> None:
    tables = whole()
    tables["coverage"].pop()
    good = write(tmp_path / "good.trace", tables)
    done = CliRunner().invoke(command, [str(good)], standalone_mode=False)
    assert done.exit_code == 0
    assert "no errors, 1 warning" in done.stdout
    tables["moves"][0]["bytes"] = -1
    bad = write(tmp_path / "bad.trace", tables)
    done = CliRunner().invoke(command, [str(bad)], standalone_mode=False)
    assert isinstance(done.exception, GateFailed)
    assert "error: moves: bytes is negative: 1 rows. [schema_kept]" in done.stdout
    done = CliRunner().invoke(command, [str(bad), "--json"])
    assert done.exit_code == 1
    figures = json.loads(done.stdout)
    assert (figures["errors"], figures["warnings"], len(figures["findings"])) == (1, 1, 2)
    done = CliRunner().invoke(command, [str(bad), "--quiet"], standalone_mode=False)
    assert "warning" not in done.stdout


def test_sql_command_prints_json_csv_and_a_table(tmp_path: Path) -> None:
    path = str(write(tmp_path / "t.trace", whole()))
    query = "SELECT request, output_tokens, error, [1, 2] AS l, 'nan'::DOUBLE AS f FROM requests ORDER BY 1"
    rows = json.loads(CliRunner().invoke(sql_command, [path, query, "--json"]).stdout)
    assert rows[0] == {"request": 1, "output_tokens": 3, "error": None, "l": [1, 2], "f": None}
    assert json.loads(CliRunner().invoke(sql_command, [path, "SELECT 1 WHERE false", "--json"]).stdout) == []
    lines = CliRunner().invoke(sql_command, [path, query, "--csv"]).stdout.splitlines()
    assert lines[:2] == ["request,output_tokens,error,l,f", '1,3,,"[1, 2]",nan']
    table = CliRunner().invoke(sql_command, [path, "-"], input="SELECT '[red]x[/red]' AS a, 7 AS b").stdout
    assert "[red]x[/red]" in table
    assert "7" in table
    done = CliRunner().invoke(sql_command, [path, "SELECT nope FROM requests"], standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    done = CliRunner().invoke(sql_command, [path, " "], standalone_mode=False)
    assert isinstance(done.exception, UsageError)


def test_sql_help_names_the_tables() -> None:
    text = CliRunner().invoke(sql_command, ["--help"]).stdout
    assert all(f"  {name} " in text for name in ("requests", "tokens", "coverage"))


def test_compact_command_tells_what_it_did(tmp_path: Path) -> None:
    w = TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False)
    w.append("tokens", whole()["tokens"])
    w.flush()
    w._folder.release()
    (w.path / "tokens/00000.parquet.tmp").write_bytes(b"half")
    done = CliRunner().invoke(compact_command, [str(w.path), "--json"])
    assert json.loads(done.stdout) == {"journals": 1, "rows": 5, "removed": 1}
    assert "nothing to do" in CliRunner().invoke(compact_command, [str(w.path)]).stdout
    assert hoptrace.open(w.path).rows("tokens") == 5
