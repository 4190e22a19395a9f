"""What each engine says of itself becomes the manifest's entry; what it does not say is named, never assumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.pages import ENGINES, Pages, asked, context
from test_hf_config import WIDTH, safetensors

from hoptrace.collectors.base import Finding
from hoptrace.collectors.engines import catalog, command_line, model_files
from hoptrace.collectors.engines.catalog import ENGINES as KNOWN
from hoptrace.collectors.engines.catalog import GIVES
from hoptrace.collectors.engines.identify import GATEWAYS
from hoptrace.collectors.engines.plan import plan
from hoptrace.manifest import Server

VLLM = {
    "/v1/models": (ENGINES / "vllm" / "models.json").read_text(),
    "/version": (ENGINES / "vllm" / "version.json").read_text(),
    "/metrics": (ENGINES / "vllm" / "metrics.prom").read_text(),
    "/kv_event_sources": (ENGINES / "vllm" / "kv_event_sources.json").read_text(),
}
INFO = {"/server_info?config_format=json": (ENGINES / "vllm" / "server_info.json").read_text()}
ARGV = json.loads((ENGINES / "vllm" / "tree.json").read_text())[0]["cmdline"]
TOY = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
       "torch_dtype": "float32", "vocab_size": 1024}  # fmt: skip


async def described(
    pages: Pages, engine: str, *, pid: int | None = None, server: Server | None = None
) -> tuple[Server, list[str], Any]:
    server = server or Server(name=engine.replace(".", ""), engine=engine, model="org/model")
    async with asked(pages) as api:
        ctx = context(api, server=server, pid=pid)
        notes = await catalog.describe(ctx)
        return ctx.server, notes, ctx


def said(notes: list[str], words: str) -> bool:
    return any(words in n for n in notes)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line that a test says the server was started with."""

    def with_words(argv: list[str]) -> int:
        monkeypatch.setattr(command_line, "arguments", lambda pid: argv)
        return os.getpid()

    return with_words


# -- vLLM -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "files", "dtype", "size", "words"),
    [
        ({"dtype": "float32"}, "bfloat16", "float32", 4 * 203, None),
        ({"dtype": "bfloat16"}, "float32", "bfloat16", 2 * 203, None),
        ({}, "bfloat16", "bfloat16", 2 * 203, None),
        ({"dtype": "auto"}, "float32", "auto", None, "what it is served in is not known"),
        ({"dtype": "bfloat16", "quantization": "fp8"}, "bfloat16", "bfloat16", None, "quantised on loading (fp8)"),
    ],
)
def test_bytes_of_weights_are_those_in_memory(
    told: dict[str, str], files: str, dtype: str, size: int | None, words: str | None, tmp_path: Path
) -> None:
    """A bfloat16 model that is served in float32 has twice the bytes of its file, which each step reads."""
    (tmp_path / "config.json").write_text(json.dumps(TOY | {"torch_dtype": files}))
    safetensors(tmp_path / "model.safetensors", {"a": ("BF16", [10, 20]), "b": ("F32", [3])}, WIDTH)
    server = Server(name="s", config=dict(told))
    notes = model_files._fill(server, tmp_path)
    assert (server.config["dtype"], server.weight_bytes, server.parameters) == (dtype, size, 203)
    assert said(notes, words) if words else notes == []


async def test_vllm_from_its_page_and_command_line(started: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "models/toy").mkdir(parents=True)
    (tmp_path / "models/toy/config.json").write_text(json.dumps(TOY))
    monkeypatch.setattr(model_files, "places_of", lambda pid: (tmp_path, None, None))
    server, notes, ctx = await described(Pages(VLLM), "vllm", pid=started(ARGV))
    assert (server.block_size_tokens, server.block_count, server.kv_capacity_tokens) == (32, 131071, 131071 * 32)
    assert (server.max_sequences, server.max_batched_tokens, server.context_tokens) == (8, 512, 1024)
    assert (server.layers, server.heads, server.kv_heads, server.head_size, server.hidden_size) == (1, 2, 1, 32, 64)
    assert (server.model_path, server.kv_dtype, server.prefix_caching) == ("/models/toy", "float32", True)
    assert server.config["dtype"] == "float32" and server.config["enforce_eager"] is True
    assert server.config["kv_event_sources"]["0"]["endpoint"] == "tcp://*:5691"
    assert "sekret" not in server.model_dump_json()
    assert notes == []
    names = [c.name for c in catalog.sources(ctx)]
    assert names == ["vllm-plugin", "vllm-metrics", "kv-events", "vllm-log"]


