"""hoptrace: what coordination and data movement cost in LLM inference.

``hoptrace.open("run.trace")`` gives a :class:`Trace`: Polars lazy frames, DuckDB views and the manifest.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

__all__ = ["Trace", "__version__", "open"]

try:
    __version__ = version("hoptrace")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

if TYPE_CHECKING:
    from hoptrace.reader import Trace
    from hoptrace.reader import open_trace as open  # noqa: A004 - hoptrace.open(...) reads as it should


def __getattr__(name: str) -> Any:
    # On first use: what runs inside an engine's process imports this package, and must not load Polars there.
    if name in ("Trace", "open"):
        from hoptrace import reader

        return reader.Trace if name == "Trace" else reader.open_trace
    raise AttributeError(f"module 'hoptrace' has no attribute {name!r}")
