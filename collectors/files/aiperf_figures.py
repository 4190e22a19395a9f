"""AIPerf's figures over a whole run: `profile_export_aiperf.json`."""

from __future__ import annotations

from pathlib import Path

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.bench_figures import Figures
from hoptrace.collectors.files.json_walk import whole_object

__all__ = ["IMPORTER", "AiperfFigures"]

_ABOUT = ("input_config", "telemetry_data", "run_info", "schema_version", "aiperf_version", "benchmark_id", "error_summary")
_CANCELLED = "The run was cancelled: its figures are of the part that ran."


class AiperfFigures(Importer):
    """AIPerf's figures of a run."""

    kind = "aiperf-figures"
    summary = "AIPerf figures of a run (profile_export_aiperf.json): no requests"

    def matches(self, path: Path, head: bytes) -> bool:
        start = head.lstrip()
        names = (b'"request_throughput"', b'"request_latency"', b'"unit"', b'"avg"')
        return start.startswith(b"{") and b"\n" in start and all(n in start for n in names)

    def read(self, path: Path, sink: Sink) -> None:
        figures = Figures(sink, "aiperf")
        found = whole_object(sink)
        figures.tree(found, leave=_ABOUT)
        if found.get("was_cancelled"):
            sink.note(_CANCELLED)
        figures.write(None, requests=0)


IMPORTER = AiperfFigures()
