"""Flags that several engines have under names of their own: when they can matter, which values are tried, what they mean.

Each function judges by the evidence first. What is left out says why in one line; what is tried goes by doublings from the
present value, and stops where a larger (smaller) value can do no more (no less).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hoptrace.replay.advise.model import Change
from hoptrace.replay.advise.scene import Found, Scene, of_share, size_of

__all__ = [
    "another_server", "budget", "kv_space", "prefix_cache", "sequences", "server_change", "speculation", "split_change",
]  # fmt: skip

Typed = Callable[[int], Change]
_LEAST_BUDGET = 16


def sequences(scene: Scene, flag: str, make: Typed) -> Found:
    """How many requests run at once: more only where one ever waited for a place, fewer only where several ran."""
    found, e, now = Found(), scene.evidence, scene.resolved.max_sequences
    if now is None:
        return found.unjudged(flag, "the trace does not tell how many sequences may run at once")
    if e.stood["slots"] > 0:
        wanted = max(e.most_waiting, now + 1)
        value = now
        for _ in range(3):
            value *= 2
            found.changes.append(make(value))
            if value >= wanted:
                break
    else:
        found.cannot(f"more of {flag}", f"no request waited for a place: {e.most_running:,} of {now:,} were taken at most")
    if e.most_running <= 1:
        return found.cannot(f"less of {flag}", "never did two requests run at once")
    fewer = [v for v in _halves(now) if v < e.most_running]
    found.changes += [make(v) for v in fewer[:2]]
    return found


def budget(scene: Scene, flag: str, make: Typed, *, beside: bool = True) -> Found:
    """Tokens of a step: more only where steps were as large as it, fewer only where prompts were computed beside decoders.

    ``beside``: whether the engine computes prompts and decoders in one step.
    """
    found, e, now = Found(), scene.evidence, scene.resolved.max_batched_tokens
    if now is None:
        return found.unjudged(flag, "the trace does not tell how many tokens a step may have")
    if e.budget_ns > 0 or e.stood["budget"] > 0:
        found.changes += [make(v) for v in (2 * now, 4 * now)]
    else:
        found.cannot(f"more of {flag}", f"no step was that large: {e.most_step_tokens:,} of {now:,} tokens at most")
    if not beside:
        return found.cannot(f"less of {flag}", "prompts are computed before anybody's next token, in whatever chunks")
    if e.most_beside == 0:
        return found.cannot(f"less of {flag}", "no step held a prompt beside decoders, so smaller chunks would spare nobody")
    largest = e.most_beside
    least = max(scene.resolved.max_sequences or 1, _LEAST_BUDGET)
    smaller = [v for v in _halves(now) if least <= v < largest]
    if not smaller:
        return found.cannot(
            f"less of {flag}", f"prompts had {largest:,} tokens of a step at most: a smaller budget hardly differs"
        )
    found.changes += [make(v) for v in smaller[:3]]
    return found


def prefix_cache(scene: Scene, on: str, off: str, make: Callable[[], Change], *, unshared: str) -> Found:
    """Switched on where prompts begin alike. ``unshared``: how the engine's users get prefix blocks into a trace."""
    found, e = Found(), scene.evidence
    if scene.resolved.cache is not None:
        if e.reused == 0:
            return found.unjudged(off, "no prompt found a beginning in the cache; what looking for it costs is not in a replay")
        return found.cannot(off, f"the cache spares {of_share(e.reused)} of the prompt tokens")
    if e.reusable is None:
        return found.unjudged(on, unshared)
    if e.reusable < 0.01:
        return found.cannot(on, f"{of_share(e.reusable)} of the prompt tokens were in an earlier prompt too")
    found.changes.append(make())
    return found


def kv_space(scene: Scene, flag: str, make: Typed) -> Found:
    """More KV space, where it ever lacked; ``make`` gets tokens."""
    found, e, now = Found(), scene.evidence, scene.resolved.capacity_tokens
    if now is None:
        return found.unjudged(flag, "the trace does not tell the KV space")
    if not e.lacks_kv:
        return found.cannot(flag, f"KV space never lacked: requests held {of_share(e.most_kv_tokens / now)} of it at most")
    found.changes += [make(now * 3 // 2), make(now * 2)]
    return found


def another_server(scene: Scene, flag: str, changes: Sequence[Change]) -> Found:
    """One more server like this one, where requests meet at all."""
    found, e = Found(), scene.evidence
    if e.mean_running < 1.05 and not any(e.stood.values()):
        return found.cannot(flag, f"requests hardly meet: {e.mean_running:.2f} run at once on average")
    found.changes += changes
    return found


def server_change(
    scene: Scene, flag: str, typed: tuple[str, ...], now: str, notes: tuple[str, ...] = (), label: str = ""
) -> Change:
    """The change to one more server, least requests in flight first."""
    n = scene.servers + 1
    return Change(
        flag, typed, (f"servers.count={n}", "routing.kind=least_load"), now, size_of(scene.servers, n),
        needs="another server like it", label=label, notes=notes,
    )  # fmt: skip


def split_change(flag: str, typed: tuple[str, ...], settings: tuple[str, ...], label: str) -> Change:
    """The change to a prefill and a decode server: a bound, since one server's trace does not tell what transfers take."""
    note = "A bound: transfers take no time in it. hoptrace replay --policy pd-1-1 with a [links] of yours says what they take."
    return Change(flag, typed, settings, "one server for both", 2.0, "another server like it", label, True, (note,))


def speculation(scene: Scene, flag: str) -> Found:
    """Never judged: without proposals a trace does not tell how many are accepted, with them not what a step costs alone."""
    why = "nobody proposed tokens in this trace, so how many would be accepted is unknown"
    if scene.speculates:
        why = "the trace ran with it, and its step cost cannot be told apart from the proposals'"
    return Found().unjudged(flag, why)


def _halves(now: int) -> list[int]:
    """Powers of two below ``now``, the largest first; half of it before them where it is none."""
    found = [now // 2] if now >= 2 else []
    power = 1 << max(0, (now // 2).bit_length() - 1)
    while power >= 1:
        if power not in found and power < now:
            found.append(power)
        power //= 2
    return found
