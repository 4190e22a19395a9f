"""numba's compiler with its cache of compiled code, or without where there is no place for one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from numba import njit

__all__ = ["cached_njit"]


def cached_njit(function: Callable[..., Any], *, nogil: bool = False, forceinline: bool = False, counted: bool = True) -> Any:
    """``njit(cache=True)``; where neither the package's folder nor the user's can be written, compiled anew in each run.

    Args:
        forceinline: into its callers, for functions that take many arrays (each costs seven words a call).
        counted: whether arrays' references are counted, which costs more than all else in a small function. A function without
            must neither allocate nor return any array. numba has the option, but does not document it.
    """
    options: dict[str, Any] = {"nogil": nogil, "forceinline": forceinline, "_nrt": counted}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError as e:
        # numba has no class of its own for this, and looks for a place when it decorates, not when it compiles.
        if "no locator available" not in str(e):
            raise
        _say_once()
        return njit(**options)(function)


@cache
def _say_once() -> None:
    logging.getLogger("hoptrace").warning(
        "hoptrace: compiled code cannot be kept here, so each run compiles anew (some seconds). "
        "Set NUMBA_CACHE_DIR to a folder that you may write to."
    )
