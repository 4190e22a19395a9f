"""A real vLLM with a toy model, for tests and benchmarks: one layer, random weights, no tokenizer, prompts are token ids.

``HOPTRACE_VLLM_PYTHON`` names a Python that has vLLM. hoptrace itself need not be installed there: a folder of links and its
entry points is put on the server's path.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
TOY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128, "vocab_size": 1024,
    "max_position_embeddings": 4096, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "1",
}  # fmt: skip


def python() -> str | None:
    """The Python that has vLLM, or null."""
    return os.environ.get("HOPTRACE_VLLM_PYTHON")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def toy_model(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TOY | changes))
    return folder


def plugin_path(folder: Path) -> Path:
    """A folder that makes hoptrace and its entry points importable, as an installed package would be."""
    package = folder / "hoptrace"
    package.mkdir(parents=True, exist_ok=True)
    for file in (ROOT / "core").iterdir():
        if file.name != "__pycache__" and not (package / file.name).exists():
            (package / file.name).symlink_to(file)
    if not (package / "collectors").exists():
        (package / "collectors").symlink_to(ROOT / "collectors")
    info = folder / "hoptrace-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hoptrace\nVersion: 0\n")
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in e.items()) for group, e in project["entry-points"].items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@dataclass
class VllmServer:
    """One server. ``tree`` are its processes as they were when it was ready."""

    port: int
    log: Path
    process: subprocess.Popen[bytes]
    tree: list[psutil.Process] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self, seconds: float = 240) -> VllmServer:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"vLLM ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2):
                    root = psutil.Process(self.process.pid)
                    self.tree = [root, *root.children(recursive=True)]
                    return self
            except (OSError, urllib.error.URLError):
                time.sleep(0.5)
        raise RuntimeError(f"vLLM did not start in {seconds} s:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """kill -9 of the whole tree."""
        known = {p.pid: p for p in self.tree}
        try:
            root = psutil.Process(self.process.pid)
            known |= {p.pid: p for p in [root, *root.children(recursive=True)]}
        except psutil.NoSuchProcess:
            pass
        for p in known.values():
            try:
                p.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(list(known.values()), timeout=20)
        self.process.wait(20)

    def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, timeout: float = 120
    ) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"} | (headers or {})
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            answer: dict[str, Any] = json.loads(reply.read())
            return answer

    def complete(self, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        """One completion of exactly ``tokens`` tokens."""
        body = {
            "model": "toy", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip
        return self.post("/v1/completions", body | more)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            text: str = reply.read().decode()
            return text


def start(
    folder: Path, *flags: str, env: dict[str, str] | None = None, port: int | None = None, name: str = "vllm"
) -> VllmServer:
    """Start a server; :meth:`VllmServer.wait` for it. ``folder`` keeps its model, log and the plug-in's links."""
    model = toy_model(folder / "toy")
    port = port or free_port()
    log = folder / f"{name}.log"
    command = [
        python() or "python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "toy",
        "--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "float32",
        "--block-size", "32", "--enforce-eager", "--max-model-len", "2048", "--generation-config", "vllm", *flags,
    ]  # fmt: skip
    path = os.pathsep.join([str(plugin_path(folder / "path")), *filter(None, [(env or {}).get("PYTHONPATH")])])
    environment = os.environ | ENVIRONMENT | (env or {}) | {"PYTHONPATH": path}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True, preexec_fn=_with_parent
        )
    return VllmServer(port, log, process)


def _with_parent() -> None:
    """A server does not outlive the test run that started it, however that ends (prctl(2), PR_SET_PDEATHSIG); its own children
    end with it."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
