"""PCIe links and errors, resctrl, RAPL, control groups: recorded trees, trees after the kernel's documentation, hostile files."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.guests import copied, guest, roots_of
from support.watched import Watched

from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.kernel.cgroup_files import keyed, place_of
from hoptrace.collectors.hardware.kernel.cgroups import CgroupSource
from hoptrace.collectors.hardware.kernel.energy import MOST_WATTS, EnergySource, Unwrapped
from hoptrace.collectors.hardware.kernel.pci import PciSource
from hoptrace.collectors.hardware.kernel.pci_files import Link, aer, gigatransfers, lanes
from hoptrace.collectors.hardware.kernel.resctrl import ResctrlSource, reading
from hoptrace.collectors.hardware.listener import Found as FoundProcess
from hoptrace.collectors.hardware.source import Roots, Server

DATA = Path(__file__).parent / "data" / "hardware" / "kernel"
CXL = "sys/devices/pci0000:0c/0000:0c:00.0/0000:0d:00.0"


def put(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def told(w: Watched, entity: str, name: str) -> list[Any]:
    rows = [r for r in w.rows() if (r["entity"], r["name"]) == (entity, name)]
    return [
        (r["value_int"] if r["value_int"] is not None else r["value_float"]) if r["status"] == "ok" else r["status"] for r in rows
    ]


# -- PCIe ------------------------------------------------------------------------------------------------------------------


def test_links_of_a_guest(tmp_path: Path) -> None:
    w = Watched(PciSource(roots_of(guest("cxl-volatile-6.12"))), tmp_path / "t.trace")
    assert w.probe().sees == "4 links, 4 with error counts"
    w.sample()
    last = w.last()
    assert last["pcie:0000:0d:00.0", "link_speed_gt_per_s"] == 32 and last["pcie:0000:0d:00.0", "link_width_lanes"] == 16
    # Its port could do 64 GT/s x32, the device itself not: the link is at its best.
    assert last["pcie:0000:0d:00.0", "most_link_speed_gt_per_s"] == 32
    assert last["pcie:0000:0d:00.0", "most_link_width_lanes"] == 16
    assert last["pcie:0000:0d:00.0", "aer_correctable_errors"] == last["pcie:0000:0c:01.0", "aer_fatal_errors"] == 0
    assert not [n for _, n in last if "BadTLP" in n]
    assert w.events() == []


def test_an_emulated_disk_has_no_link(tmp_path: Path) -> None:
    """Its files say Unknown, 0 and 255 lanes."""
    w = Watched(PciSource(roots_of(guest("hmat-only-6.12"))), tmp_path / "t.trace")
    w.sample()
    assert "pcie:0000:00:06.0" not in {e for e, _ in w.last()}


def test_a_link_that_trains_down_is_an_event(tmp_path: Path) -> None:
    tree = copied("cxl-volatile-6.12", tmp_path)
    w = Watched(PciSource(roots_of(tree)), tmp_path / "t.trace")
    w.sample()
    put(tree / CXL, {"current_link_speed": "8.0 GT/s PCIe\n", "current_link_width": "4\n"})
    w.sample()
    put(tree / CXL, {"current_link_speed": "Unknown\n", "current_link_width": "0\n"})
    w.sample()
    put(tree / CXL, {"current_link_speed": "32.0 GT/s PCIe\n", "current_link_width": "16\n"})
    w.sample()
    assert told(w, "pcie:0000:0d:00.0", "link_width_lanes") == [16, 4, "absent", 16]
    assert [d for _, d in w.events()] == [
        "pcie:0000:0d:00.0 trained down: 32 GT/s x16 before, 8 GT/s x4 now; its ends could do 32 GT/s x16",
        "pcie:0000:0d:00.0 is down: 8 GT/s x4 before, unknown speed x? now; its ends could do 32 GT/s x16",
        "pcie:0000:0d:00.0 changed: unknown speed x? before, 32 GT/s x16 now; its ends could do 32 GT/s x16",
    ]


def test_a_link_that_begins_below_its_best(tmp_path: Path) -> None:
    tree = copied("cxl-volatile-6.12", tmp_path)
    put(tree / CXL, {"current_link_width": "8\n"})
    w = Watched(PciSource(roots_of(tree)), tmp_path / "t.trace")
    w.sample(2)
    assert [d for _, d in w.events()] == [
        "pcie:0000:0d:00.0 runs at 32 GT/s x8, its ends could do 32 GT/s x16 (an idle link may save power)"
    ]


def test_errors_begin_with_the_zero_that_was_seen(tmp_path: Path) -> None:
    tree = copied("cxl-volatile-6.12", tmp_path)
    w = Watched(PciSource(roots_of(tree)), tmp_path / "t.trace")
    w.sample()
    path = tree / CXL / "aer_dev_correctable"
    path.write_text(path.read_text().replace("BadTLP 0", "BadTLP 3").replace("TOTAL_ERR_COR 0", "TOTAL_ERR_COR 3"))
    w.sample(4)
    assert isinstance(w.source, PciSource)
    w.sample()
    assert told(w, "pcie:0000:0d:00.0", "aer_correctable_errors") == [0, 3]
    assert told(w, "pcie:0000:0d:00.0", "aer_correctable_BadTLP_errors") == [0, 3]


def test_a_device_that_is_lost_comes_back_as_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = copied("cxl-volatile-6.12", tmp_path)
    w = Watched(PciSource(roots_of(tree)), tmp_path / "t.trace")
    w.sample()
    read = KeptFile.read

    def gone(file: KeptFile) -> bytes:
        if "0000:0d:00.0" in str(file.path):
            raise OSError(errno.ENODEV, "No such device", str(file.path))
        return read(file)

    monkeypatch.setattr(KeptFile, "read", gone)
    w.sample()
    monkeypatch.undo()
    w.sample(60)
    rows = [r for r in w.rows() if (r["entity"], r["name"]) == ("pcie:0000:0d:00.0", "link_width_lanes")]
    lives = [(r["value_int"], r["status"], r["incarnation"][-2:]) for r in rows]
    assert lives[1] == (None, "lost", rows[0]["incarnation"][-2:]) and lives[-1] == (16, "ok", "/1")
    assert [d for _, d in w.events()] == ["pcie:0000:0d:00.0 is gone", "pcie:0000:0d:00.0 is back"]


def test_an_error_of_one_device_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = Watched(PciSource(roots_of(guest("cxl-volatile-6.12"))), tmp_path / "t.trace")
    read = KeptFile.read

    def fails(file: KeptFile) -> bytes:
        if "0000:0d:00.0" in str(file.path):
            raise OSError(errno.EIO if "aer" not in file.path.name else errno.EACCES, "no", str(file.path))
        return read(file)

    monkeypatch.setattr(KeptFile, "read", fails)
    w.sample()
    last = w.last()
    assert last["pcie:0000:0d:00.0", "link_width_lanes"] == "error" and last["pcie:0000:0e:00.0", "link_width_lanes"] == 16
    assert last["pcie:0000:0d:00.0", "aer_fatal_errors"] == "denied" and last["pcie:0000:0e:00.0", "aer_fatal_errors"] == 0


@pytest.mark.parametrize(
    ("data", "speed"),
    [(b"32.0 GT/s PCIe\n", 32), (b"2.5 GT/s\n", 2.5), (b"8 GT/s\n", 8), (b"Unknown\n", None), (b"Unknown speed", None),
     (b"", None), (b"-5 GT/s", None), (b"nan GT/s", None), (b"1e99 GT/s", None), (b"x GT/s", None), (b"16.0 Gb/s", None)],
)  # fmt: skip
def test_speeds(data: bytes, speed: float | None) -> None:
    assert gigatransfers(data) == speed


@given(st.binary(max_size=100))
def test_hostile_pci_files(data: bytes) -> None:
    assert lanes(data) is None or 0 < (lanes(data) or 0) <= 32
    gigatransfers(data)
    total, kinds = aer(data)
    assert all(n >= 0 for n in kinds.values()) and (total is None or total >= 0)


def test_lesser_links() -> None:
    best = Link(32, 16)
    assert Link(16, 16).below(best) and Link(32, 8).below(best) and not best.below(best)
    assert not Link(None, None).below(best) and not Link(64, None).below(best)


# -- resctrl ---------------------------------------------------------------------------------------------------------------


def resctrl(sys: Path) -> Path:
    """After Documentation/filesystems/resctrl.rst: two caches, a control group, a monitoring group below it."""
    root = sys / "fs/resctrl"
    for group, n in (("", 1), ("/serving", 2), ("/serving/mon_groups/one", 3)):
        for domain in ("mon_L3_00", "mon_L3_01"):
            put(root, {f".{group}/mon_data/{domain}/{f}": f"{n * 1000}\n" for f in ("mbm_total_bytes", "llc_occupancy")})
    put(root, {"info/L3_MON/mon_features": "mbm_total_bytes\n", "mon_data/mon_L3_00/mbm_local_bytes": "Unavailable\n"})
    return root


def test_bandwidth_by_cache_and_group(tmp_path: Path) -> None:
    root = resctrl(tmp_path / "sys")
    w = Watched(ResctrlSource(Roots(tmp_path, tmp_path / "sys")), tmp_path / "t.trace")
    assert w.probe().sees == "2 domains, 3 groups"
    w.sample()
    put(root, {"mon_data/mon_L3_01/mbm_total_bytes": "Error\n", "mon_data/mon_L3_00/mbm_local_bytes": "77\n"})
    shutil.rmtree(root / "serving")
    assert isinstance(w.source, ResctrlSource)
    for file, _ in w.source._files.values():
        file.close()
    w.sample(2)
    assert told(w, "resctrl:/mon_L3_00", "mbm_total_bytes") == [1000, 1000]
    assert told(w, "resctrl:/mon_L3_01", "mbm_total_bytes") == [1000, "error", "error"]
    assert told(w, "resctrl:/mon_L3_00", "mbm_local_bytes") == ["absent", 77, 77]
    assert told(w, "resctrl:/serving/mon_L3_00", "llc_occupancy_bytes") == [2000, "lost"]
    assert told(w, "resctrl:/serving/mon_groups/one/mon_L3_01", "mbm_total_bytes") == [3000, "lost"]


def test_why_there_is_no_resctrl(tmp_path: Path) -> None:
    source = ResctrlSource(Roots(tmp_path, tmp_path))
    assert source.probe().status == "unsupported"
    (tmp_path / "filesystems").write_text("nodev\tsysfs\nnodev\tresctrl\n")
    found = source.probe()
    assert found.status == "absent" and "mount -t resctrl" in (found.remedy or "")
    (tmp_path / "fs/resctrl/info").mkdir(parents=True)
    assert "no monitoring" in (source.probe().reason or "")


def test_words_instead_of_numbers() -> None:
    assert [reading(d) for d in (b"12\n", b"Unavailable\n", b"Error\n", b"Unassigned\n", b"", b"-1", b"1 2")] == [
        (12, "ok"), (None, "absent"), (None, "error"), (None, "absent"), (None, "error"), (None, "error"), (None, "error"),
    ]  # fmt: skip


# -- RAPL ------------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**12), st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 10**9)), max_size=30))
def test_energy_goes_on_over_wraps(most: int, steps: list[tuple[int, int]]) -> None:
    """A counter that begins anew at its range tells the energy as long as it turns at most once between two readings."""
    count, truth, at, before = Unwrapped(most), 0, 0, 0
    count.add(0, 0)
    for taken, gap_ns in steps:
        taken = min(taken, most - 1)
        at += gap_ns
        truth += taken
        given_back = count.add(truth % most, at)
        if count.stretch:
            assert gap_ns / 1000 * MOST_WATTS >= most
            return
        assert given_back == truth
        before = given_back
    assert before == truth


def test_energy_is_not_trusted_over_a_long_gap() -> None:
    count = Unwrapped(262_143_328_850)
    assert count.add(262_143_000_000, 0) == 262_143_000_000
    assert count.add(1_000_000, 10**9) == 262_144_328_850 and count.wraps == 1
    # Two minutes at 2 kW are 240 kJ, less than the range; three could have turned it twice.
    assert count.add(2_000_000, 121 * 10**9) == 262_145_328_850 and count.stretch == 0
    assert count.add(3_000_000, 301 * 10**9) == 3_000_000 and count.stretch == 1
    assert count.add(262_143_328_851, 302 * 10**9) is None and count.add(-1, 302 * 10**9) is None


def rapl(sys: Path) -> Path:
    """After Documentation/power/powercap/powercap.rst; numbers as on a two-socket Xeon."""
    root = sys / "class/powercap"
    for zone, name, most in (
        ("intel-rapl:0", "package-0", 262143328850), ("intel-rapl:0:0", "dram", 65712999613),
        ("intel-rapl:1", "package-1", 262143328850), ("intel-rapl-mmio:0", "package-0", 262143328850),
    ):  # fmt: skip
        put(root / zone, {"name": f"{name}\n", "energy_uj": "262143000000\n", "max_energy_range_uj": f"{most}\n"})
    put(root / "intel-rapl:0:0", {"energy_uj": "5\n"})
    put(root / "intel-rapl", {"enabled": "1\n"})
    return root


def test_energy_by_zone(tmp_path: Path) -> None:
    root = rapl(tmp_path / "sys")
    w = Watched(EnergySource(Roots(tmp_path, tmp_path / "sys")), tmp_path / "t.trace")
    assert w.probe().sees == "package-0, package-0/dram, package-1"
    w.sample()
    put(root, {"intel-rapl:0/energy_uj": "1000000\n", "intel-rapl:1/energy_uj": "x\n", "intel-rapl:0:0/energy_uj": "9\n"})
    w.sample()
    assert told(w, "rapl:package-0", "energy_uj") == [262143000000, 262144328850]
    assert told(w, "rapl:package-0", "energy_wraps") == [0, 1]
    assert told(w, "rapl:package-0/dram", "energy_uj") == [5, 9] and told(w, "rapl:package-1", "energy_uj")[-1] == "error"


def test_energy_that_only_root_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rapl(tmp_path / "sys")

    def refused(path: Path, flags: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refused)
    found = EnergySource(Roots(tmp_path, tmp_path / "sys")).probe()
    monkeypatch.undo()
    assert found.status == "denied" and "root" in (found.remedy or "")


def test_no_energy(tmp_path: Path) -> None:
    assert EnergySource(Roots(tmp_path, tmp_path)).probe().status == "absent"


# -- control groups --------------------------------------------------------------------------------------------------------


def server(pid: int | None) -> Server:
    return Server("s", lambda: FoundProcess(pid, None if pid else "no process"))


def grouped(root: Path, line: str, tree: str = "sys/fs/cgroup") -> Roots:
    put(root, {"proc/7/cgroup": line, f"{tree}/cgroup.controllers": "cpu io memory\n"})
    return Roots(root / "proc", root / "sys")


def test_a_group_of_the_second_version(tmp_path: Path) -> None:
    """Recorded pressure and CPU time; throttling after cgroup-v2.rst."""
    roots = grouped(tmp_path, "0::/kubepods/pod1\n")
    group = tmp_path / "sys/fs/cgroup/kubepods/pod1"
    shutil.copytree(DATA / "cgroup", group)
    throttled = "nr_periods 50\nnr_throttled 8\nthrottled_usec 1250000\n"
    put(group, {"cpu.stat": (group / "cpu.stat").read_text() + throttled, "memory.current": "4096\n",
                "memory.events": "low 0\nhigh 2\nmax 3\noom 0\noom_kill 1\n"})  # fmt: skip
    w = Watched(CgroupSource((server(7), server(None)), roots), tmp_path / "t.trace")
    found = w.probe()
    assert found.sees == "/kubepods/pod1" and found.reason == "no process"
    w.sample()
    last = w.last()
    here = "cgroup:/kubepods/pod1"
    assert last["pressure:/kubepods/pod1", "cpu_some_ns"] == 3195404 * 1000
    assert last[here, "throttled_ns"] == 1_250_000_000 and last[here, "throttled_periods"] == 8
    assert last[here, "memory_max_events"] == 3 and last[here, "oom_kills"] == 1 and last[here, "memory_used_bytes"] == 4096
    usage = keyed((DATA / "cgroup/cpu.stat").read_bytes())[b"usage_usec"]
    assert last[here, "cpu_ns"] == usage * 1000 > 0


def test_a_group_of_the_first_version_as_recorded(tmp_path: Path) -> None:
    roots = grouped(tmp_path, "4:memory:/m\n1:cpu,cpuacct:/docker/x\n0::/\n", "sys/fs/cgroup/unified")
    put(tmp_path / "sys/fs/cgroup/cpu,cpuacct/docker/x", {"cpu.stat": (DATA / "cgroup/v1.cpu.stat").read_text()})
    w = Watched(CgroupSource((server(7),), roots), tmp_path / "t.trace")
    assert w.probe().sees == "/docker/x (first version: no pressure)"
    w.sample()
    last = w.last()
    assert last["cgroup:/docker/x", "throttled_ns"] == 3185560312 and last["cgroup:/docker/x", "throttled_periods"] == 40
    assert {e for e, _ in last} == {"cgroup:/docker/x"}  # the root's pressure is not this group's


@pytest.mark.parametrize(
    ("line", "words"),
    [("0::/\n", "root group"), ("1:cpu:/\n0::/\n", "first version"), ("0::/../x\n", "outside this container"),
     ("0::/gone\n", "no tree"), ("", "no tree"), ("garbage\n:::\n", "no tree")],
)  # fmt: skip
def test_why_there_is_no_group(tmp_path: Path, line: str, words: str) -> None:
    roots = grouped(tmp_path, line)
    put(tmp_path / "sys/fs/cgroup/cpu", {"cgroup.sane_behavior": "0\n"})
    found = CgroupSource((server(7),), roots).probe()
    assert found.status == "absent" and words in (found.reason or "")


def test_a_container_s_own_group_looks_like_a_root(tmp_path: Path) -> None:
    roots = grouped(tmp_path, "0::/\n")
    put(tmp_path / "sys/fs/cgroup", {"cgroup.events": "populated 1\n"})
    place = place_of(7, roots.proc, roots.sys)
    assert (place.path, place.folder) == ("/", tmp_path / "sys/fs/cgroup")


def test_a_group_that_ends(tmp_path: Path) -> None:
    roots = grouped(tmp_path, "0::/a\n")
    group = tmp_path / "sys/fs/cgroup/a"
    shutil.copytree(DATA / "cgroup", group)
    source = CgroupSource((server(7),), roots)
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    shutil.rmtree(group)
    (tmp_path / "proc/7/cgroup").unlink()
    w.sample(2)
    assert told(w, "pressure:/a", "cpu_some_ns")[-1] == told(w, "cgroup:/a", "cpu_ns")[-1] == "lost"
    assert source._groups == {}


def test_nobody_to_look_at(tmp_path: Path) -> None:
    roots = Roots(tmp_path, tmp_path)
    assert CgroupSource((), roots).probe().status == CgroupSource((server(None),), roots).probe().status == "absent"
    assert "cgroup: No such file" in (CgroupSource((server(7),), roots).probe().reason or "")
