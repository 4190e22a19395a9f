"""Delimited text and JSON lines: every form of mess is read, or rejected with its row, and always counted."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.imports import rows, run, told

from hoptrace.collectors.files import blocks as blocks_module
from hoptrace.collectors.files.ahead import ahead
from hoptrace.collectors.files.blocks import blocks
from hoptrace.errors import InputError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AT = "2024-05-10 00:00:00"


def _pairs(folder: Path) -> list[tuple[int, int]]:
    return rows(folder).select("prompt_tokens", "output_tokens").rows()  # type: ignore[return-value]


def test_azure_2024_has_a_zone(tmp_path: Path) -> None:
    done = run(tmp_path, HEADER + f"{AT}.009930+00:00,2162,5\n{AT}+00:00,9,1\n2024-05-10 02:00:01.5+02:00,9,2\n")
    # 2024-05-10 00:00:00 UTC; a time without a fraction among others with one.
    assert (rows(tmp_path)["arrival_ns"] - 1_715_299_200_000_000_000).to_list() == [9_930_000, 0, 1_500_000_000]
    assert not told(done, "time zone")


def test_azure_2023_has_crlf_ticks_and_no_last_line_end(tmp_path: Path) -> None:
    done = run(
        tmp_path, HEADER.replace("\n", "\r\n") + "2023-11-16 18:15:46.6805901,374,44\r\n2023-11-16 18:15:50.9951690,396,109"
    )
    assert rows(tmp_path)["arrival_ns"].to_list() == [1_700_158_546_680_590_100, 1_700_158_550_995_169_000]
    assert told(done, "TIMESTAMP states no time zone; it is taken as UTC.")


def test_old_header_and_vidur_by_name(tmp_path: Path) -> None:
    run(tmp_path, "PromptTokenCount,GeneratedTokenCount,Time\n10,3,2023-11-16 18:15:46.5\n", out="o.trace")
    run(tmp_path, "num_decode_tokens,arrived_at,num_prefill_tokens\n3,1.5,10\n4,0.25,11\n", out="v.trace")
    assert rows(tmp_path, out="o.trace").select("prompt_tokens", "output_tokens").rows() == [(10, 3)]
    frame = rows(tmp_path, out="v.trace")
    assert frame.select("arrival_ns", "prompt_tokens", "output_tokens").rows() == [
        (1_500_000_000, 10, 3),
        (250_000_000, 11, 4),
    ]


def test_no_times_keeps_the_order_and_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "ContextTokens,GeneratedTokens\n9,1\n8,2\n7,3\n")
    frame = rows(tmp_path)
    assert frame["prompt_tokens"].to_list() == [9, 8, 7]
    assert frame["arrival_of"].unique().to_list() == ["intended"]
    assert told(done, "no times")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    run(tmp_path, (HEADER + f"{AT},9,1\n{AT},8,2\n").encode(encoding))
    assert _pairs(tmp_path) == [(9, 1), (8, 2)]


def test_latin_1_reads_and_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, b"Timestamp,Model,Request tokens,Response tokens\n5,caf\xe9,4,1\n")
    assert rows(tmp_path)["model"].to_list() == ["caf�"]
    assert told(done, "no text in its encoding")


def test_blank_lines_semicolons_and_spaces(tmp_path: Path) -> None:
    done = run(tmp_path, f"\nTIMESTAMP; ContextTokens ;GeneratedTokens\n\n{AT}; 9 ;1\n\n\r\n{AT};x;2\n{AT};8;2\n\n")
    assert _pairs(tmp_path) == [(9, 1), (8, 2)]
    assert (done.read, done.first_rejects[0]["row"]) == (3, 7)


def test_quoted_fields_line_ends_and_separators(tmp_path: Path) -> None:
    text = f'TIMESTAMP,ContextTokens,GeneratedTokens,note\n{AT},"9",1,"a, ""b""\nc"\n{AT},x,2,z\n{AT},8,2,"d"\n'
    done = run(tmp_path, text)
    assert _pairs(tmp_path) == [(9, 1), (8, 2)]
    # The second record begins in line 4: the first one has two lines.
    assert done.first_rejects[0]["row"] == 4
    assert told(done, "Columns that were not used: note.")


def test_a_quote_that_never_closes_costs_one_row(tmp_path: Path) -> None:
    lines = [f"{AT},{i + 1},1,ok\n" for i in range(5_000)]
    lines[2_000] = f'{AT},2001,1,"open\n'
    done = run(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens,note\n" + "".join(lines))
    assert (done.read, done.written) == (5_000, 4_999)
    assert done.reasons == {"a quote opens in it and never closes": 1}
    assert done.first_rejects[0]["row"] == 2_002


def test_a_quote_inside_a_field_is_a_character(tmp_path: Path) -> None:
    done = run(tmp_path, f'TIMESTAMP,ContextTokens,GeneratedTokens,note\n{AT},9,1,5" disk\n{AT},8,2,ok\n{AT},7,3,6" disk\n')
    assert (done.rejected, _pairs(tmp_path)) == (0, [(9, 1), (8, 2), (7, 3)])


def test_ragged_rows(tmp_path: Path) -> None:
    done = run(tmp_path, HEADER + f"{AT},9,1,,\n{AT},9\n{AT},8,2,surplus\n{AT},7,3\n2024-05-10 00:0")
    assert _pairs(tmp_path) == [(9, 1), (7, 3)]
    assert done.reasons == {
        "it has no GeneratedTokens": 1, "it has more fields than the header": 1, "it has no ContextTokens": 1,
    }  # fmt: skip
    assert done.read == 5


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("NaN", "it has no ContextTokens"),
        ("null", "it has no ContextTokens"),
        ("-", "it has no ContextTokens"),
        ("0", "ContextTokens is less than 1"),
        ("1.5", "ContextTokens is not a number of tokens"),
        ("inf", "ContextTokens is not a number of tokens"),
        ("1e400", "ContextTokens is not a number of tokens"),
        ("0x10", "ContextTokens is not a number of tokens"),
        ("99999999999999999999", "ContextTokens is not a number of tokens"),
    ],
)
def test_lengths_that_are_none(tmp_path: Path, value: str, reason: str) -> None:
    done = run(tmp_path, HEADER + f"{AT},{value},1\n{AT},9,1\n")
    assert done.reasons == {reason: 1}


@pytest.mark.parametrize(("value", "tokens"), [("12.0", 12), ("1.2e1", 12), (" 12 ", 12), ("+12", 12)])
def test_lengths_in_other_words(tmp_path: Path, value: str, tokens: int) -> None:
    run(tmp_path, HEADER + f"{AT},{value},1\n")
    assert _pairs(tmp_path) == [(tokens, 1)]


def test_capitals_do_not_count_in_a_header(tmp_path: Path) -> None:
    run(tmp_path, f"timestamp,contexttokens,generatedtokens\n{AT},9,1\n")
    assert _pairs(tmp_path) == [(9, 1)]


# -- JSON lines ---------------------------------------------------------------------------------------------------------


def test_json_lines_of_every_mess(tmp_path: Path) -> None:
    good = '{"timestamp": 1, "input_length": 5, "output_length": 2}'
    text = "\n".join(
        [
            good,
            "",
            '{"timestamp": 2, "input_length": "6", "output_length": 2.0}',  # numbers in other words
            '{"timestamp": 3, "input_length": NaN, "output_length": 2}',  # NaN is no value
            '{"timestamp": 4, "input_length": 7, "output_length": NaN}',
            "[1]",
            "null",
            '{"timestamp": 5, "input_length": true, "output_length": 2}',
            '{"timestamp": 6, "input_length": 5, "output_length": 2} x',
            '{"timestamp": 7, "input_length": {"a": 5}, "output_length": 2}',
            '{"timestamp": 8, "input_length": 5, "hash_ids": [9223372036854775808]}',
            '{"timestamp": 9, "input_length": 5, "hash_ids": [1, null]}',
            '{"timestamp": 10, "input_length": 5, "hash_ids": 4}',
            '{"timestamp": 11, "inp\\u0075t_length": 8, "output_length": 2}',  # an escape in a key
            '{"timestamp": 12, "input_length": 5, "outp',
        ]
    )
    done = run(tmp_path, text)
    assert (done.read, done.written, done.rejected) == (14, 4, 10)
    assert rows(tmp_path).select("prompt_tokens", "output_tokens").rows() == [(5, 2), (6, 2), (7, None), (8, 2)]
    rejected = rows(tmp_path, "events")["detail"].to_list()
    assert [d.split(", ")[1].split(":")[0] for d in rejected] == [f"row {n}" for n in (4, 6, 7, 8, 9, 10, 11, 12, 13, 15)]
    assert done.reasons == {
        "it has no input_length": 1, "it is not a JSON object": 2, "input_length is not a number of tokens": 2,
        "it is not JSON": 2, "hash_ids is not a list of whole numbers": 3,
    }  # fmt: skip


def test_fractions_of_a_millisecond_and_large_times_are_exact(tmp_path: Path) -> None:
    run(tmp_path, '{"timestamp": 0.123456, "input_length": 1}\n{"timestamp": 1700158546680.591, "input_length": 1}\n')
    assert rows(tmp_path)["arrival_ns"].to_list() == [123_456, 1_700_158_546_680_591_000]


# -- laws ---------------------------------------------------------------------------------------------------------------

_field = st.text(st.sampled_from('ab,"\n\r;é 1-'), max_size=6)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(-2, 50), st.integers(-2, 50), _field), min_size=1, max_size=40), st.data())
def test_csv_is_read_as_pythons_csv_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[tuple[int, int, str]], data: st.DataObject
) -> None:
    """Whatever stands in quoted fields and wherever blocks are cut."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator=data.draw(st.sampled_from(["\n", "\r\n"])))
    out.writerow(["ContextTokens", "GeneratedTokens", "note"])
    out.writerows([p, o, n] for p, o, n in records)
    monkeypatch.setattr(blocks_module, "_READ_BYTES", data.draw(st.integers(60, 200)))
    body = text.getvalue() + "1,1,end\n"
    done = run(tmp_path, body, out=f"{len(list(tmp_path.iterdir()))}.trace")
    assert done.read == len(records) + 1
    assert done.written == sum(p >= 1 and o >= 0 for p, o, _ in records) + 1


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.fixed_dictionaries(
                {"input_length": st.one_of(st.integers(-1, 99), st.none(), st.floats(), st.text(max_size=3), st.booleans())},
                optional={"output_length": st.one_of(st.integers(-1, 9), st.none()), "timestamp": st.integers(0, 10**6)},
            ).map(json.dumps),
            st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1, max_size=8),
        ),
        max_size=30,
    )
)
def test_json_lines_are_counted_whatever_they_are(tmp_path: Path, lines: list[str]) -> None:
    first = '{"input_length": 3, "output_length": 1, "timestamp": 0}'
    done = run(tmp_path, "\n".join([first, *lines]) + "\n", out=f"{len(list(tmp_path.iterdir()))}.trace")
    assert done.read == 1 + sum(bool(line.encode().strip()) for line in lines)
    assert done.read == done.written + done.rejected

    def usable(line: str) -> bool:
        try:
            record = json.loads(line)
        except ValueError:
            return False
        if not isinstance(record, dict):
            return False
        prompt, output = record.get("input_length"), record.get("output_length")
        whole = type(prompt) is int or (isinstance(prompt, float) and prompt.is_integer() and abs(prompt) < 2**53)
        if isinstance(prompt, str):
            return prompt.strip().lstrip("+").isdecimal() and int(prompt) >= 1
        return whole and prompt >= 1 and (output is None or output >= 0)

    assert done.written == 1 + sum(map(usable, lines))


