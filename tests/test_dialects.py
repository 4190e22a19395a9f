"""Streams of every dialect, as rows: tokens, totals, ends. Events are written by hand after what the servers' sources send."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_record import all_work, rows

from hoptrace.collectors.engines.streams.conversation import Conversation
from hoptrace.collectors.engines.streams.hashing import HashKey
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.manifest import Manifest
from hoptrace.openai_stream import StreamDecoder
from hoptrace.sse import ServerSentEvent
from hoptrace.stream_fast import read_plain
from hoptrace.writer import TraceWriter

MS = 1_000_000


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded")) as writer:
        yield Recorder(writer, "toy", HashKey("test", b"k" * 32))


def ask(body: Any, path: str, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    return "\r\n".join([f"POST {path} HTTP/1.1", f"Content-Length: {len(data)}", *headers, "", ""]).encode() + data


def event(data: Any, name: str | None = None) -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(data).encode() + b"\n\n"


def head(kind: str = "text/event-stream", *more: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", f"Content-Type: {kind}", "Transfer-Encoding: chunked", *more, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def talk(
    recorder: Recorder, path: str, body: Any, *events: bytes, at: list[int] | None = None, more: tuple[str, ...] = ()
) -> None:
    """One request and its stream: each event in a read of its own, 10 ms apart (or ``at``, in ms)."""
    one = Conversation(recorder)
    one.from_client(ask(body, path, *more), 0)
    times = [t * MS for t in at] if at else [10 * MS * (i + 1) for i in range(len(events))]
    for i, (data, time_ns) in enumerate(zip(events, times, strict=True)):
        one.from_server((head() if i == 0 else b"") + chunk(data), time_ns)
    one.from_server(b"0\r\n\r\n", times[-1])
    all_work(recorder)


def whole(recorder: Recorder, path: str, body: Any, answer: Any) -> None:
    one = Conversation(recorder)
    one.from_client(ask(body, path), 0)
    one.from_server(head("application/json") + chunk(json.dumps(answer).encode()) + b"0\r\n\r\n", MS)
    all_work(recorder)


def told(recorder: Recorder) -> tuple[dict[str, Any], list[tuple[int, int, int, int]]]:
    """The last request's row, and (sequence, index, ms, count) of its tokens."""
    row = rows(recorder, "requests", "request")[-1]
    tokens = [t for t in rows(recorder, "tokens", "sequence", "index") if t["request"] == row["request"]]
    return row, [(t["sequence"], t["index"], t["time_ns"] // MS, t["count"]) for t in tokens]


def test_openai_responses(recorder: Recorder) -> None:
    usage = {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
    }
    kinds: list[dict[str, Any]] = [
        {"type": "response.created", "response": {"id": "resp_1", "model": "m", "status": "in_progress"}},
        {"type": "response.reasoning_text.delta", "delta": "hm"},
        {"type": "response.reasoning_summary_text.delta", "delta": "so"},
        {"type": "response.reasoning_text.done", "text": "hm so"},
        {"type": "response.output_text.delta", "delta": "Hi", "logprobs": []},
        {"type": "response.output_text.delta", "delta": "", "logprobs": []},
        {"type": "response.function_call_arguments.delta", "delta": "{}"},
        {"type": "response.output_text.done", "text": "Hi"},
        {"type": "response.completed", "response": {"id": "resp_1", "status": "completed", "usage": usage}},
    ]
    talk(recorder, "/v1/responses", {"input": "x", "max_output_tokens": 7}, *(event(k, k["type"]) for k in kinds))
    row, tokens = told(recorder)
    # The fifth is the end-of-sequence token, made when the answer ended.
    assert tokens == [(0, 0, 20, 1), (0, 1, 30, 1), (0, 2, 50, 1), (0, 3, 70, 1), (0, 4, 90, 1)]
    assert (row["prompt_tokens"], row["output_tokens"], row["max_tokens"], row["request_id"]) == (9, 5, 7, "resp_1")
    assert (row["first_token_ns"], row["first_visible_ns"], row["finish_reason"]) == (20 * MS, 50 * MS, "completed")
    assert rows(recorder, "stages", "request")[0]["cached_tokens"] == 4


def test_openai_responses_that_fail(recorder: Recorder) -> None:
    failed = {"type": "response.failed", "response": {"status": "failed", "error": {"code": "server_error", "message": "quotes"}}}
    talk(recorder, "/v1/responses", {"input": "x"}, event({"type": "response.output_text.delta", "delta": "H"}), event(failed))
    row, tokens = told(recorder)
    assert row["error"] == "the stream reported an error: server_error" and tokens == [(0, 0, 10, 1)]


def test_anthropic_messages(recorder: Recorder) -> None:
    kinds: list[dict[str, Any]] = [
        {
            "type": "message_start",
            "message": {
                "id": "msg_1",
                "model": "m",
                "content": [],
                "stop_reason": None,
                "usage": {"input_tokens": 3, "cache_read_input_tokens": 6, "output_tokens": 1},
            },
        },
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "c2ln"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hi"}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ""}},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
    ]
    talk(recorder, "/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, *(event(k, k["type"]) for k in kinds))
    row, tokens = told(recorder)
    assert tokens == [(0, 0, 40, 1), (0, 1, 70, 1), (0, 2, 80, 1)]
    assert (row["prompt_tokens"], row["output_tokens"], row["finish_reason"]) == (9, 3, "max_tokens")
    assert (row["first_token_ns"], row["first_visible_ns"], row["last_token_ns"]) == (40 * MS, 70 * MS, 80 * MS)
    assert rows(recorder, "stages", "request")[0]["cached_tokens"] == 6


def test_tgi(recorder: Recorder) -> None:
    def token(i: int, text: str, special: bool = False, **more: Any) -> bytes:
        return event(
            {
                "index": i,
                "token": {"id": i, "text": text, "logprob": -1.0, "special": special},
                "generated_text": None,
                "details": None,
            }
            | more
        )

    end = {"generated_text": "a b", "details": {"finish_reason": "eos_token", "generated_tokens": 3, "input_length": 8}}
    events = [token(1, "a"), token(2, " b"), token(3, "</s>", True, **end)]
    talk(recorder, "/generate_stream", {"inputs": "x" * 64, "parameters": {"max_new_tokens": 5}}, *events)
    row, tokens = told(recorder)
    assert tokens == [(0, 0, 10, 1), (0, 1, 20, 1), (0, 2, 30, 1)]
    assert (row["prompt_tokens"], row["output_tokens"], row["max_tokens"], row["finish_reason"]) == (8, 3, 5, "eos_token")
    whole(
        recorder,
        "/generate",
        {"inputs": "x"},
        {"generated_text": "a", "details": {"finish_reason": "length", "generated_tokens": 2, "prefill": [{"id": 1}] * 4}},
    )
    row, tokens = told(recorder)
    assert (row["prompt_tokens"], row["output_tokens"], row["finish_reason"], tokens) == (4, 2, "length", [])
    talk(
        recorder,
        "/generate_stream",
        {"inputs": "x"},
        token(1, "a"),
        event({"error": "Request failed: quotes", "error_type": "generation"}),
    )
    assert told(recorder)[0]["error"] == "the stream reported an error: generation"


def test_sglang_sends_all_text_each_time_and_running_totals(recorder: Recorder) -> None:
    def part(text: str, total: int, reason: Any = None, index: int | None = None) -> bytes:
        meta = {"id": "rid", "prompt_tokens": 6, "completion_tokens": total, "cached_tokens": 2, "finish_reason": reason}
        return event({"text": text, "meta_info": meta} | ({} if index is None else {"index": index}))

    events = [
        part("a", 1),
        part("a b", 5),
        part("a b", 6),
        part("a b c", 8, {"type": "length", "length": 8}),
        b"data: [DONE]\n\n",
    ]
    talk(recorder, "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 8}, "stream": True}, *events)
    row, tokens = told(recorder)
    assert tokens == [(0, 0, 10, 1), (0, 1, 20, 4), (0, 5, 30, 1), (0, 6, 40, 2)]
    assert (row["prompt_tokens"], row["output_tokens"], row["max_tokens"], row["finish_reason"]) == (6, 8, 8, "length")
    assert row["request_id"] == "rid"
    two = [
        part("a", 1, index=0),
        part("z", 2, index=1),
        part("a b", 3, {"type": "stop"}, 0),
        part("z y", 4, {"type": "length"}, 1),
    ]
    talk(recorder, "/generate", {"text": "x", "sampling_params": {"n": 2}}, *two)
    row, tokens = told(recorder)
    assert tokens == [(0, 0, 10, 1), (0, 1, 30, 2), (1, 0, 20, 2), (1, 2, 40, 2)]
    assert row["output_tokens"] == 7 and row["finish_reason"] == "length, stop"
    answers = [
        {"text": "a", "meta_info": {"prompt_tokens": p, "completion_tokens": c, "finish_reason": {"type": "stop"}}}
        for p, c in ((3, 4), (5, 6))
    ]
    whole(recorder, "/generate", {"text": ["x", "y"]}, answers)
    row, _ = told(recorder)
    assert (row["prompt_tokens"], row["output_tokens"]) == (8, 10)


def test_vllm_tokens_in_tokens_out(recorder: Recorder) -> None:
    def part(ids: list[int], reason: str | None = None) -> bytes:
        return event({"request_id": "generate-1", "choices": [{"index": 0, "token_ids": ids, "finish_reason": reason}]})

    usage = event({"request_id": "generate-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
    talk(
        recorder,
        "/inference/v1/generate",
        {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}},
        part([7]),
        part([8, 9], None),
        part([5], "length"),
        usage,
    )
    row, tokens = told(recorder)
    assert tokens == [(0, 0, 10, 1), (0, 1, 20, 2), (0, 3, 30, 1)]
    assert (row["prompt_tokens"], row["output_tokens"], row["max_tokens"], row["first_visible_ns"]) == (3, 4, 4, 10 * MS)


def test_llama_cpp_progress_of_the_prompt(recorder: Recorder) -> None:
    def part(progress: dict[str, Any]) -> bytes:
        return event({"index": 0, "content": "", "tokens": [], "stop": False, "tokens_predicted": 0, "prompt_progress": progress})

    events = [
        part({"total": 90, "cache": 10, "processed": 42, "time_ms": 20}),
        part({"total": 90, "cache": 10, "processed": 90, "time_ms": 45}),
        event({"index": 0, "content": "a", "tokens": [1], "stop": False, "tokens_predicted": 1}),
        event({"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": "limit", "tokens_predicted": 1}),
    ]
    talk(recorder, "/completion", {"prompt": "x", "n_predict": 1, "return_progress": True}, *events, at=[50, 70, 71, 72])
    row, tokens = told(recorder)
    assert tokens == [(0, 0, 71, 1)], "a chunk of the prompt is no token"
    assert (row["scheduled_ns"], row["prompt_tokens"]) == (25 * MS, 90), "the earliest telling is nearest to the truth"
    assert rows(recorder, "stages", "request")[0]["cached_tokens"] == 10


def test_vllm_metrics_of_the_request(recorder: Recorder) -> None:
    metrics = {"time_to_first_token_ms": 12.0, "generation_time_ms": 19.0, "queue_time_ms": 5.0, "mean_itl_ms": 19.0}
    events = [
        event({"id": "cmpl-1", "choices": [{"index": 0, "text": "a", "finish_reason": None}]}),
        event({"id": "cmpl-1", "choices": [{"index": 0, "text": "b", "finish_reason": "length"}]}),
        event({"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}, "metrics": metrics}),
    ]
    talk(recorder, "/v1/completions", {"prompt": "x"}, *events, at=[40, 60, 90])
    row, _ = told(recorder)
    assert row["engine_first_token_ns"] == 40 * MS  # 60 - 19 is later: what was seen at 40 had been made by then
    assert (row["scheduled_ns"], row["queued_ns"]) == (28 * MS, 23 * MS)


def test_kept_apart_first_token_and_first_visible_token_and_the_last_text(recorder: Recorder) -> None:
    def part(delta: dict[str, Any], reason: str | None = None) -> bytes:
        return event({"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    usage = {"prompt_tokens": 4, "completion_tokens": 100, "completion_tokens_details": {"reasoning_tokens": 40}}
    events = [
        part({"role": "assistant", "content": ""}),
        part({"reasoning_content": "hm"}),
        part({"reasoning_details": [{"type": "reasoning.encrypted", "data": "xx"}]}),
        part({"content": "Hi"}),
        part({}, "stop"),
        event({"choices": [], "usage": usage}),
    ]
    talk(recorder, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, *events, at=[5, 10, 15, 20, 21, 51])
    row, tokens = told(recorder)
    assert [t[2] for t in tokens] == [10, 20]
    assert (row["first_token_ns"], row["first_visible_ns"], row["last_token_ns"]) == (10 * MS, 20 * MS, 20 * MS)
    assert row["output_tokens"] == 100, "reasoning tokens are a part of it"
    assert recorder.stats.counts_differ == 1


def test_whitespace_that_counts_no_token_and_chunks_of_several(recorder: Recorder) -> None:
    totals = [1, 5, 5, 7, 12]
    events = [
        event({"id": "c", "choices": [{"index": 0, "text": t}], "usage": {"prompt_tokens": 1, "completion_tokens": n}})
        for t, n in zip(["a", "bcd", " ", "e", "f"], totals, strict=True)
    ]
    talk(recorder, "/v1/completions", {"prompt": "x"}, *events)
    row, tokens = told(recorder)
    assert tokens == [(0, 0, 10, 1), (0, 1, 20, 4), (0, 5, 40, 2), (0, 7, 50, 5)] and row["output_tokens"] == 12


ZSTD = pytest.importorskip("zstandard", reason="needs zstandard")


@pytest.mark.parametrize(
    ("name", "encode"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda b: (lambda c: c.compress(b) + c.flush())(zlib.compressobj(wbits=-15))),
        ("zstd", lambda b: ZSTD.ZstdCompressor().compress(b)),
    ],
)
@pytest.mark.parametrize("members", [1, 2])
def test_encodings_are_undone_for_looking_only(recorder: Recorder, name: str, encode: Any, members: int) -> None:
    if name == "deflate" and members == 2:
        pytest.skip("a deflate body is one stream")
    data = [event({"choices": [{"index": 0, "text": "a"}]}), event({"choices": [{"index": 0, "text": "b"}]})]
    body = b"".join(map(encode, data)) if members == 2 else encode(b"".join(data))
    one = Conversation(recorder)
    one.from_client(ask({}, "/v1/completions"), 0)
    one.from_server(head("text/event-stream", f"Content-Encoding: {name}"), 1)
    for i in range(len(body)):
        one.from_server(chunk(body[i : i + 1]), 2 + i)
    one.from_server(b"0\r\n\r\n", 999)
    all_work(recorder)
    assert len(told(recorder)[1]) == 2 and recorder.writer.manifest.rows_dropped == {}


@pytest.mark.parametrize(
    ("name", "why"), [("gzip", "answer that is not in the encoding that it tells"), ("x9", "answer in encoding x9")]
)
def test_encodings_that_cannot_be_undone_are_counted(recorder: Recorder, name: str, why: str) -> None:
    one = Conversation(recorder)
    one.from_client(ask({}, "/v1/completions"), 0)
    one.from_server(head("text/event-stream", f"Content-Encoding: {name}") + chunk(b"not that") + b"0\r\n\r\n", 1)
    all_work(recorder)
    assert told(recorder)[0]["finish_ns"] == 1 and told(recorder)[0]["output_tokens"] is None
    assert recorder.writer.manifest.rows_dropped == {why: 1} and recorder.stats.faults == 0


class Kept:
    """A writer that keeps rows in memory: a real one for each example would take a second."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.dropped: list[str] = []

    def append(self, name: str, rows: list[dict[str, Any]]) -> None:
        self.rows.setdefault(name, []).extend(dict(r) for r in rows)

    def append_arrow(self, name: str, data: Any) -> None:
        self.rows.setdefault(name, []).extend(data.to_pylist())

    def drop(self, reason: str, rows: int = 1) -> None:
        self.dropped.append(reason)


# -- however the bytes are cut -------------------------------------------------------------------------------------------

EVENTS = [
    event({"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
    event({"id": "c", "choices": [{"index": 0, "delta": {"reasoning": "hm"}}]}),
    b": keep-alive\n\n",
    event({"id": "c", "choices": [{"index": 1, "delta": {"content": "käse"}}]}, "message"),
    event({"id": "c", "choices": [{"index": 0, "delta": {"content": "x"}}, {"index": 1, "delta": {"content": "y"}}]}).replace(
        b"\n", b"\r\n"
    ),
    event({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
    event({"id": "c", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}),
    b"data: [DONE]\n\n",
]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12), st.lists(st.integers(1, 400), min_size=1, max_size=12), st.booleans()
)
def test_any_cut_gives_the_same_rows(chunks: list[int], reads: list[int], gz: bool) -> None:
    stream = b"".join(EVENTS)
    body, at, i = b"", 0, 0
    data = gzip.compress(stream) if gz else stream
    while at < len(data):
        n = chunks[i % len(chunks)]
        body += chunk(data[at : at + n])
        at, i = at + n, i + 1
    wire = head("text/event-stream", *(["Content-Encoding: gzip"] if gz else [])) + body + b"0\r\nX-Trailer: 1\r\n\r\n"
    writer = Kept()
    recorder = Recorder(writer, "toy", None)  # type: ignore[arg-type]
    one = Conversation(recorder)
    one.from_client(ask({}, "/v1/chat/completions"), 0)
    at = i = 0
    while at < len(wire):
        n = reads[i % len(reads)]
        one.from_server(wire[at : at + n], 1 + i)
        at, i = at + n, i + 1
    all_work(recorder)
    tokens = sorted(writer.rows["tokens"], key=lambda t: (t["sequence"], t["index"]))
    row = {k: v for r in writer.rows["requests"] for k, v in r.items() if v is not None}
    assert [(t["sequence"], t["index"], t["count"]) for t in tokens] == [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]
    assert (row["output_tokens"], row["prompt_tokens"], row["finish_reason"], row.get("error")) == (4, 3, "stop", None)
    assert row["first_token_ns"] <= row["first_visible_ns"] <= row["last_token_ns"] <= row["finish_ns"]
    assert tokens[3]["coalesced"] == (tokens[2]["time_ns"] == tokens[3]["time_ns"])
    assert recorder.stats.faults == 0


_odd = st.sampled_from(
    [None, "", "x", "käse", 0, 1, -1, 1.5, True, [], [1], {}, {"a": 1}, "y" * 300, [{"type": "reasoning.text", "text": "t"}]]
)
_choice = st.fixed_dictionaries(
    {},
    optional={
        "index": _odd,
        "text": _odd,
        "finish_reason": _odd,
        "logprobs": _odd,
        "token_ids": _odd,
        "message": _odd,
        "delta": _odd
        | st.fixed_dictionaries(
            {},
            optional=dict.fromkeys(
                (
                    "content",
                    "reasoning",
                    "reasoning_content",
                    "refusal",
                    "tool_calls",
                    "function_call",
                    "reasoning_details",
                    "role",
                ),
                _odd,
            ),
        ),
    },
)
_chunks = st.fixed_dictionaries(
    {"choices": st.lists(_choice, max_size=2) | _odd},
    optional=dict.fromkeys(
        ("id", "model", "request_id", "usage", "timings", "metrics", "error", "prompt_progress", "object"), _odd
    ),
)


@given(st.lists(_chunks, min_size=1, max_size=4))
def test_the_fast_reader_says_what_the_general_one_says(values: list[dict[str, Any]]) -> None:
    fast, general = StreamDecoder(), StreamDecoder()
    for value in values:
        assert fast.event(ServerSentEvent(json.dumps(value))) == general.object(value)


def test_the_usual_chunks_are_read_fast() -> None:
    """The test above would also pass if nothing were."""
    chat = {
        "id": "c",
        "object": "o",
        "created": 1,
        "model": "m",
        "usage": None,
        "choices": [{"index": 0, "delta": {"content": "x", "tool_calls": []}, "logprobs": None, "finish_reason": None}],
    }
    assert read_plain(json.dumps(chat)) == ("c", "m", 0, 1, None)
    assert read_plain('{"choices":[{"text":"","index":2,"finish_reason":"stop"}]}') == (None, None, 2, 0, "stop")
    assert read_plain('{"choices":[{"delta":{"reasoning":"a","content":"b"}}]}') == (None, None, 0, 3, None)
    for odd in ('{"choices":[]}', "[1]", "{", '{"choices":[{"text":"x"}],"usage":{"completion_tokens":1}}'):
        assert read_plain(odd) is None
