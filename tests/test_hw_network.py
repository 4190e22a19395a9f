"""Network counters: a recorded node with NDR adapters, soft-RoCE of a guest, and this machine's own interfaces."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import struct
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.guests import guest, roots_of
from support.watched import Watched

from hoptrace.collectors.hardware.listener import Found as FoundProcess
from hoptrace.collectors.hardware.network import ethtool, sources
from hoptrace.collectors.hardware.network.ethtool import EthtoolSource, meaning, names_of
from hoptrace.collectors.hardware.network.infiniband import InfinibandSource
from hoptrace.collectors.hardware.network.interfaces import InterfacesSource, interfaces_of
from hoptrace.collectors.hardware.network.stack import StackSource, softnet, two_lines
from hoptrace.collectors.hardware.source import Asked, Roots, Server

DATA = Path(__file__).parent / "data" / "hardware" / "network"


@pytest.fixture
def ndr(tmp_path: Path) -> Path:
    with tarfile.open(DATA / "sys-class-infiniband-h100.tar.gz") as tar:
        tar.extractall(tmp_path / "ndr", filter="data")
    return tmp_path / "ndr"


def test_octets_are_four_bytes_on_a_real_node(ndr: Path, tmp_path: Path) -> None:
    w = Watched(InfinibandSource(Roots(ndr / "proc", ndr / "sys")), tmp_path / "t.trace")
    assert w.probe().sees == "9 devices, 9 ports"
    w.sample()
    rows = w.rows()
    sums = {way: sum(r["value_int"] for r in rows if r["name"] == "data_bytes" and r["direction"] == way) for way in ("rx", "tx")}
    assert sums == {"rx": 8_197_790_748_936_452, "tx": 8_295_936_099_546_204}
    assert {r["unit"] for r in rows if r["name"] == "data_bytes"} == {"bytes"}
    last = w.last()
    assert last["rdma:mlx5_1/1", "link_downed"] == 255
    assert last["rdma:mlx5_1/1", "rate_bytes_per_s"] == 50e9, "400 Gb/s"
    assert last["rdma:mlx5_1/1", "state"] == 4


def test_soft_roce_has_no_byte_counters_and_says_so(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/rxe0/ports/1"
    (port / "hw_counters").mkdir(parents=True)
    (port / "hw_counters/sent_pkts").write_text("12\n")
    (port / "hw_counters/lifespan").write_text("12000\n")
    (port / "state").write_text("4: ACTIVE\n")
    source = InfinibandSource(Roots(tmp_path / "proc", tmp_path / "sys"))
    w = Watched(source, tmp_path / "t.trace")
    assert w.probe().sees == "1 devices, 1 ports" and "without byte counters: rxe0" in str(w.probe().reason)
    w.sample()
    assert source._ports["rdma:rxe0/1"].lifespan_s == 12.0
    assert w.last() == {("rdma:rxe0/1", "sent_pkts"): 12, ("rdma:rxe0/1", "state"): 4}


def test_a_port_that_goes_down_one_that_is_cleared_and_one_that_is_gone(ndr: Path, tmp_path: Path) -> None:
    source = InfinibandSource(Roots(ndr / "proc", ndr / "sys"))
    base = ndr / "sys/class/infiniband"
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    (base / "mlx5_0/ports/1/state").write_text("1: DOWN\n")
    (base / "mlx5_0/ports/1/counters/port_rcv_data").write_text("17\n")
    (base / "mlx5_0/ports/1/counters/port_xmit_data").write_text("N/A (not supported)\n")
    for path in (base / "mlx5_4").rglob("*"):
        if path.is_file():
            path.write_text("")
    shutil.rmtree(base / "mlx5_4")
    source._due_s = 0.0
    w.sample()
    rows = [r for r in w.rows() if (r["entity"], r["name"], r["direction"]) == ("rdma:mlx5_0/1", "data_bytes", "rx")]
    assert rows[-1]["value_int"] == 68 and rows[0]["value_int"] > 68 and rows[0]["width_bits"] is None, (
        "it was reset: no width, no wrap"
    )
    assert w.values("rdma:mlx5_4/1", "link_downed")[-1] == "lost"
    assert set(w.events()) == {("link", "rdma:mlx5_0/1: state 4 -> 1 (4 is active)"), ("device error", "rdma:mlx5_4/1 is gone")}


def test_hardware_counters_are_read_no_faster_than_they_change(ndr: Path, tmp_path: Path) -> None:
    source = InfinibandSource(Roots(ndr / "proc", ndr / "sys"))
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    folder = ndr / "sys/class/infiniband/mlx5_0/ports/1/hw_counters"
    name = next(p.name for p in sorted(folder.iterdir()) if p.name != "lifespan")
    was = int((folder / name).read_text())
    (folder / name).write_text(f"{was + 5}\n")
    w.sample()
    port = source._ports["rdma:mlx5_0/1"]
    port.due_s = 0.0
    w.sample()
    assert w.values("rdma:mlx5_0/1", name) == [was, was + 5]
    assert port.lifespan_s >= 1.0


def test_an_adapter_that_answers_with_an_error(ndr: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = Watched(InfinibandSource(Roots(ndr / "proc", ndr / "sys")), tmp_path / "t.trace")
    w.sample()
    real = os.pread

    def broken(fd: int, n: int, at: int) -> bytes:
        if Path(f"/proc/self/fd/{fd}").readlink().name == "port_rcv_data":
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, n, at)

    monkeypatch.setattr(os, "pread", broken)
    w.sample()
    monkeypatch.undo()
    rx = [
        r["status"] for r in w.rows() if r["name"] == "data_bytes" and r["direction"] == "rx" and r["entity"] == "rdma:mlx5_0/1"
    ]
    assert rx[-1] == "error" and w.values("rdma:mlx5_0/1", "state") == [4]


# -- interfaces ------------------------------------------------------------------------------------------------------------


def test_interfaces_of_a_recorded_machine(tmp_path: Path) -> None:
    w = Watched(InterfacesSource(roots_of(guest("plain-vm"))), tmp_path / "t.trace")
    if not w.probe().available:
        pytest.skip("the recorded tree keeps no /proc/net/dev")
    w.sample()
    assert {"net:lo", "net:eth0"} <= {e for e, _ in w.last()}


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"Inter-| Receive\n face |bytes\n  eth0:18446744073709551615 2 3 4 0 0 0 0 9 10 11 12 0 0 0 0\n",
         [("eth0", [18446744073709551615, 2, 3, 4, 0, 0, 0, 0, 9, 10, 11, 12, 0, 0, 0, 0])]),
        (b"eth0: 1 2 3\n", []), (b"eth0: 1 2 3 4 5 6 7 8 9 10 11 x 13\n", []),
        (b"eth0: -1 2 3 4 5 6 7 8 9 10 11 12\n", []), (b"", []),
        (b"a b:c: 1 2 3 4 5 6 7 8 9 10 11 12\n", []),
    ],
)  # fmt: skip
def test_lines_of_proc_net_dev(data: bytes, found: list[tuple[str, list[int]]]) -> None:
    assert list(interfaces_of(data)) == found


def test_the_server_s_own_network_and_an_interface_that_goes(tmp_path: Path) -> None:
    folder = tmp_path / "proc/77/net"
    folder.mkdir(parents=True)
    line = "eth0: 100 2 3 4 0 0 0 0 900 10 11 12 0 0 0 0\n"
    (folder / "dev").write_text(line + line.replace("eth0", "veth1"))
    servers = [Server("s", lambda: FoundProcess(77))]
    w = Watched(InterfacesSource(Roots(tmp_path / "proc", tmp_path / "sys"), servers), tmp_path / "t.trace")
    assert w.probe().sees == "eth0, veth1; as the server sees them"
    w.sample()
    (folder / "dev").write_text(line.replace("100", "150"))
    w.sample()
    rows = [(r["direction"], r["value_int"]) for r in w.rows() if (r["entity"], r["name"]) == ("net:eth0", "raw_bytes")]
    assert sorted(set(rows)) == [("rx", 100), ("rx", 150), ("tx", 900)]
    assert w.values("net:veth1", "packets")[-1] == "absent"


def test_bytes_over_loopback_are_counted_here(tmp_path: Path) -> None:
    w = Watched(InterfacesSource(), tmp_path / "t.trace")
    if not w.probe().available or "lo" not in str(w.probe().sees):
        pytest.skip("no loopback here")
    w.sample()
    a, b = socket.socketpair(socket.AF_UNIX)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        there, _ = server.accept()
        client.sendall(b"x" * 100_000)
        got = 0
        while got < 100_000:
            got += len(there.recv(1 << 16))
        there.close()
    a.close()
    b.close()
    w.sample()
    sent = [r["value_int"] for r in w.rows() if (r["entity"], r["name"], r["direction"]) == ("net:lo", "raw_bytes", "tx")]
    assert sent[-1] - sent[0] >= 100_000


# -- drivers and stack -----------------------------------------------------------------------------------------------------


def test_a_driver_s_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ioctl's own layout, answered by a driver that counts three things, then two, then not at all."""
    names = [b"rx_vport_rdma_unicast_bytes", b"tx_prio3_pause", b"rx_packets"]
    state = {"n": 3, "error": 0}

    def ioctl(sock: object, request: int, frame: bytes) -> int:
        if state["error"]:
            raise OSError(state["error"], os.strerror(state["error"]))
        import ctypes

        name, address = struct.unpack("16sP", frame)
        assert request == 0x8946 and name.rstrip(b"\0") == b"eth9"
        command = ctypes.c_uint32.from_address(address).value
        if command == 0x37:
            ctypes.c_uint32.from_address(address + 16).value = state["n"]
        elif command == 0x1B:
            for i, n in enumerate(names[: state["n"]]):
                ctypes.memmove(address + 12 + 32 * i, n.ljust(32, b"\0"), 32)
        else:
            ctypes.c_uint32.from_address(address + 4).value = state["n"]
            for i in range(state["n"]):
                ctypes.c_uint64.from_address(address + 8 + 8 * i).value = (1 << 40) + i
        return 0

    monkeypatch.setattr(ethtool.fcntl, "ioctl", ioctl)
    source = EthtoolSource()
    monkeypatch.setattr(source, "_adapters", lambda: ["eth9"])
    w = Watched(source, tmp_path / "t.trace")
    assert w.probe().sees == "eth9 (3)"
    w.sample()
    state["n"] = 2
    w.sample()
    state.update(n=3, error=errno.ENODEV)
    w.sample()
    rows = [(r["direction"], r["unit"], r["value_int"], r["status"]) for r in w.rows() if r["name"] == "rdma_bytes"]
    assert rows[0] == ("rx", "bytes", 1 << 40, "ok")
    assert [s for *_, s in rows if s != "ok"] == ["error", "lost"]
    assert {n for _, n in w.last()} == {"rdma_bytes", "tx_prio3_pause", "rx_packets"}


