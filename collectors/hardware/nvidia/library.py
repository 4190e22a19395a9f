"""NVIDIA's management library, loaded once for the process through nvidia-ml-py: start, calls, restart after a device's loss.

Tested here against a compiled stub of libnvidia-ml.so.1 only: no GPU was lent to this project's machine.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from hoptrace.collectors.hardware.nvidia.errors import NO_FUNCTION, UNKNOWN, NvmlError, found_by_code
from hoptrace.collectors.hardware.source import Found, Roots

__all__ = ["Nvml", "library", "within"]

_T = TypeVar("_T")

_START_S, _RESTART_S, _QUIET_S = 20.0, 5.0, 1.0
_PACKAGE = "pip install 'hoptrace[nvidia]'"


class Nvml:
    """The library. ``generation`` grows when it was started anew: handles of an older one must not be used."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._ml: Any = None
        self._state = threading.Condition()
        self._starting = threading.Lock()
        self._using: dict[str, float] = {}
        self._closed_to_all = False
        self.generation = 0
        self.driver: str | None = None

    def start(self) -> Found:
        """Load and initialise, if that is not done. Says why not; does not raise, and returns within 20 s."""
        with self._starting:
            if self.generation:
                return Found("ok", sees=f"driver {self.driver}")
            try:
                import pynvml
            except ImportError as e:
                return Found("absent", f"the Python package nvidia-ml-py can't be imported ({e})", _PACKAGE)
            self._ml = pynvml
            if self._path and pynvml.nvmlLib is None:
                # pynvml loads by the name libnvidia-ml.so.1 unless its `nvmlLib` is set already.
                try:
                    pynvml.nvmlLib = ctypes.CDLL(self._path)
                except OSError as e:
                    return Found("absent", f"{self._path} can't be loaded: {e}", "name the driver's libnvidia-ml.so.1")
            try:
                within(_START_S, "nvmlInit", self._initialise)
            except NvmlError as e:
                return found_by_code(e)
            self.generation = 1
            return Found("ok", sees=f"driver {self.driver}")

    @property
    def driver_version(self) -> tuple[int, ...] | None:
        """(580, 82, 7) for 580.82.07; null where it is not told."""
        try:
            return tuple(int(part) for part in (self.driver or "").split("."))
        except ValueError:
            return None

    def call(self, name: str, *arguments: Any) -> Any:
        """A function of pynvml. NvmlError says which code it gave; a function that the driver or the package lacks gives 13."""
        try:
            return getattr(self._ml, name)(*arguments)
        except self._ml.NVMLError as e:
            raise NvmlError(int(e.value), name) from None
        except self._ml.NVMLLibraryMismatchError:
            raise NvmlError(NO_FUNCTION, name) from None
        except AttributeError:
            raise NvmlError(NO_FUNCTION, name, "this version of nvidia-ml-py does not have it") from None

    def constant(self, name: str, default: int) -> int:
        """A constant of pynvml, for what depends on its version."""
        return int(getattr(self._ml, name, default))

    def symbol(self, name: str) -> Callable[..., int]:
        """A C function itself, for what is called ten times a second. NvmlError 13 if the driver's library has it not."""
        try:
            return getattr(self._ml.nvmlLib, name)  # type: ignore[no-any-return]
        except AttributeError:
            raise NvmlError(NO_FUNCTION, name) from None

    @staticmethod
    def by_reference(structure: Any) -> Any:
        """A structure as an argument of :meth:`symbol`'s functions."""
        return ctypes.byref(structure)

    @property
    def module(self) -> Any:
        """pynvml, for its structures."""
        return self._ml

    @contextmanager
    def using(self, who: str) -> Iterator[None]:
        """Around calls: the library is not restarted under them, and :meth:`overdue` sees which of them hang."""
        with self._state:
            while self._closed_to_all:
                self._state.wait()
            self._using[who] = time.monotonic()
        try:
            yield
        finally:
            with self._state:
                self._using.pop(who, None)
                self._state.notify_all()

    def overdue(self, seconds: float) -> list[str]:
        """Who has been in a call for longer than that."""
        now = time.monotonic()
        with self._state:
            return [who for who, since in self._using.items() if now - since > seconds]

    def restart(self) -> bool:
        """Shut down and initialise again, for devices that went and came back: the library keeps its list from the start. Not
        done while somebody is in a call (one that hangs must not stop the others), nor twice at once. Call it outside `using`."""
        with self._state:
            if self._closed_to_all:
                return False
            self._closed_to_all = True
            quiet = self._state.wait_for(lambda: not self._using, _QUIET_S)
        try:
            if not quiet:
                return False
            self.generation += 1  # whatever comes of it: handles are of an earlier start
            within(_RESTART_S, "nvmlInit", self._again)
            return True
        except NvmlError:
            return False
        finally:
            with self._state:
                self._closed_to_all = False
                self._state.notify_all()

    def _initialise(self) -> None:
        self.call("nvmlInit")
        try:
            self.driver = str(self.call("nvmlSystemGetDriverVersion"))
        except NvmlError:
            self.driver = None

    def _again(self) -> None:
        with suppress(NvmlError):
            self.call("nvmlShutdown")
        self._initialise()


def within(seconds: float, what: str, work: Callable[[], _T]) -> _T:
    """What it gives, from a thread that is left behind if it hangs: calls on a lost GPU may never return. NvmlError 999 then."""
    failed: list[Exception] = []
    given: list[_T] = []
    done = threading.Event()

    def run() -> None:
        try:
            given.append(work())
        except Exception as e:  # handed over to the caller
            failed.append(e)
        done.set()

    threading.Thread(target=run, name="hoptrace-nvml", daemon=True).start()
    if not done.wait(seconds):
        raise NvmlError(UNKNOWN, what, f"it did not return within {seconds:g} s")
    if failed:
        raise failed[0]
    return given[0]


_LOADED: dict[str | None, Nvml] = {}
_LOADING = threading.Lock()


def library(roots: Roots) -> Nvml | None:
    """The process's library; null where the roots are another machine's and no library is named for it."""
    if roots.nvml is None and not roots.live:
        return None
    with _LOADING:
        return _LOADED.setdefault(roots.nvml, Nvml(roots.nvml))
