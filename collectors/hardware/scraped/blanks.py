"""DCGM's values that stand for none (dcgm_structs.h): each kind of number has a range of its own, one value for each reason.

Exporters leave most of them out; what they let through must never become a number.
"""

from __future__ import annotations

import re

from hoptrace.collectors.engines.prometheus import Reading
from hoptrace.collectors.hardware.sink import Status

__all__ = ["blank", "blanks_of"]

_FP64, _INT32, _INT64 = 140737488355328.0, 0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0
_BY_OFFSET: tuple[Status, ...] = ("absent", "absent", "unsupported", "denied")
"""Blank, not found, not supported, not permitted."""

_LINE = re.compile(r"^(DCGM_FI_.*[ \t])(92233720368547757\d\d)\b.*$", re.M)


def blank(value: float) -> Status | None:
    """Which status a value means that is none; null for a real one. Of 64-bit integers nothing but the fact is left in a float:
    see :func:`blanks_of`."""
    if value >= float(_INT64):
        return "absent"
    for first in (_FP64, float(_INT32)):
        offset = value - first
        if offset in (0.0, 1.0, 2.0, 3.0):
            return _BY_OFFSET[int(offset)]
    return None


def blanks_of(text: str) -> dict[str, Status]:
    """Why each series of a page has no value that bears one of the 64-bit blanks, by its name with labels."""
    found: dict[str, Status] = {}
    if "922337203685477579" not in text:
        return found
    for match in _LINE.finditer(text):
        offset = int(match[2]) - _INT64
        if 0 <= offset < len(_BY_OFFSET):
            for sample in Reading({}).page(f"{match[1]}0\n").samples:
                found[sample.name] = _BY_OFFSET[offset]
    return found
