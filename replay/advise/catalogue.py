"""Which engine's flags, and all changes of one flag that are worth a try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Server
from hoptrace.replay.advise import llamacpp, sglang, vllm
from hoptrace.replay.advise.model import NOT_JUDGED, Change, Left
from hoptrace.replay.advise.scene import Family, Scene

__all__ = ["ENGINES", "Catalogue", "catalogue_of", "judge", "named"]


@dataclass(frozen=True)
class Catalogue:
    """One engine's flags. ``unjudged``: flags that bear on performance and no replay can tell, with the reason."""

    engine: str
    families: tuple[Family, ...]
    unjudged: tuple[tuple[str, str], ...]


ENGINES = {
    "vllm": Catalogue("vLLM", vllm.FAMILIES, vllm.UNJUDGED),
    "sglang": Catalogue("SGLang", sglang.FAMILIES, sglang.UNJUDGED),
    "llama.cpp": Catalogue("llama.cpp", llamacpp.FAMILIES, llamacpp.UNJUDGED),
}
# What is printed is typed again: llama.cpp's flags are known by their short names.
_SHORT = {"np": "parallel", "b": "batch-size"}
_KNOWN = ", ".join(c.engine for c in ENGINES.values())
_HINT = "hoptrace replay --set KEY=VALUE and hoptrace sweep try any policy on any trace."


def catalogue_of(server: Server | None) -> Catalogue:
    """The flags of the engine that the trace was recorded from.

    Raises:
        InputError: the trace does not tell it, or it is one whose flags are not known here.
    """
    engine = None if server is None else server.engine
    if engine is None:
        raise InputError(f"The trace does not tell which engine it ran on; advice is about the flags of {_KNOWN}.", hint=_HINT)
    if engine not in ENGINES:
        raise InputError(f"The trace ran on {engine}; advice is about the flags of {_KNOWN}.", hint=_HINT)
    return ENGINES[engine]


def judge(catalogue: Catalogue, scene: Scene) -> tuple[list[Change], list[Left]]:
    """What to try, and what is left out and why, in the order of the catalogue."""
    changes: list[Change] = []
    left: list[Left] = []
    for family in catalogue.families:
        found = family.judge(scene)
        changes += found.changes
        left += found.left
    left += [Left(flag, NOT_JUDGED, why) for flag, why in catalogue.unjudged]
    return changes, left


def named(catalogue: Catalogue, scene: Scene, tries: Sequence[str]) -> list[Change]:
    """Changes that the user names, as in ``max-num-seqs=32``. UsageError: no such flag, or no such value."""
    takes = {f.flag: f.make for f in catalogue.families if f.make is not None}
    found = []
    for text in tries:
        flag, is_, value = text.partition("=")
        flag = flag.strip().lstrip("-").replace("_", "-")
        make = takes.get(_SHORT.get(flag, flag))
        if not is_ or make is None:
            raise UsageError(f"--try {text[:60]!r} is no change that {catalogue.engine} and a replay both know.",
                             hint=f"FLAG=VALUE, with one of: {', '.join(takes)}.")  # fmt: skip
        found.append(make(scene, value.strip()))
    return found
