"""Importers: golden values of the real files, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

import hoptrace
from hoptrace.cli.import_files import command
from hoptrace.collectors.files.run import import_files
from hoptrace.errors import InputError, UsageError

DATA = Path(__file__).parent / "data" / "requests"
MOONCAKE = Path(__file__).parent / "data" / "reference" / "mooncake_slice.jsonl"
SHARED = Path(__file__).parents[2] / "shared" / "traces" / "requests"


def _requests(out: Path) -> pl.DataFrame:
    return hoptrace.open(out).table("requests").collect()


def test_azure_slice(tmp_path: Path) -> None:
    import_files([DATA / "azure_conv_first200.csv"], tmp_path / "a.trace", source="Azure", licence="CC-BY-4.0")
    rows = _requests(tmp_path / "a.trace")
    assert rows.height == 200
    first = rows.row(0, named=True)
    # 2023-11-16 18:15:46.68059 UTC
    assert (first["arrival_ns"], first["prompt_tokens"], first["output_tokens"]) == (1_700_158_546_680_590_000, 374, 44)
    assert first["finish_ns"] is None and first["first_token_ns"] is None
    assert rows["arrival_of"].unique().to_list() == ["received"]
    manifest = hoptrace.open(tmp_path / "a.trace").manifest
    assert manifest.closed and manifest.origin == "imported"
    assert manifest.imported_from[0]["licence"] == "CC-BY-4.0"


def test_azure_whole_file(tmp_path: Path) -> None:
    path = SHARED / "azure2023" / "AzureLLMInferenceTrace_conv.csv"
    if not path.exists():
        pytest.skip("extra check: needs ../shared, which a user's clone lacks")
    import_files([path], tmp_path / "a.trace")
    rows = _requests(tmp_path / "a.trace")
    # Published check X10.
    assert (rows.height, rows["prompt_tokens"].sum(), rows["output_tokens"].sum()) == (19366, 22_361_870, 4_088_665)
    assert rows["arrival_ns"].max() - rows["arrival_ns"].min() == 3_501_721_937_000  # type: ignore[operator]


def test_mooncake_slice(tmp_path: Path) -> None:
    import_files([MOONCAKE], tmp_path / "m.trace")
    rows = _requests(tmp_path / "m.trace")
    lines = [json.loads(x) for x in (MOONCAKE).read_text().splitlines()]
    assert rows["prefix_blocks"].to_list() == [x["hash_ids"] for x in lines]
    assert rows["prompt_tokens"].to_list() == [x["input_length"] for x in lines]
    assert rows["block_size"].unique().to_list() == [512]
    assert rows["hash_space"].n_unique() == 1


def test_mooncake_whole_file(tmp_path: Path) -> None:
    path = SHARED / "mooncake" / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip("extra check: needs ../shared, which a user's clone lacks")
    import_files([path], tmp_path / "m.trace")
    rows = _requests(tmp_path / "m.trace")
    blocks = rows["prefix_blocks"].explode()
    # Published check X1.
    assert (rows.height, rows["prompt_tokens"].sum(), rows["output_tokens"].sum()) == (12031, 144_793_823, 4_122_048)
    assert (blocks.len(), blocks.n_unique()) == (288_500, 182_790)


def test_old_header_and_vidur_by_name(tmp_path: Path) -> None:
    old = tmp_path / "old.csv"
    old.write_text("PromptTokenCount,GeneratedTokenCount,Time\n10,3,2023-11-16 18:15:46.5\n")
    vidur = tmp_path / "vidur.csv"
    vidur.write_text("num_decode_tokens,arrived_at,num_prefill_tokens\n3,1.5,10\n4,0.25,11\n")
    import_files([old], tmp_path / "o.trace")
    import_files([vidur], tmp_path / "v.trace")
    assert _requests(tmp_path / "o.trace").select("prompt_tokens", "output_tokens").rows() == [(10, 3)]
    assert _requests(tmp_path / "v.trace").select("arrival_ns", "prompt_tokens", "output_tokens").rows() == [
        (1_500_000_000, 10, 3),
        (250_000_000, 11, 4),
    ]


def test_no_times_keeps_the_order_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("ContextTokens,GeneratedTokens\n9,1\n8,2\n7,3\n")
    manifest = import_files([path], tmp_path / "x.trace").manifest
    assert _requests(tmp_path / "x.trace")["prompt_tokens"].to_list() == [9, 8, 7]
    assert any("no times" in n for n in manifest.notes)


def test_rows_without_lengths_are_rejected_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("arrived_at,ContextTokens,GeneratedTokens\n0,9,1\n1,,2\n2,-3,3\n3,4,0\n")
    manifest = import_files([path], tmp_path / "x.trace").manifest
    assert _requests(tmp_path / "x.trace")["prompt_tokens"].to_list() == [9, 4]
    assert sum(manifest.rows_dropped.values()) == 2


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,4\n",
            "row 2: ContextTokens is not a number of tokens ('many')",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,3,4\n", "row 2: TIMESTAMP is not a time ('now')"),
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
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError) as e:
        import_files([path], tmp_path / "out.trace")
    assert says in str(e.value)
    assert not (tmp_path / "out.trace").exists()


def test_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Choose one of: azure, mooncake"):
        import_files([DATA / "azure_conv_first200.csv"], tmp_path / "x.trace", kind="azur")
    (tmp_path / "there.trace").mkdir()
    with pytest.raises(UsageError, match="already there"):
        import_files([DATA / "azure_conv_first200.csv"], tmp_path / "there.trace")
    with pytest.raises(InputError, match="There is no file"):
        import_files([tmp_path / "none.csv"], tmp_path / "x.trace")


def test_command_prints_json(tmp_path: Path) -> None:
    out = tmp_path / "m.trace"
    result = CliRunner().invoke(command, [str(MOONCAKE), "--limit", "5", "-o", str(out), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["requests"] == 5
