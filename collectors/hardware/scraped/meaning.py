"""What a known series of a Prometheus page means: whose it is, in what unit, whether it is a total, in which direction."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hoptrace.collectors.hardware.sink import Direction, Semantics

__all__ = ["Labels", "Meaning", "fixed", "label", "pci_address", "told"]

Labels = Mapping[str, str]
_PART = re.compile(r"[^\s/{}\"\\\x00-\x1f\x7f]{1,128}")
_BDF = re.compile(r"(?:0000)?([0-9a-fA-F]{4}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2}\.[0-7])")


@dataclass(frozen=True, slots=True)
class Meaning:
    """``entity``: from the labels, null where they do not tell; ``of``: its form, for people. scale: what one is, in ``unit``.
    whole: values are integers after the scale. window_ns: of a rate, where it is fixed. end: the reading at which the counter
    stops for good (it saturates). ``doc``: what is to be known of it."""

    name: str
    unit: str
    semantics: Semantics
    entity: Callable[[Labels], str | None]
    direction: Direction | None = None
    scale: int | float = 1
    whole: bool = False
    doc: str = ""
    of: str = ""
    window_ns: int | None = None
    end: int | None = None

    def value(self, read: float) -> int | float:
        """A finite reading in the unit."""
        return round(read * self.scale) if self.whole else read * self.scale


def told(labels: Labels, name: str) -> str | None:
    """A label's value as a part of an entity; null where it is not there, or could pass for another entity (a slash, a quote,
    blanks): who writes a page must not choose whose series he writes."""
    value = labels.get(name)
    return value if value is not None and _PART.fullmatch(value) else None


def label(*names: str, form: str) -> Callable[[Labels], str | None]:
    """An entity of these labels' values, put into ``form``; null where one is not there."""

    def entity(labels: Labels) -> str | None:
        values = [told(labels, n) for n in names]
        return form.format(*values) if all(v is not None for v in values) else None

    return entity


def fixed(entity: str) -> Callable[[Labels], str | None]:
    """The same entity, whatever the labels say."""
    return lambda labels: entity


def pci_address(text: str | None) -> str | None:
    """A PCI address as sysfs writes it (0000:17:00.0): exporters write eight digits of the domain, and capitals."""
    match = _BDF.fullmatch(text or "")
    return f"{match[1]}:{match[2]}:{match[3]}".lower() if match else None
