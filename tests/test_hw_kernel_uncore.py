"""Uncore counters on trees written by hand after the kernel's documentation (support/uncore_trees.py); perf's own part live."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.uncore_trees import AMD_DF, AMD_UMC, CXL, CXL_EVENTS, FREE, IIO_SKX, IIO_SNR, IMC, cpus, device, free_ports
from support.watched import Watched

from hoptrace.collectors.hardware.kernel import sources, uncore_counts
from hoptrace.collectors.hardware.kernel.pmu import bytes_per_count, encode, pmus
from hoptrace.collectors.hardware.kernel.uncore import UncoreSource
from hoptrace.collectors.hardware.kernel.uncore_counts import Counted, Refused
from hoptrace.collectors.hardware.perf.events import Count, Event, PerfEvent
from hoptrace.collectors.hardware.source import Asked, Roots

WHY = ("nothing here", "other hardware")


class Fake:
    """Counters whose counts the test sets; ``refuse``: error of the next opening, ``fail``: of each read."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int, int], Count] = {}
        self.opened: list[tuple[int, int, int]] = []
        self.refuse: int | None = None
        self.fail: int | None = None

    def __call__(self, event: Event, cpu: int) -> Any:
        if self.refuse is not None:
            raise OSError(self.refuse, "refused")
        key = (event.type, event.config, cpu)
        self.opened.append(key)
        fake = self

        class One:
            def read(self) -> Count:
                if fake.fail is not None:
                    raise OSError(fake.fail, "gone")
                return fake.counts.get(key, Count(0))

            def close(self) -> None:
                return None

        return One()


def watched(list_them: Callable[..., Any], root: Path, fake: Fake) -> Watched:
    source = UncoreSource("u", "q", list_them, WHY, roots=Roots(root / "proc", root / "sys"), opener=fake)
    return Watched(source, root / "t.trace")


def table(w: Watched) -> dict[tuple[str, str, str | None], Any]:
    return {(r["entity"], r["name"], r["direction"]): r["value_int"] if r["status"] == "ok" else r["status"] for r in w.rows()}


# -- what sysfs says -------------------------------------------------------------------------------------------------------


def test_bits_go_where_the_format_says() -> None:
    formats = {"event": ("config", (0, 1, 2, 3, 4, 5, 6, 7, 32, 33)), "hdm": ("config2", (4, 5)), "on": ("config1", (18,))}
    assert encode("event=0x181,on,hdm=2", 9, formats) == Event(9, 0x81 | 1 << 32, 1 << 18, 2 << 4)
    assert encode("config=0x10,event=1", 9, formats) == Event(9, 0x11)
    for terms, words in (
        ("event=0x400", "too large"),
        ("umask=1", "no term 'umask'"),
        ("on=2", "too large"),
        ("event=-1", "too"),
    ):
        with pytest.raises(ValueError, match=words):
            encode(terms, 9, formats)


@given(st.integers(0, (1 << 14) - 1), st.integers(0, (1 << 12) - 1))
def test_each_value_has_its_own_bits(event: int, umask: int) -> None:
    """Of the data fabric's split fields, read back as the hardware would."""
    df = {"event": ("config", (*range(8), *range(32, 38))), "umask": ("config", (*range(8, 16), *range(24, 28)))}
    config = encode(f"event={event},umask={umask:#x}", 1, df).config
    assert config & 0xFF | (config >> 32 & 0x3F) << 8 == event
    assert config >> 8 & 0xFF | (config >> 24 & 0xF) << 8 == umask


@pytest.mark.parametrize(
    ("scale", "unit", "size"),
    [("3.814697266e-6", "MiB", 4), ("3.0517578125e-5", "MiB", 32), ("6.103515625e-5", "MiB", 64), ("6.1e-5", "MiB", 63.96),
     ("64", "Bytes", 64), ("1", None, None), ("x", "MiB", None), ("-1", "MiB", None), ("nan", "MiB", None),
     ("1", "Joules", None)],
)  # fmt: skip
def test_scales(tmp_path: Path, scale: str, unit: str | None, size: float | None) -> None:
    events = {"bw": "event=1", "bw.scale": scale} | ({"bw.unit": unit} if unit else {})
    device(tmp_path, "uncore_x", 5, FREE, events)
    found = bytes_per_count(pmus(tmp_path, "uncore_x")[0], "bw")
    assert found == (size if size is None else pytest.approx(size, rel=1e-4)) and (not size or size % 1 or found == size)


