"""numba's compiled code, kept between runs, and dropped when any file that it was made from changes.

numba keeps compiled code beside the source (or in the user's cache, or in NUMBA_CACHE_DIR) and makes it anew when the function's
own file changes, but not when a function that it calls, in another file, does: the old arithmetic would go on unseen.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from hoptrace.compiling import cached_njit

__all__ = ["compiled", "lean"]


def compiled(*modules: ModuleType, forceinline: bool = False, counted: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """``njit(cache=True)`` for a function that calls compiled functions of ``modules``: their sources are part of the stamp.

    Modules of ours that those name in turn count, too. ``forceinline``, ``counted``: see :func:`hoptrace.compiling.cached_njit`.
    """
    digest = hashlib.sha256(b"".join(Path(f).read_bytes() for f in sorted(_files(modules, set())))).hexdigest()

    def wrap(function: Callable[..., Any]) -> Any:
        dispatcher = cached_njit(function, forceinline=forceinline, counted=counted)
        # No public way leads there. Should numba move it, its own stamp remains, and the test of this file says so.
        kept = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
        if kept is not None and hasattr(kept, "_source_stamp"):
            kept._source_stamp = (kept._source_stamp, digest)
        return dispatcher

    return wrap


def _files(modules: Iterable[ModuleType], seen: set[str]) -> set[str]:
    """The files of modules of ours, and of those that they name, or a function of."""
    for m in modules:
        if m.__name__.startswith("hoptrace.") and m.__file__ and m.__file__ not in seen:
            seen.add(m.__file__)
            values = vars(m).values()
            named = (x if isinstance(x, ModuleType) else sys.modules.get(getattr(x, "__module__", None) or "") for x in values)
            _files([x for x in named if x is not None], seen)
    return seen


def lean(*modules: ModuleType, forceinline: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """:func:`compiled` for functions that neither allocate nor return arrays: nothing is counted."""
    return compiled(*modules, forceinline=forceinline, counted=False)
