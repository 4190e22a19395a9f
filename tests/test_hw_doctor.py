"""`hoptrace doctor`: on a recorded machine, on this one, and on what is none; servers that are found running."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.command import run
from support.guests import guest

from hoptrace.cli.doctor_view import Examined, as_dict, missing_text, text
from hoptrace.collectors.hardware.examination import Entry
from hoptrace.collectors.hardware.here import Here, servers_here
from hoptrace.collectors.hardware.source import Found


def recorded(name: str, *words: str) -> Any:
    tree = guest(name)
    return run("doctor", "--proc", str(tree / "proc"), "--sys", str(tree / "sys"), *words)


def test_a_recorded_machine_as_json() -> None:
    done = recorded("cxl-volatile-6.12", "--for", "200ms", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["format"] == "doctor/1" and told["every_s"] == 0.1 and told["contradictions"] == []
    sources = {s["name"]: s for s in told["sources"]}
    assert sources["numa"]["available"] and sources["numa"]["sees"].startswith("4 nodes") and sources["numa"]["series"] > 50
    assert sources["numa"]["cpu_us_per_sample"] > 0 and sources["numa"]["core_share"] > 0 and sources["numa"]["failed"] is None
    assert 0 < told["core_share"] <= sum(s["core_share"] or 0 for s in told["sources"]) + 1e-4
    for s in told["sources"]:
        assert s["answers"], s["name"]
        assert s["available"] == (s["status"] == "ok")
        assert s["available"] or s["reason"], f"{s['name']} does not say why not"
    assert sources["nvml"]["status"] == "unsupported", "a driver is not asked about another machine"
    assert {n["name"] for n in told["platform"]["nodes"]} >= {"dram0", "cxl3", "socket0"}
    assert told["servers"] == []
    assert (sources["process"]["status"], sources["process"]["reason"]) == (
        "absent",
        "no inference server was found running there",
    )


def test_a_recorded_machine_s_graph(snapshot: Any) -> None:
    done = recorded("hmat-only-6.12", "--graph")
    assert done.returncode == 0 and done.stdout == snapshot
    graph = json.loads(recorded("hmat-only-6.12", "--graph", "--json").stdout)
    assert set(graph) == {"nodes", "links", "coherent"}


def test_this_machine_as_a_person_reads_it() -> None:
    done = run("doctor", "--for", "300ms", "-q")
    assert done.returncode == 0, done.stderr
    assert "Here: " in done.stdout and "Platform:" in done.stdout and "of one core together" in done.stdout
    if Path("/proc/self/schedstat").exists():
        assert "\nprocess" in done.stdout, "some process is looked at"
    for line in done.stdout.splitlines():
        assert len(line) <= 200


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [(("--proc", "/nowhere"), 4, "is no Linux /proc"), (("--pid", "99999999"), 2, "There is no process 99999999"),
     (("--scrape", "ftp://x"), 2, "not the URL of a page"), (("--every", "soon"), 2, "not a duration")],
)  # fmt: skip
def test_what_can_t_be(words: tuple[str, ...], code: int, told: str) -> None:
    done = run("doctor", *words)
    assert done.returncode == code and told in done.stderr and "Traceback" not in done.stderr


def entries() -> list[Entry]:
    return [
        Entry("cpu", "how busy", "fast", Found("ok", sees="2 CPUs"), 0.1, 20, 12, 90.0, 0.0009),
        Entry("nvml", "what GPUs do", "own", Found("absent", "libnvidia-ml.so.1 is not found", "install the driver"), 0.1),
        Entry("rdma", "what ports carry", "fast", Found("denied", "ports: Permission denied"), 0.1),
        Entry("block", "disks", "fast", Found("ok"), 0.1, 0, 4, None, None, "OSError: [Errno 5] Input/output error"),
    ]


def test_the_whole_of_it(snapshot: Any) -> None:
    found = Examined(
        entries(), {"nodes": [{"name": "dram0", "kind": "dram", "capacity_bytes": 1 << 34}], "links": [], "coherent": []},
        ["raw_bytes_per_s of pcie:0000:31:00.0 saw nothing …"], [Here(812, "vllm serve", (8000,)), Here(9, "x", ())], 0.1,
    )  # fmt: skip
    assert text(found) == snapshot
    assert missing_text(found) == snapshot
    assert as_dict(found)["core_share"] == 0.0009 and as_dict(found)["sources"][3]["failed"].startswith("OSError")
    assert missing_text(Examined(entries()[:1], {}, [], [], 0.1)) == "Every source that hoptrace knows is here."


def _process(proc: Path, pid: int, *words: str, port_inode: int | None = None) -> None:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} ({Path(words[0]).name[:15]}) S 1 {'0 ' * 17} 5000 0 9 {'0 ' * 20}\n")
    (folder / "cmdline").write_bytes(b"\0".join(w.encode() for w in words) + b"\0")
    if port_inode is not None:
        (folder / "fd/3").symlink_to(f"socket:[{port_inode}]")


def test_servers_that_run_here(tmp_path: Path) -> None:
    _process(tmp_path, 100, "/opt/llama-server", "-m", "secret-model.gguf", "--api-key", "s3cret", port_inode=71)
    _process(tmp_path, 200, "/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server", "--port", "8000", port_inode=72)
    _process(tmp_path, 300, "/bin/bash", "vllm serve", port_inode=73)
    _process(tmp_path, 400, "/usr/sbin/nginx", "worker", port_inode=74)
    (tmp_path / "net").mkdir()
    lines = [
        f"   {i}: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 {71 + i} 1\n"
        for i, port in enumerate((8080, 8000, 22, 80))
    ]
    (tmp_path / "net/tcp").write_text("  sl  local_address …\n" + "".join(lines))
    found = servers_here(tmp_path)
    assert [(h.pid, h.ports) for h in found] == [(100, (8080,)), (200, (8000,))]
    assert "s3cret" not in str(found) and "gguf" not in str(found)
    assert servers_here(tmp_path / "none") == []


def test_this_process_is_no_server() -> None:
    assert os.getpid() not in [h.pid for h in servers_here()]


def test_trees_that_are_none(tmp_path: Path) -> None:
    for words in (["--sys", str(tmp_path)], ["--sys", "/etc/passwd"], ["--proc", str(tmp_path)], ["--sys", ""]):
        done = run("doctor", *words)
        assert done.returncode == 4 and "is no Linux /" in done.stderr, words
        done = run("attach", "http://127.0.0.1:9", "-o", str(tmp_path / "t.trace"), *words)
        assert done.returncode == 4 and "is no Linux /" in done.stderr, words
