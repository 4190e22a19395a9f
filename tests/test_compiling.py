"""Compiled code where it can be kept, and where it cannot."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import numba
import pytest

from hoptrace import compiling


def _double(x: int) -> int:
    return 2 * x


def test_nowhere_to_keep_it_compiles_all_the_same_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    compiling._say_once.cache_clear()

    def homeless(*args: Any, **options: Any) -> Any:
        if options.get("cache"):
            # numba decides when it decorates.
            def refuse(function: Any) -> Any:
                raise RuntimeError(f"cannot cache function {function.__name__!r}: no locator available for file 'x.py'")

            return refuse
        return numba.njit(*args, **options)

    with mock.patch.object(compiling, "njit", homeless), caplog.at_level(logging.WARNING, "hoptrace"):
        assert compiling.cached_njit(_double)(21) == 42
        assert compiling.cached_njit(_double)(4) == 8
    assert [("NUMBA_CACHE_DIR" in r.message) for r in caplog.records] == [True]


def test_another_fault_is_not_hidden() -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("something else")

    with mock.patch.object(compiling, "njit", broken), pytest.raises(RuntimeError, match="something else"):
        compiling.cached_njit(_double)
