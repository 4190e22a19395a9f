"""llama.cpp's flags (common/arg.cpp and tools/server, build 11434) and what each means in a replay.

Slots share ``-c`` evenly unless ``--kv-unified`` is set (which an explicit ``-np`` leaves off), so more slots of the same length
want a larger ``-c``. Prompts begin in any iteration beside the tokens of running slots, up to ``-b`` together.
"""

from __future__ import annotations

from hoptrace.replay.advise import families as of
from hoptrace.replay.advise.model import Change
from hoptrace.replay.advise.scene import Family, Found, Scene, size_of, whole

__all__ = ["FAMILIES", "UNJUDGED"]

UNJUDGED = (
    ("ubatch-size", "what a step costs in passes of another size is not in the trace"),
    ("cache-reuse", "it finds equal text inside prompts, and a trace knows only how they begin"),
    ("cache-type-k, -v", "what q8_0 changes in a step's time is not in the trace, and slots never lack KV of their own"),
    ("no-cont-batching", "no policy of a replay has it"),
    ("cache-ram", "the host's prompt cache is not modelled"),
    ("threads, flash-attn", "they change what a step costs, and the trace shows one side only"),
    ("spec-type", "how many proposed tokens would be accepted is unknown"),
)
"""Flags that bear on performance and that a replay of one trace cannot tell, with the reason."""

_PHYSICAL = 512
"""llama.cpp's default of ``-ub``; ``-b`` below it makes it as small (src/llama-context.cpp)."""


def _slots(scene: Scene, n: int) -> Change:
    r, now = scene.resolved, scene.resolved.max_sequences
    typed, settings, notes = [f"-np {n}"], [f"batching.max_sequences={n}"], []
    present, context = f"-np {now}", r.context_tokens
    if context is not None and not scene.server.config.get("kv_unified"):
        typed.append(f"-c {n * context}")
        present += f" -c {(now or 0) * context}"
        if r.capacity_tokens is not None:
            settings.append(f"kv.capacity_tokens={n * context}")
        if now is not None and n > now:
            notes.append(f"It takes {scene.room((n - now) * context)}.")
    return Change("parallel", tuple(typed), tuple(settings), present, size_of(now, n), notes=tuple(notes))


def _budget(scene: Scene, n: int) -> Change:
    now = scene.resolved.max_batched_tokens
    physical = scene.server.config.get("n_ubatch")
    smaller = n < (physical if isinstance(physical, int) else _PHYSICAL)
    notes = ("It makes -ub as small, so a step's passes over the weights stay one.",) if smaller else ()
    return Change("batch-size", (f"-b {n}",), (f"batching.max_batched_tokens={n}",), f"-b {now}", size_of(now, n), notes=notes)


def _caching(_: Scene) -> Change:
    return Change("cache-prompt", ("--cache-prompt",), ("prefix_cache.enabled=true", "prefix_cache.kind=slot"), "off")


def _judge_caching(scene: Scene) -> Found:
    why = "the trace holds no prefix blocks: capture with the proxy"
    return of.prefix_cache(scene, "cache-prompt", "no-cache-prompt", lambda: _caching(scene), unshared=why)


def _judge_servers(scene: Scene) -> Found:
    n = scene.servers + 1
    typed = ("a second llama-server like this one" if n == 2 else f"{n} llama-servers like this one",)
    note = "On cores of its own, behind a router that sends each request where fewest are."
    return of.another_server(
        scene, "another llama-server", [of.server_change(scene, "another llama-server", typed, str(scene.servers), (note,))]
    )  # fmt: skip


FAMILIES: tuple[Family, ...] = (
    Family(
        "parallel",
        lambda s: of.sequences(s, "parallel", lambda n: _slots(s, n)),
        lambda s, text: _slots(s, whole("parallel", text)),
    ),
    Family(
        "batch-size",
        lambda s: of.budget(s, "batch-size", lambda n: _budget(s, n)),
        lambda s, text: _budget(s, whole("batch-size", text)),
    ),
    Family("cache-prompt", _judge_caching),
    Family("another llama-server", _judge_servers),
)