def test_hostile_devices(tmp_path: Path) -> None:
    for n, (formats, mask) in enumerate(
        [({"event": "config:0-99"}, "0"), ({"event": ":"}, "x"), ({}, ""), ({"event": "config"}, "1-")]
    ):
        device(tmp_path, f"amd_umc_{n}", 3, formats, cpumask=mask)
    (tmp_path / "bus/event_source/devices/amd_umc_9").mkdir()
    (tmp_path / "bus/event_source/devices/amd_umc_9/type").write_text("x")
    device(tmp_path, "amd_umc_bad", 3, AMD_UMC)
    assert [p.name for p in pmus(tmp_path, "amd_umc")] == [f"amd_umc_{n}" for n in range(4)]
    assert all(isinstance(c, Refused) for c in uncore_counts.amd_memory(tmp_path, tmp_path))


# -- what is counted -------------------------------------------------------------------------------------------------------


def test_intel_ports(tmp_path: Path) -> None:
    sys = tmp_path / "sys"
    cpus(sys, {0: 0, 28: 1})
    device(sys, "uncore_iio_free_running_0", 40, FREE, free_ports(4, "3.814697266e-6", out=True), "0,28")
    device(sys, "uncore_iio_free_running_10", 41, FREE, free_ports(8, "3.0517578125e-5"), "0")
    fake = Fake()
    w = watched(uncore_counts.intel_ports, tmp_path, fake)
    assert w.probe().sees == "2 devices, 24 counters"
    fake.counts = {(40, 0x21FF, 28): Count(1000), (40, 0x31FF, 0): Count(7), (41, 0x27FF, 0): Count(10)}
    w.sample()
    found = table(w)
    assert found["iio:1/0/1", "data_bytes", "tx"] == 4000 and found["iio:0/0/1", "data_bytes", "rx"] == 28
    assert found["iio:0/10/7", "data_bytes", "tx"] == 320 and found["iio:0/0/1", "data_bytes", "tx"] == 0


def test_a_kernel_whose_scale_is_wrong_is_not_believed(tmp_path: Path) -> None:
    """Ice Lake before the fix of April 2025: 4 bytes for what counts 32."""
    device(tmp_path / "sys", "uncore_iio_free_running_0", 40, FREE, free_ports(8, "3.814697266e-6"))
    found = watched(uncore_counts.intel_ports, tmp_path, Fake()).probe()
    assert found.status == "unsupported" and "wrong by 8" in (found.reason or "")


@pytest.mark.parametrize(
    ("formats", "mask"), [(IIO_SKX, 0x0F << 36 | 7 << 44), (IIO_SNR, 0xFF << 36 | 7 << 48)], ids=["skylake", "ice lake"]
)
def test_intel_stacks_as_perf_iostat(tmp_path: Path, formats: dict[str, str], mask: int) -> None:
    sys = tmp_path / "sys"
    cpus(sys, {0: 0})
    device(sys, "uncore_iio_3", 33, formats)
    device(sys, "uncore_iio_free_running_3", 34, FREE)
    fake = Fake()
    fake.counts = {(33, 0x04_83 | mask, 0): Count(1), (33, 0x01_83 | mask, 0): Count(2), (33, 0x04_C0 | mask, 0): Count(3),
                   (33, 0x01_C0 | mask, 0): Count(4)}  # fmt: skip
    w = watched(uncore_counts.intel_stacks, tmp_path, fake)
    w.sample()
    assert table(w) == {
        ("iio:0/3/all", "inbound_read_bytes", None): 4, ("iio:0/3/all", "inbound_write_bytes", None): 8,
        ("iio:0/3/all", "outbound_read_bytes", None): 12, ("iio:0/3/all", "outbound_write_bytes", None): 16,
    }  # fmt: skip
    assert sorted(fake.opened) == sorted(fake.counts)


