"""Imports as a whole: kinds by content, exact counts, rejects, several files, limits, failures that leave nothing."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from click.testing import CliRunner
from support.imports import DATA, SHARED, rows, run, told

import hoptrace
from hoptrace.cli.import_files import command
from hoptrace.collectors.files import rejects as rejects_module
from hoptrace.collectors.files.base import Sink
from hoptrace.collectors.files.kinds import importers, kind_of
from hoptrace.collectors.files.run import import_files
from hoptrace.errors import InputError, UsageError
from hoptrace.validate import validate

AZURE = DATA / "requests" / "azure_conv_first200.csv"
MOONCAKE = DATA / "reference" / "mooncake_slice.jsonl"
CSV = "arrived_at,ContextTokens,GeneratedTokens\n"


def _shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip("extra check: needs ../shared, which a user's clone lacks")
    return path


# -- real files ---------------------------------------------------------------------------------------------------------


def test_azure_slice(tmp_path: Path) -> None:
    done = import_files([AZURE], tmp_path / "out.trace", source="Azure", licence="CC-BY-4.0")
    frame = rows(tmp_path)
    assert (done.read, done.written, done.rejected, frame.height) == (200, 200, 0, 200)
    first = frame.row(0, named=True)
    # 2023-11-16 18:15:46.68059 UTC
    assert (first["arrival_ns"], first["prompt_tokens"], first["output_tokens"]) == (1_700_158_546_680_590_000, 374, 44)
    assert first["finish_ns"] is None and first["first_token_ns"] is None and first["max_tokens"] is None
    assert frame["arrival_of"].unique().to_list() == ["received"]
    manifest = hoptrace.open(tmp_path / "out.trace").manifest
    assert manifest.closed and manifest.origin == "imported"
    entry = manifest.imported_from[0]
    assert (entry["licence"], entry["rows_read"], entry["rows_written"], entry["rows_rejected"]) == ("CC-BY-4.0", 200, 200, 0)
    assert entry["kind"] == "azure" and len(entry["sha256"]) == 64 and entry["bytes"] == AZURE.stat().st_size
    assert not [f for f in validate(hoptrace.open(tmp_path / "out.trace")) if f.level == "error"]


@pytest.mark.parametrize(
    ("name", "height", "prompt", "output", "span_ns"),
    [
        # INDEX.md's facts.
        ("requests/azure2023/AzureLLMInferenceTrace_conv.csv", 19366, 22_361_870, 4_088_665, 3_501_721_937_000),
        ("requests/vidur/splitwise_conv.csv", 19366, 22_361_870, 4_088_665, 3_501_721_937_000),
        ("requests/mooncake/conversation_trace.jsonl", 12031, 144_793_823, 4_122_048, 3_536_999_000_000),
        ("requests/llmservingsim/workload_me2_01_mixed.jsonl", 608, 5_604_402, 1_837_003, 60_898_463_000),
    ],
)
def test_whole_public_files(tmp_path: Path, name: str, height: int, prompt: int, output: int, span_ns: int) -> None:
    done = import_files([_shared(name)], tmp_path / "out.trace")
    frame = rows(tmp_path)
    assert (done.read, done.rejected) == (height, 0)
    assert (frame.height, frame["prompt_tokens"].sum(), frame["output_tokens"].sum()) == (height, prompt, output)
    assert int(frame["arrival_ns"].max()) - int(frame["arrival_ns"].min()) == span_ns  # type: ignore[arg-type]


def test_mooncake_blocks_of_the_whole_file(tmp_path: Path) -> None:
    done = import_files([_shared("requests/mooncake/conversation_trace.jsonl")], tmp_path / "out.trace")
    blocks = rows(tmp_path)["prefix_blocks"].explode()
    # Published check X1; every prompt has ceil(length ÷ 512) of them, chained, so nothing is to be told.
    assert (blocks.len(), blocks.n_unique()) == (288_500, 182_790)
    assert done.manifest.notes == ["Times are ms since the log's own start."]


def test_vidurs_times_are_azures(tmp_path: Path) -> None:
    import_files([DATA / "import" / "vidur_first100.csv"], tmp_path / "v.trace")
    import_files([AZURE], tmp_path / "a.trace")
    vidur, azure = rows(tmp_path, out="v.trace"), rows(tmp_path, out="a.trace").head(100)
    assert vidur["prompt_tokens"].to_list() == azure["prompt_tokens"].to_list()
    # Vidur has µs, Azure ticks of 100 ns; INDEX.md: they differ by 4.55e-13 s at most before rounding.
    assert vidur["arrival_ns"].to_list() == (azure["arrival_ns"] - azure["arrival_ns"][0]).to_list()


def test_llmservingsim_slice(tmp_path: Path) -> None:
    done = import_files([DATA / "import" / "llmservingsim_first60.jsonl"], tmp_path / "out.trace")
    frame = rows(tmp_path)
    assert done.manifest.imported_from[0]["kind"] == "llmservingsim"
    assert frame.height == 60
    assert frame.row(0, named=True)["arrival_ns"] == 101_537_000
    assert frame["arrival_of"].unique().to_list() == ["intended"]


# -- kinds --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44", "azure"),
        ("PromptTokenCount,GeneratedTokenCount,Time\n10,3,2023-11-16 18:15:46.5\n", "azure"),
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n",
            "burstgpt",
        ),
        ('{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 9, "output_length": 2}\n', "bailian"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [1]}\n', "mooncake"),
        ('{"session_id": "a", "text_input": "Hi", "output_length": 2}\n', "mooncake"),
        ('{"input_toks": 9, "output_toks": 2, "arrival_time_ns": 5}\n', "llmservingsim"),
        ("31800,0.0433,1.0486,Gamma,0.9094,0.0885\n", "servegen"),
        ('1.2.3.4 - - [10/Oct/2026:13:55:36 +0000] "POST /v1/completions HTTP/1.1" 200 26 "-" "curl" 1.234\n', "log"),
    ],
)
@pytest.mark.parametrize("packed", ["plain", "gz", "zst", "bom", "utf-16"])
def test_kind_by_content(tmp_path: Path, text: str, kind: str, packed: str) -> None:
    data = text.encode()
    pack = {
        "plain": lambda: data,
        "gz": lambda: gzip.compress(data),
        "zst": lambda: pa.compress(data, codec="zstd", asbytes=True),
        "bom": lambda: b"\xef\xbb\xbf" + data,
        "utf-16": lambda: text.encode("utf-16"),
    }
    (tmp_path / "file").write_bytes(pack[packed]())
    assert kind_of(tmp_path / "file", None).kind == kind


def test_every_kind_has_words_for_the_list() -> None:
    result = CliRunner().invoke(command, ["--kinds"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines() if line[0] != " "] == list(importers())


def test_a_half_gzip_is_told(tmp_path: Path) -> None:
    data = gzip.compress((CSV + "".join(f"{i},{i + 1},2\n" for i in range(100_000))).encode())
    with pytest.raises(InputError, match="is damaged"):
        run(tmp_path, data[: len(data) // 2])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


# -- counts and rejects -------------------------------------------------------------------------------------------------

MIXED = CSV + "0,9,1\n1,,2\n2,-3,3\n3,4,0\n4,x,1\n5,5,1,7\n"


def test_read_is_written_plus_rejected(tmp_path: Path) -> None:
    done = run(tmp_path, MIXED)
    assert (done.read, done.written, done.rejected) == (6, 2, 4)
    assert done.reasons == {
        "it has no ContextTokens": 1, "ContextTokens is less than 1": 1, "ContextTokens is not a number of tokens": 1,
        "it has more fields than the header": 1,
    }  # fmt: skip
    assert [(r["row"], r["value"]) for r in done.first_rejects] == [(3, None), (4, "-3"), (6, "x"), (7, None)]
    assert rows(tmp_path)["prompt_tokens"].to_list() == [9, 4]
    manifest = done.manifest
    assert manifest.rows_dropped == done.reasons
    assert (manifest.imported_from[0]["rows_read"], manifest.imported_from[0]["rows_rejected"]) == (6, 4)
    events = rows(tmp_path, "events")
    assert events["kind"].unique().to_list() == ["rejected"]
    assert events["detail"].to_list()[1] == "file, row 4: ContextTokens is less than 1 ('-3')"
    assert set(events["time_ns"].to_list()) == {0}


def test_rejects_file_has_all_events_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejects_module, "KEPT", 10)
    text = CSV + "0,9,1\n" + "1,x,1\n" * 25
    done = run(tmp_path, text, rejects=tmp_path / "bad.csv")
    assert done.rejected == 25
    bad = pl.read_csv(tmp_path / "bad.csv")
    assert bad.columns == ["file", "row", "reason", "value"]
    assert bad["row"].to_list() == list(range(3, 28))
    assert rows(tmp_path, "events").height == 10


def test_rejects_file_stays_when_all_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"all 2 were rejected. The first: row 2: it has no ContextTokens\."):
        run(tmp_path, CSV + "0,,1\n1,x,1\n", rejects=tmp_path / "bad.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.csv", "file"]
    assert pl.read_csv(tmp_path / "bad.csv").height == 2
    with pytest.raises(UsageError, match="already there"):
        run(tmp_path, CSV + "0,1,1\n", rejects=tmp_path / "bad.csv")
    assert not (tmp_path / "out.trace").exists()


def test_strict_names_the_first_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"file: row 3: it has no ContextTokens") as e:
        run(tmp_path, MIXED, strict=True)
    assert e.value.exit_code == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]
    with pytest.raises(InputError, match=r"4 records were rejected"):
        run(tmp_path, MIXED, strict=True, rejects=tmp_path / "bad.csv")
    assert pl.read_csv(tmp_path / "bad.csv").height == 4


def test_several_files_are_numbered_on(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(CSV + "0,9,1\nx,9,1\n1,8,1\n")
    (tmp_path / "b").write_text(
        '{"timestamp": 5, "input_length": 7, "session_id": "s"}\n{"input_length": 6, "session_id": "s"}\n'
    )
    done = import_files([tmp_path / "a", tmp_path / "b"], tmp_path / "out.trace")
    frame = rows(tmp_path)
    assert frame["request"].to_list() == [0, 1, 2, 3]
    assert frame["parent_request"].to_list() == [None, None, None, 2]
    assert frame["prompt_tokens"].to_list() == [9, 8, 7, 6]
    entries = [(e["file"], e["rows_read"], e["rows_written"], e["rows_rejected"]) for e in done.manifest.imported_from]
    assert entries == [("a", 3, 2, 1), ("b", 2, 2, 0)]
    assert told(done, "all start at once")
    covered = rows(tmp_path, "coverage")
    assert set(covered["source"].to_list()) == {"import:azure", "import:mooncake"}
    with pytest.raises(UsageError, match="named twice"):
        import_files([tmp_path / "a", tmp_path / "a"], tmp_path / "o2.trace")


def test_files_on_different_clocks_are_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(CSV + "0,9,1\n")
    done = import_files([tmp_path / "a", AZURE], tmp_path / "out.trace")
    assert told(done, "they lie far apart")


def test_limit_is_by_arrival_and_takes_the_rest_along(tmp_path: Path) -> None:
    log = "".join(
        json.dumps({"ts": t, "in": n, "c": 1, "s": f"s{n}"}) + "\n" for t, n in ((3, 30), (1, 10), (2, 20), (2, 21), (0, 0))
    )
    done = run(tmp_path, log, mapping="arrival_s=ts,prompt_tokens=in,cached_tokens=c,session=s", limit=2)
    frame = rows(tmp_path)
    assert (done.read, done.written, done.beyond_limit) == (5, 2, 3)
    # Of two that arrive together the earlier line is kept.
    assert frame.select("request", "prompt_tokens").rows() == [(0, 10), (1, 0)]
    assert rows(tmp_path, "stages")["request"].to_list() == [0, 1]
    assert told(done, "3 more were read")
    assert not [f for f in validate(hoptrace.open(tmp_path / "out.trace")) if f.level == "error"]


def test_limit_keeps_parents_and_rows_of_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hoptrace.collectors.files.mooncake import Mooncake

    plain = Mooncake.read

    def with_moves(self: Mooncake, path: Path, sink: Sink) -> None:
        plain(self, path, sink)
        moves = {"start_ns": [1, 2, 3], "object": ["kv"] * 3, "src": ["a"] * 3, "dst": ["b"] * 3, "request": [None, 1, 3]}
        sink.write("moves", pl.DataFrame(moves))

    monkeypatch.setattr(Mooncake, "read", with_moves)
    lines = [
        {"timestamp": t, "input_length": t + 1, "session_id": s} for t, s in ((9, "x"), (1, "a"), (8, "x"), (2, "a"), (3, "a"))
    ]
    run(tmp_path, "".join(json.dumps(x) + "\n" for x in lines), limit=2)
    assert rows(tmp_path).select("request", "parent_request", "prompt_tokens").rows() == [(0, None, 2), (1, 0, 3)]
    assert rows(tmp_path, "moves").select("start_ns", "request").rows() == [(1, None), (2, 0), (3, 1)]


def test_limit_of_more_than_there_are(tmp_path: Path) -> None:
    done = run(tmp_path, CSV + "0,9,1\n", limit=5)
    assert (done.written, done.beyond_limit) == (1, 0)


def test_context_is_counted_and_kept(tmp_path: Path) -> None:
    done = run(tmp_path, CSV + "0,4000,96\n1,4000,97\n2,9000,1\n", context_tokens=4096)
    assert rows(tmp_path).height == 3
    assert told(done, "Requests longer than the context of 4,096 tokens, kept as they are: 2.")


# -- failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,4\n",
            "row 2: ContextTokens is not a number of tokens ('many')",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,3,4\n", "row 2: TIMESTAMP is not a time ('now')"),
        ("a.csv", "TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\n", "the column ContextTokens twice"),
        ("a.jsonl", '{"input_length": \n', "row 1: it is not JSON"),
        ("a.jsonl", '{"input_length": 0}\n', "row 1: input_length is less than 1 ('0')"),
        ("a.jsonl", '{"input_length": -3, "timestamp": 0}\n', "row 1: input_length is less than 1 ('-3')"),
        ("a.jsonl", '{"input_length": 3, "timestamp": -1}\n', "row 1: timestamp is negative ('-1')"),
        ("a.jsonl", '{"input_length": 3, "hash_ids": ["x"]}\n', "row 1: hash_ids is not a list of whole numbers"),
        ("a.txt", "hello\n", "of no kind"),
        ("a.csv", "", "is empty"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(InputError) as e:
        run(tmp_path, text, name)
    assert says in str(e.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == [name]


def test_a_header_alone_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no record"):
        run(tmp_path, CSV)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Choose one of: .*azure, "):
        import_files([AZURE], tmp_path / "x.trace", kind="azur")
    (tmp_path / "there.trace").mkdir()
    with pytest.raises(UsageError, match="already there"):
        import_files([AZURE], tmp_path / "there.trace")
    with pytest.raises(InputError, match="There is no file"):
        import_files([tmp_path / "none.csv"], tmp_path / "x.trace")
    with pytest.raises(InputError, match="cannot be read"):
        import_files([tmp_path], tmp_path / "x.trace")


def test_a_fault_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hoptrace.collectors.files.request_csv import RequestCsv

    def broken(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RequestCsv, "_write", staticmethod(broken))
    with pytest.raises(KeyboardInterrupt):
        import_files([AZURE], tmp_path / "x.trace")
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    code = (
        "import sys, time, hoptrace.collectors.files.run as r\n"
        "r._describe = lambda *a: (print('here', flush=True), time.sleep(60))\n"
        "from pathlib import Path\n"
        "r.import_files([Path(sys.argv[1])], Path(sys.argv[2]))\n"
    )
    out = tmp_path / "x.trace"
    child = subprocess.Popen([sys.executable, "-c", code, str(AZURE), str(out)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"here\n"
    with pytest.raises(UsageError, match="Another import writes"):
        import_files([AZURE], out)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not out.exists() and (tmp_path / "x.trace.importing").exists()
    import_files([AZURE], out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.trace"]
    assert rows(tmp_path, out="x.trace").height == 200


# -- the command --------------------------------------------------------------------------------------------------------


def test_command_prints_json(tmp_path: Path) -> None:
    out = tmp_path / "m.trace"
    result = CliRunner().invoke(command, [str(MOONCAKE), "--limit", "5", "-o", str(out), "--json"])
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert (printed["requests"], printed["read"], printed["written"], printed["beyond_limit"]) == (5, 400, 5, 395)


def test_command_prints_counts_reasons_and_notes(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text(MIXED)
    result = CliRunner().invoke(command, [str(tmp_path / "f.csv"), "-o", str(tmp_path / "x.trace")])
    assert result.exit_code == 0
    assert "  6 records read = 2 written + 4 rejected\n" in result.stdout
    assert "  rejected 1: it has no ContextTokens\n" in result.stdout
    assert "    f.csv, row 4: ContextTokens is less than 1 ('-3')\n" in result.stdout
    assert "  note: arrived_at is in seconds since the log's own start.\n" in result.stdout
    quiet = CliRunner().invoke(command, [str(tmp_path / "f.csv"), "-o", str(tmp_path / "y.trace"), "-q"])
    assert quiet.exit_code == 0 and quiet.output == ""


def test_parts_of_a_large_import_need_no_merging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hoptrace.collectors.files.run as run_module

    monkeypatch.setattr(run_module, "_PART_ROWS", 60)
    import_files([AZURE], tmp_path / "out.trace")
    made = hoptrace.open(tmp_path / "out.trace")
    # Files whose rows are the table's as they lie there: nothing to merge.
    assert len(made.files("requests") or []) == len(made.manifest.tables["requests"]) > 1
    assert rows(tmp_path)["request"].to_list() == list(range(200))


# -- files that are none ------------------------------------------------------------------------------------------------


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(InputError, match=r"no ordinary file.*Write it to a file"):
            import_files([path], tmp_path / "t.trace")
    with pytest.raises(InputError, match=r"There is no file -\. Write it to a file"):
        import_files([Path("-")], tmp_path / "t.trace")


@pytest.mark.parametrize(
    ("pack", "says"),
    [
        (bz2.compress, "packed with bzip2"), (lzma.compress, "packed with xz"),
        (lambda data: gzip.compress(gzip.compress(data)), "packed twice"), (lambda data: b"PK\x03\x04" + data, "a zip archive"),
    ],
)  # fmt: skip
def test_what_is_not_undone_is_told(tmp_path: Path, pack: Callable[[bytes], bytes], says: str) -> None:
    for kind in (None, "azure"):
        with pytest.raises(InputError, match=says + ".* Unpack it first"):
            run(tmp_path, pack(AZURE.read_bytes()), kind=kind)


def test_rejects_and_output_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"-o and --rejects both name"):
        run(tmp_path, AZURE.read_bytes(), rejects=tmp_path / "out.trace")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_whole_folder_of_one_run(tmp_path: Path) -> None:
    folder = DATA / "bench" / "llmservingsim"
    names = ("meta.json", "timeseries.csv", "requests.jsonl")
    done = import_files([folder / n for n in names], tmp_path / "t.trace")
    alone = import_files([folder / "requests.jsonl"], tmp_path / "alone.trace")
    assert (done.read, done.manifest.notes) == (alone.read, alone.manifest.notes)
    with pytest.raises(InputError, match=r"meta\.json is of no kind"):
        import_files([folder / "meta.json"], tmp_path / "x.trace")


def test_more_tokens_than_anything_has(tmp_path: Path) -> None:
    text = CSV + "0,2147483647,1\n1,2147483648,1\n2,1,9223372036854775807\n"
    done = run(tmp_path, text)
    assert (done.written, done.reasons) == (1, {"ContextTokens is too large": 1, "GeneratedTokens is too large": 1})
