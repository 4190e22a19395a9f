"""Network counters: a recorded node with NDR adapters, soft-RoCE of a guest, and this machine's own interfaces."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import tarfile
import time
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.guests import guest, roots_of
from support.watched import Watched

from hoptrace.collectors.hardware.listener import Found as FoundProcess
from hoptrace.collectors.hardware.network import sources
from hoptrace.collectors.hardware.network.infiniband import InfinibandSource
from hoptrace.collectors.hardware.network.interfaces import FEW, InterfacesSource, interfaces_of
from hoptrace.collectors.hardware.network.rdma_names import hw_meaning, meaning
from hoptrace.collectors.hardware.network.where import Place, own_net
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
    sums = {way: sum(r["value_int"] for r in rows if r["name"] == "raw_bytes" and r["direction"] == way) for way in ("rx", "tx")}
    assert sums == {"rx": 8_197_790_748_936_452, "tx": 8_295_936_099_546_204}
    assert {r["unit"] for r in rows if r["name"] == "raw_bytes"} == {"bytes"}
    last = w.last()
    assert last["rdma:mlx5_1/1", "link_downed"] == "stale", "an 8-bit counter at its end is no count"
    assert ("counter", "rdma:mlx5_1/1: link_downed stands at its end (255) and counts no more until reset") in w.events()
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
    assert w.probe().sees == "1 devices, 1 ports" and "no port counters: rxe0 (hw_counters only)" in str(w.probe().reason)
    w.sample()
    assert [g.every_s for g in source._ports["rdma:rxe0/1"].groups] == [12.0]
    assert w.last() == {("rdma:rxe0/1", "packets"): 12, ("rdma:rxe0/1", "state"): 4}


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
    rows = [r for r in w.rows() if (r["entity"], r["name"], r["direction"]) == ("rdma:mlx5_0/1", "raw_bytes", "rx")]
    assert rows[-1]["value_int"] == 68 and rows[0]["value_int"] > 68 and rows[0]["width_bits"] is None, (
        "it was reset: no width, no wrap"
    )
    assert w.values("rdma:mlx5_4/1", "link_downed")[-1] == "lost"
    assert {(k, d) for k, d in w.events() if k != "counter"} == {
        ("link", "rdma:mlx5_0/1: state 4 -> 1 (4 is active)"),
        ("device error", "rdma:mlx5_4/1 is gone"),
    }


def test_hardware_counters_are_read_no_faster_than_they_change(ndr: Path, tmp_path: Path) -> None:
    source = InfinibandSource(Roots(ndr / "proc", ndr / "sys"))
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    folder = ndr / "sys/class/infiniband/mlx5_0/ports/1/hw_counters"
    name = next(p.name for p in sorted(folder.iterdir()) if p.name != "lifespan")
    was = int((folder / name).read_text())
    (folder / name).write_text(f"{was + 5}\n")
    w.sample()
    group = next(g for g in source._ports["rdma:mlx5_0/1"].groups if any(c.what.name == name for c in g.counters))
    group.due_s = 0.0
    w.sample()
    assert w.values("rdma:mlx5_0/1", name) == [was, was + 5]
    assert group.every_s >= 1.0


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
    rx = [r["status"] for r in w.rows() if r["name"] == "raw_bytes" and r["direction"] == "rx" and r["entity"] == "rdma:mlx5_0/1"]
    assert rx[-1] == "error" and w.values("rdma:mlx5_0/1", "state") == [4]


@pytest.mark.parametrize(
    ("file", "extended", "name", "unit", "one", "way", "end"),
    [
        ("port_xmit_data", True, "raw_bytes", "bytes", 4, "tx", None),
        ("port_rcv_data", False, "raw_bytes", "bytes", 4, "rx", 4294967295),
        ("port_xmit_wait", True, "port_xmit_wait", "ticks", 1, None, 4294967295),
        ("symbol_error", True, "symbol_error", "errors", 1, None, 65535),
        ("local_link_integrity_errors", True, "local_link_integrity_errors", "1", 1, None, 15),
        ("of_a_newer_kernel", True, "of_a_newer_kernel", "1", 1, None, None),
    ],
)  # fmt: skip
def test_files_of_a_port(file: str, extended: bool, name: str, unit: str, one: int, way: str | None, end: int | None) -> None:
    what = meaning(file, extended=extended)
    assert (what.name, what.unit, what.one, what.direction, what.end) == (name, unit, one, way, end)


@pytest.mark.parametrize(
    ("file", "unit", "way", "semantics"),
    [
        ("tx_bytes", "bytes", "tx", "cumulative"),  # efa
        ("rdma_read_bytes", "bytes", None, "cumulative"),
        ("tx_rdma_ucast_pkts", "packets", "tx", "cumulative"),  # ionic
        ("active_qps", "1", None, "gauge"),  # bnxt_re
        ("out_of_sequence", "1", None, "cumulative"),  # mlx5
        ("rx_write_requests", "1", "rx", "cumulative"),
    ],
)
def test_a_driver_s_own_counters(file: str, unit: str, way: str | None, semantics: str) -> None:
    what = hw_meaning(file)
    assert (what.name, what.unit, what.direction, what.semantics, what.end) == (file, unit, way, semantics, None)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A port of an adapter without 64-bit counters: no unicast_* files."""
    port = tmp_path / "sys/class/infiniband/mthca0/ports/1"
    (port / "counters").mkdir(parents=True)
    for name, text in (("port_xmit_data", "4294967290"), ("port_rcv_data", "1"), ("link_downed", "0")):
        (port / "counters" / name).write_text(text + "\n")
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("10 Gb/sec (4X)\n")
    return port


