"""What vLLM's own scheduler decides, step by step, on a virtual clock and without a model: references for the replay's tests.

Run with the Python of an environment that has vLLM (written with 0.32.0, CPU build) and numpy:
``python benchmarks/support/ref_vllm_scheduler.py tests/data/reference/vllm_scheduler``. It builds
``vllm.v1.core.sched.scheduler.Scheduler`` with a KVCacheConfig, adds requests at their arrival, calls ``schedule()``, gives a
sampled token to each request that has computed all it knows, calls ``update_from_output()``, and lets the clock go on by the cost
of the step. It writes one JSON a scenario; the README there says what it holds.
"""

from __future__ import annotations

import json
import lzma
import os
import random
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MS = 1_000_000
STEP_NS, PREFILL_TOKEN_NS, DECODER_NS = 5 * MS, 20_000, 400_000
"""Cost of a step: so much, and so much for each prompt token (those computed again included) and for each decoder."""

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 1000, "torch_dtype": "float32",
    "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip

COST_NS = {"step": STEP_NS, "prefill_token": PREFILL_TOKEN_NS, "decoder": DECODER_NS}

ACCEPT_PPM = 600_000
"""Chance that a proposal is taken, given those before it were."""


def draw(seed: int, what: int, a: int, b: int) -> int:
    """The replay's random numbers (``hoptrace.replay.draws``, SplitMix64), written again: vLLM's environment has no hoptrace."""
    mask = (1 << 64) - 1
    z = seed & mask
    for word in (what, a, b):
        z = ((z + word) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return z >> 2


def scheduler(settings: dict[str, Any], transfers: KVTransferConfig | None = None) -> Scheduler:
    """vLLM's scheduler with these settings; ``blocks`` are usable ones (vLLM keeps one more for itself)."""
    folder = tempfile.mkdtemp()
    (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=settings["context"])
    rules = SchedulerConfig(
        max_num_seqs=settings["max_sequences"], max_num_batched_tokens=settings["budget"], max_model_len=settings["context"],
        is_encoder_decoder=False, enable_chunked_prefill=settings["chunked"], policy=settings["policy"], async_scheduling=False,
        watermark=settings["watermark"], scheduler_reserve_full_isl=settings["reserve_full_isl"],
    )  # fmt: skip
    cache = CacheConfig(block_size=settings["block"], enable_prefix_caching=settings["prefix_caching"])
    config = VllmConfig(model_config=model, scheduler_config=rules, cache_config=cache, kv_transfer_config=transfers)
    if settings["spec_tokens"]:
        config.speculative_config = SpeculativeConfig(
            method="ngram", num_speculative_tokens=settings["spec_tokens"], prompt_lookup_max=3, target_model_config=model,
            target_parallel_config=config.parallel_config,
        )  # fmt: skip
    n = settings["blocks"] + 1
    layer = FullAttentionSpec(block_size=settings["block"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=n, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)])
    cache.num_gpu_blocks = n
    return Scheduler(config, kv, StructuredOutputManager(config), block_size=settings["block"], log_stats=False)


