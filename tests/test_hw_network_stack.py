"""Drivers' statistics, links of adapters, the network stack, and what adapters there are for the graph."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import struct
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.guests import guest, roots_of
from support.watched import Watched

from hoptrace.collectors.hardware.listener import Found as FoundProcess
from hoptrace.collectors.hardware.network import ethtool
from hoptrace.collectors.hardware.network.carrier import CarrierSource
from hoptrace.collectors.hardware.network.ethtool import MAX_STATISTICS, EthtoolSource, names_of
from hoptrace.collectors.hardware.network.ethtool_names import is_known, meaning
from hoptrace.collectors.hardware.network.facts import Adapter, Port, network_facts
from hoptrace.collectors.hardware.network.stack import StackSource, softnet, two_lines
from hoptrace.collectors.hardware.source import Roots, Server

DATA = Path(__file__).parent / "data" / "hardware" / "network"


# -- drivers' statistics ---------------------------------------------------------------------------------------------------


class Driver:
    """Answers the ioctl in the kernel's layout, as kernels before 6.19 do: all that it has, however small the caller's room."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.error, self.grows = names, 0, 0

    def __call__(self, sock: object, request: int, frame: bytes) -> int:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        name, address = struct.unpack("16sP", frame)
        assert request == 0x8946 and name.rstrip(b"\0") == b"eth9"
        command = ctypes.c_uint32.from_address(address).value
        if command == 0x37:
            ctypes.c_uint32.from_address(address + 16).value = len(self.names)
        elif command == 0x1B:
            ctypes.c_uint32.from_address(address + 8).value = len(self.names)
            for i, n in enumerate(self.names):
                ctypes.memmove(address + 12 + 32 * i, n.encode().ljust(32, b"\0"), 32)
        elif command == 0x1D:
            n_now = len(self.names) + self.grows
            ctypes.c_uint32.from_address(address + 4).value = n_now
            for i in range(n_now):
                ctypes.c_uint64.from_address(address + 8 + 8 * i).value = (1 << 40) + i
        else:
            raise AssertionError(f"unexpected command {command:#x}")
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    d = Driver(["rx_vport_rdma_unicast_bytes", "tx_prio3_pause", "rx_packets"])
    monkeypatch.setattr(ethtool.fcntl, "ioctl", d)
    monkeypatch.setattr(ethtool, "adapters", lambda sys: ["eth9"])
    return d


def test_a_driver_s_statistics_by_our_names(driver: Driver, tmp_path: Path) -> None:
    w = Watched(EthtoolSource(), tmp_path / "t.trace")
    assert w.probe().sees == "eth9 (3)"
    w.sample()
    told = {(r["entity"], r["name"], r["direction"], r["unit"]): r["value_int"] for r in w.rows()}
    assert told == {
        ("net:eth9", "rdma_unicast_bytes", "rx", "bytes"): 1 << 40,
        ("net:eth9", "prio3_pause", "tx", "frames"): (1 << 40) + 1,
        ("net:eth9", "rx_packets", "rx", "packets"): (1 << 40) + 2,
    }


def test_statistics_that_change_in_mid_capture_are_named_anew(driver: Driver, tmp_path: Path) -> None:
    source = EthtoolSource()
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    driver.names = ["rx_packets", "tx_packets"]  # what was at place 0 is now at none: never read by place
    w.sample()
    source._due_s = 0.0
    w.sample()
    assert w.values("net:eth9", "rdma_unicast_bytes") == [1 << 40, "error"]
    rows = [(r["value_int"], r["status"], r["incarnation"][-2:]) for r in w.rows() if r["name"] == "rx_packets"]
    assert rows == [((1 << 40) + 2, "ok", "/1"), (None, "error", "/1"), (1 << 40, "ok", "/2")]


def test_a_driver_that_grows_between_two_calls_writes_into_room_that_is_ours(driver: Driver, tmp_path: Path) -> None:
    w = Watched(EthtoolSource(), tmp_path / "t.trace")
    w.sample()
    driver.grows = 10_000
    w.sample()
    assert w.values("net:eth9", "prio3_pause") == [(1 << 40) + 1, "error"]


