"""Which requests tell most of what a server's steps cost: prompts alone, decoders alone, both together, long contexts.

A pure function of the server's limits and its pace. Four kinds of phases, each in up to two rounds, so that a machine whose speed
drifts shows it in both halves and does not lend it to one kind:

- *decoders alone*: requests that begin together and end one after another, each some tokens later than the one before: every
  batch from all of them down to one is seen, with no more requests than the largest.
- *prompts beside decoders*: one, half and all but one of the sequences decode, while prompts come one by one.
- *prompts alone*: lengths in a geometric row from a few tokens to the context, and the token budget; one output token each, so
  that nothing decodes.
- *long contexts*: prompts of half the context and of nearly all of it, which then decode together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

__all__ = ["FEWEST", "Limits", "Pace", "Phase", "Probe", "design", "paced"]

FEWEST = 8
"""Requests of the smallest probe; two of them tell the pace."""
_PACE_OUT = 8
_SHORT = 16  # tokens: of the prompts whose decoding is of interest, and of the shortest prompt
_MARGIN = 0.97  # words are not quite tokens: lengths keep this much below what the server takes
_DECODER = 0.5  # what a further decoder is taken to add to a step, of a step of one: before the first phase nobody knows
_FEW = 8  # lengths of prompts alone that stay where time is short
_GAP = 3  # steps of decoders alone between prompts
_STAIR = (2, 8)  # output tokens by which each of the decoders outlasts the one before: least, most
_LONG_OUT = 12
# Shares of the time, by kind of phase.
_SHARES = {"prompts alone": 0.35, "decoders alone": 0.25, "prompts beside decoders": 0.25, "long contexts": 0.15}
_PLAN = 0.8  # of the time limit that is planned for


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server takes: sequences at once, tokens in a step, context of a request, KV space in tokens (null: unlimited)."""

    sequences: int = 8
    budget: int = 2048
    context: int = 2048
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds for a prompt token, and for a step of one decoder."""

    prompt_token_s: float
    step_s: float

    def step(self, decoders: int) -> float:
        """Seconds for a step of so many decoders, a guess on the dear side."""
        return self.step_s * (1 + _DECODER * max(decoders - 1, 0))


@dataclass(frozen=True, slots=True)
class Probe:
    """One request: sent so many seconds after its phase begins."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests that are sent in one go; the next phase begins when all are answered. ``kind``: of the four."""

    kind: str
    probes: tuple[Probe, ...]
    expected_s: float


