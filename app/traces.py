"""Which traces the dashboard shows: paths as given, a folder of traces stands for those in it, none given stands for the samples.

Light on imports: the command line uses it before it starts anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hoptrace.errors import InputError
from hoptrace.manifest import FILE, read_manifest

__all__ = ["checked", "labels", "resolve"]


def resolve(given: Sequence[Path | str]) -> list[Path]:
    """The trace folders behind what was given, in that order, each once.

    Raises:
        InputError: a folder that is no trace and holds none.
    """
    if not given:
        from hoptrace.samples import samples

        return samples()
    found: list[Path] = []
    for item in given:
        path = Path(item).expanduser().absolute()
        inside = sorted(p.parent for p in path.glob(f"*/{FILE}")) if path.is_dir() and not (path / FILE).exists() else []
        found.extend(inside or [path])
    return list(dict.fromkeys(found))


def checked(given: Sequence[Path | str]) -> list[Path]:
    """:func:`resolve`, with every manifest read once.

    Raises:
        InputError: one of them is no trace, is damaged, or is newer than this hoptrace reads.
    """
    traces = resolve(given)
    if not traces:
        raise InputError("There is no trace to show.", hint="Name one: hoptrace app run.trace")
    for path in traces:
        read_manifest(path)
    return traces


def labels(traces: Sequence[Path]) -> dict[Path, str]:
    """A short name for each: the folder's, with as many folders above it as it takes to tell two apart."""
    result: dict[Path, str] = {}
    for path in traces:
        for depth in range(1, len(path.parts) + 1):
            name = "/".join(path.parts[-depth:])
            if sum("/".join(p.parts[-depth:]) == name for p in traces) == 1:
                break
        result[path] = name.removesuffix(".trace")
    return result