def test_an_adapter_that_goes_and_one_that_is_busy(driver: Driver, tmp_path: Path) -> None:
    source = EthtoolSource()
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    driver.error = errno.EBUSY
    w.sample()
    driver.error = 0
    w.sample()
    driver.error = errno.ENODEV
    w.sample(2)
    assert w.values("net:eth9", "rx_packets") == [(1 << 40) + 2, "error", (1 << 40) + 2, "lost"]
    assert w.events() == [("device error", "net:eth9 is gone")]


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [(errno.EOPNOTSUPP, "unsupported", "count nothing"), (errno.EPERM, "denied", "not permitted"), (errno.EIO, "error", "Input")],
)
def test_what_a_driver_that_refuses_is_said_to_be(driver: Driver, error: int, status: str, words: str) -> None:
    driver.error = error
    found = EthtoolSource().probe()
    assert found.status == status and words in str(found.reason)


def test_of_very_many_statistics_known_ones_stay(driver: Driver, tmp_path: Path) -> None:
    driver.names = [f"ch{i}_arm" for i in range(MAX_STATISTICS + 5)] + ["rx_bytes_phy"]
    w = Watched(EthtoolSource(), tmp_path / "t.trace")
    w.sample()
    last = w.last()
    assert len(last) == MAX_STATISTICS and last["net:eth9", "raw_phy_bytes"] == (1 << 40) + MAX_STATISTICS + 5


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("tx_prio3_bytes", ("prio3_bytes", "bytes", "tx")), ("rx_prio0_pause_duration", ("prio0_pause_duration", "us", "rx")),
        ("rx_bytes_phy", ("raw_phy_bytes", "bytes", "rx")), ("octets_tx_total", ("raw_phy_bytes", "bytes", "tx")),
        ("octets_rx_ok", ("octets_rx_ok", "bytes", "rx")), ("tx0_kicks", ("tx0_kicks", "kicks", "tx")),
        ("rx_xdp_tx", ("rx_xdp_tx", "1", None)), ("odd", ("odd", "1", None)), ("", ("", "1", None)),
        ("tx_prio9x_bytes", ("tx_prio9x_bytes", "bytes", "tx")),
    ],
)  # fmt: skip
def test_names_of_statistics(name: str, ours: tuple[str, str, str | None]) -> None:
    assert meaning(name) == ours
    assert is_known(name) == (ours[0] != name)


def test_a_recorded_adapter_s_names_do_not_run_into_each_other() -> None:
    names = (DATA / "ethtool-S-ionic.txt").read_text().split()
    assert len(names) == 607
    ours = [(n, way) for n, _, way in map(meaning, names)]
    assert len(set(ours)) == len(ours), "two statistics under one name would be two counters in one"
    assert ("raw_phy_bytes", "rx") in ours and ("pauses", "tx") in ours


def test_the_kernel_s_own_answer_here(tmp_path: Path) -> None:
    tool = shutil.which("ethtool")
    source = EthtoolSource()
    found = source.probe()
    if tool is None or not found.available:
        pytest.skip("no ethtool, or no adapter that counts")
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    name, adapter = next(iter(source._adapters.items()))
    said = subprocess.run([tool, "-S", name], capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    assert [line.split(":")[0].strip() for line in said] == adapter.names
    assert len(w.last()) == len({meaning(n)[0] for n in adapter.names})


def test_a_recorded_machine_s_driver_is_not_asked() -> None:
    found = EthtoolSource(roots_of(guest("plain-vm"))).probe()
    assert found.status == "unsupported" and found.remedy


# -- links of adapters -----------------------------------------------------------------------------------------------------


def adapter(sys: Path, name: str, **files: str) -> Path:
    folder = sys / "class/net" / name
    (folder / "device").mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(text + "\n")
    return folder


def test_a_link_that_flaps_and_negotiates_less(tmp_path: Path) -> None:
    sys = tmp_path / "sys"
    folder = adapter(sys, "eth0", operstate="up", carrier_changes="2", speed="400000")
    (sys / "class/net/lo").mkdir()
    w = Watched(CarrierSource(Roots(tmp_path / "proc", sys)), tmp_path / "t.trace")
    assert w.probe().sees == "eth0"
    w.sample()
    for state, speed, changes in (("down", "-1", "3"), ("up", "100000", "4")):
        adapter(sys, "eth0", operstate=state, speed=speed, carrier_changes=changes)
        w.sample()
    (folder / "operstate").write_text("marvellous\n")
    (folder / "carrier_changes").write_text("\n")
    w.sample()
    assert w.values("net:eth0", "rate_bytes_per_s") == [50_000_000_000, "absent", 12_500_000_000]
    assert w.values("net:eth0", "state") == [6, 2, 6, "error"] and w.values("net:eth0", "carrier_changes") == [2, 3, 4, "error"]
    assert w.events() == [
        ("link", "net:eth0: up -> down"), ("link", "net:eth0: down -> up"), ("link", "net:eth0: 400000 -> 100000 Mbit/s"),
    ]  # fmt: skip


def test_an_adapter_that_is_pulled_out_and_put_back(tmp_path: Path) -> None:
    sys = tmp_path / "sys"
    adapter(sys, "eth0", operstate="up", carrier_changes="9", speed="1000")
    source = CarrierSource(Roots(tmp_path / "proc", sys))
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    shutil.rmtree(sys / "class/net/eth0")
    source._due_s = 0.0
    w.sample()
    adapter(sys, "eth0", operstate="up", carrier_changes="12", speed="1000")
    source._due_s = 0.0
    w.sample()
    rows = [(r["value_int"], r["status"], r["incarnation"][-2:]) for r in w.rows() if r["name"] == "carrier_changes"]
    assert rows == [(9, "ok", "/1"), (None, "lost", "/1"), (12, "ok", "/2")]
    assert w.events() == [("device error", "net:eth0 is gone")]


# -- the stack -------------------------------------------------------------------------------------------------------------

SNMP = b"Tcp: RtoAlgorithm InSegs OutSegs RetransSegs\nTcp: 1 20 30 4\nUdp: InDatagrams\nUdp: 9\n"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (SNMP, {"RtoAlgorithm": 1, "InSegs": 20, "OutSegs": 30, "RetransSegs": 4}),
        (b"Tcp: A B\nTcp: 1\n", {}), (b"Tcp: A B\n", {}), (b"Tcp: A B\nTcp: 1 -1\n", {"A": 1}), (b"", {}), (b"Tcp:\nTcp:\n", {}),
    ],
)  # fmt: skip
def test_pairs_of_lines(data: bytes, found: dict[str, int]) -> None:
    assert two_lines(data, (b"Tcp",)) == found


