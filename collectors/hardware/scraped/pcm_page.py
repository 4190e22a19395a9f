"""Intel PCM's sensor server (pcm-sensor-server, port 9738): what its page /metrics counts since the server's start.

The page has no TYPE lines. /persecond prints the same names as differences over a second or more: that page is refused, since
nothing on it says so. Units: pcm-sensor-server.cpp (getBytesReadFromMC and its like: bytes; getConsumedJoules: J). What it sums
over the machine (aggregate="system" without a socket) keeps its own name. Not tested on a real page: none is recorded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from hoptrace.collectors.hardware.scraped.meaning import Labels, Meaning, told
from hoptrace.collectors.hardware.sink import Direction

__all__ = ["PCM", "is_of_pcm", "pcm_meaning"]

_LINK = re.compile(r"(Incoming_Data|Outgoing_Data_And_Non_Data)_Traffic_On_Link_(\d+)")


def _socket(form: str) -> Callable[[Labels], str | None]:
    def entity(labels: Labels) -> str | None:
        socket = told(labels, "socket")
        return form.format(socket) if socket and labels.get("source") == "uncore" else None

    return entity


def _bytes(form: str, way: Direction, name: str = "data_bytes", doc: str = "") -> Meaning:
    return Meaning(name, "bytes", "cumulative", _socket(form), way, whole=True, of=form.format("SOCKET"), doc=doc)


def _joules(form: str) -> Meaning:
    doc = "six digits on the page: coarse"
    return Meaning("energy_uj", "uJ", "cumulative", _socket(form), None, 1_000_000, True, doc, form.format("SOCKET"))


PCM: Mapping[str, Meaning] = {
    "DRAM_Reads": _bytes("imc:{0}", "read"), "DRAM_Writes": _bytes("imc:{0}", "write"),
    "Persistent_Memory_Reads": _bytes("pmem:{0}", "read"), "Persistent_Memory_Writes": _bytes("pmem:{0}", "write"),
    "Embedded_DRAM_Reads": _bytes("edc:{0}", "read"), "Embedded_DRAM_Writes": _bytes("edc:{0}", "write"),
    "CXL_Write_Mem": _bytes("cxl:socket-{0}", "write", doc="writes only; PCM halves them on some models"),
    "CXL_Write_Cache": _bytes("cxl:socket-{0}", "write", "cache_bytes"),
    "Package_Joules_Consumed": _joules("rapl:package-{0}"), "DRAM_Joules_Consumed": _joules("rapl:package-{0}/dram"),
}  # fmt: skip
"""By the name on the page."""


def pcm_meaning(name: str) -> Meaning | None:
    """The meaning of a series of pcm-sensor-server. Of links between sockets: what comes in is data, what goes out more."""
    if (known := PCM.get(name)) is not None:
        return known
    if (match := _LINK.fullmatch(name)) is None:
        return None
    form = "upi:{0}/" + match[2]
    return _bytes(form, "rx") if match[1] == "Incoming_Data" else _bytes(form, "tx", "raw_bytes")


def is_of_pcm(name: str) -> bool:
    """Whether a page that has such a series is PCM's."""
    return name == "Measurement_Interval_in_us" or pcm_meaning(name) is not None
