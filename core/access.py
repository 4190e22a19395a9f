"""What one transfer costs besides its bytes: the access path of each mechanism, and the packet overhead of each kind of link.

A *hop* is one step of an access path (queue entry, doorbell, descriptor fetch, DMA, wire, completion, poll, copy, serialization).
Payload hops carry the data; control operations carry none. The figures stand in where a move does not say its own: they are
*assumed*, never *counted*. They name the least that the mechanism needs, so what they give is a lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import urlsplit

__all__ = ["ACCESS", "OVERHEAD", "Access", "Hop", "Overhead", "access", "is_loopback"]


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of an access path: its kind, what is done, whether it carries the payload, and who performs it."""

    kind: str
    what: str
    payload: bool = False
    who: str = ""


@dataclass(frozen=True, slots=True)
class Access:
    """The path of one transfer.

    ``hops`` are taken once a transfer; ``per_link`` once for each link that it crosses: a message is stored and forwarded, so
    every connection has its own. ``source``: where the steps are written down.
    """

    mechanism: str
    hops: tuple[Hop, ...]
    per_link: tuple[Hop, ...]
    source: str

    def payload_hops(self, links: int = 1) -> int:
        """Hops that carry the payload, of one transfer over ``links`` links."""
        return sum(h.payload for h in self.hops) + max(links, 1) * sum(h.payload for h in self.per_link)

    def control_ops(self, links: int = 1) -> int:
        """Steps that carry none, of one transfer over ``links`` links."""
        return sum(not h.payload for h in self.hops) + max(links, 1) * sum(not h.payload for h in self.per_link)


_WIRE = Hop("wire", "the packets cross the link", payload=True, who="link")
_NIC = "Neugebauer et al., Understanding PCIe performance for end host networking, SIGCOMM 2018 (its model of a simple NIC)"

ACCESS: MappingProxyType[str, Access] = MappingProxyType({
    a.mechanism: a
    for a in (
        Access(
            "load_store", (),
            (Hop("wire", "the cache line crosses the link, ordered by the coherence protocol", payload=True, who="core"),),
            "a load or store names its address and needs no queue and no answer that software sees",
        ),
        Access(
            "uncached", (),
            (
                Hop("wire", "the read's request crosses PCIe as a packet without data", who="core"),
                Hop("wire", "the completion carries the data back", payload=True, who="device"),
            ),
            "PCI Express Base Specification: a memory read is non-posted (741 ns a round trip measured, platform-constants 5); a "
            "posted write has no request of its own",
        ),
        Access(
            "memcpy",
            (Hop("copy", "a processor reads the source and writes the destination", payload=True, who="core"),), (),
            "one pass of loads and stores; no queue, no confirmation",
        ),
        Access(
            "dma",
            (
                Hop("queue entry", "the driver writes the copy command into the channel", who="driver"),
                Hop("doorbell", "a posted register write tells the engine", who="driver"),
                Hop("descriptor fetch", "the engine reads the command from host memory", who="copy engine"),
                Hop("DMA", "the engine moves the data", payload=True, who="copy engine"),
                Hop("completion", "the engine writes a semaphore or an event", who="copy engine"),
                Hop("poll", "the host finds the completion (stream or event synchronisation)", who="core"),
            ),
            (_WIRE,),
            "queue, doorbell, fetch, completion of a copy engine as NVIDIA's open GPU documentation describes host channels; "
            "6-7 us for a small copy (platform-constants 9)",
        ),
        Access(
            "rdma",
            (
                Hop("queue entry", "a work request is written into the send queue", who="core"),
                Hop("doorbell", "a register write tells the adapter", who="core"),
                Hop("descriptor fetch", "the adapter reads the work request", who="adapter"),
                Hop("DMA", "the adapter reads the payload from memory", payload=True, who="adapter"),
                Hop("DMA", "the far adapter writes it to memory", payload=True, who="far adapter"),
                Hop("completion", "the far adapter acknowledges and the near one writes a completion entry", who="both adapters"),
                Hop("poll", "the host finds the entry in the completion queue", who="core"),
            ),
            (_WIRE,),
            "Kalia, Kaminsky, Andersen, Design guidelines for high performance RDMA systems, USENIX ATC 2016, section 2 (a "
            "one-sided write, reliable connection)",
        ),
        Access(
            "collective",
            (
                Hop("poll", "the sender waits until the receiver's buffer is free", who="sending GPU"),
                Hop("copy", "the sender writes into the receiver's buffer", payload=True, who="sending GPU"),
                Hop("completion", "the sender raises the step counter", who="sending GPU"),
                Hop("poll", "the receiver waits for the counter", who="receiving GPU"),
                Hop("copy", "the receiver takes the data out, reducing it", payload=True, who="receiving GPU"),
            ),
            (_WIRE,),
            "one send between neighbours as NCCL's primitives do it: head and tail counters of a FIFO per peer (NCCL source, "
            "src/device/prims_simple.h); an all-reduce over n ranks is 2 (n - 1) of these per rank",
        ),
        Access(
            "message", (),
            (
                Hop("copy", "send() copies into the socket's buffers", payload=True, who="kernel"),
                Hop("queue entry", "the driver writes a transmit descriptor", who="driver"),
                Hop("doorbell", "the driver writes the queue's tail register", who="driver"),
                Hop("descriptor fetch", "the adapter reads the descriptor", who="adapter"),
                Hop("DMA", "the adapter reads the packet", payload=True, who="adapter"),
                _WIRE,
                Hop("DMA", "the far adapter writes the packet to memory", payload=True, who="far adapter"),
                Hop("completion", "the adapter writes the receive descriptor back and interrupts", who="far adapter"),
                Hop("poll", "epoll tells the process that the socket can be read", who="kernel"),
                Hop("copy", "recv() copies out to the process", payload=True, who="kernel"),
                Hop("completion", "the acknowledgement goes back", who="far kernel"),
            ),
            f"{_NIC}; acknowledgement: RFC 9293 and RFC 1122, 4.2.3.2 (one for at most two full segments: transfers above some "
            "2.9 kB take more)",
        ),
        Access(
            "loopback", (),
            (
                Hop("copy", "send() copies into the socket's buffers", payload=True, who="kernel"),
                Hop("queue entry", "the packet is put on the CPU's backlog queue", who="kernel"),
                Hop("interrupt", "a soft interrupt takes it from there", who="kernel"),
                Hop("poll", "epoll tells the process that the socket can be read", who="kernel"),
                Hop("copy", "recv() copies out to the process", payload=True, who="kernel"),
                Hop("completion", "the acknowledgement goes back the same way", who="kernel"),
            ),
            "a message over TCP within one Linux host: drivers/net/loopback.c hands the packet to netif_rx, which queues it for "
            "NET_RX_SOFTIRQ; no adapter, so no doorbell and no descriptor",
        ),
        Access(
            "file",
            (
                Hop("queue entry", "the command is written into the submission queue", who="driver"),
                Hop("doorbell", "the queue's tail register is written", who="driver"),
                Hop("descriptor fetch", "the controller reads the command", who="controller"),
                Hop("DMA", "the controller moves the data", payload=True, who="controller"),
                Hop("completion", "the controller writes a completion entry", who="controller"),
                Hop("interrupt", "and interrupts the host", who="controller"),
                Hop("poll", "the host takes the entry", who="core"),
                Hop("doorbell", "and writes the completion queue's head register", who="driver"),
                Hop("copy", "the page cache is copied to the process (not with direct I/O)", payload=True, who="kernel"),
            ),
            (_WIRE,),
            "NVM Express Base Specification, command submission and completion mechanism (eight steps); Linux buffered reads and "
            "writes",
        ),
    )
})  # fmt: skip
"""The access path of each value of `moves.mechanism`, and ``loopback``: a message that stays within one host."""


