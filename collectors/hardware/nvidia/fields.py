"""Many of NVML's fields in one call: each has its own return code, type and value.

The time of a reading is the call's, on the trace clock: the driver's own stamps (UTC in microseconds) are not used.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from typing import Any

from hoptrace.collectors.hardware.nvidia.errors import GONE, NvmlError, status_of_code
from hoptrace.collectors.hardware.nvidia.library import Nvml
from hoptrace.collectors.hardware.nvidia.table import ALL_LINKS, Field
from hoptrace.collectors.hardware.sink import Semantics, Sink, Status

__all__ = ["Batch", "Slot", "decoded", "link_slots", "raw_of", "width_of"]

_AGAIN_S = 3600.0
_BITS_32 = 1 << 32
_ALL_ONES_32 = _BITS_32 - 1
_ALL_ONES_64 = (1 << 64) - 1
_ONE = struct.Struct("<IIqqIIQ")
"""nvmlFieldValue_t: fieldId, scopeId, timestamp, latencyUsec, valueType, nvmlReturn, value (a union of eight bytes)."""
_WIDTHS = (None, 32, 64, 64, 64, 32, 16)
"""By nvmlValueType_t: double, unsigned int, unsigned long, unsigned long long, signed long long, signed int, unsigned short."""


def decoded(kind: int, raw: int, semantics: Semantics) -> tuple[int | float | None, Status]:
    """The value of a union's eight bytes, by its type; without one the status that says why."""
    value: int | float
    if kind in (2, 3):
        return (None, "unsupported") if raw == _ALL_ONES_64 else (raw, "ok")
    if kind == 1:
        value = raw & _ALL_ONES_32
        # Of a count that wraps it is a value like all others.
        return (None, "unsupported") if value == _ALL_ONES_32 and semantics == "gauge" else (value, "ok")
    if kind == 6:
        return raw & 0xFFFF, "ok"
    if kind == 0:
        value = struct.unpack("<d", struct.pack("<Q", raw))[0]
        if not math.isfinite(value):
            return None, "error"
    elif kind == 4:
        value = raw - (1 << 64) if raw >> 63 else raw
    elif kind == 5:
        value = (raw & _ALL_ONES_32) - (_BITS_32 if raw >> 31 & 1 else 0)
    else:
        return None, "error"
    return (None, "error") if value < 0 and semantics == "cumulative" else (value, "ok")


def raw_of(value: Any) -> int:
    """The eight bytes of one c_nvmlFieldValue_t's value."""
    return int(_ONE.unpack(bytes(value))[6])


def width_of(kind: int, scale: int) -> int | None:
    """At how many bits a count wraps, in the unit after the scale."""
    width = _WIDTHS[kind] if kind < len(_WIDTHS) else None
    return None if width is None else min(64, width + scale.bit_length() - 1)


class Slot:
    """One field of one entity, and what is known of it so far."""

    __slots__ = ("again_s", "entity", "field", "kind", "number", "scope", "wide", "width")

    def __init__(self, field: Field, entity: str, scope: int = 0) -> None:
        self.field, self.entity, self.scope = field, entity, scope
        self.number: int | None = None
        self.kind: int | None = None
        self.width: int | None = None
        self.wide = False
        self.again_s = 0.0

    def series(self, kind: int | None, raw: int, out: Sink, incarnation: str) -> int:
        """The series for a value of this type: another type is another width, and so another series."""
        f = self.field
        if kind is not None and f.may_be_32 and not self.wide and raw >= _BITS_32 and kind in (2, 3, 4):
            self.wide, self.kind = True, None
        if self.number is not None and (kind is None or kind == self.kind):
            return self.number
        counted = f.semantics == "cumulative"
        self.kind = kind
        self.width = width_of(kind, f.scale) if counted and kind is not None else None
        if self.width == 64 and f.may_be_32 and not self.wide:
            self.width = 32  # until a value beyond has been seen: taken for wider, a wrap would be a loss that nobody notices
        self.number = out.series(
            self.entity, f.name, f.unit, f.semantics, direction=f.direction, incarnation=incarnation if counted else None,
            width_bits=self.width,
        )  # fmt: skip
        return self.number


