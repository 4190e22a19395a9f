"""The two ends of a relayed connection, without sockets: who is stopped when, and which reads are late."""

from __future__ import annotations

from typing import Any

from hoptrace.collectors.engines.streams.relay import Client, Server


class Wire:
    """A transport that notes what is done to it."""

    def __init__(self) -> None:
        self.written = b""
        self.done: list[str] = []

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return "close" in self.done or "abort" in self.done

    def get_extra_info(self, name: str) -> Any:
        return None

    def set_write_buffer_limits(self, high: int) -> None:
        self.done.append("limits")

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.done.append(name)


class Talk:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.told.append((name, *args))


class Nothing:
    """A proxy without a server of its own."""

    recorder: Any = None
    prefix, authority, working = "", "srv:1", True

    def __init__(self) -> None:
        self.clients: set[Client] = set()
        self.now = 0

    def now_ns(self) -> int:
        self.now += 1
        return self.now

    def work_soon(self) -> None:
        return


def pair(monkeypatch: Any) -> tuple[Client, Server, Wire, Wire, Talk]:
    monkeypatch.setattr(Client, "_connect", lambda self: None)
    client = Client(Nothing())  # type: ignore[arg-type]
    talk = Talk()
    client.talk = talk  # type: ignore[assignment]
    client.connection_made(Wire())
    server = Server(client)
    server.connection_made(Wire())
    client.server = server
    return client, server, client.transport, server.transport, talk


def test_what_waited_behind_a_slow_client_is_late(monkeypatch: Any) -> None:
    client, server, down, up, talk = pair(monkeypatch)
    server.data_received(b"a")
    client.pause_writing()
    assert up.done[-1] == "pause_reading"
    client.resume_writing()
    assert up.done[-1] == "resume_reading"
    server.data_received(b"b" * (1 << 16))  # a full read: there may be more behind it
    server.data_received(b"c")  # this emptied what had waited
    server.data_received(b"d")
    told = [(args[1][:1], args[3]) for args in talk.told if args[0] == "from_server"]
    assert told == [(b"a", False), (b"b", True), (b"c", True), (b"d", False)]
    assert down.written == b"a" + b"b" * (1 << 16) + b"cd"


def test_a_server_that_does_not_take_more_stops_its_client(monkeypatch: Any) -> None:
    _, server, down, _, _ = pair(monkeypatch)
    server.pause_writing()
    server.pause_writing()
    assert down.done.count("pause_reading") == 1
    server.resume_writing()
    assert down.done[-1] == "resume_reading"


def test_each_end_tells_the_talk_once(monkeypatch: Any) -> None:
    client, server, _, up, talk = pair(monkeypatch)
    client.data_received(b"GET / HTTP/1.1\r\nHost: me\r\n\r\n")
    assert up.written == b"GET / HTTP/1.1\r\nHost: srv:1\r\n\r\n"
    client.connection_lost(None)
    server.connection_lost(None)
    assert [args[0] for args in talk.told] == ["from_client", "client_closed", "server_closed"]
    assert "abort" in up.done


def test_the_servers_end_closes_the_client_after_what_is_left(monkeypatch: Any) -> None:
    client, server, down, _, talk = pair(monkeypatch)
    server.eof_received()
    server.connection_lost(None)
    client.connection_lost(None)
    assert down.done.count("close") == 1 and "abort" not in down.done
    assert [args[0] for args in talk.told] == ["server_closed"]
