"""Parts of the plain engine that can be replaced: routers, orders, victims, evictions (docs/replay-plugins.md).

A plan names one as ``python:NAME``; NAME is an entry point of the group ``hoptrace.policies``: a callable without arguments (a
router's: with the plan's :class:`Routing`) that gives the part.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

from hoptrace.errors import HoptraceError, InputError
from hoptrace.replay.plan import Routing

__all__ = [
    "GROUP", "PREFIX", "Block", "CachedTokens", "Clock", "Draw", "EngineView", "Eviction", "KeyOf", "Parts", "RequestView",
    "Router", "Victim", "Watched", "guarded", "load", "name_of", "wrong",
]  # fmt: skip

GROUP = "hoptrace.policies"
PREFIX = "python:"

Block = int | tuple[int, int]
"""A cached block: its id, or (request, unit) where nobody but that request can find it."""

Draw = Callable[[int, int, int], int]
"""``draw(what, a, b)``: a number in [0, 2^62), the same in each run of one seed."""

T = TypeVar("T")


class RequestView(Protocol):
    """What a part may read of a request (never change)."""

    number: int
    prompt_tokens: int
    output_tokens: int
    arrival_ns: int
    session: int
    priority: int
    ids: list[int]
    generated: int
    computed: int

    @property
    def rank(self) -> tuple[int, int, int]:
        """(key, arrival, number): the least comes first in a queue."""


class EngineView(Protocol):
    """What a router sees of an engine."""

    @property
    def in_flight(self) -> int:
        """Requests sent there by this router, not done or handed over."""

    @property
    def kv_used_tokens(self) -> int:
        """KV that requests hold there; as old as the plan's ``age_ns`` says."""

    def cached_tokens(self, request: RequestView) -> int:
        """Tokens of the prompt's leading blocks that are in its cache."""


class Router(Protocol):
    """Chooses an engine."""

    def choose(self, request: RequestView, engines: Sequence[EngineView], draw: Draw) -> int:
        """Position of the engine among ``engines``. Called once a request, in the order of their routing."""


class KeyOf(Protocol):
    """Orders the waiting queue."""

    def key(self, request: RequestView) -> int:
        """The least key comes first (then arrival, then number). Called once a request, when it has arrived."""


class Victim(Protocol):
    """Chooses who gives up its KV when there is no room."""

    def victim(self, running: Sequence[RequestView]) -> int:
        """Position in ``running``, which is in the order of admission and not empty."""


class Eviction(Protocol):
    """Blocks that may be dropped: those of a prefix cache that nobody holds, or those of a tier."""

    def add(self, block: Block) -> None:
        """A block may be dropped from now on; it has just been used."""

    def remove(self, block: Block) -> None:
        """A block that was added is in use again, or is dropped."""

    def oldest(self, kept: Container[Block]) -> Block:
        """The block to drop next, of those added, not removed, and not in ``kept`` (there is one)."""


class Clock(Protocol):
    """Says when steps begin and end, instead of the step cost. No policy names one: :mod:`hoptrace.replay.truths` does."""

    def begin_ns(self, engine: int, now_ns: int, ready_ns: int) -> int:
        """When an engine that wants to begin a step may: ``now_ns``, or later. ``ready_ns``: the end of its gap."""

    def end_ns(self, engine: int, begin_ns: int, cost_ns: int) -> int:
        """The end, after ``begin_ns``, of the step that begins then. ``cost_ns``: its end by the step cost less its begin."""


class CachedTokens(Protocol):
    """Says what an admission finds in the cache. No policy names one: :mod:`hoptrace.replay.truths` does."""

    def cached_tokens(self, request: RequestView, again: int) -> int | None:
        """Tokens that need not be computed, fewer than the request knows; null: what the simulated cache holds. ``again``: how
        often it was driven out before."""


@dataclass(frozen=True)
class Parts:
    """Parts instead of those that the plan names; null: as planned. Routers and evictions are made anew for each use."""

    router: Callable[[Routing], Router] | None = None
    decode_router: Callable[[Routing], Router] | None = None
    order: KeyOf | None = None
    victim: Victim | None = None
    eviction: Callable[[], Eviction] | None = None
    tier_eviction: Callable[[], Eviction] | None = None
    clock: Clock | None = None
    cached: CachedTokens | None = None


class Watched:
    """An eviction of somebody else's: what it does wrong becomes an error that names it."""

    def __init__(self, name: str, part: Eviction) -> None:
        self._name = name
        self._part = part
        self._there: set[Block] = set()

    def add(self, block: Block) -> None:
        """See :class:`Eviction`."""
        self._there.add(block)
        guarded(self._name, "add", lambda: self._part.add(block))

    def remove(self, block: Block) -> None:
        """See :class:`Eviction`."""
        self._there.discard(block)
        guarded(self._name, "remove", lambda: self._part.remove(block))

    def oldest(self, kept: Container[Block]) -> Block:
        """See :class:`Eviction`."""
        block = guarded(self._name, "oldest", lambda: self._part.oldest(kept))
        if block not in self._there or block in kept:
            raise wrong(self._name, block, "a block that is there and may be dropped")
        return block


def load(name: str) -> Callable[..., Any]:
    """The entry point that ``python:NAME`` names.

    Raises:
        InputError: there is none of that name, or it cannot be imported.
    """
    plain = name.removeprefix(PREFIX)
    found = {e.name: e for e in entry_points(group=GROUP)}
    if plain not in found:
        there = ", ".join(sorted(found)) or "none is installed"
        raise InputError(f"There is no plug-in {name!r}.", hint=f"Entry points of the group {GROUP}: {there}.")
    try:
        part = found[plain].load()
    except Exception as e:
        raise InputError(f"The plug-in {name!r} cannot be loaded: {_told(e)}.", hint=f"It is {found[plain].value}.") from e
    if not callable(part):
        raise InputError(f"The plug-in {name!r} is nothing that can be called.", hint=f"It is {found[plain].value}.")

    def make(*arguments: Any) -> Any:
        made = part(*arguments)
        with suppress(AttributeError, TypeError):
            made.hoptrace_name = name
        return made

    make.hoptrace_name = name  # type: ignore[attr-defined]
    return make


def name_of(part: object) -> str:
    """What a message calls a part: as the plan does, or by its class."""
    found = getattr(part, "hoptrace_name", None) or getattr(part, "__name__", None)
    return str(found or type(part).__name__)


def guarded(name: str, what: str, call: Callable[[], T]) -> T:
    """Call a part; whatever it raises becomes an error that names it."""
    try:
        return call()
    except HoptraceError:
        raise
    except Exception as e:
        raise InputError(
            f"The plug-in {name} failed in {what}: {_told(e)}.", hint="docs/replay-plugins.md says what it may do."
        ) from e


def wrong(name: str, answer: object, wanted: str) -> InputError:
    """The error for an answer that makes no sense."""
    return InputError(f"The plug-in {name} answered {answer!r}; {wanted} was asked for.", hint="docs/replay-plugins.md")


def _told(e: BaseException) -> str:
    text = str(e).splitlines()[0][:200] if str(e) else ""
    return f"{type(e).__name__}: {text}" if text else type(e).__name__