@given(st.binary(max_size=300), st.integers(1, 50), st.booleans())
def test_blocks_are_the_whole_text_in_order(data: bytes, size: int, quoted: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "_READ_BYTES", size)
        patch.setattr(blocks_module, "encoding_of", lambda start: ("utf-8", 0))
        found = list(blocks(io.BytesIO(data), quoted=quoted))
    assert b"".join(b.data for b in found) == data.decode(errors="replace").encode()
    line = 1
    for b in found:
        assert b.line == line
        line += b.data.count(b"\n")
    for b in found[:-1]:
        assert b.data.endswith(b"\n")


def test_ahead_keeps_the_order_and_raises_where_it_happened() -> None:
    assert list(ahead(range(20), lambda n: n * n)) == [n * n for n in range(20)]

    def work(n: int) -> int:
        if n == 5:
            raise ValueError("five")
        return n

    seen = []
    with pytest.raises(ValueError, match="five"):
        for n in ahead(range(10), work):
            seen.append(n)
    assert seen == [0, 1, 2, 3, 4]


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held at once is a few blocks, whatever the file's length."""
    import hoptrace.collectors.files.csv_rows as csv_module

    monkeypatch.setattr(blocks_module, "_READ_BYTES", 2_000)
    heights: list[int] = []
    plain = csv_module.CsvFile._frame

    def spy(self: csv_module.CsvFile, block: blocks_module.Block) -> tuple[pl.DataFrame, bool]:
        frame = plain(self, block)
        heights.append(frame[0].height)
        return frame

    monkeypatch.setattr(csv_module.CsvFile, "_frame", spy)
    run(tmp_path, HEADER + f"{AT},9,1\n" * 5_000)
    assert sum(heights) == 5_000 and max(heights) < 150


