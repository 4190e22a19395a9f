"""Objects shaped as vLLM 0.32 hands them to a stat logger and a scheduler: only the attributes that the plug-in reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


def details(index: int, ctx: int, ctx_tokens: int, gen: int, gen_tokens: int, ms: float, **more: Any) -> SimpleNamespace:
    base = {
        "iteration_index": index, "num_ctx_requests": ctx, "num_ctx_tokens": ctx_tokens, "num_generation_requests": gen,
        "num_generation_tokens": gen_tokens, "elapsed_ms": ms, "num_encoder_inputs": 0, "num_encoder_output_tokens": 0,
        "is_dummy": False,
    }  # fmt: skip
    return SimpleNamespace(**base | more)


def prefix(requests: int = 0, queries: int = 0, hits: int = 0, **sources: int) -> SimpleNamespace:
    return SimpleNamespace(
        requests=requests, queries=queries, hits=hits, preempted_requests=0, preempted_queries=0, preempted_hits=0,
        hits_by_source=sources,
    )  # fmt: skip


def scheduler_stats(**more: Any) -> SimpleNamespace:
    base: dict[str, Any] = {
        "num_running_reqs": 0, "num_waiting_reqs": 0, "num_skipped_waiting_reqs": 0, "num_kv_fetch_reqs_by_stage": {},
        "kv_cache_usage": 0.0, "iteration_details": None, "prefix_cache_stats": prefix(), "connector_prefix_cache_stats": None,
        "kv_cache_eviction_events": [], "spec_decoding_stats": None, "kv_connector_stats": None, "ec_connector_stats": None,
    }  # fmt: skip
    return SimpleNamespace(**base | more)


@dataclass
class Finished:
    request_id: str | None
    finish_reason: str = "length"
    e2e_latency: float = 1.0
    num_prompt_tokens: int = 10
    num_generation_tokens: int = 5
    max_tokens_param: int | None = 5
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queued_time: float = 0.1
    prefill_time: float = 0.2
    inference_time: float = 0.8


class IterationStats:
    """With the method that the plug-in wraps to see the engine's own times."""

    def __init__(self, timestamp: float) -> None:
        self.iteration_timestamp = timestamp
        self.num_generation_tokens = 0
        self.prompt_token_stats = SimpleNamespace(computed=0, local_cache_hit=0, external_kv_transfer=0, cached_tokens=0, total=0)
        self.num_preempted_reqs = 0
        self.finished_requests: list[Finished] = []

    def update_from_finished_request(self, finish_reason: str, request_id: str, *, req_stats: Any) -> str:
        self.finished_requests.append(Finished(request_id, finish_reason))
        return "as before"


@dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    max_tokens: int = 100
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass
class Output:
    """SchedulerOutput."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any
    preempted_req_ids: set[str] | None = None
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    num_invalid_spec_tokens: dict[str, int] | None = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Scheduler:
    """Chunks prompts by a token budget, decodes one token a step, as vLLM's does in outline; keeps its own books to compare."""

    def __init__(self, vllm_config: Any = None, budget: int = 16, seats: int = 4) -> None:
        self.vllm_config = vllm_config or SimpleNamespace()
        self.budget, self.seats = budget, seats
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.deferred_waiting: set[Any] = set()
        self.seen: set[str] = set()
        self.books: list[dict[str, tuple[int, int]]] = []
        self.clock = 0.0

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def preempt(self) -> str | None:
        """Take the youngest of the running ones out."""
        if not self.running:
            return None
        victim = self.running.pop()
        victim.num_computed_tokens = 0
        self.waiting.insert(0, victim)
        return victim.request_id

    def schedule(self, preempt: bool = False) -> Output:
        gone = self.preempt() if preempt else None
        left, chosen = self.budget, []
        for request in list(self.running):
            n = min(request.num_tokens - request.num_computed_tokens, left)
            if n > 0:
                chosen.append((request, n))
                left -= n
        new, resumed = [], []
        while self.waiting and left > 0 and len(self.running) < self.seats and not gone:
            request = self.waiting.pop(0)
            n = min(request.num_tokens - request.num_computed_tokens, left)
            left -= n
            self.running.append(request)
            (resumed if request.request_id in self.seen else new).append((request, n))
            self.seen.add(request.request_id)
        cached = [*chosen, *resumed]
        output = Output(
            {r.request_id: n for r, n in [*cached, *new]},
            [SimpleNamespace(req_id=r.request_id, num_computed_tokens=r.num_computed_tokens) for r, _ in new],
            SimpleNamespace(
                req_ids=[r.request_id for r, _ in cached], num_computed_tokens=[r.num_computed_tokens for r, _ in cached],
                num_output_tokens=[r.num_output_tokens for r, _ in cached], resumed_req_ids={r.request_id for r, _ in resumed},
            ),
            {gone} if gone else None,
        )  # fmt: skip
        if output.num_scheduled_tokens:
            self.books.append({r.request_id: (n, r.num_computed_tokens) for r, n in [*cached, *new]})
        for request, n in [*cached, *new]:
            request.num_computed_tokens += n
        return output

    def update_from_output(self, output: Output, results: Any) -> dict[int, Any]:
        out = []
        for name in output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or request not in self.running or request.num_computed_tokens < request.num_tokens:
                continue
            request.num_output_tokens += 1
            ended = request.num_output_tokens >= request.max_tokens
            stats = SimpleNamespace(
                num_computed_tokens=request.num_prompt_tokens, num_local_cached_tokens=0, num_external_cached_tokens=0
            )
            out.append(
                SimpleNamespace(
                    request_id=name, new_token_ids=[1], finish_reason="length" if ended else None,
                    prefill_stats=stats if request.num_output_tokens == 1 else None,
                )
            )  # fmt: skip
            if ended:
                self.running.remove(request)
                del self.requests[name]
        self.clock += 0.001
        return {0: SimpleNamespace(timestamp=1000.0 + self.clock, outputs=out)}

    def finish_requests(self, ids: str, status: str) -> list[Request]:
        request = self.requests.pop(ids, None)
        if request is None:
            return []
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        return [request]
