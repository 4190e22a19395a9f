"""What vLLM's own schedulers decide where KV moves, on a virtual clock: a host tier and a prefill/decode pair.

Run as ref_vllm_scheduler.py (which it uses): ``python benchmarks/support/ref_vllm_transfers.py
tests/data/reference/vllm_transfers``. Tiers: vLLM's ``OffloadingConnector`` with its ``CPUOffloadingManager`` (LRU), prompts
only; a store is done at the end of its step, a load takes ``base + blocks × per block``. Pairs: a prefill and a decode scheduler
and, between them, a connector that decides nothing but what NIXL's does: the decode side loads the whole prompt that it has not
got, once; the prefill side keeps a request's blocks until they have been read.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import ref_vllm_scheduler as base
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

MS = base.MS
LOAD_NS = {"base": 2 * MS, "block": 300_000}


class PairConnector(KVConnectorBase_V1):
    """Decides what NIXL's does (v1/nixl/scheduler.py), moves nothing; ``loads``: (request, tokens) begun since last asked."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.loads: list[tuple[int, int]] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """The whole prompt comes from the other side."""
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        missing = request.num_prompt_tokens - num_computed_tokens
        return missing, missing > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """One transfer a request."""
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            self.loads.append((int(request.request_id), num_external_tokens))
            request.kv_transfer_params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing for a worker."""
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """The prefill side's blocks stay until they have been read."""
        return bool((request.kv_transfer_params or {}).get("do_remote_decode")), None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """No worker."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No worker."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """No worker."""

    def wait_for_save(self) -> None:
        """No worker."""


class Engine:
    """One of vLLM's schedulers on the virtual clock."""

    def __init__(self, settings: dict[str, Any], transfers: KVTransferConfig) -> None:
        self.settings = settings
        self.made = base.scheduler(settings, transfers)
        self.connector = self.made.connector
        if settings.get("host_blocks"):
            self.connector.connector_scheduler.manager = CPUOffloadingManager(num_chunks=settings["host_blocks"])
        self.hasher = get_request_block_hasher(settings["block"], sha256) if settings["prefix_caching"] else None
        self.decoding: set[int] = set()
        self.emitted: dict[int, int] = {}
        self.steps: list[dict[str, Any]] = []
        self.end_ns: int | None = None
        self.pending: Any = None
        self.remote: set[int] = set()
        self.load_job: dict[int, int] = {}

    def add(self, i: int, q: dict[str, Any], output: int, **params: Any) -> None:
        """Queue a request."""
        sampling = SamplingParams(
            max_tokens=output, ignore_eos=True, extra_args={"kv_transfer_params": params} if params else None
        )
        self.made.add_request(
            Request(
                request_id=f"{i:06d}", prompt_token_ids=q["tokens"], pooling_params=None, arrival_time=float(q["arrival_ns"]),
                sampling_params=sampling, block_hasher=self.hasher,
            )
        )  # fmt: skip
        self.emitted[i] = 0

    def begin(self, now: int) -> tuple[list[tuple[int, int]], bool]:
        """A pass, and its step if there is one: loads begun (request, blocks); whether a step began or one was driven out."""
        was_running = {int(r.request_id) for r in self.made.running}
        out = self.made.schedule()
        counts = {int(r): n for r, n in out.num_scheduled_tokens.items()}
        preempted = sorted(int(r) for r in out.preempted_req_ids or ())
        self.decoding -= set(preempted)
        computed = {r: self.made.requests[f"{r:06d}"].num_computed_tokens - n for r, n in counts.items()}
        loads, jobs = [], []
        if isinstance(self.connector, PairConnector):
            loads = [(r, -(-n // self.settings["block"])) for r, n in self.connector.loads]
            self.connector.loads = []
        else:
            meta = out.kv_connector_metadata
            for job, what in meta.load_jobs.items():
                loads.append((int(what.req_id), len(what.src_spec.block_ids)))
                self.load_job[int(what.req_id)] = job
            jobs = list(meta.store_jobs)
        pool = self.made.kv_cache_manager.block_pool
        row = {
            "start_ns": now,
            "parts": [[r, n, computed[r]] for r, n in counts.items()],
            "preempted": preempted,
            "held": self.settings["blocks"] - pool.get_num_free_blocks(),
            "admitted": [[r, computed[r]] for r in counts if r not in was_running],
            "running": len(self.made.running),
            "waiting": len(self.made.waiting) + len(self.made.kv_holding_waiting),
            "loads": [list(x) for x in loads],
        }
        if not counts:
            if jobs:
                self._stored(jobs)
            if loads or preempted:
                self.steps.append(row)
            self.made.update_from_output(out, ModelRunnerOutput(req_ids=[], req_id_to_index={}))
            return loads, bool(preempted)
        # The step that computes the last prompt token of one whose KV came from elsewhere is a decoder's: see the README.
        single = {r for r in counts if r in self.remote}
        self.decoding |= single
        self.remote -= single
        prefill = sum(n for r, n in counts.items() if r not in self.decoding)
        decoders = sum(r in self.decoding for r in counts)
        self.end_ns = now + base.STEP_NS + base.PREFILL_TOKEN_NS * prefill + base.DECODER_NS * decoders
        self.pending = (out, list(counts), jobs)
        self.steps.append(row)
        return loads, True

    def _stored(self, jobs: list[int]) -> None:
        meta = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))
        self.made._update_from_kv_xfer_finished(KVConnectorOutput(kv_connector_worker_meta=meta))

    def finish(self) -> list[int]:
        """The step's end: requests that have ended."""
        out, order, jobs = self.pending
        sampled: list[list[int]] = []
        for r in order:
            q = self.made.requests[f"{r:06d}"]
            if q.num_computed_tokens < q.num_tokens:
                sampled.append([])
                continue
            sampled.append([100_000 + r * 10_000 + self.emitted[r]])
            self.emitted[r] += 1
            self.decoding.add(r)
        ids = [f"{r:06d}" for r in order]
        before = {int(r.request_id) for r in self.made.running}
        result = ModelRunnerOutput(req_ids=ids, req_id_to_index={r: j for j, r in enumerate(ids)}, sampled_token_ids=sampled)
        if jobs:
            self._stored(jobs)
        self.made.update_from_output(out, result)
        self.pending, self.end_ns = None, None
        return sorted(before - {int(r.request_id) for r in self.made.running})

    def loaded(self, r: int) -> None:
        """A load has ended."""
        meta = None
        if r in self.load_job:
            meta = OffloadingWorkerMetadata(completed_jobs={self.load_job.pop(r): 1})
        self.made._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={f"{r:06d}"}, kv_connector_worker_meta=meta))

    def sent(self, r: int) -> None:
        """A hand-over has ended: the blocks here are free."""
        self.made._update_from_kv_xfer_finished(KVConnectorOutput(finished_sending={f"{r:06d}"}))


