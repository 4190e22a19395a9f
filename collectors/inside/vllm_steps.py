"""What the watched scheduler does, as records. No import of vLLM: everything is read by attribute. Nothing here raises.

Requests get small numbers, so that a step of hundreds of them stays small. Records:

====  ================================================================================================
k     "a": requests told: a list of [number, identifier, prompt tokens, max tokens, priority, queued ns or null, P/D flags].
      Repeated every second for those that run, so that a reader who comes late, or missed some, knows them.
      P/D flags: 1 its KV is to be sent on (prefill side), 2 its KV comes from elsewhere (decode side).
k     "x": requests ended from outside (client gone, error): a list of [number, status]
k     "c": a step that has been worked through
n     steps with tokens since the engine began, counted as vLLM's iteration index counts (without dummies)
t     schedule start, schedule end, update start, update end: CLOCK_MONOTONIC ns
q     numbers of the requests in it; then z tokens of each, b context before the step, o tokens generated before it
new   how many at the end of q are new (first time scheduled), then positions of those that resume after a preemption
pre   numbers of those preempted while it was scheduled
r w   running, waiting requests after scheduling; d deferred ones of the waiting
kb    KV blocks in use after scheduling
wq    prefill requests that wait, their tokens, waiting requests that had begun, their context (null: too many to look at)
g     CLOCK_MONOTONIC ns that the engine stamps on the results
y     numbers of requests with results; m tokens of each
f     [number, reason] of those that ended with this step
ps    [number, prompt tokens computed, found locally, from elsewhere] of those whose prompt is done
sp    drafted tokens proposed and accepted
kr    numbers of the requests whose KV from elsewhere has come with this step
k     "v": the same of a step without tokens, which is no step otherwise: t time of the results, l numbers
====  ================================================================================================
"""

from __future__ import annotations

import contextlib
from typing import Any

from hoptrace.collectors.inside.channel import Channel
from hoptrace.collectors.inside.vllm_config import config_of_vllm, dp_rank_of, look

__all__ = ["StepRecorder"]

_TELL_NS = 1_000_000_000
_WAITING_LOOK = 64
_IN_FLIGHT = 64
_REQUESTS = 1 << 17


class StepRecorder:
    """Turns calls of a scheduler into records. With a null channel every call returns at once."""

    def __init__(self, channel: Channel | None) -> None:
        self._channel = channel
        self._numbers: dict[str, int] = {}
        self._next = 0
        self._steps = 0
        self._told_ns = 0
        self._open: dict[int, tuple[Any, dict[str, Any]]] = {}

    @classmethod
    def of(cls, scheduler: Any) -> StepRecorder:
        """The recorder of a vLLM scheduler: its channel says the configuration and the rank. Never raises."""
        channel = None
        with contextlib.suppress(Exception):
            config = scheduler.vllm_config
            about = {"engine": "vllm", "dp_rank": dp_rank_of(config), "scheduler": type(scheduler).__name__}
            about["config"] = config_of_vllm(config, kv_cache_config=getattr(scheduler, "kv_cache_config", None))
            channel = Channel.open("engine", about)
        return cls(channel)

    # -- requests -----------------------------------------------------------------------------------------------------

    def added(self, request: Any, now_ns: int) -> None:
        """A request comes to the scheduler."""
        if self._channel is None:
            return
        try:
            if request.request_id not in self._numbers:
                self._tell([self._about(request, now_ns)], now_ns)
        except Exception as e:
            self._channel.fault(e)

    def finished(self, requests: Any, status: Any, now_ns: int) -> None:
        """Requests were ended from outside. ``requests`` is what the scheduler gave back (a list of requests)."""
        if self._channel is None or not requests:
            return
        try:
            gone = [[self._numbers.pop(r.request_id), _name(status)] for r in requests if r.request_id in self._numbers]
            if gone and self._channel.on:
                self._channel.send({"k": "x", "t": now_ns, "l": gone}, now_ns)
        except Exception as e:
            self._channel.fault(e)

    def _about(self, request: Any, queued_ns: int | None) -> list[Any]:
        number = self._numbers.get(request.request_id)
        if number is None:
            if len(self._numbers) >= _REQUESTS:  # none is ever told to have ended: do not grow for ever
                self._numbers.clear()
            number = self._numbers[request.request_id] = self._next
            self._next += 1
        params = getattr(request, "kv_transfer_params", None) or {}
        flags = (1 if params.get("do_remote_decode") else 0) | (2 if params.get("do_remote_prefill") else 0)
        return [
            number, request.request_id, getattr(request, "num_prompt_tokens", None), getattr(request, "max_tokens", None),
            getattr(request, "priority", None), queued_ns, flags,
        ]  # fmt: skip

    def _tell(self, told: list[list[Any]], now_ns: int) -> None:
        assert self._channel is not None
        if told and self._channel.on:
            self._channel.send({"k": "a", "t": now_ns, "l": told}, now_ns)

    # -- steps --------------------------------------------------------------------------------------------------------

    def scheduled(self, scheduler: Any, output: Any, start_ns: int, end_ns: int) -> None:
        """A batch has been chosen."""
        if self._channel is None:
            return
        try:
            if output.total_num_scheduled_tokens and self._channel.on:
                self._open[id(output)] = (output, self._composition(scheduler, output, start_ns, end_ns))
                while len(self._open) > _IN_FLIGHT:
                    del self._open[next(iter(self._open))]
        except Exception as e:
            self._channel.fault(e)

    def _composition(self, scheduler: Any, output: Any, start_ns: int, end_ns: int) -> dict[str, Any]:
        tokens, cached, new = output.num_scheduled_tokens, output.scheduled_cached_reqs, output.scheduled_new_reqs
        ids = [*cached.req_ids, *(n.req_id for n in new)]
        numbers = self._numbers
        fresh = [scheduler.requests[i] for i in ids if i not in numbers]
        again = end_ns - self._told_ns > _TELL_NS
        if fresh or again:
            self._tell([self._about(r, None) for r in fresh], end_ns)
            if again:
                self._told_ns = end_ns
                known = (scheduler.requests.get(i) for i in ids)
                told = [self._about(r, None) for r in known if r is not None]
                for i in range(0, len(told), 512):
                    self._tell(told[i : i + 512], end_ns)
        record: dict[str, Any] = {
            "k": "c", "t": [start_ns, end_ns], "q": [numbers[i] for i in ids], "z": [tokens[i] for i in ids],
            "b": [*cached.num_computed_tokens, *(n.num_computed_tokens for n in new)],
            "o": [*cached.num_output_tokens, *(scheduler.requests[n.req_id].num_output_tokens for n in new)], "new": [len(new)],
            "r": len(scheduler.running),
        }  # fmt: skip
        if cached.resumed_req_ids:
            record["new"] += [j for j, i in enumerate(cached.req_ids) if i in cached.resumed_req_ids]
        if preempted := getattr(output, "preempted_req_ids", None):
            record["pre"] = [numbers[i] for i in preempted if i in numbers]
        with contextlib.suppress(Exception):
            record["w"] = scheduler.get_request_counts()[1]
            if deferred := len(scheduler.deferred_waiting):
                record["d"] = deferred
        pool = look(scheduler, "kv_cache_manager.block_pool")
        if pool is not None:
            record["kb"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        with contextlib.suppress(Exception):
            record["wq"] = _waiting(scheduler)
        return record

    def sampled(self, output: Any, results: Any) -> list[int] | None:
        """Drafted tokens proposed and accepted, before the scheduler cuts what follows a stop (as vLLM counts them)."""
        try:
            drafts = getattr(output, "scheduled_spec_decode_tokens", None)
            if self._channel is None or not drafts:
                return None
            tokens, at = results.sampled_token_ids, results.req_id_to_index
            sampled = {i: len(tokens[at[i]]) for i in drafts if i in at and tokens}
            proposed = sum(len(drafts[i]) for i, n in sampled.items() if n)
            invalid = getattr(output, "num_invalid_spec_tokens", None) or {}
            return [proposed - sum(invalid.values()), sum(max(n - 1, 0) for n in sampled.values())]
        except Exception:
            return None

    def updated(
        self, output: Any, results: Any, outputs: Any, start_ns: int, end_ns: int, drafts: list[int] | None = None
    ) -> None:
        """A batch's results have been worked in. ``drafts``: what :meth:`sampled` gave before."""
        if self._channel is None:
            return
        try:
            if not output.total_num_scheduled_tokens:
                self._empty(results, outputs, end_ns)
                return
            step, self._steps = self._steps, self._steps + 1
            _, record = self._open.pop(id(output), (None, None))
            if record is None or not self._channel.on:
                return
            record["n"] = step
            record["t"] += [start_ns, end_ns]
            if drafts is not None:
                record["sp"] = drafts
            self._results(record, outputs)
            arrived = look(results, "kv_connector_output.finished_recving")
            if arrived:
                record["kr"] = [self._numbers[i] for i in arrived if i in self._numbers]
            self._channel.send(record, end_ns)
        except Exception as e:
            self._channel.fault(e)

    def _empty(self, results: Any, outputs: Any, end_ns: int) -> None:
        """A step without tokens may still bring KV: a request waits for it, and nothing else is there to do."""
        arrived = look(results, "kv_connector_output.finished_recving")
        if not arrived or self._channel is None or not self._channel.on:
            return
        stamps = [m.timestamp for m in (outputs or {}).values() if m.timestamp]
        time_ns = round(stamps[0] * 1e9) if stamps else end_ns
        self._channel.send({"k": "v", "t": time_ns, "l": [self._numbers[i] for i in arrived if i in self._numbers]}, end_ns)

    def _results(self, record: dict[str, Any], outputs: Any) -> None:
        numbers = self._numbers
        who: list[int] = []
        count: list[int] = []
        ended: list[list[Any]] = []
        prompts: list[list[Any]] = []
        for message in (outputs or {}).values():
            if message.timestamp:
                record["g"] = round(message.timestamp * 1e9)
            for o in message.outputs:
                number = numbers.get(o.request_id)
                if number is None:
                    continue
                who.append(number)
                count.append(len(o.new_token_ids))
                if (prefill := getattr(o, "prefill_stats", None)) is not None:
                    names = ("num_computed_tokens", "num_local_cached_tokens", "num_external_cached_tokens")
                    prompts.append([number, *(getattr(prefill, name, None) for name in names)])
                if o.finish_reason is not None:
                    ended.append([number, str(o.finish_reason)])
                    del numbers[o.request_id]
        record["y"], record["m"] = who, count
        if ended:
            record["f"] = ended
        if prompts:
            record["ps"] = prompts


def _waiting(scheduler: Any) -> list[int] | None:
    """Waiting requests by whether they have begun; null if they are too many to look at in each step."""
    waiting = scheduler.waiting
    if len(waiting) > _WAITING_LOOK:
        return None
    found = [0, 0, 0, 0]
    for request in waiting:
        if request.num_output_tokens:
            found[2] += 1
            found[3] += request.num_tokens
        else:
            found[0] += 1
            found[1] += request.num_prompt_tokens - request.num_computed_tokens
    return found


def _name(status: Any) -> str:
    return str(getattr(status, "name", status))