def run(settings: dict[str, Any], asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that vLLM's scheduler makes of these requests."""
    made = scheduler(settings)
    hasher = get_request_block_hasher(settings["block"], sha256)
    pending = deque(sorted(range(len(asked)), key=lambda i: (asked[i]["arrival_ns"], i)))
    decoding: set[int] = set()
    emitted = [0] * len(asked)
    now, steps = 0, []
    k = settings["spec_tokens"]
    while pending or made.has_unfinished_requests():
        if not made.has_unfinished_requests():
            now = max(now, asked[pending[0]]["arrival_ns"])
        while pending and asked[pending[0]]["arrival_ns"] <= now:
            i = pending.popleft()
            q = asked[i]
            made.add_request(
                Request(
                    request_id=f"{i:06d}", prompt_token_ids=q["tokens"], pooling_params=None, arrival_time=float(q["arrival_ns"]),
                    sampling_params=SamplingParams(max_tokens=q["output"], ignore_eos=True), priority=q["priority"],
                    block_hasher=hasher if settings["prefix_caching"] else None,
                )
            )  # fmt: skip
        was_running = {int(r.request_id) for r in made.running}
        out = made.schedule()
        counts = {int(r): n for r, n in out.num_scheduled_tokens.items()}
        running_now = {int(r.request_id) for r in made.running}
        preempted = sorted(int(r) for r in out.preempted_req_ids or ())
        decoding -= set(preempted)
        admitted = [r for r in counts if r not in was_running or r in preempted]
        computed = {r: made.requests[f"{r:06d}"].num_computed_tokens - n for r, n in counts.items()}
        start = now
        if counts:
            prefill = sum(n for r, n in counts.items() if r not in decoding)
            decoders = sum(r in decoding for r in counts)
            extra = sum(n - 1 for r, n in counts.items() if r in decoding)
            now += STEP_NS + PREFILL_TOKEN_NS * (prefill + extra) + DECODER_NS * decoders
        pool = made.kv_cache_manager.block_pool
        evictable = sum(b.ref_cnt == 0 and b.block_hash is not None for b in pool.blocks)
        row = {
            "start_ns": start,
            "parts": [[r, n, computed[r]] for r, n in counts.items()],
            "preempted": preempted,
            "held": settings["blocks"] - pool.get_num_free_blocks(),
            "evictable": evictable,
            "admitted": [[r, computed[r]] for r in admitted],
            "running": len(running_now),
            "waiting": len(made.waiting) + len(made.kv_holding_waiting),
        }
        order = list(counts)
        sampled: list[list[int]] = []
        for r in order:
            q = made.requests[f"{r:06d}"]
            drafts = len(out.scheduled_spec_decode_tokens.get(q.request_id, ()))
            if q.num_computed_tokens - drafts < q.num_tokens:
                sampled.append([])
                continue
            taken = 0
            while taken < drafts and asked[r]["accept"][emitted[r] + taken]:
                taken += 1
            sampled.append([100_000 + r * 10_000 + emitted[r] + j for j in range(1 + taken)])
            decoding.add(r)
        if k:
            row["drafted"] = [[r, len(out.scheduled_spec_decode_tokens.get(f"{r:06d}", ()))] for r in order]
        ids = [f"{r:06d}" for r in order]
        result = ModelRunnerOutput(req_ids=ids, req_id_to_index={r: j for j, r in enumerate(ids)}, sampled_token_ids=sampled)
        made.update_from_output(out, result)
        for j, r in enumerate(order):
            emitted[r] += min(len(sampled[j]), asked[r]["output"] - emitted[r])
        if k:
            row["emitted"] = [[r, emitted[r]] for r in order]
            alive = [r for j, r in enumerate(order) if f"{r:06d}" in made.requests and sampled[j]]
            made.update_draft_token_ids(DraftTokenIds([f"{r:06d}" for r in alive], [[1] * k for _ in alive]))
        steps.append(row)
        assert len(steps) < 100_000, "it does not end"
    return steps


def lengths(rng: random.Random, n: int, gap_ms: float, prompt: tuple[int, int], output: tuple[int, int]) -> list[dict[str, Any]]:
    """``n`` requests, Poisson arrivals, log-uniform lengths."""
    asked, at = [], 0
    for _ in range(n):
        at += max(1, int(rng.expovariate(1 / gap_ms) * MS))
        p = round(prompt[0] * (prompt[1] / prompt[0]) ** rng.random())
        o = round(output[0] * (output[1] / output[0]) ** rng.random())
        asked.append({"arrival_ns": at, "prompt": p, "output": o, "priority": 0})
    return asked


def own_text(asked: list[dict[str, Any]]) -> None:
    """Prompts that have nothing in common."""
    for i, q in enumerate(asked):
        q["tokens"] = [10_000_000 + i * 100_000 + j for j in range(q["prompt"])]


def shared_text(
    asked: list[dict[str, Any]], rng: random.Random, block: int, groups: int, whole: float, alpha: float = 1.0
) -> None:
    """Prompts that begin like others: a tree of prefixes of whole blocks (popular ones more often), then text of their own.

    ``whole``: share of prompts that another one asks again in whole; ``alpha``: of the Pareto law of popularity, 0: all equal.
    """
    roots = [[20_000_000 + g * 100_000 + j for j in range(block * rng.randint(2, 12))] for g in range(groups)]
    for i, q in enumerate(asked):
        if i and rng.random() < whole:
            q["tokens"] = list(asked[rng.randrange(max(0, i - 20), i)]["tokens"])
        else:
            which = min(int(rng.paretovariate(alpha)) - 1, groups - 1) if alpha else rng.randrange(groups)
            root = roots[which]
            cut = len(root) if rng.random() < 0.7 else block * rng.randint(1, len(root) // block)
            own = [10_000_000 + i * 100_000 + j for j in range(q["prompt"])]
            q["tokens"] = root[:cut] + own
        q["prompt"] = len(q["tokens"])


def block_ids(asked: list[dict[str, Any]], block: int) -> None:
    """Ids of the prompts' full blocks, chained: equal ids mean equal text from the start."""
    known: dict[tuple[int, ...], int] = {}
    for q in asked:
        parent, ids = -1, []
        for j in range(len(q["tokens"]) // block):
            key = (parent, *q["tokens"][j * block : (j + 1) * block])
            parent = known.setdefault(key, len(known))
            ids.append(parent)
        q["blocks"] = ids


BASE: dict[str, Any] = {
    "max_sequences": 16, "budget": 512, "chunked": True, "policy": "fcfs", "watermark": 0.0, "reserve_full_isl": True,
    "block": 16, "blocks": 4096, "prefix_caching": False, "context": 4096, "spec_tokens": 0,
}  # fmt: skip


def scenarios() -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """All scenarios by name: settings, requests."""
    found: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}

    def add(name: str, asked: list[dict[str, Any]], **changes: Any) -> None:
        found[name] = ({**BASE, **changes}, asked)

    def drawn(seed: int, n: int, gap: float, prompt: tuple[int, int], output: tuple[int, int]) -> list[dict[str, Any]]:
        asked = lengths(random.Random(seed), n, gap, prompt, output)
        own_text(asked)
        return asked

    add("chunked", drawn(1, 150, 60, (20, 2500), (1, 120)))
    add("few_places", drawn(2, 150, 60, (20, 800), (1, 80)), max_sequences=5)
    add("small_budget", drawn(3, 120, 40, (5, 900), (1, 60)), budget=64, max_sequences=48, block=64, blocks=2048)
    add("whole_prompts", drawn(4, 150, 60, (20, 1500), (1, 80)), chunked=False, budget=4096)
    add("decoders_wait_for_budget", drawn(5, 120, 25, (2, 400), (20, 120)), budget=40, max_sequences=40)
    add("tight_kv", drawn(6, 110, 30, (16, 500), (10, 300)), blocks=120, max_sequences=32, context=1600)
    add("tight_kv_blocks_of_64", drawn(7, 110, 30, (16, 500), (10, 300)), blocks=34, block=64, max_sequences=32, context=1600)
    add("tight_kv_whole_prompts", drawn(8, 100, 30, (16, 500), (10, 300)), blocks=120, chunked=False, budget=1600, context=1600)
    add("watermark", drawn(9, 110, 30, (16, 500), (10, 300)), blocks=110, watermark=0.05, max_sequences=32, context=1600)
    for seed, name, changes in (
        (10, "priority", {"blocks": 4096}),
        (11, "priority_tight_kv", {"blocks": 120, "context": 1600, "max_sequences": 32}),
    ):
        asked = drawn(seed, 110, 30, (16, 500), (10, 300))
        rng = random.Random(seed)
        for q in asked:
            q["priority"] = rng.randrange(4)
        add(name, asked, policy="priority", **changes)
    asked = drawn(12, 100, 30, (16, 800), (1, 80))
    for q in asked:
        q["priority"] = q["prompt"]
    add("shortest_first", asked, policy="priority", max_sequences=6)
    asked = drawn(13, 100, 30, (16, 800), (1, 80))
    for i, q in enumerate(asked):
        q["priority"] = q["arrival_ns"] // MS + (200 if i % 3 else 2000)
    add("deadlines", asked, policy="priority", max_sequences=6)
    for seed, name, whole, changes in (
        (14, "prefix", 0.0, {}),
        (15, "prefix_evictions", 0.0, {"blocks": 260, "context": 1600, "max_sequences": 12}),
        (16, "prefix_preemptions", 0.0, {"blocks": 110, "context": 1600, "max_sequences": 32}),
        (17, "prefix_whole_prompts_again", 0.4, {"blocks": 260, "context": 1600, "max_sequences": 12}),
        (18, "prefix_tight_priority", 0.0, {"blocks": 110, "context": 1600, "max_sequences": 32, "policy": "priority"}),
        (19, "prefix_watermark_blocks_of_64", 0.0, {"blocks": 30, "block": 64, "context": 1600, "watermark": 0.1}),
    ):
        rng = random.Random(seed)
        asked = lengths(rng, 150, 30, (5, 300), (5, 200))
        shared_text(asked, rng, {**BASE, **changes}["block"], 12, whole)
        if changes.get("policy") == "priority":
            for q in asked:
                q["priority"] = rng.randrange(4)
        add(name, asked, prefix_caching=True, **changes)
    for seed, name, changes in (
        (20, "speculation", {}),
        (21, "speculation_small_budget", {"budget": 48, "max_sequences": 24}),
        (22, "speculation_tight_kv", {"blocks": 120, "max_sequences": 32, "context": 1600}),
    ):
        rng = random.Random(seed)
        asked = drawn(seed, 120, 40, (16, 500), (10, 300))
        add(name, asked, spec_tokens=3, **changes)
    return found


def main(folder: Path) -> None:
    """Write all scenarios."""
    init_none_hash(sha256)
    only = sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    for name, (settings, asked) in scenarios().items():
        if only and name not in only:
            continue
        for i, q in enumerate(asked):
            tokens = q["output"] + 8 if settings["spec_tokens"] else 0
            q["accept"] = [draw(0, 4, i, j) % 1_000_000 < ACCEPT_PPM for j in range(tokens)]
        if settings["prefix_caching"]:
            block_ids(asked, settings["block"])
        steps = run(settings, asked)
        keep = ("arrival_ns", "prompt", "output", "priority", "blocks")
        kept = [{k: q[k] for k in keep if q.get(k)} for q in asked]
        said = {
            "vllm": vllm.__version__, "settings": settings, "cost_ns": COST_NS, "accept_ppm": ACCEPT_PPM, "requests": kept,
            "steps": steps,
        }  # fmt: skip
        text = json.dumps(said, separators=(",", ":"))
        path = folder / f"{name}.json.xz"
        path.write_bytes(lzma.compress(text.encode(), preset=9))
        gone = sum(len(s["preempted"]) for s in steps)
        hits = sum(h for s in steps for _, h in s["admitted"])
        print(f"{name}: {len(steps)} steps, {gone} preemptions, {hits} cached tokens, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
