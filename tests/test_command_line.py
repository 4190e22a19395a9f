"""A server's flags from its command line, its process tree, and that no secret comes with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pages import ENGINES
from test_process import stat_line

from hoptrace.collectors.engines import llamacpp, sglang, trtllm, vllm
from hoptrace.collectors.engines.command_line import flags
from hoptrace.collectors.hardware.tree import MAX_PROCESSES, arguments, tree_of

TREE = json.loads((ENGINES / "vllm" / "tree.json").read_text())


def test_vllm_as_it_was_started() -> None:
    found = flags(TREE[0]["cmdline"][1:], vllm.FLAGS)
    assert found == {
        "model": "/models/toy", "served_model_name": ["toy"], "load_format": "dummy", "dtype": "float32", "block_size": 32,
        "max_model_len": 1024, "enforce_eager": True, "enable_logging_iteration_details": True, "max_num_seqs": 8,
        "max_num_batched_tokens": 512, "enable_prefix_caching": True,
        "kv_events_config": {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5691", "replay_endpoint": "tcp://*:5692",
        },
    }  # fmt: skip
    assert "sekret" in TREE[0]["cmdline"] and "sekret" not in json.dumps(found)


@pytest.mark.parametrize(
    ("line", "allowed", "found"),
    [
        ("--max-num-seqs=16 --max_num_batched_tokens 2k", vllm.FLAGS, {"max_num_seqs": 16, "max_num_batched_tokens": 2000}),
        ("--max-num-batched-tokens 8K -tp 4 -dp=2", vllm.FLAGS,
         {"max_num_batched_tokens": 8192, "tensor_parallel_size": 4, "data_parallel_size": 2}),
        ("--no-enable-prefix-caching --enable-chunked-prefill", vllm.FLAGS,
         {"enable_prefix_caching": False, "enable_chunked_prefill": True}),
        ("--no-enable-chunked-prefill --max-num-seqs 4 --max-num-seqs 8", vllm.FLAGS,
         {"enable_chunked_prefill": False, "max_num_seqs": 8}),
        ("--api-key sk-123 --hf-token hf_x --max-num-seqs 2", vllm.FLAGS, {"max_num_seqs": 2}),
        ("--api-key=sk-123 --chat-template {{secret}} --ssl-keyfile k", vllm.FLAGS, {}),
        ("--max-num-seqs many --block-size", vllm.FLAGS, {}),
        ("--served-model-name a b --dtype auto", vllm.FLAGS, {"served_model_name": ["a", "b"], "dtype": "auto"}),
        ("--otlp-traces-endpoint http://me:pw@h:4317", vllm.FLAGS, {"otlp_traces_endpoint": "http://h:4317"}),
        ("-c 8192 -np 4 -kvu -ctk q8_0 --api-key x", llamacpp.FLAGS,
         {"ctx_size": 8192, "parallel": 4, "kv_unified": True, "cache_type_k": "q8_0"}),
        ("--model-path m --tp 8 --page-size 64 --disable-radix-cache --api-key x", sglang.FLAGS,
         {"model_path": "m", "tp_size": 8, "page_size": 64, "disable_radix_cache": True}),
        ("serve m --max_batch_size 64 --tp_size 2 --config o.yaml", trtllm.FLAGS,
         {"max_batch_size": 64, "tp_size": 2, "extra_llm_api_options": "o.yaml"}),
    ],
)  # fmt: skip
def test_forms_of_flags(line: str, allowed: Any, found: dict[str, Any]) -> None:
    assert flags(line.split(), allowed) == found


def test_of_json_by_its_keys() -> None:
    line = [
        "--kv-events-config.publisher",
        "zmq",
        "--kv-events-config.enable-kv-cache-events=true",
        "--kv-transfer-config.token",
        "x",
    ]
    assert flags(line, vllm.FLAGS) == {
        "kv_events_config": {"publisher": "zmq", "enable_kv_cache_events": True}, "kv_transfer_config": {},
    }  # fmt: skip


def test_of_json_only_what_is_listed() -> None:
    value = '{"kv_connector":"NixlConnector","kv_role":"kv_consumer","kv_connector_extra_config":{"token":"t"},"password":"p"}'
    assert flags(["--kv-transfer-config", value], vllm.FLAGS) == {
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    }
    assert flags(["--kv-transfer-config", "[" * 100_000], vllm.FLAGS) == {}
    assert flags(["--kv-transfer-config", "{broken"], vllm.FLAGS) == {}


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=12))
def test_no_command_line_breaks_it_and_only_allowed_names_come_out(words: list[str]) -> None:
    allowed = {(a.partition("=")[2] or a).lstrip("-").replace("-", "_") for a in vllm.FLAGS}
    assert set(flags(words, vllm.FLAGS)) <= allowed


# -- the tree ---------------------------------------------------------------------------------------------------------


def plant(root: Path, pid: int, parent: int, comm: str, cmdline: list[str], state: str = "S") -> None:
    (root / str(pid)).mkdir(parents=True)
    line = stat_line(pid, comm, 1, 5000 + pid, state).replace(f") {state} 1 ", f") {state} {parent} ")
    (root / str(pid) / "stat").write_text(line)
    (root / str(pid) / "cmdline").write_bytes(b"\0".join(w.encode() for w in cmdline) + b"\0")


def recorded(root: Path) -> None:
    for p in TREE:
        plant(root, p["pid"], p["ppid"], p["comm"], p["cmdline"])


def test_the_recorded_tree_of_a_vllm(tmp_path: Path) -> None:
    recorded(tmp_path)
    plant(tmp_path, TREE[0]["ppid"], 1, "bash", ["bash", "start.sh"])
    plant(tmp_path, 99, TREE[0]["ppid"], "sleep", ["sleep", "9"])
    tree = tree_of(TREE[0]["pid"], tmp_path)
    assert [(p.role, p.command) for p in tree] == [
        ("api", "python -m vllm.entrypoints.openai.api_server"),
        ("helper", "python -c multiprocessing.resource_tracker"),
        ("engine", "VLLM::EngineCore"),
        ("worker", "VLLM::Worker"),
    ]
    assert "sekret" not in str(tree)
    assert arguments(TREE[2]["pid"], tmp_path) == ["VLLM::EngineCore"], "a title is no command line"


def test_a_listener_that_is_a_child_belongs_to_its_parents_tree(tmp_path: Path) -> None:
    plant(tmp_path, 10, 9, "vllm", ["/usr/bin/python3", "/usr/bin/vllm", "serve", "m", "--api-server-count", "2"])
    plant(tmp_path, 9, 1, "tini", ["tini", "--", "vllm", "serve"])
    plant(tmp_path, 11, 10, "VLLM::ApiServer", ["VLLM::ApiServer_0"])
    plant(tmp_path, 12, 10, "VLLM::EngineCore", ["VLLM::EngineCore_DP0"])
    assert [p.pid for p in tree_of(11, tmp_path)] == [10, 11, 12]
    assert [p.role for p in tree_of(11, tmp_path)] == ["api", "api", "engine"]


def test_a_test_runner_that_names_an_engine_is_none(tmp_path: Path) -> None:
    plant(tmp_path, 10, 1, "python", ["python", "-m", "pytest", "tests/test_vllm.py"])
    plant(tmp_path, 11, 10, "python", ["python", "-m", "sglang.launch_server", "--api-key", "x"])
    plant(tmp_path, 12, 11, "sglang::schedul", ["sglang::scheduler_TP0"])
    plant(tmp_path, 13, 11, "sglang::detoken", ["sglang::detokenizer"])
    assert [(p.pid, p.role) for p in tree_of(11, tmp_path)] == [(11, "api"), (12, "engine"), (13, "helper")]


def test_trees_are_bounded_and_loops_end(tmp_path: Path) -> None:
    plant(tmp_path, 5, 1, "python", ["python"])
    for pid in range(100, 300):
        plant(tmp_path, pid, 5, "w", ["w"])
    assert len(tree_of(5, tmp_path)) == MAX_PROCESSES
    assert tree_of(4242, tmp_path) == []
    plant(tmp_path, 7, 8, "a", ["a"])
    plant(tmp_path, 8, 7, "b", ["b"])
    assert {p.pid for p in tree_of(7, tmp_path)} <= {7, 8}


def test_a_real_tree() -> None:
    child = "import time, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); p.wait()"
    with subprocess.Popen([sys.executable, "-c", child]) as process:
        try:
            end = time.monotonic() + 10
            while len(tree_of(process.pid)) < 2 and time.monotonic() < end:
                time.sleep(0.05)
            tree = tree_of(process.pid)
            assert [p.parent for p in tree] == [os.getpid(), process.pid]
        finally:
            for p in reversed(tree_of(process.pid)):
                os.kill(p.pid, 9)