def access(mechanism: str | None, *, local: bool = False) -> Access | None:
    """The path of a mechanism; ``local``: the message stays within one host. Null for a mechanism that is not known."""
    if mechanism == "message" and local:
        return ACCESS["loopback"]
    return ACCESS.get(mechanism) if mechanism is not None else None


def is_loopback(url: str | None) -> bool:
    """Whether a server's URL names this very host (RFC 1122: 127/8, RFC 4291: ::1)."""
    try:
        host = urlsplit(url or "").hostname or ""
    except ValueError:
        return False
    return host == "localhost" or host == "::1" or (host.startswith("127.") and host.replace(".", "").isdigit())


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes that a kind of link adds as its counters see them: ``packet_bytes`` for each packet of at most ``payload_bytes``, and
    ``first_bytes`` once a transfer. ``packets_per_ack``: packets that one acknowledgement of ``packet_bytes`` answers, 0 for
    none."""

    kind: str
    payload_bytes: int
    packet_bytes: int
    source: str
    first_bytes: int = 0
    packets_per_ack: int = 0

    def of(self, payload_bytes: int, transfers: int) -> int:
        """Overhead of ``payload_bytes`` in ``transfers`` equal transfers."""
        each = self._packets(payload_bytes, transfers)
        return max(transfers, 1) * (each * self.packet_bytes + (self.first_bytes if each else 0))

    def acks(self, payload_bytes: int, transfers: int) -> int:
        """Bytes of the acknowledgements that go back for ``payload_bytes`` in ``transfers`` equal transfers."""
        if not self.packets_per_ack:
            return 0
        each = math.ceil(self._packets(payload_bytes, transfers) / self.packets_per_ack)
        return max(transfers, 1) * each * self.packet_bytes

    def _packets(self, payload_bytes: int, transfers: int) -> int:
        """Packets of one transfer."""
        return math.ceil(payload_bytes / max(transfers, 1) / self.payload_bytes) if payload_bytes > 0 else 0


_TCP = "RFC 9293 (20 bytes), RFC 7323 (timestamps 12), RFC 791 (IPv4 20), Ethernet header 14: what interface counters see"

OVERHEAD: MappingProxyType[str, Overhead] = MappingProxyType({
    o.kind: o
    for o in (
        Overhead("pcie", 256, 24, "24 bytes a packet (pcie-bench, SIGCOMM 2018), maximum payload 256 bytes"),
        Overhead("ethernet", 1448, 66, f"{_TCP}; MTU 1500", packets_per_ack=2),
        Overhead("tcp", 1448, 66, f"{_TCP}; MTU 1500", packets_per_ack=2),
        Overhead("loopback", 65_484, 66, f"{_TCP}; MTU 65536, as `lo` has it, less 52", packets_per_ack=2),
        Overhead("roce", 4096, 58, "RoCEv2: Ethernet 14, IPv4 20, UDP 8, BTH 12, ICRC 4; path MTU 4096; RETH 16 a write", 16),
        Overhead("infiniband", 4096, 24, "PortXmitData counts LRH 8, BTH 12, ICRC 4, not VCRC; MTU 4096; RETH 16 a write", 16),
    )
})  # fmt: skip
"""By the kind of a link of the platform graph. A kind that is not here (NVLink, CXL) has an overhead that is not known."""
