"""One request as its spans tell it, and the rows that come of that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hoptrace.collectors.engines.published.otlp_spans import Said, View
from hoptrace.collectors.links import readings

__all__ = ["Call", "Stay"]

_OUTER: tuple[View, ...] = ("client", "gateway", "engine")
_ENGINE_TIMES = ("queued_ns", "scheduled_ns", "engine_first_token_ns")

T = TypeVar("T")


@dataclass(slots=True)
class Stay:
    """One sequence on one engine. ``origin`` tells engines apart where ``server``, its name in the trace, is not known."""

    engine_id: str
    server: str | None
    origin: str
    said: Said | None = None
    times: dict[str, int] = field(default_factory=dict)

    def tell(self, said: Said) -> None:
        """The engine's span of it."""
        self.said = said
        for name, value in zip(_ENGINE_TIMES, (said.queued_ns, said.scheduled_ns, said.engine_first_ns), strict=True):
            if value is not None:
                self.times[name] = value


@dataclass(slots=True)
class Call:
    """One request. ``link``: what its rows are linked by. ``written``: rows were handed over under that name, so that it can't
    become part of another request any more; ``part_of``: the one that it has become part of."""

    link: str
    views: dict[View, Said] = field(default_factory=dict)
    stays: list[Stay] = field(default_factory=list)
    written: bool = False
    part_of: Call | None = None
    touched_ns: int = 0

    @property
    def gone(self) -> bool:
        """Whether it has become part of another request."""
        return self.part_of is not None

    @property
    def whole(self) -> Call:
        """The request that it is, or is part of by now."""
        call = self
        while call.part_of is not None:
            call = call.part_of
        return call

    @property
    def has_engine(self) -> bool:
        return bool(self.stays)

    @property
    def done(self) -> bool:
        """Whether each engine has told of all its sequences."""
        return bool(self.stays) and all(self._whole(stays) for stays in self._origins().values())

    def view(self, said: Said) -> None:
        """Someone's view of it. Of two in the same place (an SDK's span around that of its HTTP client, sequences of one prompt)
        the one that began first is the outer."""
        before = self.views.get(said.view)
        if before is None or said.start_ns < before.start_ns:
            self.views[said.view] = said

    def takes(self, said: Said, origin: str) -> bool:
        """Whether a span below this request's can be the same request: nothing else stands in its place yet."""
        if said.view != "engine":
            return said.view not in self.views and not self.stays
        return all(s.origin != origin for s in self.stays)

    def absorb(self, other: Call) -> bool:
        """Make ``other`` part of this request, if it has not been handed over and both can be one."""
        if other is self or other.written or other.gone:
            return False
        if set(self.views) & set(other.views) or {s.origin for s in self.stays} & {s.origin for s in other.stays}:
            return False
        self.views |= other.views
        self.stays += other.stays
        other.part_of = self
        return True

    def request(self) -> dict[str, Any]:
        """Its row of `requests`, without number and source; what is not known is left out.

        From the outermost who saw it: arrival, first token, finish. From the engine that ended last (of a split into prefill and
        decode that is the one which made the answer): tokens.
        """
        outer = [v for name in _OUTER if (v := self.views.get(name)) is not None]
        client, server = self.views.get("client"), self.views.get("gateway") or self.views.get("engine")
        known = {n: v.start_ns for n, v in (("sent", client), ("received", server)) if v is not None}
        row: dict[str, Any] = {f"{n}_ns": t for n, t in known.items()}
        if known:
            row["arrival_of"] = min(known, key=lambda n: known[n])
            row["arrival_ns"] = known[row["arrival_of"]]
        stays = self._last()
        if outer and outer[0].view == "engine":
            row["first_token_ns"] = _least(s.said.first_token_ns for s in stays if s.said)
            finish = [s.said.finish_ns for s in stays if s.said]
            row["finish_ns"] = max(f for f in finish if f is not None) if self._whole(stays) and None not in finish else None
        elif outer:
            row["first_token_ns"], row["finish_ns"] = outer[0].first_token_ns, outer[0].finish_ns
        for name in _ENGINE_TIMES:
            row[name] = _least(s.times.get(name) for s in self.stays)
        if stays:
            row["prompt_tokens"], row["output_tokens"] = _prompt(stays), self._output(stays)
        else:
            row["prompt_tokens"] = _one(v.prompt_tokens for v in reversed(outer))
            row["output_tokens"] = _one(v.output_tokens for v in reversed(outer))
        row["max_tokens"] = _one(v.max_tokens for v in outer)
        row["model"] = _one(v.model for v in outer)
        row["session"] = _one(v.session for v in outer)
        row["finish_reason"] = _one(v.finish_reason for v in outer)
        row["error"] = _one(v.error for v in outer)
        row["request_id"] = _one(readings(v.id)[0][0] if v.id and v.view == "engine" else v.id for v in outer)
        return {n: v for n, v in row.items() if v is not None}

    def stages(self) -> list[dict[str, Any]]:
        """Its rows of `stages`, without request, stage and source. A sequence has the number of its choice in the answer: that of
        its prompt times the choices per prompt, and then in the order of coming: spans do not tell which choice they are."""
        rows = []
        seen: dict[tuple[str, str], int] = {}
        for stay in self.stays:
            said, key = stay.said, (stay.engine_id, stay.origin)
            nth = seen[key] = seen.get(key, -1) + 1
            row: dict[str, Any] = {"server": stay.server, "engine_request_id": stay.engine_id}
            row["sequence"] = readings(stay.engine_id)[0][1] * (said.sequences if said is not None else 1) + nth
            row |= {"enqueued_ns": stay.times.get("queued_ns"), "scheduled_ns": stay.times.get("scheduled_ns")}
            if said is not None:
                row |= {
                    "role": said.role, "end_ns": said.engine_end_ns or said.finish_ns, "cached_tokens": said.cached_tokens,
                    "prompt_tokens": said.prompt_tokens,
                    "end_reason": "failed" if said.error else "done",
                }  # fmt: skip
            rows.append({n: v for n, v in row.items() if v is not None})
        return rows

    # -- inside -------------------------------------------------------------------------------------------------------

    def _origins(self) -> dict[str, list[Stay]]:
        found: dict[str, list[Stay]] = {}
        for stay in self.stays:
            found.setdefault(stay.origin, []).append(stay)
        return found

    def _last(self) -> list[Stay]:
        """The sequences on the engine that ended last."""
        return max(self._origins().values(), key=lambda s: max((t.said.finish_ns or 0) if t.said else 0 for t in s), default=[])

    @staticmethod
    def _whole(stays: list[Stay]) -> bool:
        """Whether there is a span of each sequence of each prompt that there is any span of."""
        told: dict[str, list[Said]] = {}
        for stay in stays:
            if stay.said is not None:
                told.setdefault(stay.engine_id, []).append(stay.said)
        return bool(told) and all(len(said) >= max(s.sequences for s in said) for said in told.values())

    def _output(self, stays: list[Stay]) -> int | None:
        counts = [s.said.output_tokens for s in stays if s.said is not None]
        return sum(n for n in counts if n is not None) if self._whole(stays) and None not in counts else None


def _prompt(stays: list[Stay]) -> int | None:
    """Prompts of a batch (each has an identifier of its own) add up; sequences of one prompt share it."""
    prompts = {s.engine_id: s.said.prompt_tokens for s in stays if s.said is not None}
    counts = [n for n in prompts.values() if n is not None]
    return sum(counts) if counts and len(counts) == len(prompts) else None


def _one(values: Iterable[T | None]) -> T | None:
    return next((v for v in values if v is not None), None)


def _least(values: Iterable[int | None]) -> int | None:
    return min((v for v in values if v is not None), default=None)
