"""llama.cpp's endpoints, from recorded answers of a real server (tests/data/llamacpp)."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.toy_server import Toy, serve

import hoptrace
from hoptrace.collectors.base import ServerAway
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines import names_llamacpp
from hoptrace.collectors.engines.http import Api, base_url
from hoptrace.collectors.engines.identify import identify
from hoptrace.collectors.engines.llamacpp import SlotsCollector, describe, sources
from hoptrace.collectors.engines.prometheus import Kind, read
from hoptrace.collectors.hardware.listener import Found
from hoptrace.errors import EnvironmentProblem, UsageError
from hoptrace.manifest import Manifest, Server
from hoptrace.writer import TraceWriter

DATA = Path(__file__).parent / "data" / "llamacpp"
FULL = {"/v1/models": "models.json", "/props": "props.json", "/slots": "slots_busy.json", "/metrics": "metrics.prom"}


def pages(files: dict[str, str], status: int = 200, server: str = "llama.cpp") -> Any:
    """Answers GET from recorded files; the mapping may be changed while the server runs."""

    def get(request: Any) -> Any:
        name = files.get(request.path)
        if name is None:
            return web.Response(status=404, body=b'{"error":{"code":404}}', headers={"Server": server})
        code = 501 if name.endswith("_off.json") else 401 if name == "denied.json" else status
        return web.Response(status=code, body=(DATA / name).read_bytes(), headers={"Server": server})

    return get


@asynccontextmanager
async def asked(files: dict[str, str], **more: Any) -> AsyncIterator[Api]:
    async with serve(Toy(get=pages(files, **more))) as toy:
        api = Api(toy.url)
        try:
            yield api
        finally:
            await api.close()


def context(api: Api, writer: TraceWriter | None = None, server: Server | None = None, pid: int | None = None) -> Context:
    find = (lambda: Found(pid)) if pid is not None else None
    return Context(api, server or Server(name="s", engine="llama.cpp"), "h", writer, find=find)


def metrics(api: Api, writer: TraceWriter | None = None, name: str = "s") -> Any:
    return sources(context(api, writer, Server(name=name, engine="llama.cpp")))[0]


def slots(api: Api, writer: TraceWriter | None = None) -> SlotsCollector:
    return SlotsCollector(context(api, writer))


def rows(writer: TraceWriter, table: str = "counters") -> list[dict[str, Any]]:
    writer.flush()
    return hoptrace.open(writer.path).table(table).collect().to_dicts()


async def test_the_server_as_it_describes_itself() -> None:
    async with asked(FULL) as api:
        server = await identify(api)
        notes = await describe(Context(api, server, "h"))
    assert (server.name, server.engine, server.model) == ("llamacpp", "llama.cpp", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert (server.max_sequences, server.context_tokens, server.max_batched_tokens) == (4, 2048, 2048)
    assert (server.parameters, server.weight_bytes, server.hidden_size) == (134515008, 96576768, 576)
    assert server.engine_version == "b0-unknown"
    assert server.kv_capacity_tokens is None, "no endpoint tells whether slots share one context"
    assert any("max_batched_tokens 2048 is llama.cpp's default" in n for n in notes), "what is assumed is said"
    assert server.config["n_ubatch"] == 512
    assert any("n_ubatch 512 is llama.cpp's default (-ub)" in n for n in notes), "what is assumed is said"


def tiny_gguf(path: Path) -> Path:
    """2 layers, 4 heads of 16, 2 KV heads, hidden 64; 512 weights in 2048 bytes."""
    import numpy as np
    from gguf import GGUFWriter

    w = GGUFWriter(path, "llama")
    w.add_block_count(2)
    w.add_embedding_length(64)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_tensor("a", np.zeros((8, 64), dtype=np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


async def described(path: str, meta: dict[str, int] | None, pid: int | None = None) -> tuple[Server, list[str]]:
    """What is told of a server that says its model lies at ``path`` and is as ``meta`` says."""
    props = json.loads((DATA / "props.json").read_text()) | {"model_path": path}
    models = json.loads((DATA / "models.json").read_text())
    models["data"][0]["meta"] = meta
    told = {"/props": props, "/v1/models": models}

    def get(request: Any) -> Any:
        return web.json_response(told[request.path]) if request.path in told else None

    async with serve(Toy(get=get)) as toy:
        api = Api(toy.url)
        server = Server(name="s", engine="llama.cpp")
        notes = await describe(Context(api, server, "h", find=lambda: Found(pid)))
        await api.close()
    return server, notes


TINY = {"n_params": 512, "n_embd": 64, "size": 2048}


def geometry(server: Server) -> tuple[int | None, ...]:
    return (server.layers, server.heads, server.kv_heads, server.head_size, server.hidden_size, server.parameters,
            server.weight_bytes)  # fmt: skip


async def test_the_geometry_comes_from_the_models_file(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "m.gguf")
    server, _ = await described(str(file), TINY)
    assert geometry(server) == (2, 4, 2, 16, 64, 512, 2048) and server.kv_dtype == "f16"
    assert server.model_path == str(file) and server.model == "m.gguf"


async def test_a_relative_path_is_seen_from_the_servers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    tiny_gguf(tmp_path / "models" / "m.gguf")
    monkeypatch.chdir(tmp_path)
    server, _ = await described("models/m.gguf", TINY, os.getpid())
    assert geometry(server) == (2, 4, 2, 16, 64, 512, 2048)
    server, notes = await described("models/m.gguf", TINY)
    assert server.layers is None and any("path is relative" in n for n in notes)


@pytest.mark.parametrize(
    "meta",
    [{"n_params": 513, "n_embd": 64}, {"n_params": 512, "n_embd": 128}, None],
    ids=["other size", "other width", "the server tells nothing, its process is not known"],
)
async def test_another_file_of_the_same_name_is_not_believed(tmp_path: Path, meta: dict[str, int] | None) -> None:
    server, notes = await described(str(tiny_gguf(tmp_path / "m.gguf")), meta)
    assert (server.layers, server.kv_heads, server.kv_dtype) == (None, None, None)
    assert any("the file of that name here is not the server's model" in n for n in notes)


async def test_a_part_of_a_model_tells_the_geometry_and_the_server_the_size(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "m-00001-of-00002.gguf")
    server, _ = await described(str(file), {"n_params": 1024, "n_embd": 64, "size": 4096})
    assert geometry(server) == (2, 4, 2, 16, 64, 1024, 4096)


async def test_endpoints_that_are_off_say_which_flag_turns_them_on(tmp_path: Path) -> None:
    files = {"/v1/models": "models.json", "/slots": "slots_off.json", "/metrics": "metrics_off.json"}
    async with asked(files) as api:
        counted = await metrics(api).probe()
        slot = await slots(api).probe()
        server = await identify(api)
        notes = await describe(Context(api, server, "h"))
    assert (counted.available, counted.reason) == (False, "/metrics is turned off: start llama-server with --metrics")
    assert (slot.available, slot.reason) == (False, "/slots is turned off: start llama-server with --slots")
    assert server.max_sequences is None and server.context_tokens == 2048
    assert any("/props is turned off: start llama-server with --props" in n for n in notes)


async def test_a_server_that_wants_a_key() -> None:
    async with asked(dict.fromkeys(FULL, "denied.json")) as api:
        server = await identify(api)
        finding = await metrics(api).probe()
    assert server.engine == "llama.cpp"
    assert not finding.available and "--key-env" in str(finding.reason)


async def test_the_key_goes_to_the_server() -> None:
    async with serve(Toy(get=pages(FULL))) as toy:
        api = Api(toy.url, "sekret")
        await api.get("/props")
        await api.close()
    assert toy.requests[0][2]["Authorization"] == "Bearer sekret"


async def test_metrics_become_counters_by_the_table_not_by_the_type_line(tmp_path: Path) -> None:
    async with asked(FULL) as api:
        with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded")) as writer:
            assert await metrics(api, writer, "llamacpp").sample() == 15
            found = {r["name"]: r for r in rows(writer)}
    predicted = found["llamacpp:tokens_predicted_total"]
    assert (predicted["value_int"], predicted["unit"], predicted["semantics"]) == (2329, "tokens", "cumulative")
    assert predicted["entity"] == "server:llamacpp" and predicted["status"] == "ok"
    seconds = found["llamacpp:prompt_seconds_total"]
    assert (seconds["value_float"], seconds["value_int"], seconds["unit"]) == (75.3428, None, "s")
    assert found["llamacpp:n_tokens_max"]["semantics"] == "gauge", "a high-water mark, though its TYPE line says counter"
    assert found["llamacpp:requests_processing"]["value_int"] == 1


def test_the_table_covers_what_the_server_tells() -> None:
    names = {s.name for s in read((DATA / "metrics.prom").read_text(), {}).samples}
    assert names <= set(names_llamacpp.KNOWN)


def test_unknown_metrics_keep_their_names_and_labels() -> None:
    page = (
        "# TYPE new:thing_total counter\nnew:thing_total{b=\"2\",a=\"1\"} 5\n"
        "# TYPE wait_seconds histogram\nwait_seconds_bucket{le=\"+Inf\"} 3\nwait_seconds_sum 1.5\nwait_seconds_count 3\n"
        "plain 1\nno_number NaN\n"
    )  # fmt: skip
    found = {s.name: s for s in read(page, {}).samples}
    assert found['new:thing_total{a="1",b="2"}'].kind == Kind("1", "cumulative")
    assert found['wait_seconds_bucket{le="+Inf"}'].kind == Kind("1", "cumulative")
    assert found["plain"].kind is None and found["plain"].value == 1.0
    assert found["no_number"].value is None


def test_b39_a_gauge_that_was_declared_a_counter_does_not_restart_anything() -> None:
    known = {"link_bytes": Kind("bytes", "gauge")}
    assert [s.kind for s in read("# TYPE link_bytes counter\nlink_bytes 12\n", known).samples] == [Kind("bytes", "gauge")]


async def test_a_total_that_falls_is_a_restart(tmp_path: Path) -> None:
    async with serve(Toy()) as toy:
        text = {"page": (DATA / "metrics.prom").read_text()}
        toy.get = lambda request: web.Response(text=text["page"])
        api = Api(toy.url)
        with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded")) as writer:
            collector = metrics(api, writer)
            await collector.sample()
            text["page"] = text["page"].replace("tokens_predicted_total 2329", "tokens_predicted_total 2400")
            text["page"] = text["page"].replace("n_busy_slots_per_decode 3.19241", "n_busy_slots_per_decode 1")
            await collector.sample()
            text["page"] = text["page"].replace("tokens_predicted_total 2400", "tokens_predicted_total 7")
            await collector.sample()
            seen = [(r["value_int"], r["incarnation"]) for r in rows(writer) if r["name"] == "llamacpp:tokens_predicted_total"]
            events = rows(writer, "events")
        await api.close()
    assert sorted(seen) == [(7, "s#2"), (2329, "s#1"), (2400, "s#1")]
    assert [e["kind"] for e in events] == ["restart"]


async def test_slots_are_written_when_they_change(tmp_path: Path) -> None:
    files = dict(FULL)
    async with asked(files) as api:
        with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded")) as writer:
            collector = slots(api, writer)
            await collector.sample()
            first = len(rows(writer))
            assert await collector.sample() == 1, "only the number of busy slots"
            files["/slots"] = "slots_idle.json"
            await collector.sample()
            found = rows(writer)
    there = json.loads((DATA / "slots_busy.json").read_text())
    assert first == 1 + 6 * len(there)
    assert [r["value_int"] for r in found if r["name"] == "slots_processing"] == [1, 1, 0]
    busy = next(s for s in there if s["is_processing"])
    decoded = [r["value_int"] for r in found if r["name"] == "n_decoded" and r["entity"] == f"server:s/slot:{busy['id']}"]
    assert decoded[0] == busy["next_token"][0]["n_decoded"] and len(decoded) == 2


async def test_pages_that_are_no_pages(tmp_path: Path) -> None:
    async with serve(Toy(get=lambda r: web.Response(text="<html>{{{ 1 2 3"))) as toy:
        api = Api(toy.url)
        with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded")) as writer:
            assert await metrics(api, writer).sample() == 0
            assert await slots(api, writer).sample() == 0
            assert writer.manifest.rows_dropped == {"llamacpp-metrics: lines that are not in the text format": 1}
        await api.close()


async def test_a_server_that_is_gone_is_away(tmp_path: Path) -> None:
    async with serve(Toy(get=pages(FULL))) as toy:
        pass
    api = Api(toy.url)
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded")) as writer:
        with pytest.raises(ServerAway):
            await metrics(api, writer).sample()
        with pytest.raises(EnvironmentProblem, match="Nothing listens at"):
            await identify(api)
    await api.close()


async def test_other_engines_are_told_apart() -> None:
    def vllm(request: Any) -> Any:
        told = {
            "/v1/models": {"data": [{"id": "org/model", "owned_by": "vllm", "max_model_len": 4096}]},
            "/version": {"version": "0.32.0"},
        }
        return web.json_response(told[request.path]) if request.path in told else None

    async with serve(Toy(get=vllm)) as toy:
        api = Api(toy.url)
        server = await identify(api)
        await api.close()
    assert (server.name, server.engine, server.engine_version) == ("vllm", "vllm", "0.32.0")
    assert (server.model, server.context_tokens) == ("org/model", 4096)


async def test_what_is_no_inference_server() -> None:
    async with serve(Toy(get=lambda r: web.Response(text="<h1>It works</h1>"))) as toy:
        api = Api(toy.url)
        with pytest.raises(EnvironmentProblem, match="not an OpenAI-compatible server") as caught:
            await identify(api)
        await api.close()
    assert caught.value.hint

    async def post_only(request: Any) -> Any:
        return web.Response(status=405 if request.path == "/v1/chat/completions" else 404)

    toy = Toy()
    toy.handle = post_only  # type: ignore[method-assign]
    async with serve(toy):
        api = Api(toy.url)
        assert (await identify(api)).engine is None, "it has no list of models, but it completes"
        await api.close()


async def test_what_speaks_no_http() -> None:
    import asyncio

    async def ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-toy\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(ssh, "127.0.0.1", 0)
    api = Api(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(EnvironmentProblem, match="does not speak HTTP"):
        await identify(api)
    await api.close()
    server.close()


async def test_a_server_that_is_still_loading() -> None:
    async with serve(Toy(get=lambda r: web.Response(status=503, text="{}"))) as toy:
        api = Api(toy.url)
        with pytest.raises(EnvironmentProblem, match="still loading"):
            await identify(api, loading_s=0.0)
        await api.close()


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://h:8000/v1/", "http://h:8000"),
        ("https://h/engine/v1", "https://h/engine"),
        ("http://user:pw@h:1", "http://h:1"),
    ],
)
def test_urls(given: str, base: str) -> None:
    assert base_url(given) == base


@pytest.mark.parametrize("given", ["", "http://", "ftp://h", "http://h:0", "http://h:99999", "http://[::1"])
def test_what_is_no_url(given: str) -> None:
    with pytest.raises(UsageError, match="is not the URL of a server"):
        base_url(given)