def test_a_counter_of_32_bits_that_is_full_is_no_silence(old: Path, tmp_path: Path) -> None:
    w = Watched(InfinibandSource(Roots(tmp_path / "proc", tmp_path / "sys")), tmp_path / "t.trace")
    w.sample()
    for words in ("4294967295", "4294967295", "12"):
        (old / "counters/port_xmit_data").write_text(words + "\n")
        w.sample()
    rows = [(r["value_int"], r["status"]) for r in w.rows() if (r["name"], r["direction"]) == ("raw_bytes", "tx")]
    assert rows[0] == (4294967290 * 4, "ok") and rows[-1] == (48, "ok") and set(rows[1:-1]) == {(None, "stale")}
    assert w.events() == [
        ("counter", "rdma:mthca0/1: port_xmit_data stands at its end (4294967295) and counts no more until reset")
    ]


def test_a_port_and_its_device_may_name_two_counters_alike(old: Path, tmp_path: Path) -> None:
    for folder, value in ((old / "hw_counters", 1), (old.parents[1] / "hw_counters", 70)):
        folder.mkdir()
        (folder / "retries").write_text(f"{value}\n")
    w = Watched(InfinibandSource(Roots(tmp_path / "proc", tmp_path / "sys")), tmp_path / "t.trace")
    w.sample(3)
    assert w.values("rdma:mthca0/1", "retries") == [1] and w.values("rdma:mthca0", "retries") == [70]


def test_a_rate_is_none_while_the_link_is_down_and_no_value_is_made_up(old: Path, tmp_path: Path) -> None:
    (old / "state").write_text("1: DOWN\n")
    (old / "counters/port_rcv_data").write_text("N/A (no PMA)\n")
    (old / "counters/link_downed").write_text("-3\n")
    w = Watched(InfinibandSource(Roots(tmp_path / "proc", tmp_path / "sys")), tmp_path / "t.trace")
    w.sample()
    last = w.last()
    assert last["rdma:mthca0/1", "rate_bytes_per_s"] == "absent" and last["rdma:mthca0/1", "link_downed"] == "error"
    assert {r["status"] for r in w.rows() if r["name"] == "raw_bytes" and r["direction"] == "rx"} == {"unsupported"}


