"""Which request continues which, who asks, and that nothing of what they say is kept."""

from __future__ import annotations

from typing import Any

import pytest
from test_dialects import Kept, ask, chunk, event, head
from test_record import all_work

from hoptrace.collectors.engines.streams.asked import read_body, session_of, tenant_of
from hoptrace.collectors.engines.streams.conversation import Conversation
from hoptrace.collectors.engines.streams.hashing import HashKey, Prompt, prompt_of
from hoptrace.collectors.engines.streams.record import Recorder

KEY = HashKey("test", b"k" * 32)
DONE = event({"id": "c", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]})


class Chats:
    """A recorder, and what its requests' rows come to."""

    def __init__(self, key: HashKey | None = KEY) -> None:
        self.writer = Kept()
        self.recorder = Recorder(self.writer, "toy", key)  # type: ignore[arg-type]
        self.now = 0

    def begin(
        self, messages: list[dict[str, Any]], *headers: str, path: str = "/v1/chat/completions", **more: Any
    ) -> Conversation:
        one = Conversation(self.recorder)
        self.now += 10
        field = "input" if path.endswith("responses") else "messages"
        one.from_client(ask({field: messages} | more, path, *headers), self.now)
        return one

    def end(self, one: Conversation, events: bytes = DONE) -> None:
        self.now += 10
        one.from_server(head() + chunk(events) + b"0\r\n\r\n", self.now)
        all_work(self.recorder)

    def whole(self, messages: list[dict[str, Any]], *headers: str, **more: Any) -> None:
        self.end(self.begin(messages, *headers, **more))

    def rows(self) -> list[dict[str, Any]]:
        merged: dict[int, dict[str, Any]] = {}
        for row in self.writer.rows["requests"]:
            merged.setdefault(row["request"], {}).update({k: v for k, v in row.items() if v is not None})
        return [merged[n] for n in sorted(merged)]

    def parents(self) -> list[int | None]:
        return [r.get("parent_request") for r in self.rows()]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def user_parts(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [part]}


def test_the_next_turn_of_a_chat_continues_the_one_before() -> None:
    chats = Chats()
    chats.whole([user("a")])
    chats.whole([user("other")])
    chats.whole([user("a"), said("x"), user("b")])
    chats.whole([user("a"), said("x"), user("b"), said("x"), user("c")])
    rows = chats.rows()
    assert chats.parents() == [None, None, 0, 2]
    assert [r.get("think_ns") for r in rows] == [None, None, 30, 10]
    assert rows[0]["session"] == rows[2]["session"] == rows[3]["session"] and rows[1].get("session") is None
    assert not any(word in str(chats.writer.rows) for word in ("other", "assistant"))


def test_what_is_not_certain_is_not_told() -> None:
    chats = Chats()
    chats.whole([user("a")])
    chats.whole([user("a")])
    chats.whole([user("a"), said("x"), user("b")])  # whose answer?
    running = chats.begin([user("r")])
    chats.whole([user("r"), said("x"), user("b")])  # that one is not over
    chats.whole([user("a"), user("b")])  # no answer between
    chats.end(running)
    assert chats.parents() == [None] * 6


def test_two_that_branch_off_have_one_parent() -> None:
    chats = Chats()
    chats.whole([user("a")])
    chats.whole([user("a"), said("x"), user("b")])
    chats.whole([user("a"), said("x"), user("c")])
    assert chats.parents() == [None, 0, 0]


def test_a_name_of_the_conversation_keeps_equal_chats_apart() -> None:
    chats = Chats()
    for name in ("alpha", "beta"):
        chats.whole([user("a")], f"X-Session-ID: {name}")
    for name in ("alpha", "beta"):
        chats.whole([user("a"), said("x"), user("b")], f"X-Session-ID: {name}")
    rows = chats.rows()
    assert chats.parents() == [None, None, 0, 1]
    assert rows[0]["session"] == rows[2]["session"] != rows[1]["session"] == rows[3]["session"]
    assert "alpha" not in str(chats.writer.rows)


def test_responses_name_the_answer_that_they_continue() -> None:
    chats = Chats()
    done = event({"type": "response.completed", "response": {"id": "resp_1", "status": "completed"}}, "response.completed")
    chats.end(chats.begin([user("a")], path="/v1/responses"), done)
    chats.end(chats.begin([user("b")], path="/v1/responses", previous_response_id="resp_1"), done)
    assert chats.parents() == [None, 0] and chats.rows()[1]["think_ns"] == 10


def test_without_hashes_there_is_none_of_it() -> None:
    chats = Chats(None)
    chats.whole([user("a")], "X-Session-ID: one", "Authorization: Bearer sk-1")
    chats.whole([user("a"), said("x"), user("b")])
    assert chats.parents() == [None, None]
    assert all("session" not in r and "tenant" not in r for r in chats.rows())


def test_who_pays_is_a_hash_of_the_key() -> None:
    chats = Chats()
    for key in ("Authorization: Bearer sk-1", "x-api-key: sk-1", "Authorization: Bearer sk-2"):
        chats.whole([user("a")], key)
    one, two, three = (r["tenant"] for r in chats.rows())
    assert one == two != three and "sk-" not in str(chats.writer.rows)
    assert tenant_of({"authorization": "Bearer sk-1"}, HashKey("test", b"o" * 32)) != one
    assert tenant_of({}, KEY) is None


@pytest.mark.parametrize(
    ("body", "session"),
    [
        (b'{"user":"u","prompt_cache_key":"p"}', "p"),
        (b'{"user":"u"}', "u"),
        (b'{"conversation":{"id":"conv_1"}}', "conv_1"),
        (b'{"session_id":"","user":5}', None),
    ],
)
def test_names_of_conversations_in_bodies(body: bytes, session: str | None) -> None:
    asked = read_body(body)
    assert asked is not None and asked.session == session
    assert session_of({"x-conversation-id": "h", "x-other": "o"}) == "h"


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"prompt": "x"}, Prompt(text="x")),
        ({"prompt": ["x"]}, Prompt(text="x")),
        ({"prompt": ["x", "y"]}, None),
        ({"prompt": [[1, 2], [3]]}, None),
        ({"inputs": "x"}, Prompt(text="x")),
        ({"text": "x"}, Prompt(text="x")),
        ({"input_ids": [1, 2]}, Prompt(tokens=[1, 2])),
        ({"token_ids": [[1, 2]]}, Prompt(tokens=[1, 2])),
        ({"input": "x"}, Prompt(text="user\x1fx\x1d")),
        ({"system": "s", "messages": [user_parts({"type": "text", "text": "x"})]}, Prompt(text="s\x1duser\x1fx\x1d")),
        ({"messages": [user_parts({"type": "image_url", "image_url": {"url": "data:"}})]}, None),
        ({"messages": [said("") | {"tool_calls": [{"id": "t"}]}]}, Prompt(text='assistant\x1f\x1e[{"id":"t"}]\x1d')),
        ({"messages": []}, None),
        ({"messages": ["x"]}, None),
    ],
)
def test_prompts_of_every_api(body: dict[str, Any], prompt: Prompt | None) -> None:
    assert prompt_of(body) == prompt


def test_a_lone_surrogate_is_hashed_like_any_other_character() -> None:
    chats = Chats()
    raw = b'{"prompt": "' + b"\\ud83d" * 70 + b'"}'
    one = Conversation(chats.recorder)
    one.from_client(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw), 1)
    chats.end(one)
    assert chats.recorder.stats.faults == 0 and chats.rows()[0]["prompt_chars"] == 70
