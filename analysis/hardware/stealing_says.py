"""The answer to 'is another process stealing my step?' in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hoptrace.analysis.hardware.rank import Rank
from hoptrace.analysis.text import counted, duration_text, percent

if TYPE_CHECKING:
    from hoptrace.analysis.hardware.stealing import Contrast

__all__ = ["LITTLE", "Answer", "unknown", "verdict"]

LITTLE = 0.01
"""Delay per step ÷ mean step below which nothing worth a word can have been lost."""
_MUCH_FOREIGN = 0.1  # share of the busy CPU time that others took
_FAINT = 0.3  # a correlation below which nobody would call it one


@dataclass(frozen=True, slots=True)
class Answer:
    """``verdict``: yes, no or unknown; ``short``: in a sentence, ``says``: in several; ``why`` it is unknown."""

    verdict: str
    short: str
    says: str
    why: str | None = None


def unknown(server: str, why: str) -> Answer:
    """Nothing can be compared."""
    said = f"Whether another process steals steps of {server} is not known: {why}."
    return Answer("unknown", said, said, why)


def verdict(
    who: str, step: float, delay: float, share: float | None, found: Rank, c: Contrast | None, width: int, few: int = 0
) -> Answer:
    """Durations in ns. ``who``: which threads; ``step``: mean length; ``delay``: what the threads waited for a CPU, summed, per
    step; ``share``: of the time that they wanted one; ``found``: correlation of that share with the slowness of the steps;
    ``width``: of a bin; ``few``: steps in bins that have too few to be compared."""
    each = f"{duration_text(delay)} for each step of {duration_text(step)}"
    waited = f"{who} waited {percent(share)} of the time a CPU was wanted, {each}"
    if delay < LITTLE * step:
        least = f"{waited}: at most {percent(delay / step)} of a step can have been lost to others."
        return Answer("no", f"No process steals steps: {least}", f"No: {least}")
    open_ = f"Whether others steal steps is open: {waited.split(', ')[0]}."
    bound = f"At most {duration_text(delay)} a step were lost at the mean."
    if delay > step:
        bound = "Summed over the threads the delay is longer than the steps, so it bounds nothing."
    if found.rho is None:
        why = str(found.why)
        said = f"Whether others steal steps cannot be told by comparison: {waited}; {why}. {bound}"
        return Answer("unknown", open_, said, why)
    told = (
        f"rank correlation {found.rho:+.2f} (95 %: {found.low:+.2f} to {found.high:+.2f}) over {found.n} bins of "
        f"{duration_text(width)}"
    )
    if few:
        told += f"; {counted(few, 'step')} in bins of fewer than three left out"
    if not found.rises:
        if found.high is not None and found.high < _FAINT:
            said = f"No sign that others steal steps: steps are not slower when threads wait for a CPU ({told})."
            short = said.replace(f" over {told.split(' over ')[1]}", "")
            return Answer("no", short, f"{said} {waited[0].upper()}{waited[1:]}. {bound}")
        said = f"Whether others steal steps is open: {waited}; slower steps may go with it or not ({told})."
        return Answer("unknown", open_, f"{said} {bound}", "the interval of the correlation holds none as well as a clear one")
    if c is not None and not c.explained_at_most_ns:
        why = "slow steps and long waits go together in their shares, and yet no step waited longer where steps were slower"
        said = f"Whether others steal steps is open: {why} ({told}). {waited[0].upper()}{waited[1:]}."
        return Answer("unknown", open_, f"{said} {bound}", why)
    return _goes_together(waited, told, c)


def _goes_together(waited: str, told: str, c: Contrast | None) -> Answer:
    others = None if c is None else c.foreign[0]
    said = f"Steps are slower when threads wait for a CPU ({told}). {waited[0].upper()}{waited[1:]}."
    most = ""
    if c is not None:
        most = f"run-queue delay can explain at most {duration_text(c.explained_at_most_ns)} of it"
        said += (
            f" Where they waited most, a step took {duration_text(c.slower_ns)} longer than where they waited least (95 %: "
            f"{duration_text(c.low_ns)} to {duration_text(c.high_ns)}); {most}."
        )
        most = f"; where they waited most, by {duration_text(c.slower_ns)} a step, of which {most}"
    if others is None:
        who, first = " Who had the CPUs is not known, for want of the machine's counters.", "Somebody steals steps"
    elif others >= _MUCH_FOREIGN:
        calm = None if c is None else c.foreign[1]
        who = f" Others took {percent(others)} of the busy CPU time then, {percent(calm)} where they waited least."
        first = "Yes, others steal steps"
    else:
        who = f" Others took {percent(others)} of the busy CPU time then: its own threads are more than the CPUs."
        first = "Not others steal steps, its own threads are more than the CPUs"
    short = f"{first}: they are slower when threads wait for a CPU ({told.split(' over ')[0]}){most.replace(' of it', '')}."
    return Answer("yes", short, f"{first}. {said}{who}")