def test_driver_names() -> None:
    assert names_of(b"rx_bytes".ljust(32, b"\0") + b"x" * 32 + b"cut") == ["rx_bytes", "x" * 32]
    assert meaning("tx_prio3_bytes") == ("tx_prio3_bytes", "bytes", "tx") and meaning("odd") == ("odd", "1", None)


def test_a_recorded_machine_s_driver_is_not_asked() -> None:
    assert EthtoolSource(roots_of(guest("plain-vm"))).probe().status == "unsupported"


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
    assert softnet(b"0000000a 00000001 00000003 0\n00000010 00000000 00000001 0\n") == (26, 1, 4)
    assert softnet(b"zz 1 2\n\n0a\n") == (0, 0, 0)


def test_the_stack_and_a_file_that_goes(tmp_path: Path) -> None:
    folder = tmp_path / "proc/net"
    folder.mkdir(parents=True)
    (folder / "snmp").write_bytes(SNMP)
    (folder / "softnet_stat").write_text("0000000a 00000001 00000003\n")
    w = Watched(StackSource(Roots(tmp_path / "proc", tmp_path / "sys")), tmp_path / "t.trace")
    assert w.probe().sees == "6 counters"
    w.sample()
    (folder / "softnet_stat").write_text("")
    (folder / "snmp").write_bytes(b"Tcp: InSegs\nTcp: 25\n")
    w.sample()
    assert w.values("tcp", "tcp_segments_in") == [20, 25] and w.values("tcp", "tcp_retransmissions") == [4, "absent"]
    assert w.values("softnet", "dropped") == [1, 0]


@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_raising(data: bytes) -> None:
    list(interfaces_of(data))
    two_lines(data, (b"Tcp", b"TcpExt"))
    softnet(data)
    names_of(data)


def test_every_source_says_what_is_missing(tmp_path: Path) -> None:
    for source in sources(Asked(Roots(tmp_path / "proc", tmp_path / "sys"))):
        found = source.probe()
        assert not found.available and found.reason, source.name
