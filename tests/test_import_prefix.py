"""Block hashes, turns and chats: Mooncake, AIPerf and Bailian."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.imports import DATA, rows, run, told

from hoptrace.collectors.files import idtable
from hoptrace.collectors.files.idtable import BlockIds, ChatIds

MOONCAKE = DATA / "reference" / "mooncake_slice.jsonl"


def _lines(*records: dict[str, object]) -> str:
    return "".join(json.dumps(r) + "\n" for r in records)


def test_mooncake_slice(tmp_path: Path) -> None:
    run(tmp_path, MOONCAKE.read_bytes())
    frame = rows(tmp_path)
    lines = [json.loads(x) for x in MOONCAKE.read_text().splitlines()]
    assert frame["prefix_blocks"].to_list() == [x["hash_ids"] for x in lines]
    assert frame["prompt_tokens"].to_list() == [x["input_length"] for x in lines]
    assert frame["block_size"].unique().to_list() == [512]
    assert frame["hash_space"].n_unique() == 1


def test_one_hash_for_two_lengths_names_both_rows(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        _lines({"input_length": 512, "hash_ids": [7]}, {"input_length": 9}, {"input_length": 100, "hash_ids": [7]}),
    )
    assert done.reasons == {"a block hash stands for blocks of two lengths": 1}
    assert done.first_rejects[0]["row"] == 3
    assert done.first_rejects[0]["value"] == "7: 512 tokens in row 1, 100 here"


def test_two_lengths_are_found_across_blocks_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hoptrace.collectors.files import blocks as blocks_module

    monkeypatch.setattr(blocks_module, "_READ_BYTES", 100)
    lines = [{"input_length": 1024, "hash_ids": [2 * i, 2 * i + 1]} for i in range(50)]
    done = run(tmp_path, _lines(*lines, {"input_length": 600, "hash_ids": [0, 1]}))
    assert done.first_rejects[0]["value"] == "1: 512 tokens in row 1, 88 here"


def test_fewer_and_more_hashes_than_blocks_are_counted(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        _lines(
            {"input_length": 1000, "hash_ids": [1, 2]}, {"input_length": 1000, "hash_ids": [1]},
            {"input_length": 2000, "hash_ids": []}, {"input_length": 1000, "hash_ids": [1, 2, 3, 4]},
        ),
        block_tokens=512,
    )  # fmt: skip
    assert rows(tmp_path)["prefix_blocks"].to_list() == [[1, 2], [1], [], [1, 2]]
    assert told(done, "Requests with fewer block hashes than their prompt has blocks")
    assert told(done, "unlike any other text): 2.") and told(done, "(the surplus was left out): 1.")


def test_block_length_from_the_file_or_the_user(tmp_path: Path) -> None:
    text = _lines({"input_length": 33, "hash_ids": [1, 2, 3]}, {"input_length": 16, "hash_ids": [1]})
    done = run(tmp_path, text, out="a.trace")
    assert rows(tmp_path, out="a.trace")["block_size"].to_list() == [16, 16]
    assert told(done, "A hash stands for 16 tokens")
    done = run(tmp_path, text, out="b.trace", block_tokens=512)
    assert rows(tmp_path, out="b.trace")["prefix_blocks"].to_list() == [[1]]
    assert done.rejected == 1  # 33 tokens of hash 1, then 16 of it


def test_hashes_that_are_not_chained_become_so(tmp_path: Path) -> None:
    """AIPerf's own example: block 1 stands second in one prompt and first in another, block 4 third and second."""
    done = run(
        tmp_path,
        _lines(
            {"timestamp": 0, "input_length": 1200, "output_length": 52, "hash_ids": [0, 1, 2]},
            {"timestamp": 105, "input_length": 1800, "output_length": 26, "hash_ids": [0, 3, 4, 5]},
            {"timestamp": 274, "input_length": 1300, "output_length": 52, "hash_ids": [1, 4, 6]},
            {"timestamp": 275, "input_length": 1300, "output_length": 52, "hash_ids": [1, 4, 6]},
        ),
    )
    a, b, c, d = rows(tmp_path)["prefix_blocks"].to_list()
    assert (a, b) == ([0, 1, 2], [0, 3, 4, 5])
    assert c == d and not set(c) & {*a, *b}
    assert told(done, "also stand behind other blocks (they were replaced by hashes of the whole prefix): 2.")


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=30), st.integers(1, 4))
def test_equal_ids_are_equal_prefixes(prompts: list[list[int]], batches: int) -> None:
    """Whatever order they come in, and however they are cut into batches: ids are equal where all up to them is."""
    table = BlockIds()
    ids: list[list[int]] = []
    for part in np.array_split(np.arange(len(prompts)), batches):
        mine = [prompts[i] for i in part]
        starts = np.cumsum([0, *map(len, mine)]).astype(np.int64)
        flat = np.array([h for p in mine for h in p], dtype=np.int64)
        lengths = np.array([4 * len(p) for p in mine], dtype=np.int64)
        out = table.scan(flat, starts, lengths, part.astype(np.int64), 4).ids
        ids += [out[a:b].tolist() for a, b in pairwise(starts.tolist())]
    seen: dict[int, tuple[int, ...]] = {}
    back: dict[tuple[int, ...], int] = {}
    for prompt, mine_ids in zip(prompts, ids, strict=True):
        for k, name in enumerate(mine_ids):
            prefix = tuple(prompt[: k + 1])
            assert seen.setdefault(name, prefix) == prefix
            assert back.setdefault(prefix, name) == name


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=300, unique=True))
def test_any_64_bit_hash_is_kept_apart(hashes: list[int]) -> None:
    table = BlockIds()
    flat = np.array(hashes, dtype=np.int64)
    starts = np.arange(len(hashes) + 1, dtype=np.int64)
    whole, rows_ = np.full(len(hashes), 8, dtype=np.int64), np.arange(len(hashes), dtype=np.int64)
    assert table.scan(flat, starts, whole, rows_, 8).ids.tolist() == hashes
    again = table.scan(flat[::-1].copy(), starts, whole - 1, rows_, 8)
    assert [(c[1], c[3]) for c in again.conflicts] == [(h, i) for i, h in reversed(list(enumerate(hashes)))]


