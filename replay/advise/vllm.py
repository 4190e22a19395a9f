"""vLLM's flags (checked with the parser of 0.32, vllm/engine/arg_utils.py) and what each means in a replay.

Rules that a combination has to keep (vllm/config/scheduler.py): ``max_num_batched_tokens`` ≥ ``max_num_seqs``, and ≥
``max_model_len`` without chunked prefill.
"""

from __future__ import annotations

from hoptrace.errors import UsageError
from hoptrace.replay.advise import families as of
from hoptrace.replay.advise.model import Change
from hoptrace.replay.advise.scene import Family, Found, Scene, size_of, whole

__all__ = ["FAMILIES", "UNJUDGED"]

UNJUDGED = (
    ("tensor-parallel-size", "the step cost is that of the recorded ranks; --cost roofline or aiconfigurator know others"),
    ("async-scheduling", "how much host time it hides is not in the trace"),
    ("long-prefill-token-threshold", "no policy of a replay has it"),
    ("enforce-eager", "it changes what a step costs, and the trace shows one side only"),
    ("stream-interval", "it changes when a client reads tokens, not when they are made"),
)
"""Flags that bear on performance and that a replay of one trace cannot tell, with the reason."""

_CPU_BLOCK, _GPU_BLOCK = 32, 16
_KERNELS = "How fast kernels are with other blocks is not in the trace."


def _sequences(scene: Scene, n: int) -> Change:
    now, tokens = scene.resolved.max_sequences, scene.resolved.max_batched_tokens
    typed, settings = [f"--max-num-seqs {n}"], [f"batching.max_sequences={n}"]
    if tokens is not None and n > tokens:
        typed.append(f"--max-num-batched-tokens {n}")
        settings.append(f"batching.max_batched_tokens={n}")
    return Change("max-num-seqs", tuple(typed), tuple(settings), str(now), size_of(now, n))


def _budget(scene: Scene, n: int) -> Change:
    now = scene.resolved.max_batched_tokens
    return Change(
        "max-num-batched-tokens", (f"--max-num-batched-tokens {n}",), (f"batching.max_batched_tokens={n}",), str(now),
        size_of(now, n),
    )  # fmt: skip


def _judge_budget(scene: Scene) -> Found:
    if not scene.resolved.chunked_prefill:
        return Found().unjudged("max-num-batched-tokens", "without chunked prefill it has to hold the longest sequence")
    return of.budget(scene, "max-num-batched-tokens", lambda n: _budget(scene, n))


def _made_budget(scene: Scene, text: str) -> Change:
    n = whole("max-num-batched-tokens", text, scene.resolved.max_sequences or 1)
    context = scene.resolved.context_tokens
    if not scene.resolved.chunked_prefill and context is not None and n < context:
        raise UsageError(
            f"--try max-num-batched-tokens={n}: without chunked prefill vLLM wants {context} (max_model_len) or more."
        )
    return _budget(scene, n)


def _caching(_: Scene) -> Change:
    return Change(
        "enable-prefix-caching", ("--enable-prefix-caching",), ("prefix_cache.enabled=true", "prefix_cache.kind=pool"), "off"
    )


def _judge_caching(scene: Scene) -> Found:
    why = "the trace holds no prefix blocks: capture with the proxy, the plug-in or KV events"
    return of.prefix_cache(
        scene, "enable-prefix-caching", "no-enable-prefix-caching", lambda: _caching(scene), unshared=why
    )  # fmt: skip


def _made_caching(scene: Scene, text: str) -> Change:
    if text in ("true", "on"):
        return _caching(scene)
    if text in ("false", "off"):
        return Change("enable-prefix-caching", ("--no-enable-prefix-caching",), ("prefix_cache.enabled=false",), "on")
    raise UsageError(f"--try enable-prefix-caching={text[:40]}: on or off is wanted.")


def _judge_chunks(scene: Scene) -> Found:
    found, r = Found(), scene.resolved
    if not r.chunked_prefill:
        found.changes.append(Change("enable-chunked-prefill", ("--enable-chunked-prefill",), (
            "batching.mode=mixed", "batching.chunked_prefill=true"), "off"))  # fmt: skip
        return found
    if scene.evidence.budget_ns == 0 and scene.evidence.stood["budget"] == 0:
        return found.cannot("no-enable-chunked-prefill", "no prompt had to be cut into chunks")
    if r.context_tokens is None:
        return found.unjudged("no-enable-chunked-prefill", "the trace does not tell max_model_len, which a step must hold then")
    tokens = max(r.context_tokens, r.max_batched_tokens or 0)
    typed = ["--no-enable-chunked-prefill"]
    settings = ["batching.mode=mixed", "batching.chunked_prefill=false"]
    if tokens != r.max_batched_tokens:
        typed.append(f"--max-num-batched-tokens {tokens}")
        settings.append(f"batching.max_batched_tokens={tokens}")
    found.changes.append(Change("no-enable-chunked-prefill", tuple(typed), tuple(settings), "on", 2.0))
    return found


def _judge_order(scene: Scene) -> Found:
    if scene.resolved.order == "priority":
        return Found().unjudged("scheduling-policy", "whether priorities are wanted is not a question of speed")
    if not scene.evidence.priorities:
        return Found().cannot("scheduling-policy priority", "no request bears a priority of its own")
    change = Change("scheduling-policy", ("--scheduling-policy priority",), ("batching.order=priority",), "fcfs")
    return Found([change])


