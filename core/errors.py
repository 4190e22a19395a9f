"""The one root of hoptrace's errors.

Only the command line turns an error into text and an exit code; everything below it raises one of these.
"""

from __future__ import annotations

__all__ = [
    "EnvironmentProblem",
    "GateFailed",
    "HoptraceError",
    "InputError",
    "UsageError",
]


class HoptraceError(Exception):
    """What went wrong in one sentence, with the remedy in ``hint``.

    ``exit_code`` is what the command line exits with: 1 a gate failed, 2 wrong use, 3 bad input, 4 environment.
    """

    exit_code = 3

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class GateFailed(HoptraceError):
    """A comparison or a validation did what it was asked and the answer is no."""

    exit_code = 1


class UsageError(HoptraceError):
    """The command was called in a way that cannot work."""

    exit_code = 2


class InputError(HoptraceError):
    """A file, a folder, a policy or a stream is not what it should be."""

    exit_code = 3


class EnvironmentProblem(HoptraceError):
    """The machine, the network or a server stands in the way."""

    exit_code = 4
