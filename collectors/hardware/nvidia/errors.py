"""What NVML's return codes mean, in words, with what would help."""

from __future__ import annotations

from hoptrace.collectors.hardware.sink import Status
from hoptrace.collectors.hardware.source import Found

__all__ = ["GONE", "NvmlError", "found_by_code", "status_of_code"]

SUCCESS, UNINITIALISED, INVALID, UNSUPPORTED, DENIED, NOT_FOUND = 0, 1, 2, 3, 4, 6
DRIVER_NOT_LOADED, TIMEOUT, NO_LIBRARY, NO_FUNCTION, LOST, RESET_REQUIRED, MISMATCH = 9, 10, 12, 13, 15, 16, 18
NOT_READY, NO_GPU, UNKNOWN = 27, 28, 999

GONE = frozenset((UNINITIALISED, DRIVER_NOT_LOADED, LOST, RESET_REQUIRED, NO_GPU))
"""The device does not answer any more, and may come back."""

_WORDS: dict[int, tuple[Status, str, str | None]] = {
    1: ("error", "NVML has been shut down", None),
    2: ("unsupported", "the driver does not know what was asked for (invalid argument)", "a newer driver"),
    3: ("unsupported", "this GPU or driver does not have it (not supported)", None),
    4: ("denied", "this user may not read it (no permission)", "run as root, or lift the driver's restriction to root"),
    6: ("absent", "not found", None),
    9: ("absent", "the NVIDIA kernel driver is not loaded", "load it (modprobe nvidia), or give the container the GPU devices"),
    11: ("error", "the kernel has an interrupt problem with a GPU", "see dmesg"),
    12: (
        "absent", "libnvidia-ml.so.1 is not found",
        "install the NVIDIA driver; in a container, start it with the NVIDIA runtime and the capability `utility`",
    ),
    13: ("unsupported", "the driver's library has no such function", "a newer driver"),
    15: ("lost", "the GPU is lost: it has fallen off the bus or does not answer", "see dmesg (Xid); reset or reboot"),
    16: ("lost", "the GPU has to be reset before it can be used again", "nvidia-smi --gpu-reset, or reboot"),
    17: ("error", "the operating system has refused the request", "see dmesg"),
    18: (
        "error", "driver and library have different versions, as after an upgrade of the driver",
        "reload the kernel modules or reboot, then start hoptrace again: no second try in this process can help",
    ),
    27: ("error", "the driver is not ready yet", None),
    28: ("absent", "the driver sees no GPU", "give this machine or container a GPU"),
    999: ("error", "an unknown error in the driver", "see dmesg"),
}  # fmt: skip
"""nvmlReturn_t of nvml.h 13.5: our status, in words, the remedy."""


class NvmlError(Exception):
    """A call failed: ``code`` as in nvml.h, ``call`` is the function's name."""

    def __init__(self, code: int, call: str, words: str | None = None) -> None:
        self.code, self.call = code, call
        super().__init__(f"{call}: {words or _entry(code)[1]} (NVML {code})")

    @property
    def status(self) -> Status:
        return status_of_code(self.code)


def status_of_code(code: int) -> Status:
    """Our status for a code other than 0."""
    return _entry(code)[0]


def found_by_code(error: NvmlError) -> Found:
    """A probe's finding from a failed call."""
    status, _, remedy = _entry(error.code)
    return Found(status, str(error), remedy)


def _entry(code: int) -> tuple[Status, str, str | None]:
    return _WORDS.get(code, ("error", "an error of the driver", None))
