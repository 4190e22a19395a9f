"""What a URL says of where to connect."""

from __future__ import annotations

from urllib.parse import SplitResult

__all__ = ["port_of"]


def port_of(parts: SplitResult) -> int:
    """The port of a URL, or that of its scheme if it names none."""
    return parts.port or (443 if parts.scheme == "https" else 80)
