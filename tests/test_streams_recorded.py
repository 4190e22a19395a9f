"""Streams that a real vLLM 0.32.0 sent (tests/data/streams), through the recorder: its totals, and every token once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_dialects import Kept, ask, chunk, head
from test_record import all_work

from hoptrace.collectors.engines.streams.conversation import Conversation
from hoptrace.collectors.engines.streams.record import Recorder

DATA = Path(__file__).parent / "data" / "streams"
MS = 1_000_000


def recorded(name: str, prompt: Any) -> tuple[dict[str, Any], dict[str, Any], list[tuple[int, int, int]], Recorder]:
    """The stream, one event each 4 ms after the first at 30 ms: (request, stage, [(sequence, index, count)], recorder)."""
    writer = Kept()
    recorder = Recorder(writer, "vllm", None)  # type: ignore[arg-type]
    talk = Conversation(recorder)
    talk.from_client(ask({"prompt": prompt, "stream": True}, "/v1/completions"), 0)
    talk.from_server(head(), 29 * MS)
    events = (DATA / f"vllm_0.32_{name}.txt").read_bytes().split(b"\n\n")[:-1]
    for i, event in enumerate(events):
        talk.from_server(chunk(event + b"\n\n"), (30 + 4 * i) * MS)
    talk.from_server(b"0\r\n\r\n", (30 + 4 * len(events)) * MS)
    all_work(recorder)
    merged: list[dict[str, Any]] = [{}, {}]
    for table, out in zip(("requests", "stages"), merged, strict=True):
        for row in writer.rows[table]:
            out.update({k: v for k, v in row.items() if v is not None})
    tokens = sorted((t["sequence"], t["index"], t["count"]) for t in writer.rows["tokens"])
    assert recorder.stats.faults == 0 and writer.dropped == []
    return merged[0], merged[1], tokens, recorder


@pytest.mark.parametrize(("name", "cached"), [("completion", 0), ("continuous", 32)])
def test_one_sequence(name: str, cached: int) -> None:
    row, stage, tokens, recorder = recorded(name, list(range(5, 69)))
    assert tokens == [(0, i, 1) for i in range(12)]
    assert (row["prompt_tokens"], row["output_tokens"], row["finish_reason"]) == (64, 12, "length")
    assert (stage["cached_tokens"], stage["engine_request_id"]) == (cached, f"cmpl-me-{name}")
    assert row["first_token_ns"] == 30 * MS and row["last_token_ns"] == 74 * MS < row["finish_ns"]
    assert (recorder.stats.counts_differ, recorder.stats.counts_untold) == (0, 0)


def test_the_engines_own_durations() -> None:
    row, stage, _, _ = recorded("completion", list(range(5, 69)))
    # It told 44.570 ms of generation, which ended at 74 ms: the first token was made at 29.430, seen at 30.
    assert row["engine_first_token_ns"] == 74 * MS - 44_570_023
    assert stage["scheduled_ns"] == row["scheduled_ns"] == row["engine_first_token_ns"] - 24_885_378
    assert row["queued_ns"] == row["scheduled_ns"] - 108_351


def test_two_sequences() -> None:
    row, _, tokens, _ = recorded("two", list(range(5, 69)))
    assert tokens == [(s, i, 1) for s in (0, 1) for i in range(7)]
    assert (row["prompt_tokens"], row["output_tokens"]) == (64, 14) and "scheduled_ns" not in row


def test_a_batch_of_prompts() -> None:
    row, _, tokens, _ = recorded("batch", [list(range(5, 69)), list(range(5, 14))])
    assert tokens == [(s, i, 1) for s in (0, 1) for i in range(5)]
    assert (row["prompt_tokens"], row["output_tokens"]) == (73, 10)


def test_a_refusal_keeps_its_type_only() -> None:
    writer = Kept()
    recorder = Recorder(writer, "vllm", None)  # type: ignore[arg-type]
    talk = Conversation(recorder)
    talk.from_client(ask({"prompt": [5] * 6400}, "/v1/completions"), 0)
    body = (DATA / "vllm_0.32_refused.json").read_bytes()
    talk.from_server(
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body), 1
    )
    all_work(recorder)
    assert writer.rows["requests"][-1]["error"] == "HTTP 400: BadRequestError 400"
    assert writer.rows["stages"][-1]["end_reason"] == "refused"
