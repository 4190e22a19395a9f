"""Pages that lie, change, grow or attack: what must not become a number, a series or another's entity."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.watched import Watched
from test_hw_scraped import Exporter, exporter, served

import hoptrace
from hoptrace.collectors.hardware.scraped import page as page_module
from hoptrace.collectors.hardware.scraped import taken as taken_module
from hoptrace.collectors.hardware.scraped.blanks import blanks_of
from hoptrace.collectors.hardware.scraped.known import meaning_of
from hoptrace.collectors.hardware.scraped.page import PageSource
from hoptrace.collectors.hardware.scraped.taken import Taken
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

__all__ = ["exporter"]

GPU = 'UUID="GPU-1",pci_bus_id="00000000:0A:00.0"'


def dropped(w: Watched) -> dict[str, int]:
    """What was left out, by reason without the source."""
    w.rows()
    return {k.split(": ", 1)[1]: n for k, n in hoptrace.open(w.writer.path).manifest.rows_dropped.items()}


def place(exporter: Exporter) -> str:
    return f"scrape:127.0.0.1:{exporter.port}"


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        ("NaN", "absent", None), ("+Inf", "error", "values that are not finite"), ("-Inf", "error", "values that are not finite"),
        ("1.7e308", "error", "values that are not finite"), ("18446744073709551615", "unsupported", "all ones (no value)"),
        ("1.8446744073709552e+19", "unsupported", "all ones (no value)"),
        ("9223372036854775792", "absent", "DCGM's blank values (absent)"),
        ("9223372036854775793", "absent", "DCGM's blank values (absent)"),
        ("9223372036854775794", "unsupported", "DCGM's blank values (unsupported)"),
        ("9223372036854775795", "denied", "DCGM's blank values (denied)"),
        ("2147483633", "absent", "DCGM's blank values (absent)"), ("140737488355331", "denied", "DCGM's blank values (denied)"),
    ],
)  # fmt: skip
def test_what_is_no_value_is_no_number(exporter: Exporter, tmp_path: Path, text: str, status: str, reason: str | None) -> None:
    w = served(exporter, tmp_path, f"DCGM_FI_DEV_FB_USED{{{GPU}}} {text}\nDCGM_FI_DEV_FB_FREE{{{GPU}}} 3\n")
    assert w.values("gpu:GPU-1", "memory_used_bytes") == [status]
    assert w.last()["gpu:GPU-1", "memory_free_bytes"] == 3 << 20, "one bad value costs that value"
    assert dropped(w) == ({reason: 1} if reason else {})


def test_blanks_of_one_gpu_are_not_another_s() -> None:
    text = 'DCGM_FI_DEV_FB_USED{UUID="a",gpu="0"} 9223372036854775795\nDCGM_FI_DEV_FB_USED{UUID="b",gpu="1"} 5\n'
    assert blanks_of(text) == {'DCGM_FI_DEV_FB_USED{UUID="a",gpu="0"}': "denied"}
    assert blanks_of("a 9223372036854775795\n") == {}, "another exporter's counter may be so large"


def test_a_series_that_stands_twice_is_taken_once(exporter: Exporter, tmp_path: Path) -> None:
    w = served(exporter, tmp_path, 'a{x="1",y="2"} 5\na{y="2",x="1"} 6\na{x="1",y="2"} 7\n')
    assert w.values(place(exporter), 'a{x="1",y="2"}') == [5.0]
    assert dropped(w) == {"series that stand on a page twice": 2}


def test_two_series_that_are_one_counter_of_ours_are_not_mixed(exporter: Exporter, tmp_path: Path) -> None:
    """Old and new name of one field, or labels that nobody here knows."""
    body = (
        f'DCGM_FI_DEV_GPU_TEMP{{{GPU}}} 30\nDCGM_FI_DEV_GPU_TEMP_CELSIUS{{{GPU}}} 31\nDCGM_FI_DEV_GPU_TEMP{{{GPU},pod="b"}} 32\n'
    )
    w = served(exporter, tmp_path, body, body.replace(" 3", " 4"))
    assert w.values("gpu:GPU-1", "temperature_c") == [30.0, 40.0]
    own = {n: v for (e, n), v in w.last().items() if e == place(exporter) and n != "page"}
    assert sorted(own.values(), key=str) == [41.0, 42.0]
    assert len(w.events()) == 1 and "more than once" in w.events()[0][1]


@pytest.mark.parametrize(
    "uuid",
    ["GPU-1/mig:3", "x pcie:0000:00:00.0", "", "a\\nb", 'a\\"b', "a}b", "x" * 200, "\x00", "a\u2028b"],
)
def test_labels_choose_nobody_else_s_entity(exporter: Exporter, tmp_path: Path, uuid: str) -> None:
    w = served(exporter, tmp_path, f'DCGM_FI_DEV_GPU_TEMP{{UUID="{uuid}"}} 30\n')
    assert not [e for e, _ in w.last() if e.startswith("gpu:")]
    assert [v for (e, n), v in w.last().items() if e == place(exporter) and n != "page"] == [30.0], "kept under its own name"


@pytest.mark.parametrize(
    ("line", "entity"),
    [
        ('node_network_receive_bytes_total{device="eth0/../x"} 5', "net:"),
        ('node_disk_read_bytes_total{device="a b"} 5', "block:"),
        ('node_infiniband_port_data_received_bytes_total{device="mlx5_0",port="1/2"} 5', "rdma:"),
        ('agent_tx_bytes_total{agent_name="A/B"} 5', "nixl:"), ('lmcache:remote_read_bytes{worker_id="0/1"} 5', "lmcache"),
        ('DRAM_Reads{socket="0/1",source="uncore"} 5', "imc:"), ('node_cpu_seconds_total{cpu="0 ",mode="user"} 5', "cpu:"),
        ('DCGM_FI_DEV_FB_USED{UUID="G",GPU_I_ID="1/2"} 5', "gpu:"),
    ],
)  # fmt: skip
def test_labels_of_every_table_are_parts_of_an_entity_only_if_they_are_plain(
    exporter: Exporter, tmp_path: Path, line: str, entity: str
) -> None:
    told = {e for e, _ in served(exporter, tmp_path, line + "\n").last()}
    assert told == {place(exporter)}, f"no {entity}"


def test_a_type_that_changes_is_read_by_its_name(exporter: Exporter, tmp_path: Path) -> None:
    """An unknown one keeps what it was declared first; another release may declare it anew."""
    lines = f"DCGM_FI_PROF_PCIE_TX_BYTES{{{GPU}}} %d\nx %d\n"
    kinds = "# TYPE DCGM_FI_PROF_PCIE_TX_BYTES {0}\n# TYPE x {0}\n"
    w = served(
        exporter, tmp_path, kinds.format("counter") + lines % (5, 50), kinds.format("gauge") + lines % (6, 60),
        kinds.format("histogram") + lines % (7, 70),
    )  # fmt: skip
    told = {(r["name"], r["semantics"], r["unit"]) for r in w.rows() if r["name"] != "page"}
    assert told == {("raw_bytes_per_s", "rate", "bytes/s"), ("x", "cumulative", None)}
    assert w.values(place(exporter), "x") == [50, 60, 70]


def test_another_exporter_at_the_same_address_is_read_anew(exporter: Exporter, tmp_path: Path) -> None:
    w = served(exporter, tmp_path, "# TYPE x counter\nx 5\n")
    exporter.status = 503
    w.sample()
    exporter.status = 200
    exporter.body = b"# TYPE x gauge\nx 0.5\n"
    w.sample()
    assert [(r["semantics"], r["status"]) for r in w.rows() if r["name"] == "x"] == [
        ("cumulative", "ok"), ("cumulative", "error"), ("gauge", "ok"),
    ]  # fmt: skip


def test_a_counter_that_shrinks_alone_keeps_its_series(exporter: Exporter, tmp_path: Path) -> None:
    body = f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{GPU}}} %d\nDCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{GPU}}} %d\n"
    w = served(exporter, tmp_path, body % (100, 7), body % (90, 8), body % (95, 9))
    assert w.values("gpu:GPU-1", "energy_mj") == [100, 90, 95] and w.events() == []
    rows = [r for r in w.rows() if r["name"] == "energy_mj"]
    assert len({r["incarnation"] for r in rows}) == 1 and {r["width_bits"] for r in rows} == {None}, "a fall is a reset, no wrap"


def test_a_counter_at_its_end_has_no_value(exporter: Exporter, tmp_path: Path) -> None:
    body = 'node_infiniband_port_transmit_wait_total{device="mlx5_0",port="1"} %d\nother 1\n# %d\n'
    w = served(exporter, tmp_path, *(body % (n, i) for i, n in enumerate((4294967290, 4294967295, 4294967295, 3))))
    assert w.values("rdma:mlx5_0/1", "port_xmit_wait") == [4294967290, "stale", 3]
    assert [k for k, _ in w.events()].count("counter") == 1


def test_a_page_that_shrinks_and_grows(exporter: Exporter, tmp_path: Path) -> None:
    w = served(exporter, tmp_path, 'a{i="1"} 1\na{i="2"} 2\n', 'a{i="1"} 3\n', "", 'a{i="1"} 4\na{i="2"} 5\n')
    assert w.values(place(exporter), 'a{i="2"}') == [2.0, "absent", 5.0]
    assert w.values(place(exporter), 'a{i="1"}') == [1.0, 3.0, "absent", 4.0]


def test_labels_that_are_others_each_time_do_not_fill_the_memory(
    exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taken_module, "MAX_EVER", 50)
    w = served(exporter, tmp_path, *("".join(f'a{{i="{n}-{i}"}} 1\n' for i in range(20)) for n in range(6)))
    assert w.sink.series_count == 50
    assert dropped(w) == {"series beyond 50 in all": 71} and [k for k, _ in w.events()] == ["gap"]


def test_an_endless_page_is_given_up(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "PAGE_BYTES", 100_000)
    sent = 0
    done = threading.Event()

    def endless(handler: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        try:
            while sent < 50_000_000:
                handler.wfile.write(b"1000\r\n" + b"a 1\n" * 1024 + b"\r\n")
                sent += 4096
        except OSError:
            pass
        handler.close_connection = True
        done.set()

    exporter.act = endless
    assert "longer than" in str(PageSource(exporter.url).probe().reason)
    assert done.wait(10) and sent < 50_000_000, "the connection was closed on it"


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500, b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, b"\x16\x03\x01\x00", b""]
)
def test_an_answer_that_is_no_http(exporter: Exporter, head: bytes) -> None:
    def answers(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(head + b"\r\n\r\n")
        handler.close_connection = True

    exporter.act = answers
    assert PageSource(exporter.url).probe().status == "lost"


def test_a_line_of_a_megabyte_and_a_million_empty_ones(exporter: Exporter, tmp_path: Path) -> None:
    w = served(exporter, tmp_path, 'a{x="' + "y" * (1 << 20) + '"} 1\nb 2\n' + "\n" * (1 << 20))
    assert w.values(place(exporter), "b") == [2.0] and dropped(w) == {"lines that are not in the text format": 1}


def test_compressed_though_not_asked_for(exporter: Exporter) -> None:
    import gzip

    exporter.body = gzip.compress(b"a 1\n" * 100)
    assert PageSource(exporter.url).probe().status == "error"


def test_pcm_s_page_of_differences_is_refused(exporter: Exporter) -> None:
    exporter.body = b'Measurement_Interval_in_us 1000000\nDRAM_Reads{socket="0",source="uncore"} 5\n'
    found = PageSource(exporter.url.replace("/metrics", "/persecond/5")).probe()
    assert found.status == "unsupported" and "/metrics" in str(found.remedy)
    assert PageSource(exporter.url).probe().sees == "2 series, 1 of them known"


_NAMES = st.sampled_from(
    [
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_PROF_PCIE_TX_BYTES",
        "node_cpu_seconds_total",
        "DRAM_Reads",
        "agent_tx_bytes_total",
        "lmcache:x",
        "x",
    ]
)
_VALUES = st.sampled_from(["0", "1", "-1", "1e400", "NaN", "+Inf", "9223372036854775794", "18446744073709551615", "5.5", "x", ""])
_LINES = st.builds(
    lambda name, label, value: f'{name}{{UUID="{label}",mode="user",cpu="{label}"}} {value}',
    _NAMES, st.text(alphabet='ab/\\"{}\n =,', max_size=6), _VALUES,
)  # fmt: skip


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceWriter]:
    w = TraceWriter(tmp_path_factory.mktemp("hostile") / "t.trace", Manifest(origin="recorded"), background=False)
    yield w
    w.close()


@given(st.lists(st.lists(_LINES | st.text(max_size=40), max_size=6), min_size=1, max_size=4))
@settings(deadline=None)
def test_any_pages_are_taken_without_raising_and_give_only_finite_values(writer: TraceWriter, pages: list[list[str]]) -> None:
    out, taken = Sink(writer, "h", "s"), Taken("h:1")
    for lines in pages:
        now = out.now_ns()
        out.at(now, now)
        taken.take("\n".join(lines), out)
    for row in out.take():
        value, status = row[10], row[11]
        assert (value is None) == (status != "ok")
        assert value is None or abs(value) < 1e300


def test_known_names_are_the_same_with_any_labels() -> None:
    assert meaning_of("node_cpu_seconds_total") is None and meaning_of("node_cpu_seconds_total", {"mode": "guest"}) is None
    known = meaning_of("node_cpu_seconds_total", {"mode": "iowait"})
    assert known is not None and (known.name, known.unit, known.value(1.5)) == ("iowait_ns", "ns", 1_500_000_000)
