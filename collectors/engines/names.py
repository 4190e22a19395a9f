"""How engines' metrics read, by name: the tables of all engines in one form.

A table says what a metric *is*; the TYPE line of the page is only asked about names that no table has. Names are those of the
page: Prometheus clients put ``_total`` behind a counter's name, so a counter stands under both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from hoptrace.collectors.engines.prometheus import Kind

__all__ = ["COMMON", "Names", "Shape", "expand"]

Shape = Literal["counter", "seconds", "gauge", "whole", "histogram"]
"""counter: a total of whole things; seconds: one of no whole things; gauge, whole: a value of now; histogram: buckets."""

Names = Mapping[str, tuple[Shape, str]]
"""Name without ``_total`` → shape and unit (of a histogram: of what it sorts)."""


def expand(names: Names) -> dict[str, Kind]:
    """The table by the names that a page uses: ``_total``, ``_bucket``, ``_count``, ``_sum``, quantiles."""
    out: dict[str, Kind] = {}
    for name, (shape, unit) in names.items():
        if shape == "histogram":
            out[f"{name}_bucket"] = out[f"{name}_count"] = Kind("1", "cumulative", whole=True)
            out[f"{name}_sum"] = Kind(unit, "cumulative")
            out[name] = Kind(unit, "gauge")  # the quantiles, where the client makes a summary of it
        elif shape in ("counter", "seconds"):
            kind = Kind(unit, "cumulative", whole=shape == "counter")
            out[name] = kind
            if not name.endswith("_total"):
                out[f"{name}_total"] = kind
        else:
            out[name] = Kind(unit, "gauge", whole=shape == "whole")
    return out


COMMON = expand(
    {
        "process_cpu_seconds": ("seconds", "s"),
        "process_resident_memory_bytes": ("whole", "bytes"),
        "process_virtual_memory_bytes": ("whole", "bytes"),
        "process_open_fds": ("whole", "files"),
        "process_max_fds": ("whole", "files"),
        "process_start_time_seconds": ("gauge", "s"),
        "python_info": ("whole", "1"),
        "python_gc_objects_collected": ("counter", "objects"),
        "python_gc_objects_uncollectable": ("counter", "objects"),
        "python_gc_collections": ("counter", "collections"),
        "http_requests": ("counter", "requests"),
        "http_request_size_bytes": ("histogram", "bytes"),
        "http_response_size_bytes": ("histogram", "bytes"),
        "http_request_duration_seconds": ("histogram", "s"),
        "http_request_duration_highr_seconds": ("histogram", "s"),
    }
)
"""What the Prometheus client of Python and the FastAPI instrumentator add to any engine's page."""
