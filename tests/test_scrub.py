"""A scrubbed trace: nothing tells where it was recorded, and every figure is as before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import hoptrace
from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import CollectorInfo, Manifest, Server
from hoptrace.metrics import summary
from hoptrace.scrub import scrub
from hoptrace.validate import validate
from hoptrace.writer import TraceWriter

HOST = "node7.secretlab.example"
PATH = "/home/Jane Doe/private weights/tiny.gguf"
SECRETS = ("node7", "secretlab", "Jane", "private weights", "/srv/", "otherbox", "10.1.2.3", "hunter2", "jane")


def manifest() -> Manifest:
    return Manifest(
        origin="recorded",
        title="A run on node7",
        hosts=[{"name": HOST, "clock": "CLOCK_MONOTONIC", "lead": True}],
        servers=[
            Server(name="llamacpp", url="http://127.0.0.1:8080", model="tiny.gguf", model_path=PATH, host=HOST, pid=4711),
            Server(
                name="far", url="http://jane:hunter2@10.1.2.3:9000/v1", model="meta-llama/Llama-3", config={"lora": "~/l/a.gguf"}
            ),
        ],
        collectors=[CollectorInfo(name="process", available=False, reason="/srv/run/x.sock: denied on NODE7")],
        imported_from=[{"source": "https://github.com/Azure/public/data.csv", "file": "/srv/data/data.csv"}],
        notes=[f"llamacpp: {PATH} was read.", "/v1/models and /props are off; 3 tokens/s."],
        platform={"nodes": [{"name": "client"}, {"name": "server:llamacpp"}]},
    )


def recorded(path: Path) -> Path:
    rows: dict[str, list[dict[str, Any]]] = {
        "requests": [
            {"request": i, "arrival_ns": i, "first_token_ns": i + 5, "finish_ns": i + 9, "output_tokens": 1, "prompt_tokens": 2,
             "model": "/srv/models/deep/tiny.gguf", "prefix_blocks": [1, 2], "request_id": f"cmpl-{i}"}
            for i in range(3)
        ],
        "tokens": [{"request": i, "index": 0, "time_ns": i + 5, "count": 1, "vantage": v}
                   for i in range(3) for v in ("proxy", "client")],
        "counters": [
            {"time_ns": 1, "host": HOST, "entity": "process:4711", "name": "on_cpu_ns", "value_int": 1},
            {"time_ns": 1, "host": "otherbox", "entity": "link:otherbox/eth0", "name": "tx_bytes", "value_int": 1},
        ],
        "events": [{"time_ns": 1, "host": HOST, "kind": "configuration change",
                    "detail": f"model_path: {PATH} -> /srv/new/tiny.gguf on node7:8080 (see file:///srv/log/a.txt)"}],
        "moves": [{"start_ns": 1, "object": "prompt", "src": "client", "dst": "server:llamacpp", "bytes": 5,
                   "path": ["client-proxy", f"proxy-{HOST}"]}],
    }  # fmt: skip
    with TraceWriter(path, manifest(), background=False) as writer:
        for name, some in rows.items():
            writer.append(name, [{"source": "proxy", **r} for r in some])
    return path


def everything(folder: Path) -> str:
    """Every value and every name in a trace, decompressed, and the raw bytes of its files."""
    said = []
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        said.append(file.read_bytes().decode("latin-1"))
        if file.suffix == ".parquet":
            data = pq.ParquetFile(file).read()
            said.append(json.dumps(data.to_pydict()) + str(data.schema))
    return "\n".join(said)


def test_nothing_tells_where_it_was_recorded(tmp_path: Path) -> None:
    source = recorded(tmp_path / "in.trace")
    before = everything(source)
    assert all(s in before for s in SECRETS), "else this test shows nothing"
    after = everything(scrub(source, tmp_path / "out.trace"))
    assert [s for s in SECRETS if s.lower() in after.lower()] == []


def test_what_it_reads_then(tmp_path: Path) -> None:
    out = hoptrace.open(scrub(recorded(tmp_path / "in.trace"), tmp_path / "out.trace"))
    m = out.manifest
    assert m.title == "A run on host-1" and m.hosts == [{"name": "host-1", "clock": "CLOCK_MONOTONIC", "lead": True}]
    near, far = m.servers
    assert (near.url, near.model_path, near.host, near.pid) == ("http://127.0.0.1:8080", "tiny.gguf", "host-1", 4711)
    assert (far.url, far.model, far.config) == ("http://host-2:9000/v1", "meta-llama/Llama-3", {"lora": "a.gguf"})
    assert m.collectors[0].reason == "x.sock: denied on host-1"
    assert m.imported_from == [{"source": "https://github.com/Azure/public/data.csv", "file": "data.csv"}]
    assert m.notes == ["llamacpp: tiny.gguf was read.", "/v1/models and /props are off; 3 tokens/s."]
    counters = out.table("counters").collect()
    assert counters.select("host", "entity").rows() == [("host-3", "link:host-3/eth0"), ("host-1", "process:4711")]
    assert out.table("events").collect()["detail"].item() == ("model_path: tiny.gguf -> tiny.gguf on host-1:8080 (see a.txt)")
    assert out.table("moves").collect()["path"].to_list() == [["client-proxy", "proxy-host-1"]]
    assert out.table("requests").collect()["model"].unique().to_list() == ["tiny.gguf"]


def test_all_else_stays(tmp_path: Path) -> None:
    a = hoptrace.open(recorded(tmp_path / "in.trace"))
    b = hoptrace.open(scrub(a.path, tmp_path / "out.trace"))
    assert summary(a).as_dict() == summary(b).as_dict()
    for name, parts in a.manifest.tables.items():
        for mine, theirs in zip(parts, b.manifest.tables[name], strict=True):
            x, y = pq.ParquetFile(a.path / mine.file).read(), pq.ParquetFile(b.path / theirs.file).read()
            text = {"host", "entity", "detail", "path", "model"}
            assert (
                x.drop_columns([c for c in x.column_names if c in text])
                .sort_by(_order(x))
                .equals(y.drop_columns([c for c in y.column_names if c in text]).sort_by(_order(y)))
            ), name
            assert x.schema.equals(y.schema, check_metadata=True)
    for field in ("created_utc", "hoptrace_version", "utc_offset_ns", "closed", "platform"):
        assert getattr(a.manifest, field) == getattr(b.manifest, field)
    assert [(f.check, f.table, f.count) for f in validate(b)] == [(f.check, f.table, f.count) for f in validate(a)]


def _order(data: Any) -> list[tuple[str, str]]:
    return [(n, "ascending") for n in ("request", "index", "vantage", "name", "time_ns") if n in data.column_names]


def test_a_trace_that_was_killed_is_scrubbed_too(tmp_path: Path) -> None:
    source = tmp_path / "in.trace"
    writer = TraceWriter(source, manifest())
    writer.append("events", [{"time_ns": 1, "host": HOST, "kind": "start", "source": "session"}])
    writer.flush()
    with pytest.raises(UsageError, match="still being written"):
        scrub(source, tmp_path / "out.trace")
    killed = tmp_path / "killed.trace"
    subprocess.run(["cp", "-r", str(source), str(killed)], check=True)
    writer.close()
    (killed / "writer.lock").unlink()
    out = hoptrace.open(scrub(killed, tmp_path / "out.trace"))
    assert out.table("events").collect()["host"].to_list() == ["host-1"] and not out.manifest.closed
    assert not list(out.path.rglob("*.journal"))


def test_a_host_that_is_called_like_a_word_of_the_trace(tmp_path: Path) -> None:
    m = Manifest(origin="recorded", hosts=[{"name": "proxy"}, {"name": "s"}], notes=["the proxy gave 3 tokens/s"])
    with TraceWriter(tmp_path / "in.trace", m, background=False) as w:
        w.append("moves", [{"start_ns": 1, "object": "kv", "src": "proxy", "dst": "s", "source": "proxy"}])
        w.append("events", [{"time_ns": 1, "host": h, "kind": "start", "source": "x"} for h in ("proxy", "s")])
    out = hoptrace.open(scrub(tmp_path / "in.trace", tmp_path / "out.trace"))
    assert out.table("moves").select("src", "dst", "source").collect().row(0) == ("proxy", "s", "proxy")
    assert out.table("events").collect()["host"].to_list() == ["host-1", "host-2"]
    assert out.manifest.notes == ["the proxy gave 3 tokens/s"]


def test_what_goes_wrong(tmp_path: Path) -> None:
    source = recorded(tmp_path / "in.trace")
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="already there"):
        scrub(source, tmp_path / "there")
    with pytest.raises(InputError, match="no trace at"):
        scrub(tmp_path / "none", tmp_path / "out")
    next((source / "events").iterdir()).write_bytes(b"PAR1 nothing")
    with pytest.raises(InputError, match="is damaged"):
        scrub(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path) -> None:
    source = recorded(tmp_path / "in.trace")
    run = [sys.executable, "-m", "hoptrace.scrub"]
    done = subprocess.run([*run, str(source), str(tmp_path / "out.trace")], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "out.trace") and hoptrace.open(tmp_path / "out.trace").rows("tokens") == 3
    again = subprocess.run([*run, str(source), str(tmp_path / "out.trace")], capture_output=True, text=True, check=False)
    assert again.returncode == 2 and "already there" in again.stderr and "Traceback" not in again.stderr
    assert subprocess.run(run, capture_output=True, check=False).returncode == 2