def test_too_many_hashes_are_told_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idtable, "_MOST", 3)
    done = run(tmp_path, _lines(*({"input_length": 512, "hash_ids": [i]} for i in range(6))))
    assert rows(tmp_path)["prefix_blocks"].to_list() == [[i] for i in range(6)]
    assert told(done, "more different block hashes than are kept")


# -- Mooncake's and AIPerf's other fields ----------------------------------------------------------------------------------


def test_missing_times_and_lengths_keep_the_order_and_are_counted(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        _lines(
            {"input_length": 9, "output_length": 1}, {"timestamp": 5, "input_length": 8, "output_length": 1},
            {"input_length": 7, "output_length": 1}, {"timestamp": 6, "input_length": 6},
        ),
    )  # fmt: skip
    frame = rows(tmp_path)
    assert frame["arrival_ns"].to_list() == [0, 5_000_000, 5_000_000, 6_000_000]
    assert frame["arrival_of"].to_list() == [None, "received", None, "received"]
    assert frame["received_ns"].to_list() == [None, 5_000_000, None, 6_000_000]
    assert told(done, "Requests without a timestamp") and told(done, "the file's order): 2.")
    assert told(done, "Requests without output_length") and told(done, "leaves them out): 1.")


def test_carried_times_go_on_over_blocks_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hoptrace.collectors.files import blocks as blocks_module

    monkeypatch.setattr(blocks_module, "_READ_BYTES", 64)
    run(tmp_path, _lines({"timestamp": 7, "input_length": 9}, *({"input_length": 8} for _ in range(20))))
    assert rows(tmp_path)["arrival_ns"].unique().to_list() == [7_000_000]


def test_aiperf_sessions_delays_and_texts(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        _lines(
            {"session_id": "a", "timestamp": 10, "input_length": 9, "output_length": 1},
            {"session_id": "b", "timestamp": 20, "text_input": "Hello world", "output_length": 4},
            {"session_id": "a", "delay": 1500.5, "input_length": 12, "output_length": 1},
            {"session_id": "a", "delay": 2, "input_length": 13, "output_length": 1},
            {"messages": [{"role": "user", "content": "Hi"}], "output_length": 1},
            {"output_length": 1},
        ),
    )
    frame = rows(tmp_path)
    assert frame["session"].to_list() == ["a", "b", "a", "a", None]
    assert frame["parent_request"].to_list() == [None, None, 0, 2, None]
    assert frame["think_ns"].to_list() == [None, None, 1_500_500_000, 2_000_000, None]
    assert frame["prompt_tokens"].to_list() == [9, None, 12, 13, None]
    assert frame["prompt_chars"].to_list() == [None, 11, None, None, None]
    assert done.reasons == {"it has no input_length": 1}
    assert told(done, "(delay, kept as think_ns), not when: 2.")
    assert told(done, "Requests with a text instead of its length in tokens") and told(done, "a replay leaves them out): 2.")