def test_intel_memory_is_counted_once(tmp_path: Path) -> None:
    sys = tmp_path / "sys"
    cpus(sys, {0: 0, 40: 1})
    scale = {
        f"{n}.{k}": v for n in ("cas_count_read", "cas_count_write") for k, v in (("scale", "6.103515625e-5"), ("unit", "MiB"))
    }
    events = {"cas_count_read": "event=0x04,umask=0x0f", "cas_count_write": "event=0x04,umask=0x30", "clockticks": "event=0"}
    device(sys, "uncore_imc_0", 20, IMC, events | scale, "0,40")
    device(
        sys, "uncore_imc_free_running_0", 21, FREE, {"read": "event=0xff,umask=0x20", "read.scale": "6.1e-5", "read.unit": "MiB"}
    )
    fake = Fake()
    fake.counts = {(20, 0x0F04, 40): Count(5)}
    w = watched(uncore_counts.intel_memory, tmp_path, fake)
    w.sample()
    found = table(w)
    assert found["imc:1/0", "data_bytes", "read"] == 320 and len(found) == 4


def test_amd(tmp_path: Path) -> None:
    sys, proc = tmp_path / "sys", tmp_path / "proc"
    proc.mkdir()
    cpus(sys, {0: 0, 96: 1})
    device(sys, "amd_umc_0", 12, AMD_UMC, cpumask="0")
    device(sys, "amd_umc_13", 25, AMD_UMC, cpumask="96")
    device(sys, "amd_df", 10, AMD_DF, cpumask="0,96")
    fake = Fake()
    fake.counts = {(25, 0x20A, 96): Count(3)}
    w = watched(uncore_counts.amd_memory, tmp_path, fake)
    w.sample()
    found = table(w)
    assert found["umc:13", "data_bytes", "write"] == 192 and found["umc:0", "data_bytes", "read"] == 0 and len(found) == 4

    text = "processor\t: 0\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: x\n\nprocessor\t: 1\nmodel\t: 99\n"
    for family, model, complexes in ((25, 17, 4), (25, 160, 4), (26, 2, 8), (25, 1, 0), (23, 49, 0)):
        (proc / "cpuinfo").write_text(text.format(family, model))
        counted = [c for c in uncore_counts.amd_fabric(sys, proc) if isinstance(c, Counted)]
        assert len(counted) == complexes * 2 * 2, (family, model)
    (proc / "cpuinfo").write_text(text.format(25, 17))
    second = [c for c in uncore_counts.amd_fabric(sys, proc) if isinstance(c, Counted) and c.entity == "iom:1/1"]
    # 0x85f, 0x7fe: low bytes in place, 8 in bits 32-37, 7 in bits 24-27.
    assert {(c.direction, c.event.config, c.cpu) for c in second} == {
        ("read", 0x5F | 0xFE << 8 | 7 << 24 | 8 << 32, 96), ("write", 0x5F | 0xFF << 8 | 7 << 24 | 8 << 32, 96),
    }  # fmt: skip


def test_cxl(tmp_path: Path) -> None:
    sys = tmp_path / "sys"
    device(sys, "cxl_pmu_mem0.0", 50, CXL, CXL_EVENTS)
    device(sys, "cxl_pmu_mem1.0", 51, CXL, {"clock_ticks": CXL_EVENTS["clock_ticks"]})
    device(sys, "cxl_pmu_mem2.0", 52, CXL, CXL_EVENTS)
    device(sys, "cxl_pmu_mem2.1", 53, CXL, CXL_EVENTS)
    fake = Fake()
    fake.counts = {(50, 0x1E98 << 48 | 0x25 << 32 | 1, 0): Count(10), (50, 0x1E98 << 48 | 0x21 << 32 | 2, 0): Count(3),
                   (50, 0x1E98 << 48 | 0x21 << 32 | 4, 0): Count(2)}  # fmt: skip
    w = watched(uncore_counts.cxl, tmp_path, fake)
    found = w.probe()
    assert found.available and found.reason == "cxl_pmu_mem1.0: this device counts no reads or writes of memory"
    w.sample()
    told = table(w)
    assert told["cxl:mem0", "data_bytes", "read"] == 640 and told["cxl:mem0", "data_bytes", "write"] == 192
    assert told["cxl:mem0", "partial_writes", "write"] == 2
    assert {e for e, _, _ in told} == {"cxl:mem0", "cxl:mem2/0", "cxl:mem2/1"}


# -- while sampling --------------------------------------------------------------------------------------------------------


