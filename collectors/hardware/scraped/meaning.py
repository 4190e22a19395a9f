"""What a known series of a Prometheus page means: whose it is, in what unit, whether it is a total, in which direction."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hoptrace.collectors.hardware.sink import Direction, Semantics, Status

__all__ = ["Labels", "Meaning", "blank", "label", "pci_address"]

Labels = Mapping[str, str]
_BDF = re.compile(r"(?:0000)?([0-9a-fA-F]{4}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2}\.[0-7])")


@dataclass(frozen=True, slots=True)
class Meaning:
    """``entity``: from the labels, null where they do not tell. scale: what one is, in ``unit``. whole: values are integers after
    the scale. ``doc``: what is to be known of it."""

    name: str
    unit: str
    semantics: Semantics
    entity: Callable[[Labels], str | None]
    direction: Direction | None = None
    scale: int = 1
    whole: bool = False
    doc: str = ""

    def value(self, read: float) -> int | float:
        """A reading in the unit."""
        return round(read * self.scale) if self.whole else read * self.scale


def label(*names: str, form: str) -> Callable[[Labels], str | None]:
    """An entity of these labels' values, put into ``form``; null where one is not there."""

    def entity(labels: Labels) -> str | None:
        values = [labels.get(n) for n in names]
        return form.format(*values) if all(values) else None

    return entity


def pci_address(text: str | None) -> str | None:
    """A PCI address as sysfs writes it (0000:17:00.0): exporters write eight digits of the domain, and capitals."""
    match = _BDF.fullmatch(text or "")
    return f"{match[1]}:{match[2]}:{match[3]}".lower() if match else None


# dcgm_fields.h: values that stand for none. Of 64-bit integers nothing but the fact is left in a floating-point text.
_BLANK_FP64 = 140737488355328.0
_BLANK_INT32 = 0x7FFFFFF0
_BLANK_INT64 = float(0x7FFFFFFFFFFFFFF0)
_BY_OFFSET: tuple[Status, ...] = ("absent", "absent", "unsupported", "denied")


def blank(value: float) -> Status | None:
    """Which status a value of DCGM means that is none (blank, not found, not supported, not permitted); null for a real one."""
    if value >= _BLANK_INT64:
        return "absent"
    for first in (_BLANK_FP64, float(_BLANK_INT32)):
        offset = value - first
        if offset in (0.0, 1.0, 2.0, 3.0):
            return _BY_OFFSET[int(offset)]
    return None
