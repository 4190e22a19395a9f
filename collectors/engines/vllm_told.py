"""Records of the stat logger (:mod:`hoptrace.collectors.inside.vllm_record`) as rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hoptrace.collectors.engines.published.step_times import Placed, StepTimes
from hoptrace.collectors.engines.vllm_join import Join
from hoptrace.collectors.engines.vllm_moves import mechanism_of, transfers
from hoptrace.collectors.engines.vllm_sums import Sums
from hoptrace.collectors.engines.vllm_watched import Emit, end_reason, role_of
from hoptrace.collectors.links import readings

__all__ = ["Told"]

_KNOWN = 4096

Write = Callable[[str, dict[str, Any]], None]
"""(table, row)"""


@dataclass(slots=True)
class _Family:
    """Sequences of one request (n > 1, several prompts) that have ended so far."""

    prompts: dict[str, int] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    output: int = 0
    ended: int = 0
    queued_ns: int | None = None
    scheduled_ns: int | None = None
    first_ns: int | None = None
    last_ns: int | None = None


@dataclass(slots=True)
class Told:
    """All engines of one server, from its API servers. ``joins``: those whose scheduler is watched: steps come from it.

    ``arrived``: by engine, when the KV of which request came, as the watched scheduler saw it.
    """

    server: str
    config: Mapping[str, Any]
    convert: Callable[[int], int]
    emit: Emit
    write: Write
    joins: dict[int, Join] = field(default_factory=dict)
    arrived: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    steps: int = 0
    dummies: int = 0
    late: int = 0
    unplaced: int = 0
    cut: int = 0
    last: dict[int, int] = field(default_factory=dict)
    sums: Sums = field(init=False)
    _times: dict[int, StepTimes[dict[str, Any]]] = field(default_factory=dict)
    _base: dict[int, int] = field(default_factory=dict)
    _heard: dict[int, int] = field(default_factory=dict)
    _families: OrderedDict[str, _Family] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.sums = Sums(self.server)

    def restart(self, config: Mapping[str, Any]) -> None:
        """The server's processes are others: iterations begin at 0 again, the numbers of the trace go on."""
        self.take(None)
        self.config = config
        self._base = {engine: last + 1 for engine, last in self.last.items()}
        self._families.clear()

    def record(self, record: Mapping[str, Any]) -> None:
        """One record "s". Records of one server must come in order of their time."""
        engine = record.get("e", 0)
        time_ns = self.convert(record["t"])
        self.sums.record(record, engine, time_ns)
        step = self._iteration(record, engine, time_ns)
        if "i" not in record and engine not in self.joins and not self.config.get("iteration_details"):
            for key, name, unit in (("r", "running", "requests"), ("u", "kv_cache_usage", "ratio")):
                self.sums.gauge(engine, name, record.get(key), unit, time_ns)
            if record.get("w") is not None:
                self.sums.gauge(engine, "waiting", record["w"] + record.get("d", 0), "requests", time_ns)
            for value, name in zip(record.get("sd") or (), ("drafts", "draft_proposed", "draft_accepted"), strict=False):
                self.sums.add(engine, name, value, "1" if name == "drafts" else "tokens", time_ns)
        for key in ("kv", "ec"):
            if record.get(key):
                self._connector(key, record[key], engine, time_ns, step)
        for finished in record.get("f", ()):
            self._finished(finished, engine, record["t"])

    # -- steps --------------------------------------------------------------------------------------------------------

    def _iteration(self, record: Mapping[str, Any], engine: int, time_ns: int) -> int | None:
        told = record.get("i")
        if not told or told[0] is None:
            return None
        index, ctx, ctx_tokens, gen, gen_tokens, elapsed, encoders, encoder_tokens, dummy = told
        self.sums.add(engine, "encoder_inputs", encoders, "1", time_ns)
        self.sums.add(engine, "encoder_tokens", encoder_tokens, "tokens", time_ns)
        if engine in self.joins:
            if dummy:
                self.dummies += 1
                self.sums.add(engine, "dummy_steps", 1, "1", time_ns)
                return None
            return self.joins[engine].match(index, (ctx, ctx_tokens, gen, gen_tokens))
        number: int = self._base.get(engine, 0) + index
        if number <= self.last.get(engine, -1):
            self.late += 1
            return None
        self.last[engine] = number
        size, blocks, capacity = (self.config.get(k) for k in ("block_size_tokens", "block_count", "kv_capacity_tokens"))
        usage = record.get("u")
        drafts = record.get("sd") or (None, None, None)
        row = {
            "server": self.server, "dp_rank": engine, "pp_rank": 0, "step": number, "prefill_requests": ctx,
            "prefill_tokens": ctx_tokens, "decode_requests": gen, "decode_tokens": gen_tokens, "running": record.get("r"),
            "waiting": None if record.get("w") is None else record["w"] + record.get("d", 0), "kv_capacity_tokens": capacity,
            # usage = 1 − free ÷ blocks (vllm/v1/core/block_pool.py). Blocks of hybrid models hold different numbers of tokens.
            "kv_used_tokens": round(usage * blocks) * size
            if usage is not None and size and blocks and capacity == blocks * size
            else None,
            "draft_proposed": drafts[1], "draft_accepted": drafts[2], "origin": "observed",
        }  # fmt: skip
        heard = max(time_ns, self._heard.get(engine, 0))
        self._heard[engine] = heard
        self._times.setdefault(engine, StepTimes()).add(row, heard, max(elapsed or 0, 1))
        return number

    def take(self, now_ns: int | None) -> int:
        """Write the steps whose times are settled at ``now_ns`` (trace clock); all if that is null. Gives their number."""
        placed: list[Placed[dict[str, Any]]] = []
        for times in self._times.values():
            before = times.unplaced
            placed += times.take(now_ns)
            self.unplaced += times.unplaced - before
        for p in placed:
            self.cut += p.cut
            self.write("steps", p.what | {"start_ns": p.start_ns, "end_ns": p.end_ns})
        self.steps += len(placed)
        return len(placed)

    # -- connectors ---------------------------------------------------------------------------------------------------

    def _connector(self, key: str, stats: Any, engine: int, end_ns: int, step: int | None) -> None:
        name = f"{key}_connector"
        found = transfers(
            stats, end_ns, f"server:{self.server}", what="kv" if key == "kv" else "activations", name=name,
            connector=str(self.config.get(name) or key), mechanism=mechanism_of(self.config.get("ucx_tls")),
        )  # fmt: skip
        # Both come with the same results: if that is one transfer and one request, it is that request's.
        there = self.arrived.get(engine, [])
        came = [who for t, who in there if t <= end_ns]
        self.arrived[engine] = [x for x in there if x[0] > end_ns]
        whose = (came[0] or None) if len(came) == 1 and len(found.moves) == 1 else None
        for table, rows in (("moves", found.moves), ("waits", found.waits)):
            for row in rows:
                row |= {"server": self.server, "step": step}
                if whose is not None:
                    self.emit(whose, table, row, False)
                else:
                    self.write(table, row)
        for what, value in found.sums:
            self.sums.add(engine, what, value, _unit(what), end_ns)
        for what, value in found.gauges:
            self.sums.gauge(engine, what, value, _unit(what), end_ns)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _finished(self, told: list[Any], engine: int, heard: int) -> None:
        who, said, e2e, prompt, output, most, cached, _, queued_for, prefill_for, inference_for = told[:11]
        if not isinstance(who, str):
            return
        queued, scheduled, first, last = (
            told[11:15] if len(told) >= 15 else _derived(heard, queued_for, prefill_for, inference_for)
        )
        times = [None if t is None else self.convert(t) for t in (queued, scheduled, first, last)]
        family = self._family(who, times[0])
        family.prompts[who] = prompt or 0
        family.output += output or 0
        family.ended += 1
        family.queued_ns = _least(family.queued_ns, times[0])
        family.scheduled_ns = _least(family.scheduled_ns, times[1])
        family.first_ns = _least(family.first_ns, times[2])
        family.last_ns = max(filter(None, (family.last_ns, times[3])), default=None)
        heard_ns = self.convert(heard)
        received = None if e2e is None else heard_ns - e2e
        row: dict[str, Any] = {
            "request_id": readings(who)[0][0], "received_ns": received, "arrival_ns": received, "arrival_of": "received",
            "queued_ns": family.queued_ns, "scheduled_ns": family.scheduled_ns, "engine_first_token_ns": family.first_ns,
            "prompt_tokens": sum(family.prompts.values()) if prompt is not None else None,
            "output_tokens": family.output if output is not None else None, "max_tokens": most, "finish_reason": said or None,
            "finish_ns": heard_ns,
        }  # fmt: skip
        if received is None:
            row.pop("arrival_of")
        if self.config.get("kv_role") == "kv_producer":
            # Its one token reaches nobody: what the answer was is the decoder's to say, whichever of the two is heard of first.
            row |= dict.fromkeys(("engine_first_token_ns", "output_tokens", "max_tokens", "finish_reason"))
        reason = end_reason(said)
        if reason != "done":
            row["error"] = "aborted in the engine" if reason == "cancelled" else "failed in the engine"
        self.emit(who, "requests", row, True)
        if engine in self.joins:
            return  # the watched scheduler writes the stays, of each sequence by its name
        stay: dict[str, Any] = {
            "server": self.server, "dp_rank": engine, "role": role_of(0, self.config.get("kv_role")), "engine_request_id": who,
            "prompt_tokens": prompt,
            "enqueued_ns": times[0], "scheduled_ns": times[1], "end_ns": times[3], "cached_tokens": cached,
            "end_reason": end_reason(said, sent_on=self.config.get("kv_role") == "kv_producer"),
        }  # fmt: skip
        prompt_index = readings(who)[0][1]
        if prompt_index in family.used:
            # n > 1: all sequences end under one name; they are numbered as they end.
            stay["sequence"] = next(i for i in count() if i not in family.used)
        family.used.add(stay.get("sequence", prompt_index))
        if cached is not None and not self.config.get("kv_connector"):
            stay["cached_device_tokens"] = cached
        self.emit(who, "stages", stay, True)

    def _family(self, who: str, queued_ns: int | None) -> _Family:
        key = readings(who)[0][0]
        family = self._families.get(key)
        if family is not None and queued_ns is not None and family.last_ns is not None and queued_ns > family.last_ns:
            family = None  # the client uses a name again
        if family is None:
            family = self._families[key] = _Family()
        self._families.move_to_end(key)
        while len(self._families) > _KNOWN:
            self._families.popitem(last=False)
        return family


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _unit(name: str) -> str:
    return next(
        (unit for end, unit in (("bytes", "bytes"), ("transferred", "bytes"), ("seconds", "s")) if name.endswith(end)), "1"
    )


def _derived(heard: int, queued: int | None, prefill: int | None, inference: int | None) -> tuple[int | None, ...]:
    """The engine's times from the lengths between them, back from when the last token was heard of (that is too late by the way
    from the engine to the API server, which the lengths do not tell)."""
    if inference is None or queued is None or prefill is None or inference < 0:
        return None, None, None, None
    scheduled = heard - inference
    return scheduled - queued, scheduled, scheduled + prefill, heard