def one_umc(root: Path, fake: Fake) -> Watched:
    device(root / "sys", "amd_umc_0", 12, AMD_UMC)
    return watched(uncore_counts.amd_memory, root, fake)


def test_a_cpu_that_goes_offline_is_lost_and_counted_anew(tmp_path: Path) -> None:
    fake = Fake()
    w = one_umc(tmp_path, fake)
    fake.counts = {(12, 0x10A, 0): Count(100)}
    w.sample()
    fake.fail = errno.ENODEV
    w.sample()
    fake.fail = None
    assert isinstance(w.source, UncoreSource)
    for counter in w.source._counters:
        counter.due_s = 0.0
    fake.counts = {(12, 0x10A, 0): Count(500)}  # from 0, and further than before: no difference to the other
    w.sample()
    rows = [r for r in w.rows() if r["direction"] == "read"]
    assert [(r["value_int"], r["status"], r["incarnation"][-2:]) for r in rows] == [
        (6400, "ok", "/1"), (None, "lost", "/1"), (32000, "ok", "/2"),
    ]  # fmt: skip
    assert [d for _, d in w.events()][-1] == "umc:0 data_bytes is counted again, from 0"


def test_estimates_are_told_and_never_fall(tmp_path: Path) -> None:
    fake = Fake()
    w = one_umc(tmp_path, fake)
    for count in (Count(None), Count(10, scaled=True), Count(9, scaled=True), Count(12, scaled=True)):
        fake.counts = {(12, 0x10A, 0): count}
        w.sample()
    rows = [r for r in w.rows() if r["direction"] == "read"]
    assert [(r["value_int"], r["status"]) for r in rows] == [(None, "absent"), (640, "ok"), (768, "ok")]
    assert [k for k, d in w.events() if "estimated" in d] == ["gap"]


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [
        (errno.EACCES, "denied", "may not open it"),
        (errno.EBUSY, "error", "taken (PCM"),
        (errno.ENOENT, "unsupported", "no such event"),
    ],
)
def test_why_it_cannot_be_opened(tmp_path: Path, number: int, status: str, words: str) -> None:
    fake = Fake()
    fake.refuse = number
    w = one_umc(tmp_path, fake)
    found = w.probe()
    assert found.status == status and words in (found.reason or "") and found.remedy
    w.sample()
    assert {r["value_int"] for r in w.rows()} == {None}


def test_many_counters_are_read_less_often_and_hold_nobody_up(tmp_path: Path) -> None:
    few = one_umc(tmp_path / "few", Fake()).source
    for n in range(150):
        device(tmp_path / "many/sys", f"amd_umc_{n}", n, AMD_UMC)
    many = watched(uncore_counts.amd_memory, tmp_path / "many", Fake()).source
    assert few.pace == "fast" and (few.every_s or 0) <= 0.1
    assert many.pace == "slow" and many.every_s == pytest.approx(1.2)


def test_a_machine_without_any(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    found = {s.name: s.probe() for s in sources(Asked(Roots(tmp_path / "proc", tmp_path / "sys")))}
    assert {n for n, f in found.items() if f.available} == set()
    assert all(f.reason and f.status in ("absent", "unsupported") for f in found.values()), found


def _opens_msr() -> bool:
    try:
        pmu = pmus(Path("/sys"), "msr")[0]
        PerfEvent(pmu.event(pmu.events["tsc"]), cpu=0).close()
    except (OSError, IndexError, KeyError, ValueError):
        return False
    return True


@pytest.mark.skipif(not _opens_msr(), reason="perf's msr device cannot be opened here")
def test_a_real_device_of_this_kernel(tmp_path: Path) -> None:
    """Time stamp counter of CPU 0: type, format and event from this machine's sysfs, counted by its kernel."""

    def tsc(sys: Path, proc: Path) -> list[Counted]:
        pmu = pmus(sys, "msr")[0]
        return [Counted(pmu.name, pmu.event(pmu.events["tsc"]), 0, "cpu:0", "tsc", "cycles", None, 1)]

    w = Watched(UncoreSource("u", "q", tsc, WHY), tmp_path / "t.trace")
    assert w.probe().available
    w.sample(3)
    told = [r["value_int"] for r in w.rows()]
    assert told[0] > 0 and told == sorted(told) and told[-1] > told[0]