class Batch:
    """Fields of one GPU in one life. What it does not have is asked for again once an hour, not at each beat."""

    def __init__(self, nvml: Nvml, slots: Sequence[Slot], incarnation: str) -> None:
        self._nvml, self._incarnation = nvml, incarnation
        self.slots = list(slots)
        self._asked: list[Slot] = []
        self._values: Any = None
        self._due_s = 0.0

    @property
    def numbers(self) -> list[int]:
        """Series that have been declared."""
        return [s.number for s in self.slots if s.number is not None]

    def there(self, fields: Sequence[Field]) -> list[Slot]:
        """Slots of these fields that the last read had a value of."""
        return [s for s in self.slots if s.field in fields and s.kind is not None and not s.again_s]

    def read(self, handle: Any, out: Sink) -> None:
        """One call for all. NvmlError if it fails, or if a field says that the GPU is gone."""
        if self._values is None or time.monotonic() >= self._due_s:
            self._ask()
        if not self._asked:
            return
        before = out.now_ns()
        try:
            self._call(handle)
        except NvmlError as e:
            if e.status != "unsupported":
                raise
            self._one_by_one(handle)
        out.at(before, out.now_ns())
        lacking = False
        for slot, (_, _, _, _, kind, code, raw) in zip(self._asked, _ONE.iter_unpack(self._values), strict=True):
            if code:
                lacking |= self._failed(slot, code, out)
                continue
            value, status = decoded(kind, raw, slot.field.semantics)
            number = slot.series(kind if value is not None else None, raw, out, self._incarnation)
            if value is None:
                out.drop("fields without a value (all ones, or none of their type)")
                out.put(number, None, status)
            else:
                out.put(number, value * slot.field.scale)
        if lacking:
            self._values = None

    def _ask(self) -> None:
        now = time.monotonic()
        self._asked = [s for s in self.slots if s.again_s <= now]
        for slot in self._asked:
            slot.again_s = 0.0
        self._due_s = min((s.again_s for s in self.slots if s.again_s), default=math.inf)
        self._values = (self._nvml.module.c_nvmlFieldValue_t * len(self._asked))()
        for value, slot in zip(self._values, self._asked, strict=True):
            value.fieldId, value.scopeId = slot.field.id, slot.scope

    def _call(self, handle: Any) -> None:
        code = self._nvml.symbol("nvmlDeviceGetFieldValues")(handle, len(self._asked), self._values)
        if code:
            raise NvmlError(code, "nvmlDeviceGetFieldValues")

    def _one_by_one(self, handle: Any) -> None:
        """A driver that refuses the whole list for one field that it does not know."""
        size = _ONE.size
        for i in range(len(self._asked)):
            one = self._nvml.module.c_nvmlFieldValue_t.from_buffer(self._values, i * size)
            try:
                code = self._nvml.symbol("nvmlDeviceGetFieldValues")(handle, 1, self._nvml.by_reference(one))
            except NvmlError as e:
                code = e.code
            if code in GONE:
                raise NvmlError(code, "nvmlDeviceGetFieldValues")
            if code:
                one.nvmlReturn = code

    def _failed(self, slot: Slot, code: int, out: Sink) -> bool:
        """A field's own code; true if it is not to be asked for soon."""
        if code in GONE:
            raise NvmlError(code, f"nvmlDeviceGetFieldValues, field {slot.field.id}")
        status = status_of_code(code)
        out.put(slot.series(None, 0, out, self._incarnation), None, status)
        if status not in ("unsupported", "denied"):
            return False
        slot.again_s = time.monotonic() + _AGAIN_S
        self._due_s = min(self._due_s, slot.again_s)
        return True


def link_slots(fields: Sequence[Field], uuid: str, links: Sequence[int]) -> list[Slot]:
    """A slot for each field and link; ALL_LINKS is the sum."""
    return [Slot(f, f"nvlink:{uuid}/{'all' if n == ALL_LINKS else n}", n) for f in fields for n in links]
