"""The parts that are here already, written as a plug-in would be: docs/replay-engine.md says what each of them does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence

from hoptrace.replay.plain.parts import Block, Draw, EngineView, RequestView, Router
from hoptrace.replay.plan import Routing

__all__ = [
    "ROUTERS", "Fcfs", "KvUse", "LastAdmitted", "LeastLoad", "Lru", "PowerOfTwo", "PrefixAware", "Priority", "Random",
    "RoundRobin", "Session", "Shortest", "WorstRank",
]  # fmt: skip


class RoundRobin:
    """One after another."""

    def __init__(self, routing: Routing) -> None:
        self._count = 0

    def choose(self, request: RequestView, engines: Sequence[EngineView], draw: Draw) -> int:
        """See :class:`Router`."""
        self._count += 1
        return (self._count - 1) % len(engines)


class Random:
    """Any."""

    def __init__(self, routing: Routing) -> None:
        pass

    def choose(self, request: RequestView, engines: Sequence[EngineView], draw: Draw) -> int:
        """See :class:`Router`."""
        return draw(1, request.number, 0) % len(engines)


class LeastLoad:
    """Fewest requests in flight."""

    def __init__(self, routing: Routing) -> None:
        pass

    def choose(self, request: RequestView, engines: Sequence[EngineView], draw: Draw) -> int:
        """See :class:`Router`."""
        return min(range(len(engines)), key=lambda i: (engines[i].in_flight, i))


class PowerOfTwo:
    """The one with fewer in flight, of two drawn (Mitzenmacher, The power of two choices in randomized load balancing, 2001)."""

    def __init__(self, routing: Routing) -> None:
        pass

    def choose(self, request: RequestView, engines: Sequence[EngineView], draw: Draw) -> int:
        """See :class:`Router`."""
        n = len(engines)
        if n == 1:
            return 0
        a, b = draw(2, request.number, 0) % n, draw(2, request.number, 1) % (n - 1)
        b += b >= a
        return b if engines[b].in_flight < engines[a].in_flight else a


class KvUse:
    """Least KV held by requests."""

    def __init__(self, routing: Routing) -> None:
        pass

    def choose(self, request: RequestView, engines: Sequence[EngineView], draw: Draw) -> int:
        """See :class:`Router`."""
        return min(range(len(engines)), key=lambda i: (engines[i].kv_used_tokens, i))


class PrefixAware:
    """Most of the prompt cached, less a charge for each request in flight."""

    def __init__(self, routing: Routing) -> None:
        self._load = routing.load_tokens

    def choose(self, request: RequestView, engines: Sequence[EngineView], draw: Draw) -> int:
        """See :class:`Router`."""

        def rank(i: int) -> tuple[int, int, int]:
            e = engines[i]
            return self._load * e.in_flight - e.cached_tokens(request), e.in_flight, i

        return min(range(len(engines)), key=rank)


class Session:
    """Always the same for one session."""

    def __init__(self, routing: Routing) -> None:
        self._without = RoundRobin(routing)

    def choose(self, request: RequestView, engines: Sequence[EngineView], draw: Draw) -> int:
        """See :class:`Router`."""
        if request.session < 0:
            return self._without.choose(request, engines, draw)
        return draw(3, request.session, 0) % len(engines)


ROUTERS: dict[str, Callable[[Routing], Router]] = {
    "round_robin": RoundRobin, "random": Random, "least_load": LeastLoad, "power_of_two": PowerOfTwo, "kv_use": KvUse,
    "prefix_aware": PrefixAware, "session": Session,
}  # fmt: skip


class Fcfs:
    """First come, first served."""

    def key(self, request: RequestView) -> int:
        """See :class:`KeyOf`."""
        return request.arrival_ns


class Shortest:
    """Shortest prompt first."""

    def key(self, request: RequestView) -> int:
        """See :class:`KeyOf`."""
        return request.prompt_tokens


class Priority:
    """The least of the trace's priorities first, as vLLM's."""

    def key(self, request: RequestView) -> int:
        """See :class:`KeyOf`."""
        return request.priority


class LastAdmitted:
    """Who was admitted last gives way."""

    def victim(self, running: Sequence[RequestView]) -> int:
        """See :class:`Victim`."""
        return len(running) - 1


class WorstRank:
    """Who comes last by key, arrival and number gives way."""

    def victim(self, running: Sequence[RequestView]) -> int:
        """See :class:`Victim`."""
        return max(range(len(running)), key=lambda i: running[i].rank)


class Lru:
    """The least recently used goes first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Block, None] = OrderedDict()

    def add(self, block: Block) -> None:
        """See :class:`Eviction`."""
        self._blocks[block] = None

    def remove(self, block: Block) -> None:
        """See :class:`Eviction`."""
        del self._blocks[block]

    def oldest(self, kept: Container[Block]) -> Block:
        """See :class:`Eviction`."""
        return next(b for b in self._blocks if b not in kept)
