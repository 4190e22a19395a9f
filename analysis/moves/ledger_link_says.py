"""What the counters of a link say against the recorded moves, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hoptrace.analysis.moves.ledger_link_counter import Counter
from hoptrace.analysis.text import bytes_text, counted, duration_text, percent
from hoptrace.platform import Link

if TYPE_CHECKING:
    from hoptrace.analysis.moves.ledger_links import LinkUse

__all__ = ["elsewhere", "says"]

_SAME = 0.02  # what counters and moves may differ by and still be said to agree
_MEMORY = ("dram", "hbm", "memory", "cxl", "ddr")
_SEVERAL = 3  # links that carried about as much: then it is not told which one took it


def says(
    link: Link,
    kind: str | None,
    counter: Counter | None,
    explained: int | None,
    protocol: int | None,
    basis: str | None,
    unexplained: int | None,
    *,
    at_least: bool,
    moves: bool,
) -> str:
    """One direction of a link in one to three sentences. ``moves``: some recorded move names the link."""
    if counter is None:
        return "No counter of it was recorded: what moves do not tell is unknown." if link.entity else "No counter belongs to it."
    if counter.counted_bytes is None:
        return f"Its counter {counter.name} is of no use: {counter.why}.{_unknown(counter)}"
    if counter.bytes is None or explained is None or unexplained is None:
        within = f" in the {duration_text(counter.counted_ns)} that its samples cover"
        return f"Its counter saw {bytes_text(counter.counted_bytes)}{within}; {counter.why}.{_unknown(counter)}"
    saw = f"Its counter saw {bytes_text(counter.bytes)}{' of payload' if counter.what == 'payload' else ''}"
    if not moves and counter.bytes:
        return f"{saw}; no recorded move names this link: who moved it is not told.{_unknown(counter)}"
    said = f"{saw}; moves explain {'at least ' if at_least else ''}{bytes_text(explained)}"
    if protocol is not None and basis == "counted":
        said += f", packets add {bytes_text(protocol)} (counted)"
    elif protocol is not None:
        said += f", packets add some {bytes_text(protocol)} (assumed)"
    elif counter.what != "payload":
        said += ", what packets add is unknown"
    if unexplained < -_SAME * max(counter.bytes, explained):
        said += f". The moves tell {bytes_text(-unexplained)} more than it carried: "
        if kind in _MEMORY:
            return said + "that much never reached this memory (what a device writes can stay in the last-level cache)."
        return f"{said}that much took another way.{_unknown(counter)}"
    if not counter.bytes:
        return f"{said}.{_unknown(counter)}"
    most = "at most " if at_least else ""
    more = " Not all moves were recorded with their bytes." if at_least else ""
    rest = max(0, unexplained)
    return f"{said}; {most}{bytes_text(rest)} ({percent(rest / counter.bytes)}) is unexplained.{more}{_unknown(counter)}"


def _unknown(c: Counter) -> str:
    """What of the counter is not known, and which others there were."""
    out = []
    if c.ambiguous and c.counted_bytes is not None:
        out.append(
            f"{counted(c.ambiguous, 'difference')} of it {'is' if c.ambiguous == 1 else 'are'} not known: at the link's rate it "
            "can have wrapped more than once in between."
        )
    if c.others:
        source = f" ({c.source})" if c.source else ""
        out.append(f"Taken: {c.name}{source}; not taken: {'; '.join(c.others)}.")
    return "".join(f" {line}" for line in out)


def elsewhere(links: Sequence[LinkUse]) -> list[str]:
    """Links whose moves tell more than they carried, with the link that carried about as much more than moves tell."""
    gaps = [(u, w, w.counter, w.unexplained_bytes) for u in links for w in u.ways]
    out: list[str] = []
    for u, w, counter, gap in gaps:
        if gap is None or counter is None or u.kind in _MEMORY or gap >= -_SAME * max(w.explained_bytes or 0, 1):
            continue
        others = [(v, x) for v, _, _, x in gaps if x is not None and v.link != u.link and 0.5 <= x / -gap <= 1.5]
        named = f"Moves name link {u.link} for {bytes_text(w.explained_bytes)}, its counter saw {bytes_text(counter.bytes)}; "
        if len(others) > _SEVERAL:
            out.append(f"{named}{len(others)} others carried about as much that no move explains: which of them is not told.")
        elif others:
            v, x = min(others, key=lambda o: abs(o[1] + gap))
            out.append(f"{named}{v.link} carried {bytes_text(x)} that no move explains: the data took that way.")
        else:
            out.append(f"Moves name link {u.link} for {bytes_text(-gap)} more than its counter saw, and no other link shows it.")
    return out
