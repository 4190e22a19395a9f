"""hoptrace: what coordination and data movement cost in LLM inference.

``hoptrace.open("run.trace")`` gives a :class:`Trace`: Polars lazy frames, DuckDB views and the manifest.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["Trace", "__version__", "open"]

try:
    __version__ = version("hoptrace")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

# After the version, which the writer reads.
from hoptrace.reader import Trace
from hoptrace.reader import open_trace as open  # noqa: A004 - hoptrace.open(...) reads as it should
