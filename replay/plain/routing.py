"""Which engine a request goes to: what the router sees, and who chooses."""

from __future__ import annotations

from hoptrace.replay.draws import draw_plain
from hoptrace.replay.plain.engine import Engine
from hoptrace.replay.plain.parts import RequestView, Router, guarded, wrong
from hoptrace.replay.plain.requests import Request

__all__ = ["Dispatcher"]


class _View:
    """One engine as a router sees it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.in_flight = 0
        self.seen: int | None = None

    @property
    def kv_used_tokens(self) -> int:
        """As old as it may be."""
        return self._engine.kv.used if self.seen is None else self.seen

    def cached_tokens(self, request: RequestView) -> int:
        """As it is."""
        assert isinstance(request, Request)
        return self._engine.kv.resident_prefix(request) if self._engine.kv.cached else 0


class Dispatcher:
    """Routes requests among some engines. ``shift`` is added to the last argument of the draws."""

    def __init__(self, name: str, router: Router, engines: list[Engine], age_ns: int, seed: int, shift: int) -> None:
        self._name = name
        self._router = router
        self._engines = engines
        self._views = [_View(e) for e in engines]
        self._position = {e.index: i for i, e in enumerate(engines)}
        self._age_ns = age_ns
        self._seed = seed
        self._shift = shift
        self._first_ns: int | None = None
        self._look = -1

    def before(self, now: int) -> None:
        """Told at the begin of each instant, so that what the router sees is as old as ``age_ns`` says."""
        if not self._age_ns:
            return
        look = 0 if self._first_ns is None else (now - self._first_ns) // self._age_ns
        if self._first_ns is None or look > self._look:
            self._look = look
            for view, e in zip(self._views, self._engines, strict=True):
                view.seen = e.kv.used

    def route(self, r: Request, now: int) -> Engine:
        """The engine for a request."""
        if self._first_ns is None:
            self._first_ns, self._look = now, 0
        at = guarded(self._name, "choose", lambda: self._router.choose(r, self._views, self._draw))
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < len(self._engines):
            raise wrong(self._name, at, f"the position of one of {len(self._engines)} engines, from 0")
        self._views[at].in_flight += 1
        return self._engines[at]

    def gone(self, engine: int) -> None:
        """A request that was sent to an engine is done or handed over."""
        self._views[self._position[engine]].in_flight -= 1

    def _draw(self, what: int, a: int, b: int) -> int:
        return draw_plain(self._seed, what, a, b + self._shift)