def paced(limits: Limits, *, token_s: float | None = None, at_most_s: float = 120.0) -> Phase:
    """One of the first two requests, from which the pace is told: a short prompt; with ``token_s``, the seconds that each of its
    tokens took, a longer one that takes a twentieth of the time at most."""
    most = _most(limits)
    if token_s is None:
        return Phase("pace", (Probe(0.0, min(_SHORT, most), _PACE_OUT),), 0.0)
    length = min(256, most // 2, int(0.05 * at_most_s / token_s) if token_s > 0 else 256)
    return Phase("pace", (Probe(0.0, min(max(2 * _SHORT, length), most), _PACE_OUT),), 0.0)


def design(limits: Limits, pace: Pace, *, requests: int = 60, at_most_s: float = 120.0) -> list[Phase]:
    """The phases, in the order in which they are sent; with the two of :func:`paced` at most ``requests`` requests.

    Lengths are as large as the limits and the time allow: by the pace all phases end within 0.8 of ``at_most_s``, as far as
    lengths can be shortened (a prompt has 16 tokens or more).
    """
    limits = replace(limits, sequences=_at_once(limits))
    left = max(requests, FEWEST) - 2
    seconds = {kind: share * at_most_s * _PLAN for kind, share in _SHARES.items()}
    rounds = 2 if left >= 40 else 1
    # A large batch is what requests are short for: where the sequences are many, one flight of stairs, as wide as can be.
    twice = rounds == 2 and limits.sequences <= 0.17 * left
    stairs = [max(1, min(limits.sequences, round((0.17 if twice else 0.4) * left)))] * (2 if twice else 1)
    long = max(1, min(round(0.13 * left), 2 * limits.sequences))
    rest = left - sum(stairs) - long
    beside = rest // 2 if limits.sequences > 1 else 0
    prompts = rest - beside
    # Where it is stopped early, what most steps of a server hold has been seen.
    found: dict[str, list[Phase]] = {
        "decoders alone": [_stair(limits, pace, n, seconds["decoders alone"] / len(stairs)) for n in stairs],
        "prompts beside decoders": _beside(limits, pace, beside, seconds["prompts beside decoders"]),
        "prompts alone": _prompts(limits, pace, prompts, rounds, seconds["prompts alone"]),
        "long contexts": _long(limits, pace, long, rounds, seconds["long contexts"]),
    }
    ordered = []
    for r in range(max(len(v) for v in found.values())):
        ordered += [phases[r] for phases in found.values() if r < len(phases)]
    return ordered


def _at_once(limits: Limits) -> int:
    """So many sequences, each a token longer than the one before, that context and KV space hold them."""
    context = int(limits.context * _MARGIN)
    kv = math.inf if limits.kv_tokens is None else limits.kv_tokens * _MARGIN
    n = max(1, min(limits.sequences, context - _SHORT))
    while n > 1 and n * _SHORT + n * (n + 1) // 2 > kv:
        n -= 1
    return n


def _most(limits: Limits) -> int:
    """The longest prompt, an output token beside it."""
    room = limits.context if limits.kv_tokens is None else min(limits.context, limits.kv_tokens)
    return max(1, int(room * _MARGIN) - _PACE_OUT)


def _row(least: int, most: int, n: int) -> list[int]:
    """n lengths from ``least`` to ``most``, each so many times the one before."""
    least = min(least, most)
    if n == 1:
        return [most]
    return [round(least * (most / least) ** (i / (n - 1))) for i in range(n)]


def _prompts(limits: Limits, pace: Pace, n: int, rounds: int, seconds: float) -> list[Phase]:
    most = _most(limits)
    lengths = _row(_SHORT, most, n)
    while most > _SHORT and _took(lengths, pace) > seconds:
        # Fewer of them first: a few long ones tell more than many short ones.
        if n > _FEW:
            n -= 1
        else:
            most = max(_SHORT, int(most * 0.9))
        lengths = _row(_SHORT, most, n)
    # A step that is filled to the brim: the length nearest to the budget is put on it.
    full = int(limits.budget * _MARGIN)
    if lengths[0] < full < most:
        at = min(range(n - 1), key=lambda i: abs(math.log(lengths[i] / full)))
        lengths[at] = full
    phases = []
    for r in range(rounds):
        mine, at_s, probes = lengths[r::rounds], 0.0, []
        for p in mine:
            probes.append(Probe(at_s, p, 1))
            # None needs to end before the next is there: prompts that meet are still prompts alone.
            at_s += 1.2 * (p * pace.prompt_token_s + pace.step_s)
        if probes:
            phases.append(Phase("prompts alone", tuple(probes), _took(mine, pace)))
    return phases


def _took(lengths: list[int], pace: Pace) -> float:
    return sum(1.2 * (p * pace.prompt_token_s + pace.step_s) for p in lengths)


def _stair(limits: Limits, pace: Pace, n: int, seconds: float) -> Phase:
    flight = sum(pace.step(d) for d in range(1, n + 1))
    prompts = n * _SHORT * pace.prompt_token_s
    each = max(_STAIR[0], min(_STAIR[1], int((seconds - prompts) / flight))) if flight > 0 else _STAIR[1]
    # The last of them is the longest; all of them together are n × prompt + each × n (n + 1) ÷ 2.
    each = max(1, min(each, (int(limits.context * _MARGIN) - _SHORT) // n))
    if limits.kv_tokens is not None:
        each = max(1, min(each, int((limits.kv_tokens * _MARGIN - n * _SHORT) * 2 / (n * (n + 1)))))
    short = max(1, min(_SHORT, int(limits.context * _MARGIN) - each * n))
    probes = tuple(Probe(0.0, short, each * (i + 1)) for i in range(n))
    return Phase("decoders alone", probes, prompts + each * flight)


def _beside(limits: Limits, pace: Pace, n: int, seconds: float) -> list[Phase]:
    if limits.sequences < 2 or n < 2:
        return []
    # One decoder with some prompts, then nearly all sequences, then half of them with what is left.
    first = min(n, 3 + n // 6)
    groups = [(1, first - 1)]
    n -= first
    if n >= 2 and limits.sequences > 2:
        decoders = max(2, min(limits.sequences - 1, n - 2))
        if n > decoders:
            groups.append((decoders, min(2, n - decoders)))
            n -= sum(groups[-1])
    if n >= 3 and limits.sequences > 3:
        decoders = max(1, min(limits.sequences // 2, n - 2))
        groups.append((decoders, min(n - decoders, 6)))
    return [_group(limits, pace, d, q, seconds / len(groups)) for d, q in groups]


def _group(limits: Limits, pace: Pace, decoders: int, prompts: int, seconds: float) -> Phase:
    each = pace.step(decoders)
    # Decoders last twice as long as is expected to be needed: a prompt that comes after them is a prompt alone.
    output = min(2 * (_GAP * (prompts + 1) + prompts), max(2, _most(limits) - _SHORT))
    held = decoders * (_SHORT + output)
    room = _most(limits) if limits.kv_tokens is None else min(_most(limits), int(limits.kv_tokens * _MARGIN) - held)
    most = max(_SHORT, min(limits.budget + limits.budget // 2, room))
    lengths = _row(max(_SHORT, most // 8), most, prompts)

    def took() -> float:
        return output * each + decoders * _SHORT * pace.prompt_token_s + sum(lengths) * pace.prompt_token_s

    while most > _SHORT and took() > seconds:
        most = max(_SHORT, int(most * 0.9))
        lengths = _row(max(_SHORT, most // 8), most, prompts)
    at_s = decoders * _SHORT * pace.prompt_token_s + _GAP * each
    probes = [Probe(0.0, _SHORT, output)] * decoders
    for p in lengths:
        probes.append(Probe(at_s, p, 1))
        at_s += p * pace.prompt_token_s + _GAP * each
    return Phase("prompts beside decoders", tuple(probes), took())


def _long(limits: Limits, pace: Pace, n: int, rounds: int, seconds: float) -> list[Phase]:
    most = max(1, _most(limits) - _LONG_OUT)
    rounds = min(rounds, n)
    counts = [n // rounds + (r < n % rounds) for r in range(rounds)]
    phases = []
    for count in counts:
        count = min(count, limits.sequences)
        length = most
        if limits.kv_tokens is not None:
            length = min(length, max(1, int(limits.kv_tokens * _MARGIN) // count - _LONG_OUT))
        while length > _SHORT and _long_took(length, count, pace) > seconds / rounds:
            # Fewer long ones tell more of contexts than many short ones.
            if count > 1:
                count -= 1
            else:
                length = max(_SHORT, int(length * 0.9))
        # One of half the length beside them: contexts that differ.
        lengths = [length] * max(1, count - 1) + [max(1, length // 2)] * (count > 1)
        probes = tuple(Probe(0.0, p, _LONG_OUT) for p in lengths)
        phases.append(Phase("long contexts", probes, _long_took(length, count, pace)))
    return phases


def _long_took(length: int, count: int, pace: Pace) -> float:
    return count * length * pace.prompt_token_s + _LONG_OUT * pace.step(count)