def test_softnet_sums_over_cpus() -> None:
    assert softnet(b"0000000a 00000001 00000003 0\n00000010 00000000 00000001 0\n") == (26, 1, 4, 2)
    assert softnet(b"zz 1 2\n\n0a\n-1 0 0\n") == (0, 0, 0, 0)


@given(st.lists(st.tuples(*[st.integers(0, 0xFFFFFFFF)] * 3), max_size=8), st.binary(max_size=20))
def test_softnet_of_any_table(rows: list[tuple[int, int, int]], noise: bytes) -> None:
    lines = [" ".join(f"{v:08x}" for v in (*row, 0, 0)) for row in rows]
    sums = tuple(sum(c) for c in zip(*rows, strict=True)) if rows else (0, 0, 0)
    assert softnet("\n".join(lines).encode()) == (*sums, len(rows))
    softnet(noise)
    two_lines(noise, (b"Tcp", b"TcpExt"))
    names_of(noise)


@pytest.fixture
def stack(tmp_path: Path) -> Roots:
    folder = tmp_path / "proc/net"
    folder.mkdir(parents=True)
    (folder / "snmp").write_bytes(SNMP)
    (folder / "softnet_stat").write_text("0000000a 00000001 00000003\n")
    return Roots(tmp_path / "proc", tmp_path / "sys")


def test_the_stack_and_files_that_change(stack: Roots, tmp_path: Path) -> None:
    w = Watched(StackSource(stack), tmp_path / "t.trace")
    assert w.probe().sees == "3 counters of TCP"
    w.sample()
    (stack.proc / "net/softnet_stat").write_text("")
    (stack.proc / "net/snmp").write_bytes(b"Tcp: InSegs\nTcp: 25\n")
    w.sample()
    assert w.values("tcp", "tcp_segments_in") == [20, 25]
    assert w.values("tcp", "tcp_retransmissions") == [4, "absent"], "netstat is not there: it was never told"
    assert w.values("softnet", "dropped") == [1, "error"], "an empty table is no zero"


def test_a_cpu_that_goes_takes_its_share_along_and_is_no_wrap(stack: Roots, tmp_path: Path) -> None:
    file = stack.proc / "net/softnet_stat"
    file.write_text("000000ff 0 0\n000000f0 0 0\n")
    w = Watched(StackSource(stack), tmp_path / "t.trace")
    w.sample()
    file.write_text("00000100 0 0\n")
    w.sample()
    rows = [r for r in w.rows() if (r["entity"], r["name"]) == ("softnet", "packets")]
    assert [r["value_int"] for r in rows] == [0xFF + 0xF0, 0x100]
    assert len({r["incarnation"] for r in rows}) == 2


