"""The verdict on a change from A to B: three questions, and which costs were moved elsewhere rather than removed.

1. Does it shorten the access path, or change it for a dearer one?
2. Does it share meaning, or only hardware?
3. Does it remove repeated work, or manage it?

Each answer rests on figures that are known on both sides and changed by 5 % or more, beyond noise as far as anyone knows it:
beyond the interval over requests, and beyond what repeats differ by. Where there is neither, the answer says so (*no
interval*). Figures that are assumed decide nothing alone, nor do those that the operating system counts for the machine,
without repeats: they are shown. Where what a question needs is missing, it cannot be told, and the answer says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hoptrace.analysis.compare.diff_change import Change
from hoptrace.analysis.compare.diff_words import label, step
from hoptrace.analysis.compare.verdict_moved import Balance, balances

__all__ = ["QUESTIONS", "UNTOLD", "Answer", "Verdict", "judge"]

QUESTIONS = {
    "path": "Does it shorten the access path, or change it for a dearer one?",
    "sharing": "Does it share meaning, or only hardware?",
    "repetition": "Does it remove repeated work, or manage it?",
}
UNTOLD = "cannot be told"
# Not `queue`: those are the stays; nor `batch`: how many share a step is a question of sharing.
_ARRANGING = ("doorbell", "poll", "sync", "launch", "lock", "message", "serialize")
_MOST = 3
_LEAST = 0.05


@dataclass(frozen=True)
class Answer:
    """``answer``: a few words, one of a fixed set for each question; ``sentence``: with the figures; ``decided_by``: names of the
    figures that decide; ``figures``: all that bear on it, each with how sure its change is; ``missing``: what cannot be known
    here."""

    question: str
    answer: str
    sentence: str
    decided_by: tuple[str, ...]
    figures: tuple[Change, ...]
    missing: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "answer": self.answer,
            "sentence": self.sentence,
            "decided_by": list(self.decided_by),
            "figures": [{**c.as_dict(), "direction": c.direction, "certainty": c.certainty} for c in self.figures],
            "missing": list(self.missing),
        }


@dataclass(frozen=True)
class Verdict:
    """``answers``: by ``path``, ``sharing``, ``repetition``. ``balances``: what fell against what rose, by kind of cost.
    ``trades``: latencies of which one got better while another got worse, in sentences."""

    answers: dict[str, Answer]
    balances: list[Balance]
    trades: list[str] = field(default_factory=list)

    @property
    def sentences(self) -> list[str]:
        """The three answers."""
        return [a.sentence for a in self.answers.values()]

    @property
    def moved(self) -> list[str]:
        """Costs that were moved elsewhere, and what flat totals hide, in sentences; time first."""
        return [s for b in self.balances for s in b.sentences]

    def as_dict(self) -> dict[str, Any]:
        return {
            "answers": {k: a.as_dict() for k, a in self.answers.items()},
            "balances": [b.as_dict() for b in self.balances],
            "moved": self.moved,
            "trades": self.trades,
        }


def judge(changes: Mapping[str, Change]) -> Verdict:
    """The verdict on all changes of a comparison, by name."""
    answers = {"path": _path(changes), "sharing": _sharing(changes), "repetition": _repetition(changes)}
    return Verdict(answers, balances(changes), _trades(changes))


# -- the path ---------------------------------------------------------------------------------------------------------


def _path(changes: Mapping[str, Change]) -> Answer:
    """Stays on servers per answer; hops, control operations, bytes × distance and arranging operations per token. Counted and
    derived ones decide. (Entries into queues are the stays.)"""
    names = ["stays_per_answer"]
    distance = "link_bytes_per_token"
    for basis in ("counted", "derived", "assumed"):
        if _known(changes, f"byte_latency_per_token.{basis}"):
            distance = "byte_latency_per_token"
        names += [f"{w}_per_token.{basis}" for w in ("payload_hops", "control_ops")]
        names += [f"{distance}.{basis}"]
        names += [f"operations_per_token.{kind}.{basis}" for kind in _ARRANGING]
    names += [f"wait_ns_per_token.{basis}" for basis in ("counted", "derived", "assumed")]
    found = _pick(changes, names)
    # How long recorded waits took scatters between runs: without repeats it is shown and decides nothing.
    sure = [c for c in found if c.basis != "assumed" and c.change is not None and (c.repeats or not c.name.startswith("wait_ns"))]
    missing = []
    for what, text in (("payload_hops_per_token", "payload hops"), ("control_ops_per_token", "control operations")):
        if not any(c.name.startswith(what) for c in sure):
            missing.append(_why(found, what, text))
    falls, rises = _of(sure, "down"), _of(sure, "up")
    way = "bytes × latency of the links" if distance == "byte_latency_per_token" else "bytes × links crossed"
    if not sure:
        return _untold("path", found, missing or ["nothing of the path is known on both sides"])
    if falls and not rises:
        answer, text = "shorter", f"B's access path is shorter: {_list(falls)}."
    elif rises and not falls:
        answer, text = "dearer", f"B's access path is dearer: {_list(rises)}."
    elif falls and rises:
        answer, text = "exchanged", f"B changes the access path for another: {_list(falls)}, while {_list(rises)}."
    else:
        answer, text = "the same", f"The access path is the same, as far as it is known: {_list(sure)}."
    if any(c.name.startswith(("link_bytes", "byte_latency")) for c in (falls + rises or sure)[:_MOST]):
        text += f" (Distance: {way}.)"
    return _answer("path", answer, text + _but(missing), falls + rises or sure, found, missing)


# -- sharing ----------------------------------------------------------------------------------------------------------


def _sharing(changes: Mapping[str, Change]) -> Answer:
    """Meaning: tokens from caches, weights read once for many. Hardware: interference of what runs together."""
    caches = _pick(changes, ["cached_share", *(f"cached_share.{t}" for t in ("device", "host", "peer", "pool", "disk"))])
    weights = _pick(changes, ["weight_bytes_per_token.counted", "weight_bytes_per_token.derived"])
    if not any(c.change is not None for c in weights):
        weights = _pick(changes, ["decode_tokens_per_step"])
    between = _pick(changes, ["prefill_interference.mean", "decode_interference.mean"])
    machine = _pick(changes, ["run_delay_ns_per_token"])
    found = [*caches, *weights, *between, *machine]
    missing = []
    if not any(c.change is not None for c in caches[:1]):
        missing.append("which prompt tokens came from caches is not known on both sides")
    if not any(c.change is not None for c in weights):
        missing.append("how many tokens share a step is not known on both sides")
    if not any(c.change is not None for c in between):
        missing.append("interference is not known on both sides")
    # Tiers are parts of the whole; a shift between tiers shows in the figures and decides nothing.
    more = [*_of(caches[:1], "up"), *_of(weights, "down" if weights and weights[0].unit == "bytes" else "up")]
    less = [*_of(caches[:1], "down"), *_of(weights, "up" if weights and weights[0].unit == "bytes" else "down")]
    sure_machine = [c for c in machine if c.repeats]
    harm, ease = _of([*between, *sure_machine], "up"), _of([*between, *sure_machine], "down")
    meaning = [c for c in (*caches[:1], *weights) if c.change is not None]
    hardware = [c for c in between if c.change is not None]
    if not meaning or not hardware:
        return _untold("sharing", found, missing)
    decided = more + less + harm + ease
    if more and less:
        answer, text = "exchanged", f"B shares one thing more and another less: {_list(more)}, while {_list(less)}"
    elif more:
        answer = "more of both" if harm else "more meaning"
        text = f"B shares more {'of both, meaning and hardware' if harm else 'meaning'}: {_list(more)}"
    elif less:
        answer = "hardware instead of meaning" if harm and not ease else "less"
        text = f"B shares less meaning{', and more hardware' if harm and not ease else ''}: {_list(less)}"
    elif harm and not ease:
        answer, text = "only hardware", "B shares only hardware: no more comes from caches and no more tokens share a step"
    else:
        answer = "less interference" if ease and not harm else "interference exchanged" if ease else "the same"
        text = "B shares as much meaning as A"
    if harm or ease:
        text += f"; of what runs together, {_list(harm + ease)}"
    elif decided:
        text += f"; interference stays ({_list(hardware)})"
    else:
        text += f": {_list([*meaning, *hardware])}"
    return _answer("sharing", answer, text + "." + _but(missing), decided or [*meaning, *hardware], found, missing)


# -- repetition -------------------------------------------------------------------------------------------------------


def _repetition(changes: Mapping[str, Change]) -> Answer:
    """Work done again, against what could be spent to avoid it: moves of KV, hand-overs, waits and confirmations. The words claim
    no purpose: a hand-over may be there for another reason."""
    again = _pick(
        changes,
        [
            "computed_prompt_tokens_per_token",
            "recomputed_tokens_per_token",
            "recompute.mean",
            *(f"amplification.{o}.{b}" for o in ("kv", "prompt") for b in ("counted", "derived", "assumed")),
        ],
    )
    names = [f"{w}_per_token.{b}" for w in ("kv_moved_bytes", "kv_transfers") for b in ("counted", "derived", "assumed")]
    names += ["transfer.mean", "handover.mean"]
    names += [f"operations_per_token.{k}.{b}" for k in ("poll", "sync", "message") for b in ("counted", "derived", "assumed")]
    spent = _pick(changes, names)
    found = [*again, *spent]
    sure_again = [c for c in again[:3] if c.change is not None and c.name in _AGAIN]
    sure_spent = [c for c in spent if c.change is not None and c.basis != "assumed"]
    missing = []
    if not any(c.name == "computed_prompt_tokens_per_token" for c in sure_again):
        missing.append("how many prompt tokens were computed is not known on both sides")
    if not any(c.name in ("recomputed_tokens_per_token", "recompute.mean") for c in sure_again):
        missing.append("what was computed again after preemptions is not known on both sides")
    if not any(c.name.startswith(("kv_", "transfer", "handover")) for c in sure_spent):
        missing.append("moves of KV between places are not known on both sides")
    if not sure_again:
        return _untold("repetition", found, missing)
    fewer, more = _of(sure_again, "down"), _of(sure_again, "up")
    dearer, cheaper = _of(sure_spent, "up"), _of(sure_spent, "down")
    price = (
        f"; carrying and confirming cost more: {_list(dearer)}"
        if dearer
        else f"; carrying and confirming cost less: {_list(cheaper)}"
        if cheaper
        else ""
    )
    if fewer and more:
        answer, text = "exchanged", f"B repeats one thing less and another more: {_list(fewer)}, while {_list(more)}{price}"
    elif fewer:
        answer = "removes and pays" if dearer else "removes"
        text = (
            f"B removes repeated work: {_list(fewer)}{price or '; carrying and confirming cost no more, as far as it is known'}"
        )
    elif more:
        answer, text = ("repeats more and pays" if dearer else "repeats more"), f"B repeats more work: {_list(more)}{price}"
    elif dearer:
        answer, text = "only manages", f"B only manages repeated work: as much is repeated ({_list(sure_again)}){price}"
    else:
        answer, text = "the same", f"B repeats as much work as A: {_list(sure_again)}{price}"
    decided = fewer + more + dearer + cheaper
    return _answer("repetition", answer, text + "." + _but(missing), decided or sure_again, found, missing)


_AGAIN = ("computed_prompt_tokens_per_token", "recomputed_tokens_per_token", "recompute.mean")


# -- trades -----------------------------------------------------------------------------------------------------------


def _trades(changes: Mapping[str, Change]) -> list[str]:
    """Of TTFT and of the time between tokens, one better and the other worse, beyond noise: the largest change of each."""
    first = [changes[n] for n in ("ttft.mean", "ttft.p50", "ttft.p95", "ttft.p99") if n in changes]
    later = [changes[f"{m}.{s}"] for m in ("itl", "tpot") for s in ("mean", "p50", "p95", "p99") if f"{m}.{s}" in changes]
    out = []
    for worse, better in ((first, later), (later, first)):
        lost = max((c for c in worse if c.verdict == "worse"), key=_size, default=None)
        won = max((c for c in better if c.verdict == "better"), key=_size, default=None)
        if lost is not None and won is not None:
            out.append(
                f"{label(won.name)} fell {_pct(won)} ({step(won)}) while {label(lost.name)} rose {_pct(lost)} ({step(lost)})."
            )
    return out


def _size(c: Change) -> float:
    return abs(c.relative) if c.relative is not None else float("inf")


# -- words ------------------------------------------------------------------------------------------------------------


def _pick(changes: Mapping[str, Change], names: Iterable[str]) -> list[Change]:
    return [changes[n] for n in names if n in changes]


def _known(changes: Mapping[str, Change], name: str) -> bool:
    return name in changes and changes[name].change is not None


def _of(changes: Sequence[Change], direction: str) -> list[Change]:
    """Those that went so, by 5 % or more, surest and largest first."""
    return sorted(
        (c for c in changes if c.direction == direction and _size(c) >= _LEAST),
        key=lambda c: (c.certainty != "beyond noise", -_size(c)),
    )


def _list(changes: Sequence[Change]) -> str:
    named = [f"{label(c.name)} {step(c)}{_mark(c)}" for c in changes[:_MOST]]
    return ", ".join(named)


def _mark(c: Change) -> str:
    """The change, and how sure it is."""
    if c.is_same or (c.relative is not None and abs(c.relative) < 0.0005 and c.direction == "same"):
        return ""
    sure = {"beyond noise": "", "within noise": ", within noise", "no interval": ", no interval"}.get(c.certainty, "")
    return f" ({_pct(c)}{sure})"


def _pct(c: Change) -> str:
    return (
        "from nothing"
        if c.relative is None
        else f"{100 * c.relative:+.1f} %"
        if abs(c.relative) < 10
        else f"× {1 + c.relative:.3g}"
    )


def _why(found: Sequence[Change], what: str, text: str) -> str:
    """Why a figure does not compare: assumed, or told by one side only."""
    mine = [c for c in found if c.name.startswith(what)]
    sides = {
        ("A" if c.a is not None else "B", c.basis) for c in mine if c.change is None and (c.a is not None or c.b is not None)
    }
    if sides:
        named = " and ".join(f"{side}'s are {basis}" for side, basis in sorted(sides, key=str))
        return f"{text} do not compare: {named}"
    if mine and all(c.basis == "assumed" for c in mine):
        return f"{text} are only assumed"
    return f"{text} are not known"


def _but(missing: Sequence[str]) -> str:
    return f" Not in it: {'; '.join(missing)}." if missing else ""


def _untold(key: str, found: Sequence[Change], missing: Sequence[str]) -> Answer:
    what = {
        "path": "Whether the access path is shorter",
        "sharing": "What is shared",
        "repetition": "Whether repeated work is removed",
    }
    return Answer(QUESTIONS[key], UNTOLD, f"{what[key]} cannot be told: {'; '.join(missing)}.", (), tuple(found), tuple(missing))


def _answer(
    key: str, answer: str, text: str, decided: Sequence[Change], found: Sequence[Change], missing: Sequence[str]
) -> Answer:
    return Answer(QUESTIONS[key], answer, text, tuple(c.name for c in decided), tuple(found), tuple(missing))
