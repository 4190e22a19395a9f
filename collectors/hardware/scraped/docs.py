"""``docs/scrape-names.md`` from the tables: ``python -m hoptrace.collectors.hardware.scraped.docs > docs/scrape-names.md``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from hoptrace.collectors.hardware.scraped.dcgm import FIELDS
from hoptrace.collectors.hardware.scraped.hosts import CPU_TIMES, NODE
from hoptrace.collectors.hardware.scraped.libraries import LIBRARIES, LMCACHE, OWN_UNITS
from hoptrace.collectors.hardware.scraped.meaning import Meaning
from hoptrace.collectors.hardware.scraped.pcm_page import PCM, pcm_meaning

__all__ = ["markdown"]

_INTRO = """# Names that `--scrape` knows

Generated from the tables by `python -m hoptrace.collectors.hardware.scraped.docs > docs/scrape-names.md`; a test holds the two
equal. How pages are read, and what becomes of every other name: [scrape.md](scrape.md).

A row says under which entity and name a series of the page stands in the table `counters`, and with which unit. ×: how many of
the unit one on the page is. *total* is `semantics` cumulative. A page's numbers are floating point, so no series has a width at
which it wraps; a total that falls is a reset. Direction is the device's: `tx` leaves the GPU, the port, the socket; `read` comes
from the memory, the disk.
"""

_DCGM = """## DCGM (dcgm-exporter)

By the number of the field, under each of its names, without `DCGM_FI_`. The TYPE line is not asked. A GPU's instance (MIG) is an
entity of its own, `gpu:UUID/mig:N`, and has no links.
"""

_NODE = """## node_exporter

Under the names of hoptrace's own sources. `node_vmstat_NAME` stands as `NAME` of `memory`, in pages, for the names that hoptrace
reads from /proc/vmstat itself. `node_disk_…` of partitions, of devices that are built of others (dm, md, loop, zram) and of the
paths of a multipath disk keep their names: their bytes would count twice.
"""

_PCM = """## Intel PCM (pcm-sensor-server, /metrics)

What it counts for one socket; sums over the machine keep their names. From PCM's source; no page of a real one was at hand.
"""

_LIBRARIES = """## NIXL, Mooncake, LMCache's server

NIXL's names are of a page of a real one (1.5.1), the others of their sources.
"""

_LMCACHE = """## LMCache inside an engine

By the name without `lmcache:` or `lmcache_`, `num_` and `_total`: all of these are in use.
"""

_UNITS = """## Names that keep their name and get a unit

Under entity `scrape:HOST:PORT`. Beside these: every name in hoptrace's tables of the engines' own pages (vLLM, SGLang,
TensorRT-LLM, Dynamo, llama.cpp, TGI, the Python client), the KV connectors' among them
(`vllm:nixl_bytes_transferred_sum`: bytes).
"""

_Row = tuple[str, Meaning]
_HEAD = "| on the page | entity | name | | unit | kind | × | |\n|---|---|---|---|---|---|---|---|\n"
_LINK = re.compile(r"_L(1?\d)(?=_|$)")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _kind(semantics: str) -> str:
    return "total" if semantics == "cumulative" else semantics


def _row(names: str, m: Meaning) -> str:
    kind = _kind(m.semantics)
    if m.window_ns is not None:
        kind += f" over {m.window_ns // 1_000_000} ms"
    scale = "" if m.scale == 1 else f"{m.scale:,}" if isinstance(m.scale, int) else f"{m.scale:g}"
    cells = (names, m.of, f"`{m.name}`", m.direction or "", m.unit, kind, scale, m.doc)
    return "| " + " | ".join(_cell(c) for c in cells) + " |\n"


def _table(rows: Iterable[tuple[str, Meaning]]) -> str:
    return _HEAD + "".join(dict.fromkeys(_row(names, m) for names, m in rows))


def _dcgm() -> str:
    """The links' fields, 18 of each kind, in one row."""
    lines: dict[str, list[int]] = {}
    for number, (names, m) in FIELDS.items():
        told = _row(", ".join(f"`{_LINK.sub('_LN', n)}`" for n in names), m)
        told = re.sub(r"nvlink:UUID/\d+", "nvlink:UUID/N", told)
        lines.setdefault(told, []).append(number)
    head = _HEAD.replace("| on the page", "| field | on the page", 1).replace("|---", "|---|---", 1)
    return head + "".join(f"| {_numbers(n)} {line}" for line, n in sorted(lines.items(), key=lambda i: i[1][0]))


def _numbers(numbers: list[int]) -> str:
    found = sorted(numbers)
    return str(found[0]) if len(found) == 1 else f"{found[0]} … {found[-1]}"


def _quoted(table: Mapping[str, Meaning]) -> Iterator[_Row]:
    return ((f"`{name}`", m) for name, m in table.items())


def _pcm() -> Iterator[_Row]:
    yield from _quoted(PCM)
    for name in ("Incoming_Data_Traffic_On_Link_0", "Outgoing_Data_And_Non_Data_Traffic_On_Link_0"):
        m = pcm_meaning(name)
        assert m is not None
        yield f"`{name[:-1]}N`", replace(m, of=f"{m.of[:-1]}N")


def _units() -> str:
    rows = (f"| `{name}` | {kind.unit} | {_kind(kind.semantics)} |\n" for name, kind in OWN_UNITS.items())
    return "| on the page | unit | kind |\n|---|---|---|\n" + "".join(rows)


def markdown() -> str:
    """The document."""
    times = ((f'`node_cpu_seconds_total{{mode="{mode}"}}`', m) for mode, m in CPU_TIMES.items())
    return "\n".join(
        (
            _INTRO,
            _DCGM, _dcgm(),
            _NODE, _table((*_quoted(NODE), *times)),
            _PCM, _table(_pcm()),
            _LIBRARIES, _table(_quoted(LIBRARIES)),
            _LMCACHE, _table(_quoted(LMCACHE)),
            _UNITS, _units(),
        )
    ).rstrip("\n") + "\n"  # fmt: skip


if __name__ == "__main__":
    print(markdown(), end="")
