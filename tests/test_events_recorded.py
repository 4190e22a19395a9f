"""A recording of a real vLLM 0.32 (tests/data/events/README.md): its KV events and spans against what it counted itself."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from support.context import KEY, context, events, rows
from support.spans import as_json

import hoptrace
from hoptrace.collectors.engines.published.kv_events import KvEvents, block_hash
from hoptrace.collectors.engines.published.otlp import OtlpReceiver
from hoptrace.collectors.engines.published.otlp_calls import Calls
from hoptrace.collectors.engines.published.otlp_wire import spans_of_json, spans_of_protobuf
from hoptrace.collectors.engines.published.zmq_stream import Endpoint
from hoptrace.collectors.files.run import import_files
from hoptrace.validate import validate

DATA = Path(__file__).parent / "data" / "events" / "vllm_0_32"
BLOCK = 32


def _messages() -> list[tuple[int, list[bytes]]]:
    found = []
    for line in (DATA / "kv_events.jsonl").read_text().splitlines():
        m = json.loads(line)
        found.append((m["received_ns"], [base64.b64decode(m[n]) for n in ("topic", "number", "payload")]))
    return found


def _bodies() -> list[bytes]:
    return [base64.b64decode(json.loads(line)) for line in (DATA / "otlp.jsonl").read_text().splitlines()]


def _sent() -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = json.loads((DATA / "sent.json").read_text())
    return sent


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    out = tmp_path_factory.mktemp("kv") / "t.trace"
    shape = {"layers": 1, "kv_heads": 1, "head_size": 32, "kv_dtype": "float32", "block_size_tokens": BLOCK}
    with context(out, **shape) as ctx:
        # As from another host: the recording's stamps are kept as they are.
        source = KvEvents(ctx, [Endpoint("tcp://10.0.0.9:5557")])
        for _, frames in _messages():
            source._ranks[0].live(frames, 10**9)
        assert source.notes() == [] and not source.hybrid
        assert ctx.writer is not None and not ctx.writer.manifest.rows_dropped
    return rows(out, "blocks")


def test_blocks_are_what_the_engine_s_cache_holds(blocks: pl.DataFrame) -> None:
    """After each of 344 steps: rows stored less rows evicted = blocks with a hash in vLLM's own pool."""
    mine, held, i, compared = blocks.rows(named=True), 0, 0, 0
    for line in (DATA / "cached_blocks.txt").read_text().splitlines():
        at, cached = map(int, line.split())
        while i < len(mine) and mine[i]["time_ns"] <= at:
            event = mine[i]["event"]
            held = 0 if event == "cleared" else held + (1 if event == "stored" else -1)
            i += 1
        assert held == cached, at
        compared += 1
    assert compared == 344 and i == len(mine)
    assert dict(blocks["event"].value_counts().iter_rows()) == {"stored": 52, "evicted": 12, "cleared": 1}
    stored = blocks.filter(pl.col("event") != "cleared")
    assert stored["medium"].unique().to_list() == ["device"] and stored["bytes"].unique().to_list() == [BLOCK * 2 * 32 * 4]
    assert stored["dp_rank"].unique().to_list() == [0] and stored["hash"].null_count() == 0


