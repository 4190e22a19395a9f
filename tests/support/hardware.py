"""A trace of counters with a process that takes the CPUs for half of the time, literal and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.memory import MemoryTrace

from hoptrace.manifest import CollectorInfo, Manifest, Server

__all__ = ["MS", "S", "cumulative", "hardware_rows", "hardware_trace"]

MS, S = 1_000_000, 1_000_000_000
_GPU = "GPU-5fa6c1b2"


def cumulative(
    entity: str, name: str, of: Callable[[float], float], *, every: float = 0.1, until: float = 40, **more: Any
) -> list[dict[str, Any]]:
    """Samples of a counter that stands at ``of(t)`` after t seconds."""
    row = {"host": "h", "entity": entity, "name": name, "unit": "ns", "semantics": "cumulative", "source": "process"}
    n = round(until / every)
    return [row | {"time_ns": round(i * every * S), "value_int": round(of(i * every))} | more for i in range(n + 1)]


def hardware_rows(
    *, calm_ms: int = 20, slow_ms: int = 30, delay_ms: float = 9, foreign: float = 0.45, half: float = 20
) -> dict[str, list[dict[str, Any]]]:
    """Steps of four decoders take ``calm_ms`` until ``half`` seconds, ``slow_ms`` after it, of which the thread that computes
    waits ``delay_ms`` for a CPU. Of two CPUs others take ``foreign`` of the busy time then."""
    steps, clock = [], 0
    while clock < 40 * S:
        took = (calm_ms if clock < half * S else slow_ms) * MS
        steps.append({
            "server": "s", "step": len(steps), "start_ns": clock, "end_ns": clock + took, "origin": "observed",
            "prefill_requests": 0, "prefill_tokens": 0, "prefill_context_tokens": 0, "decode_requests": 4, "decode_tokens": 4,
            "decode_context_tokens": 400,
        })  # fmt: skip
        clock += took
    per_s = delay_ms / slow_ms  # seconds of delay a second

    def delay(t: float) -> float:
        return max(0.0, t - half) * per_s * S

    def cpu(t: float) -> float:
        return min(t, half) * 0.9 * S + max(0.0, t - half) * (0.95 - per_s) * S

    def busy(t: float) -> float:
        return cpu(t) * 1.02 + max(0.0, t - half) * S * (0.95 - per_s) * foreign / (1 - foreign)

    counters = [
        *cumulative("process:7", "on_cpu_ns", lambda t: cpu(t) * 1.01), *cumulative("process:7", "run_delay_ns", delay),
        *cumulative("thread:7/8", "on_cpu_ns", cpu), *cumulative("thread:7/8", "run_delay_ns", delay),
        *cumulative("thread:7/8", "involuntary_switches", lambda t: max(0.0, t - half) * 100, unit="switches"),
        *cumulative("thread:7/9", "on_cpu_ns", lambda t: cpu(t) * 0.01),
        *cumulative("thread:7/9", "run_delay_ns", lambda t: 50 * MS * t),
        *cumulative("process:7", "futex_calls", lambda t: 200 * t, unit="calls", source="tracepoints"),
        *cumulative("cpu", "user_ns", busy), *cumulative("cpu", "idle_ns", lambda t: 2 * t * S - busy(t)),
        *cumulative("cpu", "steal_ns", lambda t: 0), *cumulative("hoptrace:9", "on_cpu_ns", lambda t: cpu(t) * 0.01),
        *cumulative("pressure", "cpu_some_ns", lambda t: delay(t)),
    ]  # fmt: skip
    return {"steps": steps, "counters": counters}


def _devices() -> list[dict[str, Any]]:
    """A GPU, its links, interrupts, what collecting cost; an exporter that prints zeros for the PCIe traffic of the GPU."""
    gauge = {"semantics": "gauge", "unit": "bytes", "source": "nvml"}
    slow: dict[str, Any] = {"every": 1.0, "source": "nvml"}
    return [
        *cumulative(f"gpu:{_GPU}", "memory_used_bytes", lambda t: 60 << 30, every=1, **gauge),
        *cumulative(f"gpu:{_GPU}", "memory_total_bytes", lambda t: 80 << 30, every=1, **gauge),
        *cumulative(f"gpu:{_GPU}", "sm_clock_mhz", lambda t: 1980, every=1, **gauge | {"unit": "MHz"}),
        *cumulative(f"gpu:{_GPU}", "power_throttle_ns", lambda t: max(0.0, t - 36) * S, **slow),
        *cumulative(f"gpu:{_GPU}", "energy_mj", lambda t: 300_000 * t, unit="mJ", **slow),
        *cumulative(f"nvlink:{_GPU}/3", "replay_errors", lambda t: t // 10, unit="errors", **slow),
        *cumulative(f"nvlink:{_GPU}/3", "crc_errors", lambda t: 7, unit="errors", **slow),
        *cumulative("pcie:0000:17:00.0", "raw_bytes", lambda t: t * (1 << 20), direction="tx", unit="bytes", **slow),
        *cumulative("pcie:0000:17:00.0", "data_bytes", lambda t: 0, direction="tx", unit="bytes", every=1.0, source="scraped"),
        *cumulative(
            "irq:45",
            "interrupts",
            lambda t: 100 * t,
            unit="interrupts",
            every=1.0,
            source="interrupts",
            incarnation="5f2e/PCI-MSIX 3-edge nvme0q3",
        ),
        *cumulative("node:3", "pgpromote_success", lambda t: 0, unit="pages", every=1.0, source="vmstat"),
        *cumulative("collector:processes", "cpu_ns", lambda t: 4 * MS * t, every=1.0, source="station"),
        *cumulative("collector:processes", "samples", lambda t: 10 * t, unit="samples", every=1.0, source="station"),
        *cumulative("collector:processes", "missed", lambda t: t // 20, unit="beats", every=1.0, source="station"),
        *cumulative("collector:processes", "every_ns", lambda t: 100 * MS, semantics="gauge", every=1.0, source="station"),
        *cumulative("collector:nvml", "cpu_ns", lambda t: 8 * MS * t, every=1.0, source="station"),
        *cumulative("collector:nvml", "samples", lambda t: 10 * t, unit="samples", every=1.0, source="station"),
    ]


def hardware_trace(**more: Any) -> MemoryTrace:
    """The rows with devices, as a trace of one server whose process is 7."""
    rows = hardware_rows(**more)
    rows["counters"] += _devices()
    rows["events"] = [
        {"time_ns": 5 * S, "kind": "xid", "detail": f"XID 63 on gpu:{_GPU} (row remapping)"},
        {"time_ns": 0, "kind": "start", "detail": "Began."},
    ]
    manifest = Manifest(
        origin="recorded", servers=[Server(name="s", pid=7)], closed=True,
        collectors=[CollectorInfo(name="tracepoints", available=False, reason="tracefs is not mounted", remedy="mount it")],
    )  # fmt: skip
    return MemoryTrace(rows, manifest, name="hardware")
