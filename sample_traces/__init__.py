"""Small real traces that come with hoptrace; README.md beside this file says what each is."""

from __future__ import annotations

from pathlib import Path

from hoptrace.errors import InputError

__all__ = ["sample", "samples"]


def samples() -> list[Path]:
    """The sample traces, by name."""
    return sorted(Path(__file__).parent.glob("*.trace"))


def sample(name: str) -> Path:
    """The folder of one sample trace. InputError with the names there are."""
    path = Path(__file__).parent / f"{name}.trace"
    if not path.is_dir():
        raise InputError(f"There is no sample trace {name!r}.", hint=f"There are: {', '.join(p.stem for p in samples())}.")
    return path
