"""NVIDIA's GPUs that go, come back, hang, or have another driver than library, over a stub of it; doctor, attach, the graph."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.nvml import BDFS, GPUS, LINKS, PCIE, UUIDS, Captured, capture, compiled, environment, two_gpus

import hoptrace
from hoptrace.analysis.counters import counter_totals
from hoptrace.analysis.moves.ledger_links import link_uses
from hoptrace.collectors.hardware.nvidia import per_gpu
from hoptrace.collectors.hardware.nvidia import seat as seats
from hoptrace.collectors.hardware.nvidia.errors import NvmlError
from hoptrace.collectors.hardware.nvidia.gpus import Gpu
from hoptrace.collectors.hardware.source import Found

KIB = 1024
WHO = [f"{gpu} (NVIDIA Stub, {bdf})" for gpu, bdf in zip(GPUS, BDFS, strict=True)]
NVLINKS = {
    "nodes": [{"name": f"gpu{n}", "kind": "compute"} for n in range(2)],
    "links": [
        {"name": f"gpu{n}-nvlink{k}", "a": f"gpu{n}", "b": f"gpu{1 - n}", "kind": "nvlink", "bytes_per_s": 26_562_000_000}
        | {"entity": LINKS[n][k]}
        for n in range(2)
        for k in range(2)
    ],
}


# -- a GPU that goes and comes back ----------------------------------------------------------------------------------------

# GPU 0 falls off the bus: the driver then counts one GPU, and what was the second has index 0.
GONE = {"lost.0": "1", "count": "1", "index.0": "1", "f.1.138.0": "3:150"}
# Back, one of its counters begins at 0, and one far ahead of where it was; the other GPU has gone on.
BACK = {"lost.0": None, "count": "2", "index.0": None, "f.0.138.0": "3:7", "f.0.138.1": "3:900000000000", "f.1.138.0": "3:250"}


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    return capture(
        tmp_path_factory.mktemp("lost"), two_gpus() | {"gpm.0": "1", "g.0.2": "50"}, {},
        {"lines": {"f.0.138.0": "3:160", "f.0.138.1": "3:161"}}, {"lines": GONE},
        {"lines": {"xid": "1:1:13"}, "sleep_s": 0.4}, {"lines": BACK, "alive": True},
        {"lines": {"f.0.138.0": "3:17", "f.0.138.1": "3:900000000010", "xid": "2:0:63"}}, platform=NVLINKS,
    )  # fmt: skip


def test_a_lost_gpu_is_told_once_and_its_counters_say_so(lost: Captured) -> None:
    assert lost.faults == {}, "no source has failed"
    told = [e for e in lost.events if e["kind"] in ("device error", "device")]
    assert [e["kind"] for e in told] == ["device error", "device error", "device", "device error"]
    assert told[0]["detail"].startswith(f"{WHO[0]}: nvmlDevice")
    assert told[0]["detail"].endswith("does not answer (NVML 15); nothing is known of it from here on")
    assert told[1]["detail"] == f"{GPUS[1]} ({BDFS[1]}): XID 13 (graphics engine exception)", (
        "a set with a lost GPU tells nothing"
    )
    assert told[2]["detail"].startswith(f"{WHO[0]} answers again after ")
    assert told[3]["detail"] == f"{GPUS[0]} ({BDFS[0]}): XID 63 (row remapping recorded)", "it is listened to again"
    want: list[Any] = [100 * KIB, 160 * KIB, "lost", 7 * KIB, 17 * KIB]
    assert lost.of(LINKS[0][0], "data_bytes", "tx") == want
    for name in ("sm_clock_mhz", "memory_used_bytes", "sm_active_ratio"):
        assert [v == "lost" for v in lost.of(GPUS[0], name)] == [False, True, False], name
    # After the loss it is lost in one row of each series; null is no value.
    assert all(r["value_int"] is None and r["value_float"] is None for r in lost.counters if r["status"] == "lost")


def test_the_other_gpu_goes_on_under_its_new_index(lost: Captured) -> None:
    assert lost.of(LINKS[1][0], "data_bytes", "tx") == [100 * KIB, 150 * KIB, 250 * KIB]
    assert len(lost.column("incarnation", LINKS[1][0], "data_bytes", "tx")) == 1, "the library's new start is none of the GPU"
    assert not any(r["status"] == "lost" and UUIDS[1] in r["entity"] for r in lost.counters)


def test_what_came_back_is_another_life_so_that_nothing_falls_and_nothing_leaps(lost: Captured) -> None:
    lives = lost.column("incarnation", LINKS[0][0], "data_bytes", "tx")
    assert [i.rsplit("/", 1)[1] for i in lives] == ["0", "1"] and len({i.rsplit("/", 1)[0] for i in lives}) == 1
    totals = {(r["entity"], r["name"], r["direction"]): r for r in counter_totals(lost.trace).to_dicts()}
    sent = [totals[link, "data_bytes", "tx"] for link in LINKS[0]]
    assert [(r["total"], r["breaks"], r["falls"]) for r in sent] == [((60 + 10) * KIB, 1, 0)] * 2
    used = {k.link: {w.counter.direction: w.counter for w in k.ways if w.counter} for k in link_uses(lost.trace)[0]}
    for link in range(2):
        counter = used[f"gpu0-nvlink{link}"]["tx"]
        assert (counter.counted_bytes, counter.restarts, counter.falls) == ((60 + 10) * KIB, 1, 0)
    assert used["gpu1-nvlink0"]["tx"].counted_bytes == 150 * KIB


def test_a_gpu_that_answers_again_without_a_new_start_is_listened_to_again(tmp_path: Path) -> None:
    c = capture(
        tmp_path, two_gpus() | {"gpm.1": "1", "g.1.2": "50"}, {}, {"lines": {"fail.0": "16"}, "sleep_s": 0.3},
        {"lines": {"fail.0": None, "f.0.138.0": "3:160"}, "alive": True}, {"lines": {"xid": "1:0:63", "g.1.2": "60"}},
    )  # fmt: skip
    assert c.faults == {} and c.of(LINKS[0][0], "data_bytes", "tx") == [100 * KIB, "lost", 160 * KIB]
    assert "has to be reset" in c.said("device error")[0] and c.said("device error")[1].endswith(
        "XID 63 (row remapping recorded)"
    )
    assert c.of(GPUS[1], "sm_active_ratio") == [0.5, 0.6], (
        "of the GPU that was not away nothing is lost by the library's new starts"
    )
    assert c.of(GPUS[1], "sm_clock_mhz") == [1980]


def test_one_field_that_says_the_gpu_is_lost_is_believed(tmp_path: Path) -> None:
    c = capture(tmp_path, two_gpus(), {}, {"lines": {"f.0.138.1": "r:15"}}, {"lines": {"f.0.138.1": "3:1"}, "alive": True})
    assert c.of(LINKS[0][0], "data_bytes", "tx") == [100 * KIB, "lost", 100 * KIB]
    lives = [i.rsplit("/", 1)[1] for i in c.column("incarnation", LINKS[0][0], "data_bytes", "tx")]
    assert len(lives) >= 2 and lives == sorted(set(lives), key=int)


class Driver:
    """Just enough of the library for a seat: one GPU that answers or does not."""

    generation, driver, restarts, answers = 1, "580", 0, True

    def using(self, who: str) -> AbstractContextManager[None]:
        return nullcontext()

    def call(self, name: str, *arguments: Any) -> Any:
        if not self.answers:
            raise NvmlError(15, name)
        return "handle"

    def restart(self) -> bool:
        self.restarts += 1
        return True


def test_one_that_comes_and_goes_is_looked_for_as_seldom_as_one_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, driver, out = [1000.0], Driver(), mock.Mock()
    monkeypatch.setattr(seats, "time", mock.Mock(monotonic=lambda: clock[0]))
    seat = seats.Seat(driver, Gpu(0, UUIDS[0], "NVIDIA Stub", BDFS[0]))  # type: ignore[arg-type]

    def looked_for(within_s: float) -> list[float]:
        """Lost now: when it is looked for, in seconds from now, until it is found."""
        driver.answers, begun, tries = False, clock[0], []
        assert seat.lose(NvmlError(15, "nvmlX"), out)
        while clock[0] < begun + within_s:
            clock[0] += 0.5
            before = driver.restarts
            assert seat.handle("w", out) is None
            tries += [clock[0] - begun] if driver.restarts > before else []
        driver.answers = True
        while seat.handle("w", out) is None:
            clock[0] += 0.5
        return [*tries, clock[0] - begun]

    assert looked_for(10) == [1, 3, 7, 15]
    assert looked_for(0) == [16] and looked_for(0) == [32], "it went again at once: the rest goes on growing"
    assert looked_for(0) == [60] and looked_for(0) == [60], "up to a minute"
    clock[0] += 61
    assert looked_for(0) == [1]
    assert seat.lives == 6 and out.event.call_count == 12


def test_of_a_gpu_that_hangs_when_it_is_looked_for_one_thread_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_gpu, "_HANGS_S", 0.05)
    answers = threading.Event()

    class Stuck(per_gpu.PerGpu):
        def _found(self, handle: Any) -> Found:
            answers.wait(20)
            return Found("ok")

    source = Stuck(seats.Seat(Driver(), Gpu(0, UUIDS[0], "NVIDIA Stub", BDFS[0])))  # type: ignore[arg-type]
    first = source.probe()
    assert (first.status, first.reason) == ("error", f"{GPUS[0]}: it did not return within 0.05 s (NVML 999)")
    left = threading.active_count()
    again = [source.probe() for _ in range(3)]
    assert {f.reason for f in again} == {f"{GPUS[0]}: a call to the driver has still not returned"}
    assert threading.active_count() == left
    answers.set()
    until = time.monotonic() + 10
    while not source.probe().available:
        assert time.monotonic() < until


def test_a_driver_that_fails_for_a_while_leaves_a_row_that_says_so(tmp_path: Path) -> None:
    failing = {"lines": {"fail.0": "999"}, "but": ["-0"], "sleep_s": 0.3}
    c = capture(tmp_path, two_gpus(), {}, failing, {"lines": {"fail.0": None, "f.0.138.0": "3:160"}})
    assert c.of(LINKS[0][0], "data_bytes", "tx") == [100 * KIB, "error", 160 * KIB]
    assert [i.rsplit("/", 1)[1] for i in c.column("incarnation", LINKS[0][0], "data_bytes", "tx")] == ["0"], "it was never away"
    assert c.of(GPUS[0], "memory_clock_mhz") == [3201, "error", 3201] and c.of(GPUS[1], "memory_clock_mhz") == [3201]
    assert any("nvml-0 could not be read: NvmlError: nvmlDeviceGetFieldValues: an unknown error" in e for e in c.said("source"))
    assert "nvml-0 can be read again" in c.said("source") and c.dropped["nvml-0: samples that failed (NvmlError)"] >= 1


def test_a_gpu_that_is_lost_at_the_start_is_told_and_the_others_are_recorded(tmp_path: Path) -> None:
    c = capture(tmp_path, two_gpus() | {"lost.0": "1"})
    silent = c.found["nvml-0"]
    assert silent["status"] == "lost" and "fallen off the bus" in silent["reason"] and "reset or reboot" in silent["remedy"]
    assert "nvml-state-0" not in c.found, "one source is enough to say it"
    assert c.found["nvml-1"]["status"] == "ok" and c.of(LINKS[1][0], "data_bytes", "tx") == [100 * KIB]
    assert c.found_later["nvml-0"] == silent


def test_where_all_gpus_are_lost_at_the_start_each_is_told(tmp_path: Path) -> None:
    c = capture(tmp_path, two_gpus() | {"lost.0": "1", "fail.1": "16"})
    assert [(n, f["status"]) for n, f in c.found.items()] == [("nvml-0", "lost"), ("nvml-1", "lost")]
    assert "nvidia-smi --gpu-reset" in c.found["nvml-1"]["remedy"]


def test_a_gpu_that_hangs_stops_neither_the_others_nor_the_end(tmp_path: Path) -> None:
    step = {"lines": {"hang.0": "1", "f.1.138.0": "3:101"}, "but": ["-0"], "sleep_s": 0.6}
    c = capture(tmp_path, two_gpus(), {}, step, {"lines": {"f.1.138.0": "3:102"}, "but": ["-0"]}, hangs_s=0.3)
    assert c.of(LINKS[1][0], "data_bytes", "tx") == [n * KIB for n in (100, 101, 102)]
    hung = c.said("device error")
    assert "nvml-0: a call to the driver has not returned for 0.3 s; nothing is read meanwhile" in hung
    assert all(said.startswith(("nvml-0:", "nvml-state-0:")) for said in hung)
    assert c.close_s < 4.0, "who hangs is left behind"


def test_a_gpu_that_hangs_at_the_start_keeps_nobody_waiting(tmp_path: Path) -> None:
    c = capture(tmp_path, two_gpus() | {"hang.0": "1"}, hangs_s=0.5)
    assert (c.found["nvml-0"]["status"], c.found["nvml-0"]["reason"]) == (
        "error",
        "GPU 0: it did not return within 0.5 s (NVML 999)",
    )
    assert c.of(LINKS[1][0], "data_bytes", "tx") == [100 * KIB]


# -- another driver than library -------------------------------------------------------------------------------------------


def test_a_driver_that_is_upgraded_in_mid_capture_is_not_tried_again(tmp_path: Path) -> None:
    upgraded = {"fail.0": "18", "f.1.138.0": "3:101"}
    c = capture(tmp_path, two_gpus(), {}, {"lines": upgraded}, {"lines": {"fail.0": None}, "sleep_s": 0.3})
    assert c.of(LINKS[0][0], "data_bytes", "tx") == [100 * KIB, "error"], "what a new start can't mend"
    assert c.of(LINKS[1][0], "data_bytes", "tx") == [100 * KIB, 101 * KIB]
    (said,) = c.said("device error")
    assert said.startswith(f"{WHO[0]}: nvmlDevice") and "driver and library have different versions" in said
    assert said.endswith("(NVML 18); nothing is known of it from here on, until hoptrace is started again")
    assert c.said("device") == []


def test_a_named_library_is_asked_about_another_tree(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    library = str(compiled() / "libnvidia-ml.so.1")
    c = capture(tmp_path, two_gpus(), sys=str(tmp_path / "sys"), library=library)
    assert c.found["nvml-1"]["status"] == "ok"
    (tmp_path / "2").mkdir()
    c = capture(tmp_path / "2", two_gpus(), sys=str(tmp_path / "sys"))
    assert [(n, f["status"], f["reason"]) for n, f in c.found.items()] == [
        ("nvml", "unsupported", "NVML tells of this machine, and the trees are another's")
    ]


def test_no_library_and_no_such_library(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    c = capture(tmp_path, {}, folder=tmp_path / "empty")
    found = c.found["nvml"]
    assert found["status"] == "absent" and "nvmlInit: libnvidia-ml.so.1 is not found (NVML 12)" in found["reason"]
    assert "install the NVIDIA driver; in a container, start it with the NVIDIA runtime" in found["remedy"]
    (tmp_path / "2").mkdir()
    c = capture(tmp_path / "2", two_gpus(), library="/nowhere/libnvidia-ml.so.1")
    assert c.found["nvml"]["status"] == "absent" and "/nowhere/libnvidia-ml.so.1 can't be loaded" in c.found["nvml"]["reason"]


# -- the command line, the graph -------------------------------------------------------------------------------------------


SERVER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from aiohttp import web
from support.toy_server import Toy, serve
MODELS = {{"object": "list", "data": [{{"id": "m", "object": "model", "owned_by": "me"}}]}}
def get(request):
    return web.json_response(MODELS) if request.path == "/v1/models" else None
async def main():
    async with serve(Toy([], get=get)) as toy:
        print(toy.url, flush=True)
        await asyncio.sleep(300)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    code = SERVER.format(tests=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as toy:
        assert toy.stdout is not None
        yield toy.stdout.readline().strip()
        toy.kill()


def command(tmp: Path, lines: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    control = tmp / "gpus"
    control.write_text("".join(f"{k}={v}\n" for k, v in lines.items()))
    line = [sys.executable, "-m", "hoptrace", *words]
    env = environment(compiled(), control)
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_doctor_lists_the_gpus_and_their_nvlinks_in_the_platform_graph(tmp_path: Path) -> None:
    lines = two_gpus() | {"to.1.1": "2", "up.0.1": "0"}  # one link to a switch, one down
    told = json.loads(command(tmp_path, lines, "doctor", "--json", "--for", "300ms").stdout)
    sources = {s["name"]: s for s in told["sources"]}
    for n in range(2):
        assert sources[f"nvml-{n}"]["sees"] == f"NVIDIA Stub at {BDFS[n]}, 2 NVLinks"
        assert sources[f"nvml-{n}"]["samples"] >= 1 and sources[f"nvml-{n}"]["failed"] is None
        assert sources[f"nvml-state-{n}"]["sees"] == "NVIDIA Stub, 140 GiB"
        why = sources[f"nvml-gpm-{n}"]
        assert (why["available"], why["status"], why["remedy"]) == (False, "unsupported", "Hopper or later; else DCGM")
    assert sources["nvml-events"]["sees"] == "2 GPUs"
    nodes = {n["name"]: n for n in told["platform"]["nodes"]}
    assert [nodes[f"gpu{n}"]["uuid"] for n in range(2)] == list(UUIDS) and nodes["hbm1"]["capacity_bytes"] == 150754820096
    links = {(k["a"], k["b"], k["entity"]): k for k in told["platform"]["links"] if k["kind"] == "nvlink"}
    assert set(links) == {("gpu0", "gpu1", LINKS[0][0]), ("gpu1", "gpu0", LINKS[1][0]), ("gpu1", "nvswitch", LINKS[1][1])}
    assert {k["bytes_per_s"] for k in links.values()} == {26_562_000_000}


def test_doctor_says_what_helps_where_driver_and_library_differ_and_attach_runs(url: str, tmp_path: Path) -> None:
    lines = two_gpus() | {"init": "18"}
    told = json.loads(command(tmp_path, lines, "doctor", "--json", "--for", "100ms").stdout)
    nvml = next(s for s in told["sources"] if s["name"].startswith("nvml"))
    words = "nvmlInit: driver and library have different versions, as after an upgrade of the driver (NVML 18)"
    remedy = "reload the kernel modules or reboot, then start hoptrace again: no second try in this process can help"
    assert (nvml["name"], nvml["status"], nvml["reason"], nvml["remedy"]) == ("nvml", "error", words, remedy)
    assert "gpu0" not in {n["name"] for n in told["platform"]["nodes"]}
    command(tmp_path, lines, "attach", url, "--duration", "500ms", "-o", str(tmp_path / "t.trace"))
    trace = hoptrace.open(tmp_path / "t.trace")
    mine = next(c for c in trace.manifest.collectors if c.name == "nvml")
    assert (mine.available, mine.reason, mine.remedy) == (False, words, remedy)
    assert trace.manifest.closed and trace.table("counters").collect().height > 0


def test_how_gpus_are_joined(tmp_path: Path) -> None:
    lines = two_gpus() | {
        "to.1.1": "2", "up.0.1": "0", "numa.1": "3", "nodes.0": "2", "nodes.1": "3", "level.1.0": "20", "p2p.1.0": "4",
        "f.1.170.0": "1:3", "f.1.171.0": "1:1", "f.1.171.1": "1:0", "f.1.171.2": "1:1",
        "f.1.172.0": "1:44000", "f.1.172.1": "1:99", "f.1.172.2": "1:46000", "f.1.164.1": "r:3",
    }  # fmt: skip
    a, b = capture(tmp_path, lines, graph=True).joined
    assert (a["gpu"]["index"], a["gpu"]["uuid"], a["gpu"]["bdf"], a["memory_bytes"]) == (0, UUIDS[0], BDFS[0], 150754820096)
    assert [(g["generation"], g["width"], g["numa"], g["memory_numa"]) for g in (a, b)] == [(4, 8, 1, None), (4, 8, None, 3)]
    up = {"link": 0, "to": "gpu", "bytes_per_s": 26_562_000_000}
    assert a["nvlinks"] == [up | {"bdf": BDFS[1]}]
    assert b["nvlinks"] == [up | {"bdf": BDFS[0]}, {"link": 1, "to": "switch", "bdf": "0000:87:00.0", "bytes_per_s": None}]
    assert [(g["c2c_links"], g["c2c_bytes_per_s"]) for g in (a, b)] == [(0, None), (2, 45_000_000_000)], "of three one is down"
    assert (a["nearest"], b["nearest"]) == ({UUIDS[1]: "NODE"}, {UUIDS[0]: "PXB"})
    assert (a["reads"], b["reads"], a["by_nvlink"]) == ({UUIDS[1]: "ok"}, {UUIDS[0]: "disabled by a key"}, {UUIDS[1]: "ok"})


def test_of_gpus_that_are_lost_or_hang_the_graph_has_the_rest(tmp_path: Path) -> None:
    c = capture(tmp_path, two_gpus() | {"lost.0": "1"}, graph=True)
    assert [g["gpu"]["uuid"] for g in c.joined] == [UUIDS[1]]
    assert [n["name"] for n in c.graph["nodes"] if n["name"].startswith("gpu")] == ["gpu1"]
    assert PCIE[1] in {k.get("entity") for k in c.graph["links"]} or not any(n["kind"] == "dram" for n in c.graph["nodes"])