def test_chains_tell_what_each_prompt_found_cached(blocks: pl.DataFrame) -> None:
    """From hashes and parents alone: how many leading blocks of each prompt were in the cache = the server's cached_tokens."""
    content: dict[tuple[int | None, tuple[int, ...]], int] = {}
    for _, frames in _messages():
        for event in msgspec.msgpack.decode(frames[2])[1]:
            parent = event.get("parent_block_hash")
            for k, h in enumerate(event["block_hashes"] if event["type"] == "BlockStored" else ()):
                name = block_hash(h, None, KEY.key)
                before = None if parent is None else block_hash(parent, None, KEY.key)
                content[before, tuple(event["token_ids"][k * BLOCK : (k + 1) * BLOCK])] = name
                parent = h
    arrivals = {}
    for body in _bodies():
        for span in spans_of_protobuf(body).spans:
            if span.name == "llm_request":
                arrivals.setdefault(str(span.attributes["gen_ai.request.id"]).rsplit("-", 1)[0], span.start_ns)
    chance = random.Random(7)
    shared = [chance.randrange(3, 1000) for _ in range(128)]
    prompts = [
        shared[: BLOCK * (1 + i % 4)] + [chance.randrange(3, 1000) for _ in range(20 + 37 * (i % 5))] for i in range(14)
    ]  # fmt: skip
    found = []
    for sent, prompt in zip(_sent(), prompts, strict=False):
        there: dict[int, int] = {}
        for row in blocks.filter(pl.col("time_ns") < arrivals[sent["id"]]).iter_rows(named=True):
            there[row["hash"]] = there.get(row["hash"], 0) + (1 if row["event"] == "stored" else -1)
        parent, hits = None, 0
        for k in range((len(prompt) - 1) // BLOCK):  # vLLM computes the last token anew in any case
            parent = content.get((parent, tuple(prompt[k * BLOCK : (k + 1) * BLOCK])))
            if parent is None or there.get(parent, 0) < 1:
                break
            hits += BLOCK
        found.append(hits)
    # The one of two sequences is asked for once per sequence, and usage tells the first one's.
    assert found == [s["cached_tokens"] for s in _sent()[:14]]
    assert sum(found) > 500


def test_spans_are_the_requests_that_were_sent(tmp_path: Path) -> None:
    calls = Calls()
    start_up = []
    for body in _bodies():
        found = spans_of_protobuf(body)
        assert not found.bad and found == spans_of_json(as_json(body))
        for span in found.spans:
            taken = calls.take(span, "s", "o")
            start_up += [taken.start_up] if taken.start_up else []
    assert not calls.counts and not calls.ignored
    made = {c.request()["request_id"]: c for c in calls.calls()}
    assert list(made) == [s["id"] for s in _sent()]
    for sent in _sent():
        row = made[sent["id"]].request()
        assert (row["prompt_tokens"], row["output_tokens"]) == (sent["prompt_tokens"], sent["completion_tokens"])
        order = [row[n] for n in ("arrival_ns", "queued_ns", "scheduled_ns", "engine_first_token_ns", "finish_ns")]
        assert order == sorted(order)
        # The engine's own times and the API server's, set on the first token: what is left before the queue is short.
        assert 0 <= row["queued_ns"] - row["arrival_ns"] < 50_000_000
    two_sequences, two_prompts = made[_sent()[5]["id"]], made[_sent()[14]["id"]]
    assert [s["sequence"] for s in two_sequences.stages()] == [s["sequence"] for s in two_prompts.stages()] == [0, 1]
    assert {"Overall Loading", "EngineCoreProc init (EngineCore)", "Load model (Worker_0)"} <= {s.what for s in start_up}
    assert len(start_up) == 11


def test_the_same_bodies_through_the_receiver_and_from_a_file_give_the_same(tmp_path: Path) -> None:
    import asyncio

    async def go(ctx: Any) -> None:
        receiver = OtlpReceiver(ctx.writer, ctx.links, ctx.host, ("127.0.0.1", 0), ("127.0.0.1", 0), servers=[ctx.server])
        await receiver.start()
        for body in _bodies():
            assert await receiver._accept(body, "protobuf", "10.0.0.9") == (0, "")
        await receiver.sample()
        await receiver.close()

    live, imported = tmp_path / "live.trace", tmp_path / "file.trace"
    with context(live) as ctx:
        asyncio.run(go(ctx))
    file = tmp_path / "spans.jsonl"
    file.write_text("".join(json.dumps(as_json(b)) + "\n" for b in _bodies()))
    result = import_files([file], imported)
    assert (result.read, result.written, result.rejected) == (16, 16, 0)
    left, right = rows(live, "requests").drop("source"), rows(imported, "requests").drop("source")
    assert left.height == 16 and left.sort("arrival_ns").equals(right.sort("arrival_ns"))
    assert rows(live, "stages").height == rows(imported, "stages").height == 18
    assert len(events(live, "start-up")) == len(events(imported, "start-up")) == 11
    for trace in (live, imported):
        assert not [f for f in validate(hoptrace.open(trace)) if f.level == "error"]


def test_a_message_cut_anywhere_is_no_message_or_a_shorter_one() -> None:
    from hoptrace.collectors.engines.published.kv_messages import decode_batch

    payload = _messages()[5][1][2]
    assert all(decode_batch(payload[:n]) is None for n in range(len(payload) - 1))
    body = _bodies()[5]
    for n in range(0, len(body), 7):
        try:
            spans_of_protobuf(body[:n])
        except ValueError:
            continue
