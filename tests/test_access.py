"""Access paths and packet overheads, counted by hand from the sources that each names."""

from __future__ import annotations

import pytest

from hoptrace.access import ACCESS, OVERHEAD, access, is_loopback
from hoptrace.schema import MECHANISMS

KINDS = {"queue entry", "doorbell", "descriptor fetch", "DMA", "wire", "completion", "poll", "copy", "serialization", "interrupt"}


@pytest.mark.parametrize(
    ("mechanism", "payload", "control"),
    [
        ("load_store", 1, 0),
        ("uncached", 1, 1),  # the request of a non-posted read
        ("memcpy", 1, 0),
        ("dma", 2, 5),  # command, doorbell, fetch, completion, poll
        ("rdma", 3, 5),  # work request, doorbell, fetch, completion, poll
        ("collective", 3, 3),  # credit, step counter, wait for it
        ("message", 5, 6),  # descriptor, doorbell, fetch, interrupt, readiness, acknowledgement
        ("loopback", 2, 4),  # backlog, soft interrupt, readiness, acknowledgement
        ("file", 3, 7),  # NVMe's eight steps less the data transfer
    ],
)
def test_one_transfer(mechanism: str, payload: int, control: int) -> None:
    path = ACCESS[mechanism]
    assert (path.payload_hops(), path.control_ops()) == (payload, control)
    assert {h.kind for h in path.hops + path.per_link} <= KINDS and len(path.source) > 30


def test_every_mechanism_has_a_path() -> None:
    assert set(ACCESS) == {*MECHANISMS, "loopback"}
    assert access(None) is None and access("teleport") is None and access("message", local=True) is ACCESS["loopback"]


def test_more_links() -> None:
    # A message is stored and forwarded: every connection has its own operations. A DMA crosses more wires with the same ones.
    assert (ACCESS["message"].control_ops(2), ACCESS["message"].payload_hops(2)) == (12, 10)
    assert (ACCESS["dma"].control_ops(3), ACCESS["dma"].payload_hops(3)) == (5, 4)
    assert ACCESS["message"].control_ops(0) == ACCESS["message"].control_ops(1)


def test_packets() -> None:
    # pcie-bench: ceil(n / MPS) * 24. 1,500 bytes at MPS 256 are six packets.
    assert OVERHEAD["pcie"].of(1500, 1) == 144
    assert OVERHEAD["pcie"].of(1500, 1500) == 1500 * 24, "a byte at a time costs a packet each"
    # 20 TCP + 12 timestamps + 20 IPv4 + 14 Ethernet on 1,448 bytes.
    assert OVERHEAD["ethernet"].of(1_448_000, 1) == 66_000 and OVERHEAD["ethernet"].acks(1_448_000, 1) == 33_000
    assert OVERHEAD["infiniband"].of(8192, 1) == 2 * 24 + 16 and OVERHEAD["infiniband"].acks(8192, 1) == 0
    assert all(o.of(0, 5) == 0 and o.acks(0, 0) == 0 for o in OVERHEAD.values())


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8000", True), ("http://localhost:1/v1", True), ("http://[::1]:80", True), ("http://127.8.8.8", True),
        ("http://10.0.0.1", False), ("http://127.evil.com", False), (None, False), ("http://[bad", False), ("", False),
    ],
)  # fmt: skip
def test_this_very_host(url: str | None, local: bool) -> None:
    assert is_loopback(url) is local