async def test_vllm_of_which_nothing_but_its_page_is_seen() -> None:
    server, notes, _ = await described(Pages(VLLM), "vllm")
    assert (server.block_size_tokens, server.max_sequences, server.max_batched_tokens) == (32, None, None)
    assert said(notes, "max-num-seqs and max-num-batched-tokens not known: its process is not seen here")
    assert said(notes, "layers and heads are not known")


async def test_vllm_in_development_mode_tells_more() -> None:
    server, notes, _ = await described(Pages(VLLM | INFO), "vllm")
    assert (server.max_sequences, server.max_batched_tokens) == (8, 512)
    assert server.config["tensor_parallel_size"] == 1 and server.config["enable_chunked_prefill"] is True
    assert server.config["enable_logging_iteration_details"] is True
    assert not said(notes, "max-num-seqs")
    assert "hf_token" not in server.model_dump_json()


async def test_the_defaults_of_vllm_are_not_assumed(started: Any) -> None:
    server, notes, _ = await described(Pages(VLLM), "vllm", pid=started(["vllm", "serve", "org/name", "--config", "c.yaml"]))
    assert server.max_sequences is None
    assert said(notes, "its command line does not set them, and vLLM's defaults depend on the machine")
    assert said(notes, "flags in the file that --config names are not read: c.yaml")


async def test_vllm_that_wants_a_key_or_hides_its_metrics() -> None:
    server, notes, _ = await described(Pages({"/v1/models": 401, "/metrics": 401}), "vllm")
    assert said(
        notes, "the model is not known: /v1/models needs the server's API key: name the variable that holds it with --key-env"
    )
    assert said(notes, "block size and KV capacity are not known: /metrics needs")
    assert server.block_count is None


