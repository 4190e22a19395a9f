"""What this host is called in rows."""

from __future__ import annotations

import os

__all__ = ["own_host"]


def own_host() -> str:
    """Name of this host in rows."""
    return os.uname().nodename
