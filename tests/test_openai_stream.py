"""What chunks say: tokens, totals, ends, errors. Chunks are written by hand after what servers are known to send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoptrace.openai_stream import Chunk, Emission, StreamDecoder, Timings, Usage
from hoptrace.sse import ServerSentEvent


def chat(delta: dict[str, Any], finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"id": "c1", "choices": [{"index": index, "delta": delta, "finish_reason": finish}], **more}


def text(text: str, finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "text": text, "finish_reason": finish}
    choice |= {k: more.pop(k) for k in ("token_ids", "logprobs") if k in more}
    return {"id": "c1", "choices": [choice], **more}


def decode(*chunks: dict[str, Any]) -> list[Chunk]:
    decoder = StreamDecoder()
    return [decoder.event(ServerSentEvent(json.dumps(c))) for c in chunks]


def test_b18_role_chunk_then_reasoning_then_content() -> None:
    role, *rest = decode(
        chat({"role": "assistant", "content": None}),
        chat({"reasoning": "Let"}),
        chat({"reasoning_content": " me"}),
        chat({"content": "Hi"}),
        chat({}, "stop"),
    )
    assert role.emissions == ()
    assert [c.emissions for c in rest] == [
        (Emission(0, None, visible=False, reasoning=True),),
        (Emission(0, None, visible=False, reasoning=True),),
        (Emission(0, None, visible=True, reasoning=False),),
        (Emission(0, 0, visible=False, reasoning=False, finish_reason="stop"),),
    ]


def structured(*texts: str) -> list[bool]:
    """Whether each chunk is a token."""
    chunks = decode(*(chat({"reasoning_details": [{"type": "reasoning.text", "text": t}]}) for t in texts))
    return [bool(c.emissions) for c in chunks]


def test_b20_structured_reasoning_incremental() -> None:
    assert structured("I", " think", " so", " so") == [True, True, True, True]


def test_b20_structured_reasoning_cumulative_is_not_counted_twice() -> None:
    assert structured("I", "I think", "I think", "I think so", "I think so") == [True, True, False, True, False]


def test_b20_all_of_it_again_at_the_end() -> None:
    assert structured("I", " think", " so", "I think so") == [True, True, True, False]


def test_b20_the_same_short_piece_twice_is_two_tokens() -> None:
    assert structured("\n", "\n", "x") == [True, True, True]


def test_b20_types_and_encrypted_data_are_no_tokens() -> None:
    chunks = decode(
        chat({"reasoning_details": [{"type": "reasoning.encrypted", "data": "gAAAA"}]}),
        chat({"reasoning_details": [{"type": "reasoning.text"}]}),
        chat({"reasoning_details": []}),
        chat({"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}]}),
    )
    assert [bool(c.emissions) for c in chunks] == [False, False, False, True]


def test_b22_chunks_of_several_tokens() -> None:
    sizes = [1, 4, 2, 5]
    by_ids = decode(*(text("x", token_ids=list(range(n))) for n in sizes))
    by_logprobs = decode(*(text("x", logprobs={"tokens": ["t"] * n}) for n in sizes))
    totals = [1, 5, 7, 12]
    by_usage = decode(*(text("x", usage={"completion_tokens": n, "prompt_tokens": 3}) for n in totals))
    by_timings = decode(*(text("x", timings={"predicted_n": n}) for n in totals))
    for chunks in (by_ids, by_logprobs, by_usage, by_timings):
        assert [c.emissions[0].count for c in chunks] == sizes


def test_a_total_that_falls_or_that_several_sequences_share_tells_nothing_of_a_chunk() -> None:
    fell = decode(text("x", timings={"predicted_n": 4}), text("x", timings={"predicted_n": 2}))
    assert [c.emissions[0].count for c in fell] == [4, None]
    shared = decode(text("x", index=1, usage={"completion_tokens": 1}), text("x", usage={"completion_tokens": 2}))
    assert [c.emissions[0].count for c in shared] == [None, None]


def test_the_total_of_the_last_chunk_alone_is_no_difference() -> None:
    chunks = decode(text("a"), text("b"), text("", "length", timings={"predicted_n": 2, "cache_n": 1, "prompt_n": 9}))
    assert [c.emissions[0].count for c in chunks] == [None, None, 0]
    assert chunks[2].timings == Timings(cached_tokens=1, prompt_tokens=9, predicted_tokens=2)


def test_a_token_without_text_counts_where_totals_tell_of_it() -> None:
    chunks = decode(text("a", timings={"predicted_n": 1}), text("", "stop", timings={"predicted_n": 2}))
    assert chunks[1].emissions == (Emission(0, 1, visible=False, reasoning=False, finish_reason="stop"),)


def test_b24_reasoning_tokens_are_within_completion_tokens() -> None:
    (chunk,) = decode(
        {"choices": [], "usage": {
            "prompt_tokens": 7, "completion_tokens": 100, "completion_tokens_details": {"reasoning_tokens": 40},
            "prompt_tokens_details": {"cached_tokens": 5}}}
    )  # fmt: skip
    assert chunk.usage == Usage(prompt=7, output=100, reasoning=40, cached=5)
    assert chunk.emissions == ()


@pytest.mark.parametrize(
    ("event", "message", "kind"),
    [
        (
            ServerSentEvent('{"error": {"message": "KV  full", "type": "server_error", "code": 500}}'),
            "KV full",
            "server_error 500",
        ),
        (ServerSentEvent('{"error": "boom"}', "error"), "boom", "error"),
        (ServerSentEvent('{"object": "error", "message": "boom", "type": "x", "code": 400}'), "boom", "x 400"),
        (ServerSentEvent('{"message": "boom", "type": "x"}', "error"), "boom", "x"),
        (ServerSentEvent("out of memory", "error"), "out of memory", "error"),
        (ServerSentEvent("", "error"), "error without a message", "error"),
        (ServerSentEvent('{"choices": [], "error": {"code": null, "type": ""}}'), '{"code": null, "type": ""}', "error"),
    ],
)
def test_b24_errors_in_the_middle_of_a_stream(event: ServerSentEvent, message: str, kind: str) -> None:
    chunk = StreamDecoder().event(event)
    assert (chunk.error, chunk.error_kind) == (message, kind)


def test_llama_cpp_completion() -> None:
    chunks = decode(
        {"index": 0, "content": ",", "tokens": [28], "stop": False, "tokens_predicted": 1, "tokens_evaluated": 2},
        {"index": 0, "content": " you", "tokens": [346], "stop": False, "tokens_predicted": 2, "tokens_evaluated": 2},
        {
            "index": 0,
            "content": "",
            "tokens": [],
            "stop": True,
            "stop_type": "limit",
            "tokens_predicted": 2,
            "tokens_evaluated": 2,
        },
    )
    assert [c.emissions for c in chunks] == [
        (Emission(0, 1, visible=True, reasoning=False),),
        (Emission(0, 1, visible=True, reasoning=False),),
        (Emission(0, 0, visible=False, reasoning=False, finish_reason="length"),),
    ]
    assert chunks[2].usage == Usage(prompt=2, output=2)


def test_tool_calls_and_refusals_are_visible() -> None:
    chunks = decode(chat({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}), chat({"refusal": "No"}))
    assert [c.emissions[0].visible for c in chunks] == [True, True]


def test_whole_answers() -> None:
    answer = StreamDecoder().object(
        {"id": "a", "model": "m",
         "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
         "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    )  # fmt: skip
    assert (answer.id, answer.model, answer.usage) == ("a", "m", Usage(3, 2))
    assert answer.emissions[0].finish_reason == "stop"


def test_done_and_what_is_no_json() -> None:
    decoder = StreamDecoder()
    assert decoder.event(ServerSentEvent("[DONE]")).done
    assert decoder.event(ServerSentEvent("{")).malformed
    assert decoder.event(ServerSentEvent("[1]")).malformed
    assert decoder.event(ServerSentEvent("[" * 100_000)).malformed


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["choices", "delta", "content", "text", "usage", "timings", "predicted_n", "completion_tokens", "error", "index",
             "reasoning", "reasoning_details", "finish_reason", "token_ids", "logprobs", "message", "stop", "tokens_predicted"]
        ),
        inner,
        max_size=5,
    ),
    max_leaves=25,
)  # fmt: skip


@given(st.lists(_JSON, max_size=4))
def test_hostile_chunks_never_raise(values: list[Any]) -> None:
    decoder = StreamDecoder()
    for value in values:
        for wrapped in (
            value,
            {"choices": value},
            {"choices": [value]},
            {"content": value, "stop": True, "tokens_predicted": value},
        ):
            chunk = decoder.event(ServerSentEvent(json.dumps(wrapped)))
            for e in chunk.emissions:
                assert e.sequence >= 0
                assert e.count is None or e.count >= 0
