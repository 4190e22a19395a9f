"""What advice is made of: changes of a flag that can be tried, flags that are not, and what came of those that were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CANNOT_MATTER", "NOT_JUDGED", "Change", "Left", "Outlook", "Verdict"]

CANNOT_MATTER = "cannot matter"
NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Change:
    """One change of the server's flags.

    Attributes:
        flag: the flag that it is about, without dashes: ``max-num-seqs``. Changes of one flag exclude each other.
        typed: what to type, in full: ``--max-num-seqs 16``.
        settings: what it means in a replay: ``batching.max_sequences=16``.
        now: the present value, as the trace tells it.
        size: how far it is from now, in doublings; of two that are as good the smaller is taken.
        needs: what it takes that the recorded server did not have (another server, memory); empty: nothing.
        label: how to call it where ``typed`` is long; empty: as ``typed``.
        bound: whether the replay leaves out what it costs, so that the gain is the most that it can be.
        notes: what the replay leaves out of it, in sentences.
    """

    flag: str
    typed: tuple[str, ...]
    settings: tuple[str, ...]
    now: str
    size: float = 1.0
    needs: str = ""
    label: str = ""
    bound: bool = False
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What it is called: all that has to be typed, or its label."""
        return self.label or " ".join(self.typed)


@dataclass(frozen=True)
class Left:
    """A flag that was not tried: ``kind`` is CANNOT_MATTER (by the trace's own evidence) or NOT_JUDGED (a replay cannot tell)."""

    flag: str
    kind: str
    why: str


@dataclass(frozen=True)
class Outlook:
    """One figure under a change against the own policy, on the same draws.

    ``ratio``: what-if ÷ own (middle of the draws), ``low`` and ``high``: its 90 % interval; null where it is not known.
    """

    ratio: float | None
    low: float | None
    high: float | None

    def as_dict(self) -> dict[str, float | None]:
        return {k: None if v is None else round(v, 6) for k, v in (("ratio", self.ratio), ("low", self.low), ("high", self.high))}


@dataclass(frozen=True)
class Verdict:
    """What a change (or a pair of them) comes to.

    Attributes:
        changes: one, or the two of a pair.
        gain, low, high: of the objective, positive is better, as a fraction of now (goodput: points of the share of requests);
            middle and 90 % interval over the draws.
        figures: ``metric statistic`` → outlook, of all that was compared.
        worse: figures that become worse beyond the draws' scatter, the worst first.
        extrapolated: share of its step time that rests on steps unlike any recorded one; null: the step cost does not know.
        beyond: what left what was recorded, in sentences.
        lost: requests that it refuses or leaves unfinished and the own policy does not.
        notes: of the changes, and of the replay where the own policy's has none such.
    """

    changes: tuple[Change, ...]
    gain: float | None
    low: float | None
    high: float | None
    figures: Mapping[str, Outlook] = field(default_factory=dict)
    worse: tuple[str, ...] = ()
    extrapolated: float | None = None
    beyond: tuple[str, ...] = ()
    lost: int = 0
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What they are called."""
        return " ".join(c.text for c in self.changes)

    @property
    def needs(self) -> str:
        """What it takes that the recorded server did not have."""
        return ", ".join(c.needs for c in self.changes if c.needs)

    @property
    def bound(self) -> bool:
        """Whether the gain is the most that it can be."""
        return any(c.bound for c in self.changes)

    @property
    def sure(self) -> bool:
        """Whether the interval of the gain lies above 0."""
        return self.low is not None and self.low > 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""

        def rounded(x: float | None) -> float | None:
            return None if x is None else round(x, 6)

        return {
            "flags": [c.flag for c in self.changes],
            "typed": [t for c in self.changes for t in c.typed],
            "now": [c.now for c in self.changes],
            "settings": [s for c in self.changes for s in c.settings],
            "needs": self.needs,
            "bound": self.bound,
            "gain": rounded(self.gain),
            "low": rounded(self.low),
            "high": rounded(self.high),
            "figures": {k: o.as_dict() for k, o in self.figures.items()},
            "worse": list(self.worse),
            "extrapolated": rounded(self.extrapolated),
            "beyond": list(self.beyond),
            "lost": self.lost,
            "notes": list(self.notes),
        }
