"""Prometheus pages and PCM's files: recorded ones by literal values, and a server that misbehaves in every way there is."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.watched import Watched

from hoptrace.collectors.hardware.scraped import page as page_module
from hoptrace.collectors.hardware.scraped import sources
from hoptrace.collectors.hardware.scraped import taken as taken_module
from hoptrace.collectors.hardware.scraped.blanks import blank
from hoptrace.collectors.hardware.scraped.dcgm import DCGM, FIELDS
from hoptrace.collectors.hardware.scraped.followed import PcmSource, headers
from hoptrace.collectors.hardware.scraped.known import meaning_of
from hoptrace.collectors.hardware.scraped.meaning import pci_address
from hoptrace.collectors.hardware.scraped.page import PageSource
from hoptrace.collectors.hardware.source import Asked
from hoptrace.errors import UsageError

DATA = Path(__file__).parent / "data" / "hardware" / "scraped"


class Exporter:
    """Serves ``body`` with ``status``, or does what ``act`` says."""

    def __init__(self) -> None:
        self.status, self.body = 200, b""
        self.act: Callable[[BaseHTTPRequestHandler], None] | None = None
        self.asked: list[dict[str, str]] = []
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                exporter.asked.append(dict(self.headers))
                if exporter.act is not None:
                    exporter.act(self)
                    return
                self.send_response(exporter.status)
                self.send_header("Content-Length", str(len(exporter.body)))
                self.end_headers()
                self.wfile.write(exporter.body)

            def log_message(self, *_: Any) -> None:
                return None

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/metrics"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exporter]:
    monkeypatch.setattr(page_module, "_BYTES_PER_S", 1e12)
    e = Exporter()
    yield e
    e.close()


def watched(exporter: Exporter, tmp_path: Path) -> Watched:
    return Watched(PageSource(exporter.url), tmp_path / "t.trace")


def served(exporter: Exporter, tmp_path: Path, *bodies: str | bytes) -> Watched:
    w = watched(exporter, tmp_path)
    for body in bodies:
        exporter.body = body if isinstance(body, bytes) else body.encode()
        w.sample()
    return w


def test_dcgm_of_a_real_l4(exporter: Exporter, tmp_path: Path) -> None:
    w = served(exporter, tmp_path, (DATA / "dcgm_l4_kops.prom").read_bytes())
    gpu, link = "gpu:GPU-c2f76b33-7953-256e-8f33-1343419b1a1c", "pcie:0000:31:00.0"
    last = w.last()
    assert last[gpu, "power_w"] == 16.365 and last[gpu, "energy_mj"] == 4742776
    assert last[gpu, "memory_free_bytes"] == 22563 << 20 and last[gpu, "memory_used_bytes"] == 0
    assert last[link, "replays"] == 0
    rows = {(r["entity"], r["name"], r["direction"]): r for r in w.rows()}
    tx, rx = rows[link, "raw_bytes_per_s", "tx"], rows[link, "raw_bytes_per_s", "rx"]
    assert (tx["value_float"], rx["value_float"]) == (112603.0, 17544.0)
    assert {(r["semantics"], r["unit"], r["window_ns"]) for r in (tx, rx)} == {("rate", "bytes/s", None)}, (
        "called bytes, but a rate"
    )
    assert rows[gpu, "energy_mj", None]["semantics"] == "cumulative" and rows[gpu, "energy_mj", None]["incarnation"]
    kept = [n for e, n in last if e == f"scrape:127.0.0.1:{exporter.port}" and n.startswith("DCGM_FI_DEV_VGPU_LICENSE_STATUS{")]
    assert len(kept) == 1, "what nobody knows is kept under its own name"


def test_dcgm_of_eight_h100_that_is_cut_short(exporter: Exporter, tmp_path: Path) -> None:
    w = served(exporter, tmp_path, (DATA / "dcgm_8xh100_sampled.prom").read_bytes())
    power = {e: v for (e, n), v in w.last().items() if n == "power_w"}
    assert len(power) == 8 and power["gpu:GPU-c4529c8d-69c4-b61d-e0bc-7b2460096005"] == 113.611
    assert sum(v for v in power.values() if isinstance(v, float)) == pytest.approx(583.767, abs=1e-3)


def test_types_are_by_number_and_not_by_what_the_page_says() -> None:
    nvlink = DCGM["DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"]
    assert nvlink is DCGM["DCGM_FI_DEV_NVLINK_THROUGHPUT_TOTAL"] is FIELDS[449][1]
    assert (nvlink.semantics, nvlink.direction, nvlink.value(1.0)) == ("rate", None, 1_024_000.0)
    assert DCGM["DCGM_FI_PROF_PCIE_TX_BYTES_TOTAL"].semantics == "cumulative"
    assert len({n for names, _ in FIELDS.values() for n in names}) == sum(len(names) for names, _ in FIELDS.values())


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (float(0x7FFFFFFFFFFFFFF0), "absent"), (140737488355328.0, "absent"), (140737488355330.0, "unsupported"),
        (140737488355331.0, "denied"), (2147483632.0, "absent"), (2147483634.0, "unsupported"), (2147483635.0, "denied"),
        (0.0, None), (140737488355332.0, None), (2147483636.0, None), (-5.0, None),
    ],
)  # fmt: skip
def test_dcgm_s_blank_values(value: float, status: str | None) -> None:
    assert blank(value) == status


def test_blank_values_are_no_numbers_in_the_trace(exporter: Exporter, tmp_path: Path) -> None:
    labels = '{gpu="0",UUID="GPU-1",pci_bus_id="00000000:0A:00.0"}'
    w = served(
        exporter, tmp_path,
        f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{labels} 9223372036854775794\nDCGM_FI_DEV_POWER_USAGE{labels} 140737488355331\n"
        f"DCGM_FI_DEV_SM_CLOCK{labels} 2147483634\nDCGM_FI_DEV_GPU_TEMP{labels} NaN\n",
    )  # fmt: skip
    assert w.last() | {} == {
        ("gpu:GPU-1", "energy_mj"): "unsupported", ("gpu:GPU-1", "power_w"): "denied",
        ("gpu:GPU-1", "sm_clock_mhz"): "unsupported", ("gpu:GPU-1", "temperature_c"): "absent",
        (f"scrape:127.0.0.1:{exporter.port}", "page"): 1,
    }  # fmt: skip
    assert not [
        r for r in w.rows() if r["entity"] == "gpu:GPU-1" and (r["value_int"] is not None or r["value_float"] is not None)
    ]


def test_a_mig_instance_is_no_whole_gpu(exporter: Exporter, tmp_path: Path) -> None:
    labels = '{UUID="GPU-1",pci_bus_id="00000000:0A:00.0",GPU_I_ID="3"}'
    w = served(exporter, tmp_path, f"DCGM_FI_DEV_FB_USED{labels} 7\nDCGM_FI_PROF_PCIE_TX_BYTES{labels} 5\n")
    assert w.last()["gpu:GPU-1/mig:3", "memory_used_bytes"] == 7 << 20
    assert not any(e.startswith("pcie:") for e, _ in w.last())


def test_node_exporter_under_our_own_names(exporter: Exporter, tmp_path: Path) -> None:
    w = served(exporter, tmp_path, (DATA / "node_exporter_e2e_selected.prom").read_bytes())
    rows = {(r["entity"], r["name"], r["direction"]): r["value_int"] for r in w.rows()}
    assert rows["rdma:mlx4_0/1", "raw_bytes", "rx"] == 18_527_668, "multiplied by four already"
    assert rows["rdma:mlx4_0/1", "raw_bytes", "tx"] == 14_933_760 and rows["rdma:mlx4_0/2", "raw_bytes", "rx"] == 0
    assert rows["rdma:mlx4_0/1", "packets", "rx"] == 6_825_908_347
    assert rows["memory", "pswpout", None] == 35_045


def test_nixl_counts_in_microseconds(exporter: Exporter, tmp_path: Path) -> None:
    w = served(exporter, tmp_path, (DATA / "nixl.prom").read_bytes())
    rows = {(r["entity"], r["name"], r["direction"]): (r["value_int"], r["unit"]) for r in w.rows()}
    assert rows["nixl:A", "data_bytes", "tx"] == (1_048_576, "bytes")
    assert rows["nixl:A", "transfer_time_us", None] == (626_962, "us") and rows["nixl:A", "post_time_us", None] == (1553, "us")


@pytest.mark.parametrize(
    "name", ["lmcache:remote_read_bytes", "lmcache_num_remote_read_bytes_total", "lmcache_remote_read_bytes"]
)
def test_lmcache_of_several_versions(name: str) -> None:
    meaning = meaning_of(name)
    assert meaning is not None and (meaning.name, meaning.unit, meaning.direction) == ("remote_bytes", "bytes", "read")
    assert meaning_of("lmcache:time_to_retrieve_sum") is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:31:00.0", "0000:31:00.0"),
        ("0000:A8:00.0", "0000:a8:00.0"),
        ("00010000:01:00.0", None),
        ("", None),
        (None, None),
    ],
)
def test_pci_addresses(text: str | None, address: str | None) -> None:
    assert pci_address(text) == address


def test_a_page_that_is_the_same_is_stale_and_holds_no_new_values(exporter: Exporter, tmp_path: Path) -> None:
    w = served(
        exporter, tmp_path, "# TYPE a counter\na_total 5\n", "# TYPE a counter\na_total 5\n", "# TYPE a counter\na_total 6\n"
    )
    place = f"scrape:127.0.0.1:{exporter.port}"
    assert w.values(place, "page") == [1, "stale", 2] and w.values(place, "a_total") == [5, 6]


@pytest.mark.parametrize(
    ("status", "told"), [(401, "denied"), (403, "denied"), (404, "absent"), (500, "error"), (503, "error")]
)  # fmt: skip
def test_a_page_that_is_refused_is_unknown_and_told_once(exporter: Exporter, tmp_path: Path, status: int, told: str) -> None:
    w = served(exporter, tmp_path, "a 5\n")
    exporter.status = status
    assert PageSource(exporter.url).probe().status == told
    w.sample(2)
    exporter.status = 200
    w.sample()
    assert w.values(f"scrape:127.0.0.1:{exporter.port}", "a") == [5.0, told, 5.0]
    assert [k for k, _ in w.events()] == ["metrics vanished", "metrics"]


def test_a_server_that_is_gone(exporter: Exporter, tmp_path: Path) -> None:
    w = served(exporter, tmp_path, "a 5\n")
    exporter.close()
    w.source.close()  # its kept connection is still served by a thread
    w.sample()
    assert w.values(f"scrape:127.0.0.1:{exporter.port}", "a") == [5.0, "absent"]
    assert w.events() == [("metrics vanished", f"nothing listens at 127.0.0.1:{exporter.port}")]
    assert PageSource(exporter.url).probe().remedy == "start the exporter, or name its address"


def test_a_server_that_hangs_drips_or_breaks_off(exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "_TIMEOUT_S", 0.2)
    held = threading.Event()
    exporter.act = lambda handler: held.wait(5) and None
    assert PageSource(exporter.url).probe().status == "lost"
    held.set()

    def drips(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(30):
            handler.wfile.write(b"a 1\n")
            handler.wfile.flush()
            if threading.Event().wait(0.05) or exporter.act is not drips:
                return

    exporter.act = drips
    found = PageSource(exporter.url).probe()
    assert found.status == "lost" and "did not come within" in str(found.reason)

    def breaks(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"a 1\n")
        handler.close_connection = True

    exporter.act = breaks
    assert PageSource(exporter.url).probe().status == "lost"


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"\x00\x01\x02", b'{"a": 1}'])
def test_what_is_no_page(exporter: Exporter, tmp_path: Path, body: bytes) -> None:
    exporter.body = body
    assert PageSource(exporter.url).probe().status == "error"
    w = served(exporter, tmp_path, "a 1\n", body, "a 1\n")
    assert w.values(f"scrape:127.0.0.1:{exporter.port}", "a") == [1.0, "error", 1.0]


def test_a_page_that_is_too_long(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "PAGE_BYTES", 1000)
    exporter.body = b"a 1\n" * 300
    assert "longer than" in str(PageSource(exporter.url).probe().reason)


def test_too_many_series_are_counted(exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taken_module, "MAX_SERIES", 10)
    w = served(exporter, tmp_path, "".join(f'a{{i="{i}"}} {i}\n' for i in range(25)))
    assert sum(r["entity"].startswith("scrape:") and r["name"] != "page" for r in w.rows()) == 10
    assert [k for k, _ in w.events()] == ["gap"]


def test_totals_that_all_fall_are_a_restart_and_one_alone_is_not(exporter: Exporter, tmp_path: Path) -> None:
    def body(a: int, b: int, c: int) -> str:
        return f"# TYPE a counter\na_total {a}\n# TYPE b counter\nb_total {b}\n# TYPE c counter\nc_total {c}\n"

    w = served(exporter, tmp_path, body(5, 50, 7), body(6, 60, 1), body(1, 2, 0))
    lives = [r["incarnation"].rsplit("#", 1)[1] for r in w.rows() if r["name"] == "a_total"]
    assert lives == ["1", "1", "2"]
    assert [k for k, _ in w.events()] == ["restart"]


def test_credentials_are_sent_and_never_kept(exporter: Exporter, tmp_path: Path) -> None:
    source = PageSource(f"http://user:s3cret@127.0.0.1:{exporter.port}/metrics")
    exporter.body = b"a 1\n"
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    assert exporter.asked[-1]["Authorization"] == "Basic " + base64.b64encode(b"user:s3cret").decode()
    w.rows()
    assert "s3cret" not in source.name + str(source.probe())
    for path in (tmp_path / "t.trace").rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes()


@pytest.mark.parametrize("url", ["", "ftp://x/y", "http://", "http://x:99999/", "://"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="--scrape"):
        PageSource(url)


def test_an_address_without_scheme_or_path() -> None:
    source = PageSource("gpu-node:9400")
    assert (source._host, source._port, source._path) == ("gpu-node", 9400, "/metrics")
    assert [s.name for s in sources(Asked(scrape=("gpu-node:9400",), files=(Path("x.csv"),)))] == [
        "scrape gpu-node:9400",
        "pcm x.csv",
    ]


@given(st.text(max_size=300))
def test_any_text_is_read_without_raising(text: str) -> None:
    from hoptrace.collectors.engines.prometheus import Reading

    for s in Reading({}, 100).page(text).samples:
        meaning_of(s.name.split("{")[0])


# -- PCM -------------------------------------------------------------------------------------------------------------------

HEAD = "Date,Time,SKT0,SKT0,System,System\n,,Mem Read (MB/s),Mem Write (MB/s),CXL.mem_P0Read (MB/s),Temp\n"


def test_pcm_is_followed_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "pcm.csv"
    path.write_text(HEAD + "2026-12-01,10:00:00.1,1,2,3,4\n")
    source = PcmSource(path)
    assert source.probe().sees == "6 columns"
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    with path.open("a") as f:
        f.write("2026-12-01,10:00:01.1,10.5,20,30,N/A\n2026-12-01,10:00:02.1,11,2")
    w.sample()
    with path.open("a") as f:
        f.write("1,31,5\n")
    w.sample()
    rows = [(r["entity"], r["name"], r["direction"], r["value_float"], r["unit"], r["status"]) for r in w.rows()]
    assert ("pcm:SKT0", "Mem Read (MB/s)", "read", 10.5e6, "bytes/s", "ok") in rows
    assert ("pcm:SKT0", "Mem Write (MB/s)", "write", 21e6, "bytes/s", "ok") in rows, "a line that came in two pieces"
    assert ("pcm:System", "CXL.mem_P0Read (MB/s)", "read", 31e6, "bytes/s", "ok") in rows
    assert ("pcm:System", "Temp", None, None, None, "absent") in rows
    assert not any(v in (1e6, 2e6, 3e6) for *_, v, _, _ in rows), "what was there before the capture is of another time"


def test_pcm_that_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "pcm.csv"
    path.write_text(HEAD)
    w = Watched(PcmSource(path), tmp_path / "t.trace")
    w.sample()
    with path.open("a") as f:
        f.write("2026-12-01,10:00:01,5,5,5,5\n" * 3)
    w.sample()
    path.write_text(HEAD + "2026-12-01,10:00:09,7,7,7,7\n")
    w.sample()
    assert w.values("pcm:SKT0", "Mem Read (MB/s)") == [5e6, 7e6]
    assert w.events() == [("gap", "pcm.csv was begun anew")]


def test_pcm_raw_has_no_header_and_is_refused(tmp_path: Path) -> None:
    found = PcmSource(DATA / "pcm_raw.csv").probe()
    assert found.status == "unsupported" and "no header rows" in str(found.reason)
    assert PcmSource(tmp_path / "none.csv").probe().status == "absent"
    assert headers(["a"], []) is None and headers(["", ""], ["2026-12-01", "1"]) is None
    assert headers(["S0", "", "S1"], ["a", "b", "c"]) == [("S0", "a"), ("S0", "b"), ("S1", "c")]
