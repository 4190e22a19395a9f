"""Times outside steps, and what a cache will have found: small traces whose answers follow by hand."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from hoptrace.manifest import Manifest, Server
from hoptrace.reconstruct_cached import likely_cached
from hoptrace.replay.memory_trace import FramesTrace
from hoptrace.replay.overheads import overheads
from hoptrace.schema import TABLES

MS = 1_000_000


def rows(table: str, *given: dict[str, Any]) -> pl.DataFrame:
    empty = pl.from_arrow(TABLES[table].arrow.empty_table())
    assert isinstance(empty, pl.DataFrame)
    return pl.DataFrame([{c: r.get(c) for c in empty.columns} for r in given], schema=empty.schema)


def made(**tables: pl.DataFrame) -> FramesTrace:
    server = Server.model_validate({"name": "one", "engine": "vllm", "prefix_caching": True, "block_size_tokens": 32})
    return FramesTrace(tables, Manifest(origin="recorded", servers=[server]), "t")


def request(n: int, at: int, queued: int | None, first: int) -> dict[str, Any]:
    """Times in ms. One token, so that it ends with its first."""
    return {
        "request": n, "arrival_ns": at * MS, "received_ns": at * MS, "queued_ns": None if queued is None else queued * MS,
        "first_token_ns": first * MS, "last_token_ns": first * MS, "finish_ns": first * MS,
    }  # fmt: skip


def step(n: int, start: int, end: int, origin: str = "observed") -> dict[str, Any]:
    return {
        "server": "one", "dp_rank": 0, "pp_rank": 0, "step": n, "start_ns": start * MS, "end_ns": end * MS, "origin": origin,
    }  # fmt: skip


def stay(n: int, end: int) -> dict[str, Any]:
    return {"request": n, "sequence": 0, "attempt": 0, "stage": 0, "server": "one", "end_ns": end * MS}


def test_a_wait_for_the_end_of_a_running_step_is_not_the_fronts_time() -> None:
    """Three requests come to an idle engine and are taken after 3 ms. One comes in the middle of a step of 100 ms, and one of 200
    ms: the engine takes them when these end, which says nothing but that their way was no longer."""
    steps = rows("steps", step(0, 3, 100), step(1, 203, 300), step(2, 300, 500), step(3, 703, 800))
    requests = rows(
        "requests", request(0, 0, 3, 100), request(1, 200, 203, 300), request(2, 250, 300, 500), request(3, 350, 500, 500),
        request(4, 700, 703, 800),
    )  # fmt: skip
    stages = rows("stages", *(stay(n, end) for n, end in ((0, 100), (1, 300), (2, 500), (3, 500), (4, 800))))
    found = overheads(made(requests=requests, stages=stages, steps=steps), steps, None)
    assert found.n[2] == 5
    assert found.received_to_enqueued_ns == pytest.approx(3 * MS, rel=0.04)


def test_who_was_missed_by_a_look_had_a_longer_way() -> None:
    """Both came during the first step and were not there when it ended, 20 ms later; they were when the next one ended, at 40."""
    steps = rows("steps", step(0, 0, 100), step(1, 100, 120))
    requests = rows("requests", request(0, 80, 120, 200), request(1, 80, 120, 200))
    found = overheads(made(requests=requests, stages=rows("stages", stay(0, 200), stay(1, 200)), steps=steps), steps, None)
    assert 20 * MS <= found.received_to_enqueued_ns <= 41 * MS


def test_a_delay_is_its_mean_and_one_stall_counts_no_more_than_the_99_percent_quantile() -> None:
    late = [2, 4, *[3] * 197, 1000]
    requests = rows("requests", *({**request(i, 10, None, 20), "sent_ns": (10 + x) * MS} for i, x in enumerate(late)))
    found = overheads(made(requests=requests))
    # That quantile is 3 ms, so 4 and 1000 count as 3.
    assert found.arrival_to_sent_ns == (2 + 199 * 3) * MS // 200


def test_reconstructed_steps_say_when_a_request_reached_an_idle_engine() -> None:
    """The first step begins 6 ms after its only request came: by the reconstruction the way there took so long. The second
    request came beside the first, and tells nothing."""
    steps = rows("steps", step(0, 16, 50, "reconstructed"), step(1, 50, 80, "reconstructed"))
    runs = rows(
        "residency",
        *(
            {"request": n, "sequence": 0, "server": "one", "dp_rank": 0, "first_step": n, "last_step": n, "phase": "chunk"}
            for n in (0, 1)
        ),
    )
    requests = rows("requests", request(0, 10, None, 80), request(1, 20, None, 80))
    stages = rows("stages", *({"request": n, "sequence": 0, "attempt": 0, "stage": 0, "server": "one"} for n in (0, 1)))
    found = overheads(made(requests=requests, stages=stages), steps, runs)
    assert (found.enqueued_to_ready_ns, found.n[3]) == (6 * MS, 1)
    observed = steps.with_columns(pl.lit("observed").alias("origin"))
    assert overheads(made(requests=requests, stages=stages), observed, runs).n[3] == 0


def prompt(n: int, blocks: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    known = {"hash_space": "a", "block_size": 16, "block_unit": "tokens"}
    return {**request(n, n, None, 1000), "prompt_tokens": tokens, "prefix_blocks": blocks, **known, **more}


def units(*cached: int | None) -> pl.DataFrame:
    return pl.DataFrame(
        {"request": range(len(cached)), "cached_tokens": cached, "available_ns": [n * MS for n in range(len(cached))]},
        schema={"request": pl.Int64, "cached_tokens": pl.Int64, "available_ns": pl.Int64},
    )


def test_what_a_cache_will_have_found_is_what_an_earlier_prompt_has_in_common_in_whole_blocks() -> None:
    """Blocks of 16 tokens, the engine's are of 32. The second shares three (48 tokens, one whole block of 32), the third is the
    second again (its 64 tokens less the last one: 32), the fourth is unlike."""
    requests = rows(
        "requests", prompt(0, [1, 2, 3, 4], 64), prompt(1, [1, 2, 3, 9], 64), prompt(2, [1, 2, 3, 9], 64), prompt(3, [7, 8], 40),
    )  # fmt: skip
    t = made(requests=requests)
    found = likely_cached(t, t.manifest.servers[0], units(None, None, None, None))
    assert found is not None and found.to_list() == [0, 32, 32, 0]


def test_what_a_server_told_it_found_is_not_guessed() -> None:
    t = made(requests=rows("requests", prompt(0, [1, 2], 64), prompt(1, [1, 2], 64)))
    server = t.manifest.servers[0]
    assert likely_cached(t, server, units(None, 16)) is None
    assert likely_cached(t, server.model_copy(update={"prefix_caching": None}), units(None, None)) is None
    assert likely_cached(t, server.model_copy(update={"engine": "llamacpp"}), units(None, None)) is None


def test_blocks_of_characters_and_of_other_texts() -> None:
    """The second shares 64 of its 100 characters: 32 of its 50 tokens. The third has the same hashes in a space of its own."""
    chars = {"block_size": 64, "block_unit": "characters", "prompt_chars": 100}
    requests = rows(
        "requests", prompt(0, [1], 50, **chars), prompt(1, [1], 50, **chars), prompt(2, [1], 50, **chars, hash_space="b"),
        {**request(3, 3, None, 1000), "prompt_tokens": 9},
    )  # fmt: skip
    t = made(requests=requests)
    found = likely_cached(t, t.manifest.servers[0], units(None, None, None, None))
    assert found is not None and found.to_list() == [0, 32, 0, None]