def run(prefill: Engine | None, engine: Engine, asked: list[dict[str, Any]], arrange_ns: int) -> None:
    """All requests through the pair, or through the one engine; the steps are kept in the engines."""
    first = prefill or engine
    engines = [e for e in (prefill, engine) if e]
    arrivals = sorted((q["arrival_ns"], 0, i) for i, q in enumerate(asked))
    handed: list[tuple[int, int]] = []
    loads: list[tuple[int, int, int]] = []
    number = 0
    while True:
        times = [e.end_ns for e in engines if e.end_ns is not None] + [t for t, _, _ in arrivals[:1]] + [t for t, _ in handed]
        times += [t for t, _, _ in loads]
        if not times:
            break
        now = min(times)
        woken = dict.fromkeys(range(len(engines)), False)
        for t, n, r in sorted(loads, key=lambda x: x[1]):
            if t == now:
                loads.remove((t, n, r))
                engine.loaded(r)
                if prefill:
                    prefill.sent(r)
                woken = dict.fromkeys(woken, True)
        for j, e in enumerate(engines):
            if e.end_ns == now:
                ended = e.finish()
                woken[j] = True
                if e is prefill:
                    handed += [(now + arrange_ns, r) for r in ended]
        while arrivals and arrivals[0][0] == now:
            i = arrivals.pop(0)[2]
            if prefill:
                first.add(i, asked[i], 1, do_remote_decode=True)
            else:
                first.add(i, asked[i], asked[i]["output"])
            woken[0] = True
        for t, r in sorted(handed):
            if t == now:
                handed.remove((t, r))
                engine.add(r, asked[r], asked[r]["output"], do_remote_prefill=True)
                engine.remote.add(r)
                woken[1] = True
        for j, e in enumerate(engines):
            again = woken[j] and e.end_ns is None
            while again:
                begun, more = e.begin(now)
                for r, blocks in begun:
                    loads.append((now + LOAD_NS["base"] + blocks * LOAD_NS["block"], number, r))
                    number += 1
                again = more and e.end_ns is None