# -- Bailian ------------------------------------------------------------------------------------------------------------


def _chat(chat: int, parent: int, time: float, n: int, hashes: list[int]) -> dict[str, object]:
    return {
        "chat_id": chat, "parent_chat_id": parent, "timestamp": time, "input_length": n, "output_length": 9, "type": "text",
        "turn": 1, "hash_ids": hashes,
    }  # fmt: skip


def test_bailian_conversations(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        _lines(
            _chat(55, -1, 60.5, 32, [1, 2]), _chat(159, 55, 61.114, 40, [1, 2, 3]), _chat(7, -1, 62, 16, [9]),
            _chat(8, 159, 63, 50, [1, 2, 4, 5]), _chat(4, 99, 64, 16, [8]),
        ),
    )  # fmt: skip
    frame = rows(tmp_path)
    assert frame["arrival_ns"].to_list() == [60_500_000_000, 61_114_000_000, 62_000_000_000, 63_000_000_000, 64_000_000_000]
    assert frame["parent_request"].to_list() == [None, 0, None, 1, None]
    assert frame["session"].to_list() == ["55", "55", "7", "55", "99"]
    assert frame["request_id"].to_list() == ["55", "159", "7", "8", "4"]
    assert frame["block_size"].unique().to_list() == [16]
    assert frame["think_ns"].null_count() == 5
    assert told(done, "(their parent is unknown): 1.") and told(done, "Keys that were not used: type, turn.")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 9)), max_size=40), st.integers(1, 3))
def test_chats_are_linked_to_the_latest_before_them(chats: list[tuple[int, int]], batches: int) -> None:
    table = ChatIds()
    found: list[tuple[int, int]] = []
    for part in np.array_split(np.arange(len(chats)), batches):
        if len(part):
            ids = np.array([chats[i][0] for i in part], dtype=np.int64)
            before = np.array([chats[i][1] for i in part], dtype=np.int64)
            parent, root = table.link(ids, before, int(part[0]))
            found += zip(parent.tolist(), root.tolist(), strict=True)
    known: dict[int, tuple[int, int]] = {}
    for number, (chat, before) in enumerate(chats):
        expected = (-1, chat) if before < 0 else known.get(before, (-1, before))
        assert found[number] == expected
        known[chat] = (number, expected[1])


# -- BurstGPT -----------------------------------------------------------------------------------------------------------


def test_burstgpt_failures_models_and_sessions(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,s1,1.5,ChatGPT,472,18,490,Conversation log\n45.25,,2,GPT-4,1087,0,1087,API log\n"
        "118,s1,3,ChatGPT,500,27,527,Conversation log\n119,s1,,ChatGPT,501,27,528,Conversation log\n"
        "120,s2,1,GPT-4,0,5,5,API log\n",
    )
    frame = rows(tmp_path)
    assert frame["arrival_ns"].to_list() == [5 * 10**9, 45_250_000_000, 118 * 10**9, 119 * 10**9]
    assert frame["finish_ns"].to_list() == [6_500_000_000, 47_250_000_000, 121 * 10**9, None]
    assert frame["model"].to_list() == ["ChatGPT", "GPT-4", "ChatGPT", "ChatGPT"]
    assert [e is not None for e in frame["error"]] == [False, True, False, False]
    assert frame["parent_request"].to_list() == [None, None, 0, 2]
    # The fourth comes before the third has ended: there was no pause to think.
    assert frame["think_ns"].to_list() == [None, None, 111_500_000_000, None]
    assert done.reasons == {"Request tokens is less than 1": 1}
    assert told(done, "Requests without response tokens") and told(done, "leaves them out): 1.")


def test_servegens_offline_traces_have_blocks_of_16_and_no_times(tmp_path: Path) -> None:
    """Fields as in data/offline/README.md of github alibaba/ServeGen; 446 tokens are 28 blocks of 16."""
    shared = list(range(23))
    done = run(
        tmp_path,
        _lines(
            {"request_id": 0, "type": "multimodal", "input_length": 446, "hash_ids": [*shared, *range(23, 28)], "img_ids": ["a"]},
            {"request_id": 1, "type": "multimodal", "input_length": 420, "hash_ids": [*shared, *range(28, 32)], "img_ids": ["b"]},
        ),
    )
    frame = rows(tmp_path)
    assert frame["block_size"].to_list() == [16, 16]
    assert frame["request_id"].to_list() == ["0", "1"]
    assert told(done, "A hash stands for 16 tokens") and told(done, "Keys that were not used: type, img_ids.")
    assert told(done, "Requests without a timestamp") and told(done, "Requests without output_length")
