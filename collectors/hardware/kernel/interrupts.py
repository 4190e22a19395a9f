"""Interrupts by vector with the devices they belong to, calls between CPUs, softirqs.

Entities: ``irq:N`` (a device's vector), ``irq:RES`` and others by the kernel's letters (Documentation/filesystems/proc.rst: RES
wake-ups of another CPU, CAL calls of a function there, TLB flushes there, LOC timers), ``softirq:NET_RX``. Whose vector it is
stands in the incarnation, behind the boot: a number that another device gets is another series.
"""

from __future__ import annotations

from typing import NamedTuple

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.kernel import stat
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, found_by_error, status_of

__all__ = ["InterruptSource", "Table", "table_of"]

_WRAP = (1 << stat.U32_BITS) - 1
_SEEN_BYTES = 64_000
"""A table of this size (32 CPUs with 60 vectors) takes the kernel a fraction of a millisecond. It grows as CPUs × vectors."""
_OWNERS_S = 30.0


class Table(NamedTuple):
    """/proc/interrupts. ``cpus``: which ones have a column (those that are online). ``owners``: vector → chip, number there and
    device. ``sums``: rows that belong to no device, over all columns."""

    cpus: str
    owners: dict[int, str]
    sums: dict[str, int]


def table_of(data: bytes) -> Table:
    """Lines that are none are left out; a table without CPUs is empty."""
    lines = data.split(b"\n")
    cpus = [w[3:] for w in lines[0].split() if w.startswith(b"CPU") and w[3:].isdigit()]
    owners: dict[int, str] = {}
    sums: dict[str, int] = {}
    if not cpus or not data.endswith(b"\n"):
        lines = lines[:-1]  # the last line is broken off
    n = len(cpus)
    for line in lines[1:] if n else []:
        label, colon, rest = line.partition(b":")
        label = label.strip()
        if not colon or not label:
            continue
        words = rest.split(None, n)
        if label.isdigit():
            if len(words) > n:
                owners[int(label)] = b" ".join(words[n].split()).decode("utf-8", "replace")
            continue
        counts = words[:n]
        if len(counts) == n and all(w.isdigit() for w in counts):  # ERR and MIS have one number for all CPUs
            sums[label.decode("utf-8", "replace")] = sum(map(int, counts))
    return Table(_ranges(sorted(map(int, cpus))), owners, sums)


class InterruptSource:
    """Once a second; the table of a wide machine less often, since the kernel itself needs milliseconds to write it."""

    name = "interrupts"
    answers = "which device interrupts the CPUs how often, how often CPUs call each other, and softirqs by kind"
    pace: Pace = "slow"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._stat = KeptFile(self._roots.proc / "stat")
        self._table = KeptFile(self._roots.proc / "interrupts")
        self._softirqs = KeptFile(self._roots.proc / "softirqs")
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._kinds: list[str] = []
        self._owners: dict[int, str] = {}
        self._vectors: dict[int, int] = {}
        self._soft: list[int] = []
        self._rows: dict[str, int] = {}
        self._cpus: str | None = None
        self._table_due_ns = 0

    def probe(self) -> Found:
        try:
            data = self._stat.read()
        except OSError as e:
            return found_by_error(e, "hoptrace counters need Linux")
        n = len(stat.vectors(data))
        if not n:
            return Found("unsupported", "this /proc/stat has no line of interrupts")
        try:
            table = table_of(self._table.read())
        except OSError as e:
            return Found("ok", f"without devices and calls between CPUs: {e.filename}: {e.strerror}", sees=f"{n} vectors")
        return Found("ok", sees=f"{len(table.owners)} vectors, {len(table.sums)} other kinds")

    def open(self, out: Sink) -> None:
        try:
            lines = self._softirqs.read().split(b"\n")[1:]
        except OSError:
            lines = []
        self._kinds = [line.partition(b":")[0].strip().decode("utf-8", "replace") for line in lines if b":" in line]

    def sample(self, out: Sink) -> None:
        self._look(out)
        before = out.now_ns()
        try:
            data = self._stat.read()
        except OSError as e:
            out.at(before, out.now_ns())
            out.fail([*self._vectors.values(), *self._soft], status_of(e))
            return
        out.at(before, out.now_ns())
        for number, word in enumerate(stat.vectors(data)):
            series = self._vectors.get(number)
            if series is None:
                if word == b"0" and number not in self._owners:
                    continue
                series = self._vectors[number] = self._of_vector(number, out)
            if word.isdigit():
                out.put(series, int(word))
        words = stat.softirqs(data)
        if len(words) == len(self._kinds):  # else a kind has been added that has no name here
            if not self._soft:
                self._soft = [self._series(out, f"softirq:{kind}", "softirqs", self._boot) for kind in self._kinds]
            for series, word in zip(self._soft, words, strict=True):
                if word.isdigit():
                    out.put(series, int(word))

    def close(self) -> None:
        for file in (self._stat, self._table, self._softirqs):
            file.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _look(self, out: Sink) -> None:
        """The table: devices of the vectors, and the rows that are in no other file."""
        before = out.now_ns()
        if before < self._table_due_ns:
            return
        try:
            data = self._table.read()
        except OSError as e:
            out.at(before, out.now_ns())
            out.fail(self._rows.values(), status_of(e))
            self._table_due_ns = before + int(_OWNERS_S * 1e9)
            return
        after = out.now_ns()
        out.at(before, after)
        self._table_due_ns = before + int(min(_OWNERS_S, self.every_s * len(data) / _SEEN_BYTES) * 1e9)
        table = table_of(data)
        if table.cpus != self._cpus:
            # Only CPUs that are online have a column: with one less the sums fall, and say nothing against the earlier ones.
            if self._cpus is not None:
                out.event("cpus", f"CPUs online: {table.cpus} (before: {self._cpus}); calls between CPUs are counted anew")
                out.fail(self._rows.values(), "lost")
            self._cpus, self._rows = table.cpus, {}
        for label, n in table.sums.items():
            series = self._rows.get(label)
            if series is None:
                life = f"{self._boot}/CPUs {table.cpus}"
                series = self._rows[label] = self._series(out, f"irq:{label}", "interrupts", life)
            out.put(series, n & _WRAP)  # each column wraps at 32 bits, and so does their sum, modulo that
        for number, owner in self._owners.items():
            if table.owners.get(number) != owner and number in self._vectors:
                out.put(self._vectors.pop(number), None, "lost")
        self._owners = table.owners

    def _of_vector(self, number: int, out: Sink) -> int:
        owner = self._owners.get(number)
        return self._series(out, f"irq:{number}", "interrupts", f"{self._boot}/{owner}" if owner else self._boot)

    @staticmethod
    def _series(out: Sink, entity: str, name: str, life: str) -> int:
        unit = "interrupts" if name == "interrupts" else "softirqs"
        return out.series(entity, name, unit, "cumulative", incarnation=life, width_bits=stat.U32_BITS)


def _ranges(numbers: list[int]) -> str:
    """0, 1, 2, 5 → 0-2,5, as in cputopology.rst."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
