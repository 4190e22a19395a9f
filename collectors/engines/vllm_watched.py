"""Records of the watched scheduler (:mod:`hoptrace.collectors.inside.vllm_steps`) as rows: steps, residency, tokens, stays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import pvariance
from typing import Any

from hoptrace.collectors.engines.vllm_join import Join
from hoptrace.collectors.links import readings

__all__ = ["ABORTS", "Watched", "end_reason", "role_of"]

RUN_NS = 1_000_000_000
"""A run of residency that is still open is cut and written after this time, so that a kill of hoptrace loses no more."""

_MOST = 1 << 17
_FAMILIES = 1 << 16
ABORTS = {"abort", "FINISHED_ABORTED"}
_ERRORS = {"error", "FINISHED_ERROR", "FINISHED_IGNORED"}

Emit = Callable[[str, str, dict[str, Any], bool], None]
"""(engine's identifier of the request, table, row, done)"""


def end_reason(said: str, *, sent_on: bool = False) -> str:
    """``end_reason`` of a stay from vLLM's finish reason or status; ``sent_on``: its KV goes to another server."""
    if said in ABORTS:
        return "cancelled"
    if said in _ERRORS:
        return "failed"
    return "handed over" if sent_on else "done"


def role_of(flags: int, kv_role: Any) -> str:
    """``role`` of a stay: from the request's own transfer flags, else from the server's role."""
    if flags & 1:
        return "prefill"
    if flags & 2:
        return "decode"
    return {"kv_producer": "prefill", "kv_consumer": "decode"}.get(str(kv_role), "both")


@dataclass(slots=True)
class Family:
    """What the sequences of one request (n > 1, several prompts) have in common: the first and the last of all.

    They may run on several data-parallel ranks, whose records come one rank after the other: an earlier first may come later.
    """

    name: str
    queued_ns: int
    live: int = 0
    prompts: dict[int, int | None] = field(default_factory=dict)
    output: int = 0
    scheduled_ns: int | None = None
    first_ns: int | None = None
    last_ns: int | None = None
    finish_ns: int = 0

    @property
    def prompt_tokens(self) -> int | None:
        """Of all its prompts; null where one of them is not known."""
        known = [n for n in self.prompts.values() if n is not None]
        return sum(known) if len(known) == len(self.prompts) else None


Families = OrderedDict[str, Family]


def family_of(families: Families, engine_id: str, queued_ns: int) -> Family:
    """The family of a sequence that begins; another one where the client uses a name again."""
    name = readings(engine_id)[0][0]
    family = families.get(name)
    if family is None or (not family.live and queued_ns > family.finish_ns):
        family = families[name] = Family(name, queued_ns)
        if len(families) > _FAMILIES:
            families.popitem(last=False)
    family.queued_ns = min(family.queued_ns, queued_ns)
    family.live += 1
    return family


@dataclass(slots=True)
class _Request:
    """``family``: null where its beginning was not seen. ``reach``: tokens of its sequence that were computed at some time."""

    engine_id: str
    prompt: int | None
    flags: int
    family: Family | None
    index: int = 0
    scheduled_ns: int | None = None
    reach: int = 0
    preempted: bool = False
    resumed: int = 0
    recomputed: int = 0
    found: int | None = None
    run: dict[str, Any] | None = None
    run_since_ns: int = 0


@dataclass(slots=True)
class Watched:
    """One engine. ``convert`` takes CLOCK_MONOTONIC ns to the trace clock; ``emit`` writes rows of requests."""

    server: str
    engine: int
    config: Mapping[str, Any]
    convert: Callable[[int], int]
    emit: Emit
    families: Families = field(default_factory=OrderedDict)
    join: Join = field(default_factory=Join)
    base: int = 0
    last_step: int = -1
    partial: int = 0
    unknown: int = 0
    _requests: dict[int, _Request] = field(default_factory=dict)
    _leaving: dict[int, tuple[_Request, int]] = field(default_factory=dict)
    _end_ns: int | None = None

    def restart(self, config: Mapping[str, Any]) -> None:
        """The engine's process is another: its numbers begin anew, those of the trace go on."""
        self.close()
        self.base, self.config = self.last_step + 1, config
        self._requests.clear()
        self._leaving.clear()
        self.join.restart()

    # -- requests -----------------------------------------------------------------------------------------------------

    def told(self, record: Mapping[str, Any]) -> None:
        """Record "a"."""
        for number, engine_id, prompt, most, priority, queued, flags in record["l"]:
            if number in self._requests:
                continue
            queued_ns = None if queued is None else self.convert(queued)
            family = None if queued_ns is None else family_of(self.families, engine_id, queued_ns)
            self._requests[number] = r = _Request(engine_id, prompt, flags, family)
            if len(self._requests) > _MOST:
                self._forget()
            if family is None:
                self.partial += 1
                continue
            family.prompts[readings(engine_id)[0][1]] = prompt
            row = {"request_id": family.name, "queued_ns": family.queued_ns, "arrival_ns": family.queued_ns, "priority": priority}
            self.emit(
                r.engine_id,
                "requests",
                row | {"prompt_tokens": family.prompt_tokens, "max_tokens": None if flags & 1 else most},
                False,
            )
            self.emit(r.engine_id, "stages", self._stay(r) | {"enqueued_ns": queued_ns, "prompt_tokens": prompt}, False)

    def _forget(self) -> None:
        """Of the oldest no end was ever told (the plug-in was off, or records were missed)."""
        r = self._requests.pop(next(iter(self._requests)))
        if r.family is not None:
            self._write_run(r)
            r.family.live -= 1

    def gone(self, record: Mapping[str, Any]) -> None:
        """Record "x". A step that was under way then has computed its share of them all the same."""
        for number, status in record["l"]:
            if (r := self._requests.get(number)) is not None:
                self._leaving[number] = r, record["t"]
            self._end(number, status, self.convert(record["t"]))

    def _stay(self, r: _Request) -> dict[str, Any]:
        role = role_of(r.flags, self.config.get("kv_role"))
        return {"server": self.server, "dp_rank": self.engine, "role": role, "engine_request_id": r.engine_id}

    def _end(self, number: int, said: str, time_ns: int) -> None:
        r = self._requests.pop(number, None)
        if r is None or r.family is None:
            return
        self._write_run(r)
        reason = end_reason(said, sent_on=bool(r.flags & 1))
        family = r.family
        family.live -= 1
        family.finish_ns = max(family.finish_ns, time_ns)
        row: dict[str, Any] = {
            "scheduled_ns": family.scheduled_ns,
            "last_token_ns": family.last_ns,
            "finish_ns": family.finish_ns,
            # Also of one that was aborted: its tokens were computed. A prefill's one token is its decoder's.
            "output_tokens": None if r.flags & 1 else family.output,
        }
        if reason == "cancelled":
            row["error"] = "aborted in the engine"
        elif reason == "failed":
            row["error"] = "failed in the engine"
        self.emit(r.engine_id, "requests", row, False)
        stay = {"end_ns": time_ns, "end_reason": reason, "scheduled_ns": r.scheduled_ns}
        stay |= {"resumed_tokens": r.resumed or None, "recomputed_tokens": r.recomputed or None}
        if r.found is not None:
            # A vLLM that does not tell what it found where: what was computed before the first chunk.
            stay["cached_tokens"] = r.found
        self.emit(r.engine_id, "stages", self._stay(r) | stay, True)

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Record "c": the row of `steps`. What it says of requests is emitted."""
        schedule0, schedule1, update0, update1 = (self.convert(t) for t in record["t"])
        number = self.last_step = self.base + record["n"]
        # Under asynchronous scheduling the next batch is chosen while this one runs: steps follow each other by their results.
        start = schedule0 if self._end_ns is None else max(schedule0, min(self._end_ns, update1))
        self._end_ns = update1
        new = record["new"][0]
        fresh, again = len(record["q"]) - new, set(record["new"][1:])
        chunks: list[tuple[int | None, int, int]] = []
        decodes: list[tuple[int, int]] = []
        plain = [0, 0, 0, 0]
        for j, (q, tokens, before, made) in enumerate(zip(record["q"], record["z"], record["b"], record["o"], strict=True)):
            r = self._requests.get(q) or self._leaving.get(q, (None, 0))[0]
            prompt = r.prompt if r is not None else None
            self.unknown += r is None
            context = j >= fresh or made == 0
            plain[0 if context else 2] += 1
            plain[1 if context else 3] += tokens
            # All but the last token of the sequence is in the cache: it decodes. Else it is a chunk, of a prompt or, after a
            # preemption, of what is computed again.
            decoding = made > 0 and (before >= prompt + made - 1 if prompt is not None else not context and j not in again)
            if decoding:
                decodes.append((tokens, before))
            else:
                chunks.append((prompt, tokens, before))
            if r is not None:
                self._resident(
                    r, number, tokens, before, decoding, start, j in again or (j >= fresh and r.scheduled_ns is not None)
                )
        self.join.step(record["n"], (plain[0], plain[1], plain[2], plain[3]), number)
        self._left(record)
        self._preempted(record)
        self._results(record)
        return self._row(record, number, start, update1, (schedule1 - schedule0, update1 - update0), chunks, decodes)

    def _left(self, record: Mapping[str, Any]) -> None:
        """Those who were ended while this step, or one scheduled before their end, was under way."""
        for number, (r, gone) in list(self._leaving.items()):
            if number in record["q"] and r.family is not None:
                self._write_run(r)
                times = {"scheduled_ns": r.family.scheduled_ns}
                self.emit(r.engine_id, "requests", times, False)
                self.emit(r.engine_id, "stages", self._stay(r) | {"scheduled_ns": r.scheduled_ns}, True)
            elif record["t"][0] > gone:
                del self._leaving[number]

    def _row(
        self, record: Mapping[str, Any], number: int, start: int, end: int, spent: tuple[int, int],
        chunks: list[tuple[int | None, int, int]], decodes: list[tuple[int, int]],
    ) -> dict[str, Any]:  # fmt: skip
        waiting = record.get("wq") or (None,) * 4
        size, blocks, capacity = (self.config.get(k) for k in ("block_size_tokens", "block_count", "kv_capacity_tokens"))
        used = record.get("kb")
        drafts = record.get("sp") or (None, None)
        return {
            "server": self.server, "dp_rank": self.engine, "pp_rank": 0, "step": number, "start_ns": start, "end_ns": end,
            "schedule_ns": spent[0], "update_ns": spent[1], "prefill_requests": len(chunks),
            "prefill_tokens": sum(c[1] for c in chunks),
            "prefill_context_tokens": sum(c[2] for c in chunks), "decode_requests": len(decodes),
            "decode_tokens": sum(d[0] for d in decodes), "decode_context_tokens": sum(d[1] for d in decodes),
            "prefill_length_variance": _variance([c[0] for c in chunks]),
            "decode_context_variance": _variance([d[1] for d in decodes]),
            "queued_prefill_requests": waiting[0], "queued_prefill_tokens": waiting[1], "queued_decode_requests": waiting[2],
            "queued_decode_context_tokens": waiting[3], "running": record.get("r"), "waiting": record.get("w"),
            # Blocks of hybrid models hold different numbers of tokens: then only their share is known.
            "kv_used_tokens": used * size if used is not None and size and blocks and capacity == blocks * size else None,
            "kv_capacity_tokens": capacity, "preempted": len(record.get("pre", ())),
            "draft_proposed": drafts[0], "draft_accepted": drafts[1], "origin": "observed",
        }  # fmt: skip

    def _resident(self, r: _Request, step: int, tokens: int, before: int, decoding: bool, start_ns: int, resumes: bool) -> None:
        if r.scheduled_ns is None:
            r.scheduled_ns, r.found = start_ns, before
            if r.family is not None:
                r.family.scheduled_ns = min(r.family.scheduled_ns or start_ns, start_ns)
        if resumes:
            r.resumed += min(before, r.reach)
            r.preempted = True
        if before < r.reach and not decoding:
            r.recomputed += min(r.reach, before + tokens) - before
        r.reach = max(r.reach, before + tokens) if not decoding else max(r.reach, before + 1)
        if r.family is None:
            return
        phase = "decode" if decoding else "chunk"
        run = r.run
        if run is not None and run["last_step"] + 1 == step and run["phase"] == phase and run["tokens_per_step"] == tokens:
            run["last_step"] = step
            if start_ns - r.run_since_ns > RUN_NS:
                self._write_run(r)
            r.preempted = False
            return
        last = run["last_step"] if run is not None else None
        self._write_run(r)
        common = {"server": self.server, "dp_rank": self.engine}
        if last is not None and last + 1 < step:
            gap = common | {"first_step": last + 1, "last_step": step - 1, "tokens_per_step": 0}
            self.emit(r.engine_id, "residency", gap | {"phase": "preempted" if r.preempted else "skipped"}, False)
        r.preempted = False
        r.run = common | {
            "first_step": step,
            "last_step": step,
            "phase": phase,
            "tokens_per_step": tokens,
            "context_at_start": before,
        }
        r.run_since_ns = start_ns

    def _write_run(self, r: _Request) -> None:
        if r.run is not None and "written" not in r.run:
            self.emit(r.engine_id, "residency", dict(r.run), False)
            # Kept, so that a gap after it is seen; the next step begins a new run.
            r.run = {"last_step": r.run["last_step"], "phase": None, "tokens_per_step": None, "written": True}

    def _preempted(self, record: Mapping[str, Any]) -> None:
        for q in record.get("pre", ()):
            if (r := self._requests.get(q)) is not None:
                r.preempted = True

    def _results(self, record: Mapping[str, Any]) -> None:
        time_ns = self.convert(record.get("g") or record["t"][3])
        for q, count in zip(record["y"], record["m"], strict=True):
            r = self._requests.get(q)
            if r is None or r.family is None or not count or r.flags & 1:
                continue  # the one token of a prompt that is handed on reaches nobody: the decoder makes its own
            row = {"index": r.index, "time_ns": time_ns, "count": count, "coalesced": False, "vantage": "engine"}
            r.index += count
            r.family.output += count
            family = r.family
            family.last_ns = max(family.last_ns or time_ns, time_ns)
            if family.first_ns is None or time_ns < family.first_ns:
                family.first_ns = time_ns
                times = {"engine_first_token_ns": time_ns, "first_token_ns": time_ns, "scheduled_ns": family.scheduled_ns}
                self.emit(r.engine_id, "requests", times, False)
            self.emit(r.engine_id, "tokens", row, False)
        for number, _, local, external in record.get("ps", ()):
            r = self._requests.get(number)
            if r is not None and r.family is not None and local is not None and external is not None:
                if r.found is not None:
                    # The last token of a prompt that was found whole is computed again, for what follows it.
                    r.recomputed += max(0, local + external - r.found)
                    r.found = None
                found = {"cached_tokens": local + external, "cached_device_tokens": local}
                if column := self._tier():
                    found[column] = external
                self.emit(r.engine_id, "stages", self._stay(r) | found, False)
        for number, said in record.get("f", ()):
            self._end(number, said, time_ns)

    def _tier(self) -> str | None:
        return tier_of(self.config.get("kv_connector"))

    def identifier(self, number: int) -> str | None:
        """The engine's identifier of a request by its number in the channel."""
        r = self._requests.get(number)
        return r.engine_id if r is not None else None

    def flush(self) -> None:
        """Write the runs that are open."""
        for r in self._requests.values():
            if r.family is not None:
                self._write_run(r)

    def close(self) -> None:
        """The end: write what is open."""
        self.flush()


def _variance(values: Sequence[int | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(pvariance(known)) if known and len(known) == len(values) else None


def tier_of(connector: Any) -> str | None:
    """Column of `stages` for tokens that a connector brought; null where its name does not tell from where."""
    name = str(connector or "").lower()
    if any(n in name for n in ("nixl", "p2pnccl", "moriio")) or name == "mooncakeconnector":
        return "cached_peer_tokens"
    return "cached_host_tokens" if name in ("offloadingconnector", "simplecpuoffloadconnector") else None
