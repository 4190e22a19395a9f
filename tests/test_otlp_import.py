"""Importing spans: OTLP JSON by lines and as one document, GenAI span lists, and what goes wrong in such files."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.context import rows
from support.spans import T0, S, as_json, message, vllm_span

import hoptrace
from hoptrace.collectors.files.kinds import kind_of
from hoptrace.collectors.files.otlp_json import IMPORTER, iso_ns
from hoptrace.collectors.files.run import import_files
from hoptrace.errors import InputError
from hoptrace.validate import validate

DATA = Path(__file__).parent / "data" / "events"
MS = 1_000_000


def _import(folder: Path, text: str | bytes, name: str = "spans.json") -> Any:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return import_files([file], folder / "t.trace", kind="otlp-json")


def _lines(*bodies: bytes) -> str:
    return "".join(json.dumps(as_json(b)) + "\n" for b in bodies)


@pytest.mark.parametrize("form", ["lines", "indented", "list"])
def test_lines_and_documents_give_the_same_requests(tmp_path: Path, form: str) -> None:
    first, second = message(vllm_span(0), vllm_span(1, T0 + S)), message(vllm_span(2, T0 + 2 * S))
    if form == "lines":
        text = _lines(first, second)
    elif form == "list":
        text = json.dumps([as_json(first), as_json(second)])
    else:
        groups = as_json(first)["resourceSpans"] + as_json(second)["resourceSpans"]
        text = json.dumps({"resourceSpans": groups}, indent=2)
    result = _import(tmp_path, text)
    assert (result.read, result.written, result.rejected) == (3, 3, 0)
    frame = rows(tmp_path / "t.trace", "requests").sort("request")
    assert frame["arrival_ns"].to_list() == [T0, T0 + S, T0 + 2 * S]
    assert frame["engine_first_token_ns"].to_list() == [T0 + 100 * MS, T0 + S + 100 * MS, T0 + 2 * S + 100 * MS]
    assert frame["prompt_tokens"].to_list() == [50, 51, 52] and frame["source"].unique().to_list() == ["import:otlp-json"]
    stages = rows(tmp_path / "t.trace", "stages")
    assert stages["server"].unique().to_list() == ["vllm"] and stages["request"].to_list() == [0, 1, 2]
    manifest = hoptrace.open(tmp_path / "t.trace").manifest
    assert [(s.name, s.engine) for s in manifest.servers] == [("vllm", "vllm")]
    assert not [f for f in validate(hoptrace.open(tmp_path / "t.trace")) if f.level == "error"]


def test_kinds_are_told_by_content(tmp_path: Path) -> None:
    for i, text in enumerate((_lines(message(vllm_span(0))), json.dumps(as_json(message(vllm_span(0))), indent=1))):
        file = tmp_path / f"{i}.json"
        file.write_text(text)
        assert kind_of(file, None).kind == "otlp-json"
    for name in ("otel_genai_simple_chain.json", "otel_genai_parallel_requests.json"):
        assert kind_of(DATA / name, None).kind == "otlp-json"
    assert not IMPORTER.matches(tmp_path, b'{"traceEvents": []}') and not IMPORTER.matches(tmp_path, b"a,b\n1,2\n")


def test_genai_spans_of_inference_perf(tmp_path: Path) -> None:
    """Expected: three spans, from 10:00:00.0 to 10:00:08.0 on 2026-02-25, without a zone, of 2.5, 2 and 2 s, in one session."""
    result = import_files([DATA / "otel_genai_simple_chain.json"], tmp_path / "t.trace")
    assert (result.read, result.written, result.rejected) == (3, 3, 0)
    frame = rows(tmp_path / "t.trace", "requests").sort("request")
    start = 1_772_013_600 * S
    assert frame["sent_ns"].to_list() == [start, start + 3 * S, start + 6 * S]
    assert (frame["finish_ns"] - frame["arrival_ns"]).to_list() == [2_500 * MS, 2_000 * MS, 2_000 * MS]
    assert frame["arrival_of"].unique().to_list() == ["sent"] and frame["session"].unique().to_list() == ["session"]
    assert frame["model"].unique().to_list() == ["gpt-4"] and frame["max_tokens"].unique().to_list() == [500]
    # Messages are there, their lengths in tokens are not: unknown, not guessed; and no text is kept.
    assert frame.select("prompt_tokens", "output_tokens", "prefix_blocks", "prompt_chars").null_count().row(0) == (3, 3, 3, 3)
    notes = hoptrace.open(tmp_path / "t.trace").manifest.notes
    assert "Times without a zone are taken as UTC." in notes
    assert "3 requests do not tell their prompt's or answer's tokens: a replay leaves them out." in notes
    for path in (tmp_path / "t.trace").rglob("*"):
        assert not path.is_file() or b"Eiffel" not in path.read_bytes()


def test_parallel_genai_spans(tmp_path: Path) -> None:
    result = import_files([DATA / "otel_genai_parallel_requests.json"], tmp_path / "t.trace")
    assert (result.read, result.written) == (5, 5)
    assert rows(tmp_path / "t.trace", "requests")["session"].unique().to_list() == ["session_002"]


def test_several_views_of_a_request_in_one_file(tmp_path: Path) -> None:
    client = {"id": "aa" * 8, "trace": "11" * 16, "kind": 3, "name": "chat", "start": T0 - MS, "end": T0 + S,
              "attributes": {"gen_ai.operation.name": "chat"}}  # fmt: skip
    engine = vllm_span(0) | {"trace": "11" * 16, "parent": "aa" * 8}
    result = _import(tmp_path, _lines(message(engine), message(client, scope="openai"), message(engine)))
    assert (result.read, result.written) == (1, 1)
    (row,) = rows(tmp_path / "t.trace", "requests").rows(named=True)
    assert (row["sent_ns"], row["received_ns"], row["finish_ns"], row["output_tokens"]) == (T0 - MS, T0, T0 + S, 7)
    notes = hoptrace.open(tmp_path / "t.trace").manifest.notes
    assert "1 × span that had come before (sent again)." in notes


def test_rejects_name_their_line(tmp_path: Path) -> None:
    good = as_json(message(vllm_span(0)))
    bad = as_json(message(vllm_span(1, start=0)))
    text = "\n".join([json.dumps(good), '{"resourceSpans": [', json.dumps(bad), "", '{"other": 1}', "[3]", "7"])
    result = _import(tmp_path, text)
    assert (result.read, result.written, result.rejected) == (6, 1, 5)
    assert result.reasons == {"it is no OTLP message and no list of spans": 4, "span without a start time": 1}
    assert [r["row"] for r in result.first_rejects] == [2, 3, 5, 6, 7]


def test_a_damaged_first_line_does_not_lose_the_others(tmp_path: Path) -> None:
    result = _import(tmp_path, '{"resourceSpans": [{"scopeSp\n' + _lines(message(vllm_span(0)), message(vllm_span(1))))
    assert (result.read, result.written, result.rejected) == (3, 2, 1)
    assert result.first_rejects[0]["row"] == 1


@pytest.mark.parametrize("text", [
    '{"resourceSpans": [{"scope', '{\n"resourceSpans": [\n{"scope', "[" * 100_000,
])  # fmt: skip
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="no JSON"):
        _import(tmp_path, text)
    assert not (tmp_path / "t.trace").exists()


def test_a_file_without_requests_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is about a request to a model"):
        _import(tmp_path, _lines(message({"id": "01" * 8, "name": "GET /"}, scope="http")))


def test_bad_times_are_rejected_with_what_stands_there(tmp_path: Path) -> None:
    spans = [
        {"span_id": "a", "start_time": t, "end_time": "2026-02-25T10:00:01", "attributes": {"gen_ai.operation.name": "chat"}}
        for t in ("2026-02-25T10:00:00", "yesterday", None, 17, "2026-13-25T10:00:00", "2026-02-25T10:00:00+25:00")
    ]
    result = _import(tmp_path, json.dumps({"trace_id": "t", "spans": [*spans, "x"]}))
    assert (result.read, result.written, result.rejected) == (7, 1, 6)
    assert result.reasons == {"start_time is not a date and time (2026-02-25T10:00:00.5)": 5, "it is no span": 1}


@pytest.mark.parametrize(
    ("text", "ns", "zone"),
    [
        ("1970-01-01T00:00:01", S, False), ("1970-01-01 00:00:01.5", S + S // 2, False), ("1970-01-01T01:00:00+01:00", 0, True),
        ("1969-12-31T23:00:00.000000001-01:00", 1, True), ("1970-01-01T00:00:00.123456789123Z", 123_456_789, True),
        ("2026-02-25T10:00:00.000000", 1_772_013_600 * S, False), ("1970-01-01T05:30:00+0530", 0, True),
    ],
)  # fmt: skip
def test_times_as_text(text: str, ns: int, zone: bool) -> None:
    assert iso_ns(text) == (ns, zone)


@given(st.datetimes(), st.integers(0, 999))
def test_times_as_text_are_exact(when: Any, nanoseconds: int) -> None:
    text = f"{when.isoformat(timespec='microseconds')}{nanoseconds:03d}"
    if when.year < 1000:
        return
    got = iso_ns(text)
    assert got is not None
    whole = (when.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert got == (whole * 1000 + nanoseconds, False)


@settings(max_examples=25)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_line_is_read_or_rejected(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    folder = tmp_path_factory.mktemp("j")
    text = _lines(message(vllm_span(0))).encode() + junk.replace(b"\n", b" ") + b"\n" + _lines(message(vllm_span(1))).encode()
    result = _import(folder, text)
    assert result.written == 2 and result.read == 2 + result.rejected and result.rejected <= 1


def test_a_large_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hoptrace.collectors.engines.published import otlp_calls
    from hoptrace.collectors.files import otlp_json

    monkeypatch.setattr(otlp_json, "_BATCH", 10)
    monkeypatch.setattr(otlp_calls.Calls.__init__, "__defaults__", (20,))
    result = _import(tmp_path, _lines(*(message(vllm_span(i, T0 + i * S)) for i in range(100))))
    assert (result.read, result.written) == (100, 100)
    frame = rows(tmp_path / "t.trace", "requests")
    assert frame["request"].to_list() == list(range(100)) and frame["prompt_tokens"].sum() == sum(range(50, 150))
    assert rows(tmp_path / "t.trace", "stages").join(frame, on="request", how="anti").height == 0
    assert isinstance(frame, pl.DataFrame)