def test_a_port_that_comes_back_is_another_one_and_is_looked_for_ever_less_often(old: Path, tmp_path: Path) -> None:
    source = InfinibandSource(Roots(tmp_path / "proc", tmp_path / "sys"))
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    shutil.move(str(old), str(tmp_path / "away"))
    for port in source._ports.values():
        port.close()
    w.sample()
    assert source._wait_s == 2.0 and source._due_s < time.monotonic() + 1.5, "looked for in a second, then in two"
    source._due_s = 0.0
    w.sample()
    shutil.move(str(tmp_path / "away"), str(old))
    source._due_s = 0.0
    w.sample()
    assert w.events() == [("device error", "rdma:mthca0/1 is gone"), ("device", "rdma:mthca0/1 came")]
    rows = [r for r in w.rows() if (r["name"], r["direction"]) == ("raw_bytes", "rx")]
    assert [r["status"] for r in rows] == ["ok", "absent", "lost", "ok"]
    assert rows[0]["incarnation"] != rows[-1]["incarnation"]


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
         [("eth0", [18446744073709551615, 2, 3, 4, 9, 10, 11, 12])]),
        (b"eth0: 1 2 3\n", []), (b"eth0: 1 2 3 4 5 6 7 8 9 10 11 x 13\n", []),
        (b"eth0: -1 2 3 4 5 6 7 8 9 10 11 12\n", []), (b"", []),
        (b"a b:c: 1 2 3 4 5 6 7 8 9 10 11 12\n", []),
    ],
)  # fmt: skip
def test_lines_of_proc_net_dev(data: bytes, found: list[tuple[str, list[int]]]) -> None:
    assert list(interfaces_of(data)) == found


@pytest.fixture
def two_nets(tmp_path: Path) -> Roots:
    """A machine whose server, process 77, has a network namespace of its own with an eth0 too."""
    proc = tmp_path / "proc"
    for pid, net in (("self", 1), ("77", 2), ("78", 1)):
        (proc / pid / "ns").mkdir(parents=True)
        (proc / pid / "ns/net").symlink_to(f"net:[{net}]")
    for folder, rx in ((proc / "net", 100), (proc / "77/net", 5)):
        folder.mkdir(parents=True)
        (folder / "dev").write_text(LINE.replace("100", str(rx)))
    return Roots(proc, tmp_path / "sys")


LINE = "  eth0: 100 2 3 4 0 0 0 0 900 10 11 12 0 0 0 0\n"


def _rx(w: Watched, entity: str) -> list[int | None]:
    """Bytes received in their order, equal neighbours once."""
    mine = [r for r in w.rows() if (r["entity"], r["name"], r["direction"], r["status"]) == (entity, "raw_bytes", "rx", "ok")]
    return [value for value, _ in groupby(r["value_int"] for r in mine)]


def test_a_server_in_a_container_has_an_eth0_of_its_own(two_nets: Roots, tmp_path: Path) -> None:
    servers = [Server("s", lambda: FoundProcess(77)), Server("t", lambda: FoundProcess(78))]
    w = Watched(InterfacesSource(two_nets, servers), tmp_path / "t.trace")
    assert w.probe().sees == "eth0; namespaces of their own: s", "t is in this one"
    w.sample()
    assert _rx(w, "net:eth0") == [100] and _rx(w, "net:s/eth0") == [5]


def test_a_server_that_begins_anew_in_another_namespace(two_nets: Roots, tmp_path: Path) -> None:
    pid = 77
    source = InterfacesSource(two_nets, [Server("s", lambda: FoundProcess(pid))])
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    pid = 79
    (two_nets.proc / "77").rename(two_nets.proc / "79")
    (two_nets.proc / "79/ns/net").unlink()
    (two_nets.proc / "79/ns/net").symlink_to("net:[3]")
    (two_nets.proc / "79/net/dev").write_text(LINE.replace("100", "7"))
    source._places._due_s = 0.0
    w.sample()
    rows = [r for r in w.rows() if (r["entity"], r["name"], r["direction"]) == ("net:s/eth0", "raw_bytes", "rx")]
    assert {(r["value_int"], r["status"]) for r in rows} == {(5, "ok"), (None, "lost"), (7, "ok")}
    lives = {r["incarnation"] for r in rows if r["value_int"] is not None}
    assert len(lives) == 2, "5 and 7 are never subtracted"


def test_a_namespace_that_can_not_be_told_is_left_out(two_nets: Roots, tmp_path: Path) -> None:
    (two_nets.proc / "77/ns/net").unlink()
    w = Watched(InterfacesSource(two_nets, [Server("s", lambda: FoundProcess(77))]), tmp_path / "t.trace")
    w.sample()
    assert {e for e, _ in w.last()} == {"net:eth0"}


