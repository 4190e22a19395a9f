"""vLLM with its own API server, scheduler and KV manager, and steps that compute nothing and last a stated time; it writes down
what each step held. For tests and benchmarks: the truth that hoptrace's reconstruction is held against.

Use, with this file's folder on PYTHONPATH (vLLM 0.32 on CPU; ready in about half a minute):
``--scheduler-cls modelled_vllm.Recorded --distributed-executor-backend modelled_vllm.Nothing``, and in the environment
``MODELLED_TRUTH`` (JSONL file to write) and ``MODELLED_TIMES`` (JSON file with the times, read again whenever the engine has
nothing to do, so that one server serves runs of several step lengths).

A line of the truth is one step: ``n`` (number), ``s``, ``e`` (CLOCK_MONOTONIC, ns: start of `schedule`, time of the results),
``r`` ({request: [tokens scheduled, computed before, tokens put out]}), ``p`` (requests preempted).
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

_TIMES = {"step_ms": 20.0, "prefill_ms": 0.02, "decode_ms": 0.2, "jitter": 0.0, "budget": 0}


def modelled(base: Any) -> Any:
    """A subclass of a vLLM scheduler class whose steps last as long as is stated."""

    class Recorded(base):  # type: ignore[misc]
        """The scheduler of vLLM; its steps last ``step_ms + prefill_ms × prompt tokens + decode_ms × decoders``, each times a
        factor drawn from 1 ± ``jitter``. ``budget`` sets max_num_batched_tokens anew (0: as started)."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._truth = open(os.environ["MODELLED_TRUTH"], "a", buffering=1)  # noqa: PTH123, SIM115 — for the process's life
            self._times = dict(_TIMES)
            self._most = self.max_num_scheduled_tokens
            self._began: dict[int, int] = {}
            self._before: dict[int, dict[str, int]] = {}
            self._n = 0
            self._random = random.Random(0)
            self._read_ns = 0
            self._read()

        def _read(self) -> None:
            self._read_ns = time.monotonic_ns()
            path = Path(os.environ["MODELLED_TIMES"])
            if path.exists():
                self._times = _TIMES | json.loads(path.read_text())
            self.max_num_scheduled_tokens = int(self._times["budget"]) or self._most

        def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
            start = time.monotonic_ns()
            if start - self._read_ns > 500_000_000 and len(self.running) <= 1:
                self._read()
            out = super().schedule(*args, **kwargs)
            self._began[id(out)] = start
            before = {r.req_id: r.num_computed_tokens for r in out.scheduled_new_reqs}
            cached = out.scheduled_cached_reqs
            before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            self._before[id(out)] = before
            return out

        def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
            start, before = self._began.pop(id(scheduler_output)), self._before.pop(id(scheduler_output))
            scheduled = scheduler_output.num_scheduled_tokens
            if not scheduled:
                return super().update_from_output(scheduler_output, model_runner_output)
            # A request decodes once its whole prompt has been computed; after a preemption its own tokens are a prompt again.
            decoders = [r for r in scheduled if r in self.requests and before[r] >= self.requests[r].num_prompt_tokens]
            decoders = [r for r in decoders if scheduled[r] <= 1 + len(scheduler_output.scheduled_spec_decode_tokens.get(r, ()))]
            prefill = sum(scheduled.values()) - sum(scheduled[r] for r in decoders)
            t = self._times
            lasts = (t["step_ms"] + t["prefill_ms"] * prefill + t["decode_ms"] * len(decoders)) * 1e6
            until = start + int(lasts * (1 + t["jitter"] * self._random.uniform(-1, 1)))
            while (left := until - time.monotonic_ns()) > 0:
                time.sleep(left / 1e9)
            end = time.monotonic_ns()
            made = dict(zip(model_runner_output.req_ids, model_runner_output.sampled_token_ids, strict=True))
            row = {r: [n, before[r], len(made[r])] for r, n in scheduled.items()}
            line = {"n": self._n, "s": start, "e": end, "r": row, "p": sorted(scheduler_output.preempted_req_ids or ())}
            self._truth.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._n += 1
            return super().update_from_output(scheduler_output, model_runner_output)

    return Recorded


Recorded: Any = modelled(Scheduler)


class Nothing(Executor):
    """A device of no weight: it answers at once with token 7 for whoever has computed all it has. With a speculator (``[ngram]``,
    whose drafts it makes up) it accepts 0 to all of them, drawn with a fixed seed."""

    def _init_executor(self) -> None:
        self._tokens: dict[str, int] = {}
        self._random = random.Random(1)
        self._drafts: DraftTokenIds | None = None

    @property
    def _speculative(self) -> int:
        config = self.vllm_config.speculative_config
        return int(config.num_speculative_tokens) if config else 0

    def determine_available_memory(self) -> list[int]:
        return [1 << 30]

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        spec = FullAttentionSpec(block_size=self.cache_config.block_size, num_kv_heads=1, head_size=32, dtype=torch.float32)
        return [{"model.layers.0.self_attn.attn": spec}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBNHC"]]

    def compile_or_warm_up_model(self) -> None:
        pass

    def set_kv_cache_layout(self, layout_name: str) -> None:
        pass

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        answer = [("generate",)] if method == "get_supported_tasks" else [None]
        if not non_block:
            return answer
        future: Future[Any] = Future()
        future.set_result(answer)
        return future

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        out = self._compute(scheduler_output)
        if not non_block:
            return out
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(out)
        return future

    def _compute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        for gone in work.finished_req_ids:
            self._tokens.pop(gone, None)
        before = {}
        for new in work.scheduled_new_reqs:
            self._tokens[new.req_id] = new.prompt_len
            before[new.req_id] = new.num_computed_tokens
        cached = work.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ids = list(work.num_scheduled_tokens)
        made: list[list[int]] = []
        for r in ids:
            drafts = len(work.scheduled_spec_decode_tokens.get(r, ()))
            done = before[r] + work.num_scheduled_tokens[r] - drafts >= self._tokens[r]
            n = (1 + self._random.randint(0, drafts)) if done else 0
            self._tokens[r] += n
            made.append([7] * n)
        if k := self._speculative:
            self._drafts = DraftTokenIds(ids, [[7] * k if m else [] for m in made])
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=made, prompt_logprobs_dict={}
        )

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        raise AssertionError("execute_model has answered")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafts, self._drafts = self._drafts, None
        return drafts

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass
