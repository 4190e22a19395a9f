"""SGLang's flags (python/sglang/srt/server_args.py, as of 0.5.23) and what each means in a replay.

Its scheduler computes prompts in steps of their own unless ``--enable-mixed-chunk`` is set; ``--chunked-prefill-size`` bounds
the prompt tokens of such a step. The replay admits as vLLM does: SGLang also keeps room for a share of the answers to come
(``--schedule-conservativeness``), which no policy has.
"""

from __future__ import annotations

from hoptrace.replay.advise import families as of
from hoptrace.replay.advise.model import Change
from hoptrace.replay.advise.scene import Family, Found, Scene, size_of, whole

__all__ = ["FAMILIES", "UNJUDGED"]

UNJUDGED = (
    ("tp-size", "the step cost is that of the recorded ranks; --cost roofline or aiconfigurator know others"),
    (
        "schedule-policy",
        "a replay knows fcfs; lpm, dfs-weight, lof and SGLang's own priority are held to no reference",
    ),
    ("schedule-conservativeness", "no policy of a replay keeps room for answers to come"),
    ("disable-overlap-schedule", "how much host time it hides is not in the trace"),
    (
        "max-prefill-tokens",
        "a replay has one budget for a chunk and for the prompts of a step together",
    ),
)
"""Flags that bear on performance and that a replay of one trace cannot tell, with the reason."""

_ADMITS = "SGLang also keeps room for answers to come (--schedule-conservativeness), so it may admit fewer."


def _sequences(scene: Scene, n: int) -> Change:
    now = scene.resolved.max_sequences
    notes = (_ADMITS,) if now is not None and n > now else ()
    return Change(
        "max-running-requests", (f"--max-running-requests {n}",), (f"batching.max_sequences={n}",), str(now), size_of(now, n),
        notes=notes,
    )  # fmt: skip


def _budget(scene: Scene, n: int) -> Change:
    now = scene.resolved.max_batched_tokens
    return Change(
        "chunked-prefill-size", (f"--chunked-prefill-size {n}",),
        (f"batching.max_batched_tokens={n}", f"batching.mode={scene.resolved.mode}", "batching.chunked_prefill=true"), str(now),
        size_of(now, n),
    )  # fmt: skip


def _judge_budget(scene: Scene) -> Found:
    return of.budget(
        scene, "chunked-prefill-size", lambda n: _budget(scene, n), beside=scene.resolved.mode == "mixed"
    )  # fmt: skip


def _judge_mixed(scene: Scene) -> Found:
    flag, found, e = "enable-mixed-chunk", Found(), scene.evidence
    if scene.resolved.mode == "mixed":
        return found.unjudged(flag, "it is on, as far as the trace tells")
    if e.most_running <= 1:
        return found.cannot(flag, "never did two requests run at once")
    settings = ("batching.mode=mixed", "batching.chunked_prefill=true")
    note = "Unless the recording had steps of both kinds in one, their price is extrapolated."
    found.changes.append(Change(flag, ("--enable-mixed-chunk",), settings, "off", 1.0, notes=(note,)))
    return found


def _caching(_: Scene) -> Change:
    settings = ("prefix_cache.enabled=true", "prefix_cache.kind=pool")
    return Change("disable-radix-cache", ("(leave out --disable-radix-cache)",), settings, "off")


def _judge_caching(scene: Scene) -> Found:
    why = "the trace holds no prefix blocks: capture with the proxy or KV events"
    return of.prefix_cache(
        scene, "without disable-radix-cache", "disable-radix-cache", lambda: _caching(scene), unshared=why
    )  # fmt: skip


def _kv(scene: Scene, tokens: int) -> Change:
    now = scene.resolved.capacity_tokens
    return Change(
        "max-total-tokens", (f"--max-total-tokens {tokens}",), (f"kv.capacity_tokens={tokens}",), str(now or "unknown"),
        size_of(now, tokens), needs=scene.room(tokens - (now or 0)),
        notes=("Instead of this flag --mem-fraction-static, if the device has the memory.",),
    )  # fmt: skip


def _judge_dtype(scene: Scene) -> Found:
    flag = "kv-cache-dtype fp8_e5m2"
    if (scene.server.kv_dtype or "").startswith("fp8"):
        return Found()
    if not scene.evidence.lacks_kv:
        return Found().unjudged(flag, "KV space never lacked, and what it changes in a step's time is not in the trace")
    if scene.resolved.capacity_tokens is None or scene.token_bytes is None:
        return Found().unjudged(flag, "the trace does not tell the KV space, or the shape of its KV")
    note = "What converting costs, what shorter reads spare, and what becomes of the answers is not in it."
    typed, settings = ("--kv-cache-dtype fp8_e5m2",), ("kv.dtype=fp8_e5m2",)
    return Found(
        [Change("kv-cache-dtype", typed, settings, str(scene.server.kv_dtype), 1.0, "KV of lower precision", notes=(note,))]
    )


def _judge_servers(scene: Scene) -> Found:
    n = scene.servers + 1
    now = str(scene.server.config.get("dp_size") or scene.servers)
    note = "Requests go to the server with the fewest in flight (--load-balance-method total_requests)."
    typed = (f"--dp-size {n}", "--load-balance-method total_requests")
    return of.another_server(scene, "dp-size", [of.server_change(scene, "dp-size", typed, now, (note,), typed[0])])


def _judge_split(scene: Scene) -> Found:
    flag, e = "disaggregation-mode", scene.evidence
    if scene.servers > 1:
        return Found().unjudged(flag, "the trace has several servers already")
    if e.mean_running < 1.05:
        return Found().cannot(flag, f"requests hardly meet: {e.mean_running:.2f} run at once on average")
    typed = ("--disaggregation-mode prefill", "and a second server with --disaggregation-mode decode behind a router")
    settings = ("split.prefill=1", "split.decode=1", "ceilings.links=infinite")
    label = "a prefill/decode split (--disaggregation-mode)"
    return Found([of.split_change(flag, typed, settings, label)])


def _judge_speculation(scene: Scene) -> Found:
    return of.speculation(scene, "speculative-algorithm")


FAMILIES: tuple[Family, ...] = (
    Family(
        "max-running-requests",
        lambda s: of.sequences(s, "max-running-requests", lambda n: _sequences(s, n)),
        lambda s, text: _sequences(s, whole("max-running-requests", text)),
    ),
    Family("chunked-prefill-size", _judge_budget, lambda s, text: _budget(s, whole("chunked-prefill-size", text))),
    Family("enable-mixed-chunk", _judge_mixed),
    Family("disable-radix-cache", _judge_caching),
    Family(
        "max-total-tokens",
        lambda s: of.kv_space(s, "max-total-tokens", lambda n: _kv(s, n)),
        lambda s, text: _kv(s, whole("max-total-tokens", text)),
    ),
    Family("kv-cache-dtype", _judge_dtype),
    Family("dp-size", _judge_servers),
    Family("disaggregation-mode", _judge_split),
    Family("speculative-algorithm", _judge_speculation),
)