async def test_several_engines_share_one_front_end() -> None:
    """The number of blocks is the sum over the engines (vllm/v1/engine/core_client.py), and each series has it."""
    line = next(x for x in VLLM["/metrics"].splitlines() if x.startswith("vllm:cache_config_info{"))
    page = line + "\n" + line.replace('engine="0"', 'engine="1"') + "\n"
    server, notes, _ = await described(Pages(VLLM | {"/metrics": page}), "vllm")
    assert (server.block_count, server.config["engines"]) == (131072 // 2 - 1, 2)
    assert said(notes, "of one of its 2 engines")


async def test_an_old_vllm_tells_less() -> None:
    page = (ENGINES / "vllm" / "metrics_0.4.prom").read_text()
    server, _, _ = await described(Pages({"/metrics": page}), "vllm")
    assert (server.block_size_tokens, server.block_count, server.prefix_caching) == (16, 7280, False)


# -- others -----------------------------------------------------------------------------------------------------------


# srt/server_args.py and http_server.py of 0.5.23: the arguments in whole, then the schedulers' states.
SGLANG = {
    "model_path": "org/model", "page_size": 64, "max_running_requests": None, "kv_cache_dtype": "fp8_e4m3", "dtype": "auto",
    "tp_size": 8, "dp_size": 2, "chunked_prefill_size": 8192, "max_prefill_tokens": 16384, "disable_radix_cache": False,
    "context_length": 131072, "speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4, "api_key": "server-secret",
    "admin_api_key": "admin-secret", "max_total_num_tokens": 1000, "enable_metrics": True, "enable_forward_pass_metrics": True,
    "forward_pass_metrics_ipc_name": "ipc:///tmp/fpm", "export_metrics_to_file": True, "export_metrics_to_file_dir": "/x",
    "kv_events_config": '{"publisher":"zmq","endpoint":"tcp://*:5557","secret":"s"}', "version": "0.5.23",
    "launch_command": "python -m sglang.launch_server --api-key server-secret",
    "internal_states": [{"max_running_requests": 256, "max_total_num_tokens": 430848, "private": "x"}, {}],
}  # fmt: skip


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_sglang_from_its_own_words(path: str) -> None:
    server, notes, ctx = await described(Pages({path: SGLANG}), "sglang")
    assert (server.max_sequences, server.block_size_tokens, server.kv_capacity_tokens) == (256, 64, 430848)
    assert (server.block_count, server.max_batched_tokens, server.context_tokens) == (6732, 8192, 131072)
    assert (server.kv_dtype, server.prefix_caching, server.model_path) == ("fp8_e4m3", True, "org/model")
    assert server.config["tp_size"] == 8 and server.config["speculative_algorithm"] == "EAGLE" and server.config["engines"] == 2
    text = server.model_dump_json()
    assert "secret" not in text and "private" not in text
    assert server.config["kv_events_config"] == {"publisher": "zmq", "endpoint": "tcp://*:5557"}
    assert [c.name for c in catalog.sources(ctx)] == [
        "sglang-metrics", "forward-pass", "kv-events", "sglang-export", "sglang-log",
    ]  # fmt: skip
    assert said(notes, "layers and heads are not known")


async def test_sglang_that_hides_its_settings(started: Any) -> None:
    argv = ["python", "-m", "sglang.launch_server", "--model-path", "m", "--max-running-requests", "64", "--api-key", "x"]
    server, notes, _ = await described(Pages({"/server_info": 401}), "sglang", pid=started(argv))
    assert server.max_sequences == 64 and server.kv_capacity_tokens is None
    assert said(notes, "its settings are not known: /server_info needs the server's API key")


async def test_tgi_from_its_info() -> None:
    # router/src/lib.rs: struct Info; the first as of 2.0, the second as of 3.3.7.
    old = {"model_id": "org/model", "model_dtype": "torch.float16", "max_total_tokens": 2048, "max_batch_total_tokens": 32000,
           "max_batch_size": None, "max_concurrent_requests": 128, "version": "2.0.4", "docker_label": None}  # fmt: skip
    server, notes, ctx = await described(Pages({"/info": old}), "tgi")
    assert (server.context_tokens, server.kv_capacity_tokens, server.max_sequences) == (2048, 32000, None)
    assert (server.config["max_concurrent_requests"], server.config["dtype"], server.engine_version) == (128, "float16", "2.0.4")
    assert said(notes, "sequences are not limited by number")
    server, notes, _ = await described(Pages({"/info": {"model_id": "m", "max_total_tokens": 4096}}), "tgi")
    assert server.kv_capacity_tokens is None and said(notes, "KV capacity is not known")
    assert [c.name for c in catalog.sources(ctx)] == ["tgi-metrics"]


async def test_tensorrt_llm_from_its_command_line_and_page(started: Any) -> None:
    argv = ["python3", "/usr/bin/trtllm-serve", "serve", "/models/m", "--max_batch_size", "64", "--max_num_tokens", "8192",
            "--tp_size", "2", "--extra_llm_api_options", "o.yaml"]  # fmt: skip
    page = (
        "# TYPE trtllm_kv_cache_max_blocks gauge\n"
        'trtllm_kv_cache_max_blocks{model_name="m",engine_type="trtllm"} 1000\n'
        'trtllm_kv_cache_tokens_per_block{model_name="m",engine_type="trtllm"} 32\n'
        'trtllm_parallel_config_info{model_name="m",engine_type="trtllm",tp_size="2",pp_size="1"} 1\n'
    )
    pages = Pages({"/prometheus/metrics": page, "/metrics": []})
    server, notes, ctx = await described(pages, "tensorrt-llm", pid=started(argv))
    assert (server.max_sequences, server.max_batched_tokens, server.model_path) == (64, 8192, "/models/m")
    assert (server.block_count, server.block_size_tokens, server.kv_capacity_tokens) == (1000, 32, 32000)
    assert server.config["tp_size"] == "2" and said(notes, "settings in o.yaml (--extra_llm_api_options) are not read")
    assert "/metrics" not in pages.seen, "it forgets what it has told"
    assert [c.name for c in catalog.sources(ctx)] == ["trtllm-steps", "trtllm-requests", "trtllm-metrics"]


async def test_dynamo_from_its_deployment_card() -> None:
    card = (ENGINES / "dynamo" / "frontend.prom").read_text() + "".join(
        f'dynamo_frontend_model_{n}{{model="qwen/qwen3-0.6b"}} {v}\n'
        for n, v in (("context_length", 40960), ("kv_cache_block_size", 16), ("total_kv_blocks", 1000), ("max_num_seqs", 256))
    )
    named = Server(name="dynamo", engine="dynamo", model="Qwen/Qwen3-0.6B")
    server, notes, _ = await described(Pages({"/metrics": card}), "dynamo", server=named)
    assert (server.context_tokens, server.block_size_tokens, server.block_count) == (40960, 16, 1000)
    assert (server.max_sequences, server.kv_capacity_tokens, server.config["part"]) == (256, 16000, "frontend")
    assert said(notes, "steps and KV are its workers'") and said(notes, "KV capacity is that of one worker")
    uneven = card + 'dynamo_frontend_model_total_kv_blocks{model="qwen/qwen3-0.6b",worker_id="2"} 900\n'
    server, notes, _ = await described(
        Pages({"/metrics": uneven}), "dynamo", server=named.model_copy(update={"block_count": None})
    )
    assert server.block_count is None and said(notes, "block_count is not one number")


@pytest.mark.parametrize("engine", sorted(GATEWAYS))
async def test_a_router_is_named_and_its_workers_are(engine: str) -> None:
    workers = {"workers": [{"url": "http://me:pw@w1:8000/x"}, {"url": "grpc://w2"}, "http://w3:1"]}
    server, notes, ctx = await described(Pages({"/workers": workers}), engine)
    assert server.config["workers"] == ["http://w1:8000", "http://w3:1"] and said(notes, GATEWAYS[engine])
    assert plan(ctx, {}).advice[0] == "attach to the router's workers too: http://w1:8000 http://w3:1"


async def test_a_proxy_before_it_is_said() -> None:
    server = Server(name="vllm", engine="vllm", config={"front": "nginx/1.27"})
    _, notes, _ = await described(Pages(VLLM), "vllm", server=server)
    assert notes[0].startswith("vllm: nginx/1.27 stands before the server")


async def test_a_server_that_tells_nothing_without_a_key() -> None:
    _, notes, _ = await described(Pages({}), "", server=Server(name="server", config={"denied": True}))
    assert notes == ["server: it wants an API key: name the variable that holds it with --key-env."]


async def test_an_engine_that_is_not_known() -> None:
    _, notes, ctx = await described(Pages({}), "something")
    assert said(notes, "of no engine that hoptrace knows (dynamo, llama.cpp, sglang, tensorrt-llm, tgi, vllm)")
    assert [c.name for c in catalog.sources(ctx)] == ["metrics"]


@pytest.mark.parametrize("body", [b"[" * 100_000, b"\xff\x00", b"null", b'{"data": 3}', b"1" * 10_000])
@pytest.mark.parametrize("engine", sorted(set(KNOWN)))
async def test_hostile_answers_leave_the_entry_empty(engine: str, body: bytes) -> None:
    paths = ("/v1/models", "/metrics", "/info", "/server_info", "/workers", "/props", "/slots", "/prometheus/metrics",
             "/kv_event_sources", "/server_info?config_format=json")  # fmt: skip
    server, _, _ = await described(Pages(dict.fromkeys(paths, body)), engine)
    assert (server.block_count, server.kv_capacity_tokens, server.layers) == (None, None, None)


def test_every_source_says_what_it_gives() -> None:
    assert all(GIVES.values())
    assert {"vllm-plugin", "vllm-log", "kv-events", "forward-pass", "sglang-export", "trtllm-steps", "llamacpp-log"} <= set(GIVES)


# -- the plan ---------------------------------------------------------------------------------------------------------


async def planned(findings: dict[str, Finding], engine: str = "vllm", **server: Any) -> Any:
    async with asked(Pages({})) as api:
        return plan(context(api, server=Server(name="s", engine=engine, **server)), findings)


async def test_sniffing_first_then_the_proxy() -> None:
    made = await planned({"sniff": Finding(True), "vllm-metrics": Finding(True)})
    assert [c.name for c in made.data_path] == ["sniff", "proxy"]
    assert " --sniff any:" in made.command and made.command.endswith("-o run.trace")
    made = await planned({"sniff": Finding(False, "no right")})
    assert "--proxy :9000" in made.command
    assert "sniff: " in made.text() and "not here: no right" in made.text()
    assert json.loads(json.dumps(made.as_json()))["data_path"][1]["available"] is True


async def test_the_plan_says_which_flag_gives_more() -> None:
    made = await planned(
        {"vllm-plugin": Finding(False, "none"), "vllm-log": Finding(True, "summaries only"), "process": Finding(True)}
    )
    assert made.advice[0].startswith("install hoptrace[vllm]")
    assert any("--enable-logging-iteration-details" in a for a in made.advice)
    assert [c.name for c in made.sources] == ["vllm-log", "process", "vllm-plugin"], "what is there comes first"
    made = await planned({"vllm-plugin": Finding(True), "vllm-log": Finding(True)})
    assert made.advice == []


async def test_a_worker_without_completions_has_no_data_path() -> None:
    made = await planned({"dynamo-metrics": Finding(True)}, "dynamo", config={"metrics_only": True})
    assert made.data_path == [] and "--proxy" not in made.command and any("only its metrics" in n for n in made.notes)