def test_both_headers_in_one_file(tmp_path: Path) -> None:
    done = run(tmp_path, f"TIMESTAMP,Time,ContextTokens,PromptTokenCount,GeneratedTokens,GeneratedTokenCount\n{AT},0,9,1,2,1\n")
    assert _pairs(tmp_path) == [(9, 2)]
    assert told(done, "Columns that were not used: Time, PromptTokenCount, GeneratedTokenCount.")


def test_columns_without_a_name_do_not_matter(tmp_path: Path) -> None:
    run(tmp_path, f",TIMESTAMP,ContextTokens,GeneratedTokens,,\n0,{AT},9,1,,\n1,{AT},8,2,a,b\n")
    assert _pairs(tmp_path) == [(9, 1), (8, 2)]


def test_a_file_that_is_one_long_line_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "_MOST_BYTES", 1 << 20)
    monkeypatch.setattr(blocks_module, "_READ_BYTES", 1 << 18)
    text = '{"input_length": 1, "hash_ids": [' + "1, " * 1_000_000 + "1]}"
    with pytest.raises(InputError, match=r"Line 1 of .*/file is longer than 1 MiB"):
        run(tmp_path, text, kind="mooncake")


def test_azure_2025_has_images_too(tmp_path: Path) -> None:
    done = run(tmp_path, f"TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n{AT}+00:00,2,9,1\n")
    assert _pairs(tmp_path) == [(9, 1)]
    assert told(done, "Columns that were not used: NumImages.")


def test_a_carriage_return_inside_a_record_is_a_character(tmp_path: Path) -> None:
    text = 'Timestamp,Model,Request tokens,Response tokens\n5,a\rb,4,1\n6,5" \rx,3,1\n'
    done = run(tmp_path, text)
    assert rows(tmp_path)["model"].to_list() == ["a\rb", '5" \rx']
    assert (done.read, done.rejected) == (2, 0)
