"""llama.cpp's slots: each keeps its last prompt, and a request that begins like it starts behind the common part."""

from __future__ import annotations

from hoptrace.replay.plain.requests import Request

__all__ = ["Slots"]


class Slots:
    """The slots of one engine."""

    def __init__(self, n: int) -> None:
        self._prompt: list[Request | None] = [None] * n
        self._busy = [False] * n
        self._used = [-1] * n
        self._of: dict[int, int] = {}

    def choose(self, r: Request) -> tuple[int, int]:
        """llama.cpp's choice among the free slots (there must be one): (slot, prompt tokens found in it)."""
        best, found = -1, 0
        free = [s for s, busy in enumerate(self._busy) if not busy]
        for s in free:
            tokens = _common(r, self._prompt[s])
            # slot_prompt_similarity, 0.1 by default: a shorter common prefix does not bind a request to a slot.
            if tokens > found and 10 * tokens > r.prompt_tokens:
                best, found = s, tokens
        if best >= 0:
            return best, found
        for s in free:
            if best < 0 or self._used[s] <= self._used[best]:
                best = s
        return best, _common(r, self._prompt[best])

    def take(self, r: Request, slot: int) -> None:
        """A request begins in a slot."""
        self._busy[slot], self._prompt[slot], self._of[r.number] = True, r, slot

    def leave(self, r: Request, now: int | None) -> None:
        """A request leaves its slot: done at ``now``, or (null) driven out, which loses the prompt."""
        slot = self._of.pop(r.number)
        self._busy[slot] = False
        if now is None:
            self._prompt[slot] = None
        else:
            self._used[slot] = now


def _common(r: Request, other: Request | None) -> int:
    """Tokens of the leading blocks that two prompts have in common."""
    tokens = 0
    if other is not None:
        for a, b, end in zip(r.ids, other.ids, r.ends, strict=False):
            if a != b:
                break
            tokens = end
    return tokens