def _kv(scene: Scene, tokens: int) -> Change:
    size, now = scene.resolved.block_size_tokens, scene.resolved.capacity_tokens
    # One block is never handed out (the null block, vllm/v1/core/block_pool.py).
    blocks = tokens // size + 1
    return Change(
        "num-gpu-blocks-override", (f"--num-gpu-blocks-override {blocks}",), (f"kv.capacity_tokens={(blocks - 1) * size}",),
        "unknown" if now is None else f"{now // size + 1}", size_of(now, tokens), needs=scene.room(tokens - (now or 0)),
        notes=("Instead of this flag --gpu-memory-utilization or --kv-cache-memory-bytes, if the device has the memory.",),
    )  # fmt: skip


def _judge_dtype(scene: Scene) -> Found:
    flag = "kv-cache-dtype fp8"
    r, s = scene.resolved, scene.server
    if (s.kv_dtype or "").startswith("fp8"):
        return Found()
    if s.config.get("device") == "cpu":
        return Found().unjudged(flag, "what it changes in a CPU's step is not in the trace")
    if not scene.evidence.lacks_kv:
        return Found().unjudged(flag, "KV space never lacked, and what it changes in a step's time is not in the trace")
    if r.capacity_tokens is None or scene.token_bytes is None:
        return Found().unjudged(flag, "the trace does not tell the KV space, or the shape of its KV")
    note = "What converting costs, what shorter reads spare, and what becomes of the answers is not in it."
    return Found(
        [
            Change(
                "kv-cache-dtype",
                ("--kv-cache-dtype fp8",),
                ("kv.dtype=fp8",),
                str(s.kv_dtype),
                1.0,
                "KV of lower precision",
                notes=(note,),
            )
        ]
    )


def _block(scene: Scene, size: int) -> Change:
    now = scene.resolved.block_size_tokens
    settings = (f"kv.block_size_tokens={size}",)
    return Change("block-size", (f"--block-size {size}",), settings, str(now), size_of(now, size), notes=(_KERNELS,))


def _judge_block(scene: Scene) -> Found:
    found, e, now = Found(), scene.evidence, scene.resolved.block_size_tokens
    if not e.lacks_kv and e.reused == 0:
        return found.cannot("block-size", "neither KV space lacked nor was a prefix found, which is all that it rounds")
    least = _CPU_BLOCK if scene.server.config.get("device") == "cpu" else _GPU_BLOCK
    if now <= least:
        return found.cannot("less of block-size", f"{least} is the smallest that the device's kernels take")
    if scene.blocks_tokens is not None and scene.blocks_tokens > now // 2 and not e.lacks_kv:
        return found.unjudged("less of block-size", f"the trace tells prefixes in blocks of {scene.blocks_tokens} tokens only")
    found.changes.append(_block(scene, max(least, now // 2 // least * least)))
    return found


def _watermark(scene: Scene, share: float) -> Change:
    now = scene.resolved.watermark_tokens
    held = "0.0" if not now else f"{now:,} tokens"
    return Change("watermark", (f"--watermark {share}",), (f"batching.watermark={share}",), held, 1.0 + share)


def _judge_watermark(scene: Scene) -> Found:
    if not scene.evidence.preemptions:
        return Found().cannot("watermark", "no request was preempted")
    return Found([_watermark(scene, w) for w in (0.01, 0.05)])


def _made_watermark(scene: Scene, text: str) -> Change:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise UsageError(f"--try watermark={text[:40]}: a share from 0 to below 1 is wanted.")
    return _watermark(scene, share)


def _judge_servers(scene: Scene) -> Found:
    n = scene.servers + 1
    now = str(scene.server.config.get("data_parallel_size") or scene.servers)
    note = "Requests go to the rank with the fewest in flight; what vLLM's own balancer and its coordinator cost is not in it."
    change = of.server_change(scene, "data-parallel-size", (f"--data-parallel-size {n}",), now, (note,))
    return of.another_server(scene, "data-parallel-size", [change])


def _judge_split(scene: Scene) -> Found:
    flag = "kv-transfer-config"
    if scene.servers > 1:
        return Found().unjudged(flag, "the trace has several servers already")
    if scene.evidence.beside_ns < 0.01:
        return Found().cannot(flag, "prompts and decoders hardly ever shared a step, which is what a split takes apart")
    typed = (
        """--kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'""",
        """and a second server with "kv_role":"kv_consumer" behind a proxy""",
    )
    settings = ("split.prefill=1", "split.decode=1", "split.first_token=recompute", "ceilings.links=infinite")
    label = "a prefill/decode split (--kv-transfer-config)"
    return Found([of.split_change(flag, typed, settings, label)])


def _judge_speculation(scene: Scene) -> Found:
    return of.speculation(scene, "speculative-config")


FAMILIES: tuple[Family, ...] = (
    Family(
        "max-num-seqs",
        lambda s: of.sequences(s, "max-num-seqs", lambda n: _sequences(s, n)),
        lambda s, text: _sequences(s, whole("max-num-seqs", text)),
    ),
    Family("max-num-batched-tokens", _judge_budget, _made_budget),
    Family("enable-prefix-caching", _judge_caching, _made_caching),
    Family("enable-chunked-prefill", _judge_chunks),
    Family("scheduling-policy", _judge_order),
    Family(
        "num-gpu-blocks-override",
        lambda s: of.kv_space(s, "num-gpu-blocks-override", lambda n: _kv(s, n)),
        lambda s, text: _kv(s, (whole("num-gpu-blocks-override", text, 2) - 1) * s.resolved.block_size_tokens),
    ),
    Family("kv-cache-dtype", _judge_dtype),
    Family("block-size", _judge_block, lambda s, text: _block(s, whole("block-size", text))),
    Family("watermark", _judge_watermark, _made_watermark),
    Family("data-parallel-size", _judge_servers),
    Family("kv-transfer-config", _judge_split),
    Family("speculative-config", _judge_speculation),
)
