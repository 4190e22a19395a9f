"""Run as a process: AMD's package over the library under ROCM_PATH, sampled into the trace of the first argument; the table is
the one of the package's own structure."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

from support.watched import Watched

from hoptrace.collectors.hardware.amd.gpus import AmdSource, load
from hoptrace.collectors.hardware.source import Roots


def main() -> None:
    folder = Path(os.environ["ROCM_PATH"])
    smi = load()
    from amdsmi import amdsmi_wrapper

    table = amdsmi_wrapper.amdsmi_gpu_metrics_t()
    ctypes.memset(ctypes.byref(table), 0xFF, ctypes.sizeof(table))  # as the library does: what is not told is all ones
    for name, value in json.loads(sys.argv[2]).items():
        if isinstance(value, list):
            for i, v in enumerate(value):
                getattr(table, name)[i] = v
        else:
            setattr(table, name, value)
    table.common_header.format_revision = 1
    (folder / "metrics").write_bytes(bytes(table))
    Roots.live = property(lambda self: True)  # type: ignore[assignment]
    w = Watched(AmdSource(Roots(folder / "proc", folder / "sys"), lambda: smi), Path(sys.argv[1]))
    print(w.probe())
    for error in ("0", "54", "0"):
        (folder / "error").write_text(error)
        w.source._again_s = 0.0  # type: ignore[attr-defined]
        w.sample(2)
    told = [[r["entity"], r["name"], r["direction"], r["value_int"], r["value_float"], r["status"]] for r in w.rows()]
    print(json.dumps({"rows": told, "events": w.events()}))


main()
