"""Where an engine publishes its KV events, from the configuration that it was started with or that it tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hoptrace.collectors.engines.published.zmq_stream import Endpoint

__all__ = ["endpoints_of", "of_address", "of_sources"]

DEFAULT_ENDPOINT = "tcp://*:5557"
"""vllm/config/kv_events.py and sglang/srt/disaggregation/kv_events.py: KVEventsConfig.endpoint."""

_MAX_RANKS = 1024


def endpoints_of(config: Mapping[str, Any], host: str = "127.0.0.1", ranks: int = 1) -> list[Endpoint]:
    """The endpoints of an engine's ``--kv-events-config``, one per data-parallel rank; none where it publishes nothing.

    A publisher binds an address with a wildcard (`tcp://*:5557`) or an ipc one, and then it is found at ``host``; any other
    address it connects to, and hoptrace has to bind that. Rank r uses the port plus r (``ZmqEventPublisher`` of both engines).
    A port 0 is chosen by the system: ask ``/kv_event_sources`` (:func:`of_sources`).
    """
    enabled = config.get("enable_kv_cache_events", config.get("publisher") == "zmq")
    publisher = config.get("publisher")
    if not enabled or publisher not in ("zmq", None):
        return []
    endpoint, replay, topic = config.get("endpoint") or DEFAULT_ENDPOINT, config.get("replay_endpoint"), config.get("topic")
    if not isinstance(endpoint, str) or endpoint.endswith(":0"):
        return []
    found = []
    for rank in range(max(1, min(ranks, _MAX_RANKS))):
        there = _offset(replay, rank)
        found.append(
            Endpoint(
                _reachable(_offset(endpoint, rank) or endpoint, host)
                if _binds(endpoint)
                else _offset(endpoint, rank) or endpoint,
                _reachable(there, host) if there else None,
                rank,
                bind=not _binds(endpoint),
                topic=topic if isinstance(topic, str) else "",
            )
        )
    return found


def of_sources(sources: Mapping[str, Any], host: str = "127.0.0.1", configured: str | None = None) -> list[Endpoint]:
    """The endpoints that vLLM tells at ``/kv_event_sources``: rank → its configuration with the addresses in use.

    ``configured`` is the address that the server was started with, where it is known: an address on port 0 is bound by the
    publisher and told here with its port, so that it can't be told from one that the publisher connects to.
    """
    found = []
    for rank, config in sources.items():
        if not isinstance(config, Mapping) or not str(rank).isdecimal():
            continue
        endpoint = config.get("endpoint")
        bound = configured is not None and configured.endswith(":0")
        for e in endpoints_of({**config, "enable_kv_cache_events": True}, host):
            found.append(Endpoint(e.events, e.replay, int(rank), bind=e.bind and not bound, topic=e.topic) if endpoint else e)
    return sorted(found, key=lambda e: e.rank)


def of_address(address: str, replay: str | None = None, host: str = "127.0.0.1", ranks: int = 1) -> list[Endpoint]:
    """The endpoints of an address that the user gave: `tcp://host:5557` to connect to, `bind:tcp://*:5557` to bind (for a
    publisher that connects), `tcp://*:5557` as the server's own configuration says it."""
    bind = address.startswith("bind:")
    address = address.removeprefix("bind:")
    found = []
    for rank in range(max(1, min(ranks, _MAX_RANKS))):
        events, asked = _offset(address, rank) or address, _offset(replay, rank)
        found.append(
            Endpoint(events if bind else _reachable(events, host), _reachable(asked, host) if asked else None, rank, bind=bind)
        )
    return found


def _binds(address: str) -> bool:
    return "*" in address or "::" in address or address.startswith(("ipc://", "inproc://"))


def _offset(address: Any, rank: int) -> str | None:
    if not isinstance(address, str) or not address:
        return None
    if rank == 0 or not address.startswith("tcp://"):
        return address
    base, _, port = address.rpartition(":")
    return f"{base}:{int(port) + rank}" if port.isdecimal() else address


def _reachable(address: str, host: str) -> str:
    """A wildcard address as a client reaches it."""
    base, _, port = address.rpartition(":")
    if base in ("tcp://*", "tcp://0.0.0.0", "tcp://[::]", "tcp://::"):
        return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
    return address