BASE = {**base.BASE, "prefix_caching": True}


def tier(settings: dict[str, Any]) -> Engine:
    """An engine with vLLM's host tier."""
    extra = {"cpu_bytes_to_use": 1 << 30, "offload_prompt_only": True}
    return Engine(
        settings, KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    )


def half(settings: dict[str, Any], role: str) -> Engine:
    """A prefill (kv_producer) or decode engine (kv_consumer)."""
    where = KVTransferConfig(kv_connector="PairConnector", kv_connector_module_path="ref_vllm_transfers", kv_role=role)
    return Engine(settings, where)


def write(folder: Path, name: str, said: dict[str, Any]) -> None:
    """One scenario."""
    path = folder / f"{name}.json.xz"
    path.write_bytes(lzma.compress(json.dumps(said, separators=(",", ":")).encode(), preset=9))
    steps = said.get("steps", []) + said.get("decode_steps", [])
    gone, loads = sum(len(s["preempted"]) for s in steps), sum(len(s["loads"]) for s in steps)
    print(f"{name}: {len(steps)} steps, {gone} preemptions, {loads} loads, {path.stat().st_size} bytes")


def main(folder: Path) -> None:
    """Write all scenarios."""
    init_none_hash(sha256)
    folder.mkdir(parents=True, exist_ok=True)
    keep = ("arrival_ns", "prompt", "output", "blocks")
    for seed, name, gap, whole, changes in (
        (31, "tier", 40, 0.0, {"blocks": 150, "host_blocks": 5000, "context": 1600}),
        (32, "tier_evictions", 40, 0.0, {"blocks": 150, "host_blocks": 300, "context": 1600}),
        (33, "tier_whole_prompts_again", 40, 0.4, {"blocks": 150, "host_blocks": 5000, "context": 1600}),
        (34, "tier_preemptions", 25, 0.0, {"blocks": 100, "host_blocks": 5000, "context": 1600, "max_sequences": 32}),
        (35, "tier_few_places", 40, 0.0, {"blocks": 150, "host_blocks": 400, "context": 1600, "max_sequences": 3}),
    ):
        rng = random.Random(seed)
        asked = base.lengths(rng, 120, gap, (5, 300), (5, 150))
        base.shared_text(asked, rng, 16, 40, whole, 0)
        base.block_ids(asked, 16)
        settings = {**BASE, **changes}
        engine = tier(settings)
        run(None, engine, asked, 0)
        kept = [{k: q[k] for k in keep if q.get(k)} for q in asked]
        said = {"vllm": vllm.__version__, "settings": settings, "cost_ns": base.COST_NS, "load_ns": LOAD_NS, "requests": kept}
        write(folder, name, {**said, "steps": engine.steps})
    for seed, name, caching, prefill, decode in (
        (41, "pair", False, {}, {}),
        (42, "pair_few_decode_places", False, {}, {"max_sequences": 4}),
        (43, "pair_tight_decode_kv", False, {}, {"blocks": 110, "context": 1600}),
        (44, "pair_tight_prefill_kv", False, {"blocks": 110, "context": 1600}, {"max_sequences": 6}),
        (45, "pair_prefix", True, {"blocks": 300, "context": 1600}, {"blocks": 200, "context": 1600}),
    ):
        rng = random.Random(seed)
        asked = base.lengths(rng, 120, 30, (16, 500), (10, 200))
        if caching:
            base.shared_text(asked, rng, 16, 12, 0.0)
        else:
            base.own_text(asked)
        base.block_ids(asked, 16)
        one, other = ({**BASE, "prefix_caching": caching, **c} for c in (prefill, decode))
        halves = half(one, "kv_producer"), half(other, "kv_consumer")
        run(*halves, asked, 1 * MS)
        kept = [{k: q[k] for k in keep if q.get(k) and (caching or k != "blocks")} for q in asked]
        said = {
            "vllm": vllm.__version__, "settings": one, "decode_settings": other, "cost_ns": base.COST_NS, "load_ns": LOAD_NS,
            "arrange_ns": 1 * MS, "requests": kept, "steps": halves[0].steps, "decode_steps": halves[1].steps,
        }  # fmt: skip
        write(folder, name, said)


if __name__ == "__main__":
    import ref_vllm_transfers

    ref_vllm_transfers.main(Path(sys.argv[1]))
