"""A machine as the access paths see it: a device with its host, its network adapter and its CXL memory, their links and costs.

A constant is looked for in what the caller gives, then in the platform's own file, then in its parts. What none of them has is
unknown, and asked for by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hoptrace.errors import InputError, UsageError
from hoptrace.paths_hops import COHERENT
from hoptrace.platform import catalogue, component
from hoptrace.platform_file import COMPANIONS, CONSTANTS, checked

__all__ = ["Constant", "System", "system_of"]

_SLOTS = {"device": "device", "host": "host", "nic": "nic", "cxl": "pool"}


@dataclass(frozen=True, slots=True)
class Constant:
    """A figure: its value, the range that was seen (``low`` = ``high`` = value where there is one figure), whence it is."""

    name: str
    value: float
    low: float
    high: float
    source: str
    of: str


@dataclass(frozen=True)
class System:
    """A machine. ``parts``: device, host, nic, expander, pool, as far as it has them, each as its platform file has it.

    ``given``: constants that go before those of the parts. ``assumed``: names of parts that only the catalogue's file of the
    device names, not the caller.
    """

    name: str
    parts: Mapping[str, Mapping[str, Any]]
    given: Mapping[str, Any] = field(default_factory=dict)
    assumed: frozenset[str] = frozenset()

    def constant(self, name: str, places: Iterable[str] = ()) -> Constant:
        """A constant. ``places``: the ends of the path, which say whether CXL memory is the expander's or the pool's.

        Raises:
            InputError: nobody has measured it; names the key to give.
        """
        self.need((name,), places)
        found = self.find(name, places)
        assert found is not None
        return found

    def need(self, names: Iterable[str], places: Iterable[str] = ()) -> None:
        """Sees that all of these constants are known. Raises InputError naming all that are not."""
        missing = [n for n in names if self.find(n, places) is None]
        if missing:
            what = "; ".join(f"{n} ({CONSTANTS[n]})" for n in missing)
            raise InputError(
                f"{self.name}: not known, and no default is sourced: {what}.",
                hint=f"Measure and give in a platform file: base = {self.name!r} and, under [constants], "
                + ", ".join(f"{n} = …" for n in missing),
            )

    def find(self, name: str, places: Iterable[str] = ()) -> Constant | None:
        """The same, null where it is not known. ``coherent`` is put together from its parts."""
        if name == "coherent":
            return self._coherent(places)
        for owner, entries in (("given", self.given), *self._tables("constants", places)):
            if name in entries:
                return _constant(name, entries[name], owner)
        return None

    def _coherent(self, places: Iterable[str]) -> Constant:
        rate, hit, miss, times, each = (self.constant(n, places) for n in COHERENT)
        value = rate.value * hit.value + (1 - rate.value) * miss.value + times.value * each.value
        return Constant("coherent", value, value, value, "hits, misses and invalidations as given", miss.of)

    def rate(self, link: str, keys: Iterable[str], places: Iterable[str] = ()) -> tuple[float, str, str, str]:
        """Bytes a second that ``link`` carries in one direction, by the first of ``keys`` that it has; the key, its source, and
        the part that has it.

        Raises:
            InputError: the machine has no such link, or its rate is not known.
        """
        keys = list(keys)
        for owner, links in self._tables("links", places):
            if link in links:
                entry = links[link]
                for key in keys:
                    if key in entry:
                        return float(entry[key]), key, str(entry.get("source", owner)), owner
        there = any(link in t for _, t in self._tables("links", places))
        raise InputError(
            f"{self.name}: " + (f"the rate of its link {link} is not known." if there else f"it has no link {link}."),
            hint=f"Give it in a platform file: base = {self.name!r} and, under [links.{link}], {keys[-1]} = …",
        )

    def has_link(self, link: str, places: Iterable[str] = ()) -> bool:
        """Whether it has a rate for that link."""
        return any(link in t and any(k != "source" for k in t[link]) for _, t in self._tables("links", places))

    def has_rate(self, link: str, key: str) -> bool:
        """Whether the first part that has that link says that rate of it."""
        first: Mapping[str, Any] = next((t[link] for _, t in self._tables("links", ()) if link in t), {})
        return key in first

    def _tables(self, table: str, places: Iterable[str]) -> list[tuple[str, Mapping[str, Any]]]:
        cxl = "pool" if "cxl_pool" in places else "expander"
        order = ("device", cxl, "nic", "host")
        return [(str(self.parts[p]["name"]), self.parts[p].get(table, {})) for p in order if p in self.parts]


def _constant(name: str, entry: Any, owner: str) -> Constant:
    if isinstance(entry, Mapping):
        value = float(entry["value"])
        low, high = float(entry.get("low", value)), float(entry.get("high", value))
        return Constant(name, value, low, high, str(entry.get("source", f"as given ({owner})")), owner)
    return Constant(name, float(entry), float(entry), float(entry), f"as given ({owner})", owner)


def system_of(
    name_or_path: str | Mapping[str, Any], *, constants: Mapping[str, Any] | None = None, **parts: str | None
) -> System:
    """A machine by the name of its platform or a platform file (or what is in one).

    A device brings the host, adapter and CXL memory that its file names (assumed, unless the file says where from).

    Args:
        constants: figures that go before all others, as under ``[constants]``.
        parts: ``host``, ``nic``, ``expander``, ``pool``: names or files in place of those.

    Raises:
        UsageError, InputError: as :func:`hoptrace.platform.component`, and for a part of another kind than its place.
    """
    main = (
        component(name_or_path)
        if isinstance(name_or_path, str)
        else checked(name_or_path, str(name_or_path.get("name", "given")))
    )
    main = {"name": "given", **main}
    name = str(main["name"])
    wanted = {k: main.get(k) for k in COMPANIONS}
    usual = catalogue().get(str(main.get("base", name)), {})
    assumed = {str(v) for k, v in wanted.items() if v is not None and v == usual.get(k) and parts.get(k) is None}
    for slot, part in parts.items():
        if slot not in COMPANIONS:
            raise UsageError(f"A machine has no part {slot!r}.", hint=f"There are: {', '.join(COMPANIONS)}.")
        if part is not None:
            wanted[slot] = part
    found: dict[str, Mapping[str, Any]] = {}
    for slot, part in wanted.items():
        if part is not None:
            entry = component(part)
            kind = "cxl" if slot in ("expander", "pool") else slot
            if entry.get("kind", "device") != kind:
                raise UsageError(
                    f"{part} is of kind {entry.get('kind', 'device')}, not {kind}.", hint="`hoptrace platforms` lists them."
                )
            found[slot] = entry
    kind = str(main.get("kind", "device"))
    found[_SLOTS[kind]] = main
    if kind == "cxl":
        found.setdefault("expander", main)
    given = checked({"constants": dict(constants or {})}, "constants")["constants"]
    return System(name, found, given, frozenset(assumed))
