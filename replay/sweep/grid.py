"""The grid of a sweep: a TOML file with what all points share, and the axes whose product they are."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hoptrace.errors import InputError
from hoptrace.platform import platforms
from hoptrace.replay.policy import Policy, load_policy, with_settings

__all__ = ["MOST_POINTS", "OPTIONS", "Grid", "Point", "load_grid", "parse_grid"]

OPTIONS = ("policy", "cost", "platform", "model", "rate", "seed", "arrivals", "until")
"""What a grid may set beside keys of the policy: the options of `hoptrace replay` of the same names."""

MOST_POINTS = 100_000
_HINT = 'A grid has [base] (options that all points share) and [axes], as in: [axes] rate = ["1x", "2x"].'


@dataclass(frozen=True)
class Point:
    """One what-if.

    Attributes:
        number: its position in the product, the last axis fastest.
        values: axis → value, as the grid has them.
        options: of `hoptrace replay`, without the policy. settings: KEY=VALUE on top of the policy, as --set takes them.
    """

    number: int
    values: dict[str, Any]
    policy: str
    options: dict[str, Any]
    settings: tuple[str, ...]

    def resolved(self) -> Policy:
        """The policy with the settings on top. InputError, UsageError: see :func:`hoptrace.replay.policy.with_settings`."""
        return with_settings(load_policy(self.policy), self.settings)

    def identity(self, trace: str, version: str) -> str:
        """A hash of all that the figures depend on: files are taken by their content, so a changed policy is another point.

        Args:
            trace: of the trace; version: of hoptrace.
        """
        try:
            policy: Any = self.resolved().model_dump(mode="json", exclude={"name", "description"})
        except Exception as e:  # a point that cannot be made is a row of its own, with this text
            policy = f"{type(e).__name__}: {e}"
        content = {k: _content(k, v) for k, v in self.options.items()}
        text = json.dumps([trace, version, policy, content], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Grid:
    """``axes``: name → values, in the order of the file. ``points`` are their product."""

    name: str
    base: dict[str, Any]
    axes: dict[str, list[Any]]

    @property
    def size(self) -> int:
        """How many points."""
        return math.prod(len(v) for v in self.axes.values())

    def points(self) -> Iterator[Point]:
        """All points, the last axis fastest."""
        for number, combination in enumerate(itertools.product(*self.axes.values())):
            values = dict(zip(self.axes, combination, strict=True))
            merged = self.base | values
            options = {k: v for k, v in merged.items() if k in OPTIONS and k != "policy"}
            settings = tuple(s for k, v in merged.items() if k not in OPTIONS for s in _settings(k, v))
            yield Point(number, values, str(merged.get("policy", "as-recorded")), options, settings)


def load_grid(path: Path) -> Grid:
    """A grid file. InputError: it cannot be read, or is no grid; says what."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} cannot be read: it is not text in UTF-8.") from None
    return parse_grid(text, str(path))


def parse_grid(text: str, name: str = "the grid") -> Grid:
    """A grid from TOML text. InputError names the key and what is allowed."""
    try:
        data = tomllib.loads(text)
    except ValueError as e:
        raise InputError(f"{name} is not TOML: {e}.") from None
    extra = [k for k in data if k not in ("base", "axes")]
    if extra:
        raise InputError(f"{name}: {extra[0]!r} is no part of a grid.", hint=_HINT)
    base, axes = data.get("base", {}), data.get("axes", {})
    if not isinstance(base, dict) or not isinstance(axes, dict) or not axes:
        raise InputError(f"{name}: a grid needs a table [axes] with at least one axis.", hint=_HINT)
    base, axes = _flat(base), _flat(axes)
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{name}: the axis {key} must be a list of values, not {values!r}.", hint=_HINT)
        if len({json.dumps(v, default=str, sort_keys=True) for v in values}) < len(values):
            raise InputError(f"{name}: the axis {key} has the same value twice.", hint="Each point is replayed once.")
    grid = Grid(name, base, axes)
    for key in {**base, **axes}:
        _known(key, name)
    if grid.size > MOST_POINTS:
        raise InputError(f"{name}: {grid.size:,} points; at most {MOST_POINTS:,}.", hint="Take fewer values, or several grids.")
    return grid


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of a policy written as tables, with their keys joined by dots; options stay as they are."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and key not in OPTIONS:
            found |= {f"{key}.{k}": v for k, v in _flat(value).items()}
        else:
            found[key] = value
    return found


def _known(key: str, name: str) -> None:
    """An option, or a section of a policy. The values are checked point by point: a bad one is a row, not an end."""
    section = key.split(".")[0]
    if key in OPTIONS or section in Policy.model_fields:
        return
    hint = f"Options: {', '.join(OPTIONS)}; or a policy's section and key, as batching.max_sequences."
    raise InputError(f"{name}: there is no axis or option {key!r}.", hint=hint)


def _settings(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _settings(f"{key}.{k}", v)
    else:
        yield f"{key}={json.dumps(value, default=str)}"


def _content(option: str, value: Any) -> Any:
    """A file by its content; a name of the catalogue by what the catalogue says."""
    text = str(value)
    if option == "platform" and text in platforms():
        return platforms()[text]
    path = Path(text.removeprefix("table:").removeprefix("file:").split(",speed=")[0])
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else value
    except OSError:
        return value
