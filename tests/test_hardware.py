"""The hardware section: is another process stealing my step, what threads and devices did, what collecting cost."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, Group
from support.hardware import MS, S, cumulative, hardware_rows, hardware_trace
from support.memory import MemoryTrace

import hoptrace
from hoptrace.analysis.arranging.osfigures import os_figures
from hoptrace.analysis.hardware.hardware import Hardware, hardware
from hoptrace.analysis.hardware.hardware_text import blocks
from hoptrace.analysis.hardware.rank import Rank, rank
from hoptrace.analysis.hardware.stealing import Contrast, Stealing
from hoptrace.analysis.hardware.stealing_says import verdict
from hoptrace.manifest import CollectorInfo, Manifest, Server
from hoptrace.samples import sample

SERVER = Manifest(origin="recorded", servers=[Server(name="s", pid=7)], closed=True)


def shown(h: Hardware, *, full: bool = True) -> str:
    out = io.StringIO()
    Console(file=out, width=400, color_system=None).print(Group(*blocks(h, full=full)))
    return out.getvalue()


def answer(**more: Any) -> Stealing:
    (found,) = hardware(MemoryTrace(hardware_rows(**more), SERVER)).stealing
    return found


def test_another_process_steals_the_step() -> None:
    a = answer()
    assert (a.verdict, a.bins, a.bin_ns, a.who) == ("yes", 40, S, "the thread of s that computes")
    # 1,000 steps of 20 ms and 667 of 30 ms, each of which waits 9 ms.
    assert a.steps == 1667 and a.step_ns == pytest.approx(24e6, rel=0.01)
    assert a.delay_ns_per_step == pytest.approx(9e6 * 667 / 1667, rel=0.02)
    together = a.together["run_delay_share"]
    assert together.rho is not None and together.rho > 0.8 and together.rises
    c = a.contrast
    assert c is not None and c.slower_ns == pytest.approx(10e6, rel=0.05) and c.low_ns > 5e6
    assert c.more_delay_ns == pytest.approx(9e6, rel=0.05) and c.explained_at_most_ns == c.more_delay_ns
    assert c.foreign[0] == pytest.approx(0.45, abs=0.02) and c.foreign[1] == pytest.approx(0, abs=0.01)
    assert a.says.startswith("Yes, others steal steps. Steps are slower when threads wait for a CPU (rank correlation +")
    assert "a step took 10.0 ms longer than where they waited least" in a.says
    assert "run-queue delay can explain at most 8.99 ms" in a.says and "Others took 45% of the busy CPU time then, " in a.says
    assert a.short.startswith("Yes, others steal steps: ") and a.short.endswith("at most 8.99 ms.")


def test_long_steps_count_in_the_means_though_their_bins_have_too_few_to_be_compared() -> None:
    """The last ten seconds are four steps of 2.5 s, in which the thread waits all but always."""
    rows = hardware_rows()
    rows["steps"] = [r for r in rows["steps"] if r["end_ns"] <= 30 * S]
    first = len(rows["steps"])
    for i in range(4):
        at = 30 * S + round(i * 2.5 * S)
        rows["steps"].append(rows["steps"][0] | {"step": first + i, "start_ns": at, "end_ns": at + round(2.5 * S)})
    for r in rows["counters"]:
        if r["name"] == "run_delay_ns" and r["entity"] != "thread:7/9" and r["time_ns"] > 30 * S:
            r["value_int"] = round(10 * 0.3 * S) + round((r["time_ns"] - 30 * S) * 0.95)
    (a,) = hardware(MemoryTrace(rows, SERVER)).stealing
    assert (a.steps, a.few_steps, a.bins) == (first + 4, 4, 30)
    assert a.step_ns == pytest.approx(40 * S / a.steps, rel=0.01)
    assert a.delay_ns_per_step == pytest.approx((3 + 9.5) * S / a.steps, rel=0.02), "all that it waited, over all steps"
    assert "; 4 steps in bins of fewer than three left out)" in a.says and " left out" not in a.short


def test_its_own_threads_are_more_than_the_cpus() -> None:
    a = answer(foreign=0.02)
    assert a.verdict == "yes" and a.says.startswith("Not others steal steps, its own threads are more than the CPUs.")


def test_nothing_worth_a_word_was_waited() -> None:
    a = answer(delay_ms=0.1, slow_ms=20)
    assert a.verdict == "no" and a.says.startswith("No: the thread of s that computes waited 0.3%")
    assert "at most 0.2% of a step can have been lost to others." in a.says


def test_a_delay_that_slows_no_step_is_told_as_such() -> None:
    """It waits in one half and the steps are as long in both, with a wobble that has nothing to do with it."""
    rows = hardware_rows(slow_ms=20, delay_ms=5)
    for i, step in enumerate(rows["steps"]):
        step["end_ns"] -= (i // 50 % 2) * MS
    (a,) = hardware(MemoryTrace(rows, SERVER)).stealing
    assert a.verdict == "no" and a.says.startswith("No sign that others steal steps") and "At most 2.4" in a.says


def test_what_may_go_together_or_not_is_open() -> None:
    said = verdict("the thread", 20e6, 2e6, 0.31, Rank(40, 0.2, -0.1, 0.5), None, S)
    assert (said.verdict, said.short) == (
        "unknown",
        "Whether others steal steps is open: the thread waited 31% of the time a CPU was wanted.",
    )
    assert said.why == "the interval of the correlation holds none as well as a clear one"
    assert said.says == (
        "Whether others steal steps is open: the thread waited 31% of the time a CPU was wanted, 2.00 ms for each step of 20 ms; "
        "slower steps may go with it or not (rank correlation +0.20 (95 %: -0.10 to +0.50) over 40 bins of 1.00 s). At most 2.00 "
        "ms a step were lost at the mean."
    )
    # In their shares they go together, and yet no step waited longer where steps were slower.
    odd = verdict("the threads", 20e6, 30e6, 0.6, Rank(40, 0.7, 0.3, 0.9), Contrast(13, 5e6, 1e6, 9e6, -1e6, (0.5, 0.1)), S)
    assert (
        odd.verdict == "unknown"
        and "no step waited longer where steps were slower" in odd.says
        and "it bounds nothing" in odd.says
    )


def test_a_steady_delay_cannot_be_told_by_comparison() -> None:
    a = answer(half=0)
    assert a.verdict == "unknown" and a.contrast is None
    assert a.why == "it hardly varied, so nothing can go together with it"
    assert "At most 9.0" in a.says and "cannot be told by comparison" in a.says


def test_null_with_the_reason() -> None:
    rows = hardware_rows(half=1)
    short = {t: [r for r in of if r.get("time_ns", r.get("start_ns")) < 2 * S] for t, of in rows.items()}
    (a,) = hardware(MemoryTrace(short, SERVER)).stealing
    assert (
        a.verdict == "unknown"
        and a.why == "7 bins can be compared, and 10 are needed"
        and a.together["run_delay_share"].rho is None
    )
    rows = hardware_rows()
    bare = [r for r in rows["counters"] if r["name"] != "run_delay_ns"]
    (a,) = hardware(MemoryTrace({**rows, "counters": bare}, SERVER)).stealing
    assert a.why == "no run-queue delay of its threads was recorded"
    unknown = [{**s, "decode_requests": None, "prefill_tokens": None} for s in rows["steps"]]
    (a,) = hardware(MemoryTrace({**rows, "steps": unknown}, SERVER)).stealing
    assert a.why == "no steps that say what was in them lie in the time of the counters"
    later = [{**s, "start_ns": s["start_ns"] + 1000 * S, "end_ns": s["end_ns"] + 1000 * S} for s in rows["steps"]]
    (a,) = hardware(MemoryTrace({**rows, "steps": later}, SERVER)).stealing
    assert a.why == "no steps that say what was in them lie in the time of the counters"
    h = hardware(MemoryTrace({}))
    assert (
        h.stealing == [] and h.threads is None and h.collecting.share is None and any("Who had the CPUs" in x for x in h.unseen)
    )
    assert shown(h, full=False).strip() == "" and json.dumps(h.as_dict(), allow_nan=False)


def test_without_the_machines_counters_nobody_is_named() -> None:
    rows = hardware_rows()
    own = [r for r in rows["counters"] if r["entity"] != "cpu"]
    (a,) = hardware(MemoryTrace({**rows, "counters": own}, SERVER)).stealing
    assert (
        a.verdict == "yes"
        and "Who had the CPUs is not known" in a.says
        and a.together["foreign_share"].why == "it was not recorded"
    )


def test_threads_devices_and_what_it_cost() -> None:
    h = hardware(hardware_trace(), n_steps=1667, output_tokens=6668)
    assert h.threads is not None
    assert [t.entity for t in h.threads.threads] == ["thread:7/8", "thread:7/9"]
    assert (h.threads.sums["futex_calls"], h.threads.sums_of["futex_calls"]) == (8000, "process")
    assert h.threads.per("futex_calls", 6668) == pytest.approx(8000 / 6668)
    assert (h.threads.sums["involuntary_switches"], h.threads.sums_of["involuntary_switches"]) == (2000, "threads")
    assert h.threads.missing["poll_calls"] == "tracefs is not mounted (mount it)"
    (gpu,) = h.devices.gpus
    assert (gpu.memory_mean_bytes, gpu.memory_bytes, gpu.energy_mj) == (60 << 30, 80 << 30, 12_000_000)
    assert gpu.throttled_ns == {"power": 4 * S} and gpu.clocks_mhz == {"sm": 1980.0}
    assert [(t.name, t.total) for t in h.devices.trouble] == [("replay_errors", 4)] and h.devices.quiet_counters == 1
    assert [(v.entity, v.owner, v.total, v.per_s) for v in h.devices.vectors] == [
        ("irq:45", "PCI-MSIX 3-edge nvme0q3", 4000, 100.0)
    ]
    assert h.devices.pressure == {"cpu some": pytest.approx(0.15)}
    assert [k for _, k, _ in h.devices.events] == ["xid"] and h.devices.missing == {}
    costs = {c.name: c for c in h.collecting.collectors}
    assert list(costs) == ["nvml", "processes"] and costs["nvml"].share == pytest.approx(0.008)
    assert costs["processes"].each_ns == pytest.approx(400_000) and costs["processes"].missed == 2
    assert costs["processes"].every_ns == 100 * MS
    assert h.collecting.share == pytest.approx(0.012) and h.collecting.over
    assert [(c.name, c.remedy) for c in h.absent] == [("tracepoints", "mount it")]
    assert "Sources of counters that were not there: tracepoints; why: --section hardware." in h.unseen
    (c,) = h.contradictions
    assert (c.still.source, c.moved.source) == ("scraped", "nvml") and h.warnings == [c.says]
    text = shown(h)
    for line in (
        "futex calls", "≥ 2,000", "Unknown, not 0: poll calls, ioctl calls, yield calls (tracefs is not mounted (mount it)).",
        "gpu:GPU-5fa6c1b2: memory 60 GiB at the mean, 60 GiB at most of 80 GiB; clocks sm 1,980 MHz; slowed down by power for "
        "4.00 s; 12,000 J.",
        "xid: XID 63", "Errors and retries: nvlink:GPU-5fa6c1b2/3 replay_errors +4.",
        "1 error counter of devices and links stayed as they were.",
        "Busiest interrupts: irq:45 (PCI-MSIX 3-edge nvme0q3) 4,000 (100 a second).",
        "Pressure, share of the time: cpu some 15%.",
        "Collecting from the machine took 1.20% of a core (over the 1% that may): nvml 0.8% (800 µs a sample), processes 0.4% "
        "(400 µs a sample). All of hoptrace took 0.8% (proxy, servers' pages, writing).",
        "2 beats of its sources were missed.", "tracepoints  tracefs is not mounted  mount it",
    ):  # fmt: skip
        assert line in text, line
    short = shown(h, full=False)
    assert (
        "Yes, others steal steps" in short and "Collecting from the machine took 1.20%" in short and len(short.splitlines()) == 3
    )
    assert json.loads(json.dumps(h.as_dict(), allow_nan=False)) == h.as_dict()


def test_what_was_not_asked_for_is_said() -> None:
    h = hardware(MemoryTrace(hardware_rows(), SERVER))
    assert h.threads is not None and h.threads.missing["poll_calls"] == "tracepoints were not asked for: attach --tracepoints"
    manifest = Manifest(
        origin="recorded", servers=SERVER.servers, closed=True,
        collectors=[CollectorInfo(name="nvml", available=False, reason="libnvidia-ml.so.1 is not there")],
    )  # fmt: skip
    h = hardware(MemoryTrace(hardware_rows(), manifest))
    assert "GPU memory, clocks and errors, errors of links: nvml: libnvidia-ml.so.1 is not there." in h.unseen
    assert "Interrupts by vector: no collector recorded it." in h.unseen


def test_each_server_has_its_own_answer() -> None:
    rows = hardware_rows()
    other = [{**s, "server": "t"} for s in rows["steps"]]
    calm = [
        *cumulative("process:17", "on_cpu_ns", lambda t: 0.3 * S * t),
        *cumulative("process:17", "run_delay_ns", lambda t: MS * t),
    ]  # fmt: skip
    manifest = Manifest(origin="recorded", servers=[Server(name="s", pid=7), Server(name="t", pid=17)], closed=True)
    h = hardware(MemoryTrace({"steps": rows["steps"] + other, "counters": rows["counters"] + calm}, manifest))
    assert [(a.server, a.verdict, a.who) for a in h.stealing] == [
        ("s", "yes", "the thread of s that computes"), ("t", "no", "all threads of t")
    ]  # fmt: skip


def test_two_sources_of_one_counter_are_not_mixed() -> None:
    """The second tells of the same thread from another beginning: in turn they would seem to fall and leap."""
    rows = hardware_rows()
    twice = [{**r, "source": "other", "value_int": r["value_int"] + 10**15, "time_ns": r["time_ns"] + 1}
             for r in rows["counters"] if r["entity"] == "process:7" and r["time_ns"] < 30 * S]  # fmt: skip
    both = MemoryTrace({**rows, "counters": rows["counters"] + twice}, SERVER)
    once = MemoryTrace(rows, SERVER)
    assert hardware(both).stealing[0].as_dict() == hardware(once).stealing[0].as_dict()
    assert os_figures(both, 1) == os_figures(once, 1)


def test_interrupts_are_counted_once() -> None:
    vectors = [r for n in (1, 2) for r in cumulative(f"irq:{n}", "interrupts", lambda t: 10 * t, unit="interrupts")]
    vectors += cumulative("irq:LOC", "interrupts", lambda t: 1000 * t, unit="interrupts")  # a timer is no device
    process = cumulative("process:7", "on_cpu_ns", lambda t: t)
    found = os_figures(MemoryTrace({"counters": process + vectors}), None)
    assert found is not None and found.interrupts == 800
    whole = cumulative("cpu", "interrupts", lambda t: 25 * t, unit="interrupts")
    found = os_figures(MemoryTrace({"counters": process + vectors + whole}), None)
    assert found is not None and found.interrupts == 1000


@given(st.lists(st.integers(-5, 5), min_size=10, max_size=40), st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_rank_correlation(x: list[int], seed: int) -> None:
    from scipy.stats import spearmanr

    a = np.array(x, dtype=np.float64)
    b = np.random.default_rng(seed).normal(size=len(a))
    found = rank(a, b)
    if found.rho is None:
        assert np.quantile(a, 0.9) == np.quantile(a, 0.1)
        return
    assert found.rho == pytest.approx(spearmanr(a, b).statistic, abs=1e-9)
    assert found.low is not None and found.high is not None and -1 <= found.low <= found.high <= 1
    assert rank(a, b) == found, "the same draws each time"


@pytest.mark.parametrize("name", ["llamacpp-four-slots", "llamacpp-one-slot"])
def test_on_real_captures(name: str) -> None:
    h = hardware(hoptrace.open(sample(name)))
    (a,) = h.stealing
    assert (
        a.verdict == "no"
        and a.delay_share is not None
        and a.delay_share < 0.02
        and a.who == "the thread of llamacpp that computes"
    )
    assert h.threads is not None and len(h.threads.threads) >= 5 and h.contradictions == []
    json.dumps(h.as_dict(), allow_nan=False)


def test_threads_that_nobody_read_make_the_rest_a_lower_bound() -> None:
    rows = hardware_rows()
    mine = [r for r in rows["counters"] if not r["entity"].startswith("thread:")]
    lost = cumulative("process:7", "unread_cpu_ns", lambda t: t * 0.03 * S)
    h = hardware(MemoryTrace(rows | {"counters": mine + lost}, SERVER))
    assert h.threads is not None
    assert {h.threads.sums_of[n] for n in ("run_delay_ns", "futex_calls")} == {"threads"}
    assert h.threads.sums_of["on_cpu_ns"] == "process", "its own time holds them"
    assert "≥ 8,000" in shown(h) and h.stealing[0].verdict == "yes"
    much = cumulative("process:7", "unread_cpu_ns", lambda t: t * 0.3 * S)
    (s,) = hardware(MemoryTrace(rows | {"counters": mine + much}, SERVER)).stealing
    assert s.verdict == "unknown" and s.why is not None and "threads that ended between two samples" in s.why
    # Where the threads that compute were looked at one by one, it is theirs that counts.
    (s,) = hardware(MemoryTrace(rows | {"counters": rows["counters"] + much}, SERVER)).stealing
    assert s.verdict == "yes"


def test_the_limit_is_the_capture_s_own() -> None:
    rows = hardware_rows()
    limit = cumulative("collector:station", "allowed_share", lambda t: 0, every=10, semantics="gauge", unit="1", value_int=None,
                       value_float=0.02)  # fmt: skip
    spent = cumulative("collector:a", "cpu_ns", lambda t: t * 0.015 * S)
    cost = hardware(MemoryTrace(rows | {"counters": rows["counters"] + spent + limit}, SERVER)).collecting
    assert (cost.allowed, cost.over) == (0.02, False)
    cost = hardware(MemoryTrace(rows | {"counters": rows["counters"] + spent}, SERVER)).collecting
    assert (cost.allowed, cost.over) == (0.01, True)
