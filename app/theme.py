"""Colours of the dashboard: one fixed colour per class of time, the same on every page, in light and in dark.

The eight hues are Okabe and Ito's (Color Universal Design, 2008), which people with any of the common colour-vision
deficiencies can tell apart. Colour never stands alone: labels, legends and tooltips say the same in words.
"""

from __future__ import annotations

from hoptrace.analysis.latency.parts import CLASSES, PARTS

__all__ = ["CLASS_COLOURS", "GREY", "PHASE_COLOURS", "SIDE_COLOURS", "STATE_COLOURS", "classes", "colours", "inks", "order"]

GREY = "#8C8C8C"

CLASS_COLOURS = {
    "work": "#0072B2",  # blue: what the user pays for
    "coordination": "#D55E00",  # vermilion: what this tool is about
    "carrying": "#E69F00",  # orange
    "repeated work": "#CC79A7",  # purple
    "sharing": "#009E73",  # green
    "capacity": "#56B4E9",  # sky blue
    "unexplained": GREY,
}

_DARK = ("work", "coordination", "sharing")  # white on these has a contrast of at least 3 : 1

# A prompt and its answer are both work, so neither bears another class's colour alone: dark and light blue.
PHASE_COLOURS = {"prompt": "#004C78", "answer": "#56B4E9"}
STATE_COLOURS = {"running": CLASS_COLOURS["work"], "waiting": CLASS_COLOURS["capacity"], "not told apart": GREY}
SIDE_COLOURS = ("#0072B2", "#E69F00")


def classes() -> list[str]:
    """The classes in the order in which they are stacked and listed."""
    return list(CLASSES)


def colours() -> list[str]:
    """Their colours, in that order. A class that analysis adds later is grey until it gets one."""
    return [CLASS_COLOURS.get(c, GREY) for c in CLASSES]


def inks() -> list[str]:
    """The colour of text on each class's colour, in that order: white where it reads, else near black."""
    return ["#FFFFFF" if c in _DARK else "#1A1A1A" for c in CLASSES]


def order() -> list[str]:
    """Parts' labels in stacking order: by class, then as a request meets them."""
    rank = {c: i for i, c in enumerate(CLASSES)}
    return [p.label for p in sorted(PARTS, key=lambda p: rank[p.klass])]