def test_names_of_entities_and_the_host_s_proc_in_a_container(tmp_path: Path) -> None:
    assert Place(tmp_path, None, "").entity("net", "eth0") == "net:eth0" and Place(tmp_path, None, "").entity("tcp") == "tcp"
    assert Place(tmp_path, "s", "").entity("net", "eth0") == "net:s/eth0" and Place(tmp_path, "s", "").entity("tcp") == "tcp:s"
    (tmp_path / "net").symlink_to("self/net")
    assert own_net(tmp_path) == tmp_path / "net"
    (tmp_path / "1/net").mkdir(parents=True)
    (tmp_path / "1/net/dev").touch()
    assert own_net(tmp_path) == tmp_path / "1/net"
    assert own_net(Path("/proc")) == Path("/proc/net")


def test_a_real_namespace(tmp_path: Path) -> None:
    child = subprocess.Popen(["unshare", "-n", "sleep", "20"], stderr=subprocess.DEVNULL)
    try:
        mine = Path("/proc/self/ns/net").readlink()
        for _ in range(200):
            if child.poll() is not None:
                pytest.skip("no network namespaces may be made here")
            if Path(f"/proc/{child.pid}/ns/net").readlink() != mine:
                break
            time.sleep(0.01)
        w = Watched(InterfacesSource(servers=[Server("s", lambda: FoundProcess(child.pid))]), tmp_path / "t.trace")
        assert str(w.probe().sees).endswith("namespaces of their own: s")
        w.sample()
        assert _rx(w, "net:s/lo") == [0], "nothing was ever sent there, and that is told from this machine's lo"
    finally:
        child.kill()
        child.wait()


def test_an_interface_that_goes_and_comes_back_is_another_one(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    dev = tmp_path / "proc/net/dev"
    dev.write_text(LINE + LINE.replace("eth0", "veth1"))
    source = InterfacesSource(Roots(tmp_path / "proc", tmp_path / "sys"))
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    dev.write_text(LINE.replace("100", "150"))
    w.sample()
    dev.write_text(LINE.replace("100", "160") + LINE.replace("eth0", "veth1").replace("100", "400"))
    w.sample()
    source.close()
    dev.unlink()
    dev.mkdir()
    w.sample()
    assert _rx(w, "net:eth0") == [100, 150, 160]
    veth = [r for r in w.rows() if (r["entity"], r["name"], r["direction"]) == ("net:veth1", "raw_bytes", "rx")]
    assert [(r["value_int"], r["status"]) for r in veth][:3] == [(100, "ok"), (None, "absent"), (400, "ok")]
    assert veth[0]["incarnation"] != veth[2]["incarnation"], "400 - 100 is nothing that was sent"
    assert w.last()["net:eth0", "packets"] == "error", "EISDIR: what is not known is an error, not a zero"


def test_of_many_interfaces_adapters_stay_fast(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "sys/class/net/eth0/device").mkdir(parents=True)
    names = [f"veth{i}" for i in range(FEW + 3)] + ["lo", "eth0"]

    def write(rx: int) -> None:
        (tmp_path / "proc/net/dev").write_text("".join(LINE.replace("eth0", n).replace("100", str(rx)) for n in names))

    w = Watched(InterfacesSource(Roots(tmp_path / "proc", tmp_path / "sys")), tmp_path / "t.trace")
    for rx in (1, 2, 3):
        write(rx)
        w.sample()
    assert _rx(w, "net:eth0") == _rx(w, "net:lo") == _rx(w, "net:veth0") == [1, 2, 3]
    assert _rx(w, f"net:veth{FEW}") == [1], "a beat later than once a second"


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


@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_raising(data: bytes) -> None:
    for _, values in interfaces_of(data):
        assert len(values) == 8 and min(values) >= 0


def test_every_source_says_what_is_missing_and_what_would_help(tmp_path: Path) -> None:
    for source in sources(Asked(Roots(tmp_path / "proc", tmp_path / "sys"))):
        found = source.probe()
        assert not found.available and found.reason and found.remedy, source.name