def test_a_container_s_own_tcp(stack: Roots, tmp_path: Path) -> None:
    for pid, net in (("self", 1), ("77", 2)):
        (stack.proc / pid / "ns").mkdir(parents=True)
        (stack.proc / pid / "ns/net").symlink_to(f"net:[{net}]")
    (stack.proc / "77/net").mkdir()
    (stack.proc / "77/net/snmp").write_bytes(SNMP.replace(b"1 20", b"1 7"))
    w = Watched(StackSource(stack, [Server("s", lambda: FoundProcess(77))]), tmp_path / "t.trace")
    w.sample()
    last = w.last()
    assert (last["tcp", "tcp_segments_in"], last["tcp:s", "tcp_segments_in"]) == (20, 7)
    assert {e for e, _ in last} == {"tcp", "tcp:s", "softnet"}, "the backlog is the machine's"


def test_this_machine_s_stack(tmp_path: Path) -> None:
    source = StackSource()
    w = Watched(source, tmp_path / "t.trace")
    if not w.probe().available:
        pytest.skip("no /proc/net/snmp here")
    w.sample()
    last: dict[tuple[str, str], Any] = w.last()
    told = dict(zip(*(line.split()[1:] for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:"),
                    strict=True))  # fmt: skip
    assert 0 < last["tcp", "tcp_segments_in"] <= int(told["InSegs"])
    assert last["tcp", "tcp_retransmissions"] <= int(told["RetransSegs"])


# -- facts for the graph ---------------------------------------------------------------------------------------------------


def test_a_recorded_node_s_ports(tmp_path: Path) -> None:
    with tarfile.open(DATA / "sys-class-infiniband-h100.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    facts = network_facts(Roots(tmp_path / "proc", tmp_path / "sys"))
    assert [d.name for d in facts.rdma] == [*(f"mlx5_{i}" for i in (0, 1, 4, 5, 6, 7, 8, 9)), "mlx5_bond_0"]
    assert facts.rdma[0].ports == (Port("1", "infiniband", True, 50e9, None),)
    assert facts.rdma[-1].ports[0].link_layer == "ethernet" and facts.adapters == ()
    assert facts.rdma[0].bdf is None and facts.rdma[0].numa is None, "the recording has no PCI tree"


def test_a_roce_adapter_is_one_wire_with_its_interface(tmp_path: Path) -> None:
    sys = tmp_path / "sys"
    pci = sys / "devices/pci0000:16/0000:16:01.0/0000:17:00.0"
    (pci / "net/ens1").mkdir(parents=True)
    (pci / "numa_node").write_text("1\n")
    port = pci / "infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in (("state", "1: DOWN"), ("rate", "2.5 Gb/sec (1X SDR)"), ("link_layer", "Ethernet")):
        (port / name).write_text(text + "\n")
    (pci / "infiniband/mlx5_0/device").symlink_to(pci)
    (pci / "net/ens1/device").symlink_to(pci)
    for name, text in (("speed", "200000"), ("operstate", "up"), ("type", "1")):
        (pci / "net/ens1" / name).write_text(text + "\n")
    for kind, name in (("infiniband", "mlx5_0"), ("net", "ens1")):
        (sys / "class" / kind).mkdir(parents=True)
        (sys / "class" / kind / name).symlink_to(pci / kind / name)
    (sys / "class/net/lo").mkdir()
    facts = network_facts(Roots(tmp_path / "proc", sys))
    assert facts.adapters == (Adapter("ens1", "0000:17:00.0", 1, True, 25e9, False, (("mlx5_0", "1"),)),)
    device = facts.rdma[0]
    assert (device.bdf, device.numa) == ("0000:17:00.0", 1)
    assert device.ports == (Port("1", "ethernet", False, None, "ens1"),), "a rate of a port that is down is none"


def test_soft_roce_stands_on_an_interface(tmp_path: Path) -> None:
    device = tmp_path / "sys/class/infiniband/rxe0"
    (device / "ports/1").mkdir(parents=True)
    (device / "parent").write_text("eth0\n")
    (tmp_path / "sys/class/net").mkdir(parents=True)
    facts = network_facts(Roots(tmp_path / "proc", tmp_path / "sys"))
    assert [(d.name, d.bdf, [p.interface for p in d.ports]) for d in facts.rdma] == [("rxe0", None, ["eth0"])]
