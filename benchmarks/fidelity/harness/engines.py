"""The command line and environment of one server: vLLM on CPU, vLLM with modelled steps, llama.cpp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from hoptrace.demo_model import fetch_model
from hoptrace.errors import EnvironmentProblem

_HERE = Path(__file__).resolve()
_BENCHMARKS, _ROOT = _HERE.parents[2], _HERE.parents[3]
if str(_ROOT / "tests") not in sys.path:
    sys.path.append(str(_ROOT / "tests"))

from harness.recipe import Flag, Policy  # noqa: E402
from support.vllm_server import ENVIRONMENT, TOY, plugin_path  # noqa: E402 — of the tests, after the path to them

__all__ = ["Place", "arguments", "command", "vllm_python"]

_SCHEDULER = "hoptrace.collectors.inside.vllm_scheduler.RecordingScheduler"
_DEFAULTS: dict[str, dict[str, Flag]] = {
    "vllm": {
        "dtype": "float32", "block-size": 32, "max-model-len": 2048, "enforce-eager": True, "generation-config": "vllm",
        "enable-logging-iteration-details": True, "scheduler-cls": _SCHEDULER,
    },
    "modelled": {
        "load-format": "dummy", "skip-tokenizer-init": True, "dtype": "float32", "block-size": 32, "max-model-len": 4096,
        "enforce-eager": True, "generation-config": "vllm", "enable-logging-iteration-details": True,
        "scheduler-cls": "modelled_seen.Seen", "distributed-executor-backend": "modelled_vllm.Nothing",
    },
    "llamacpp": {},
}  # fmt: skip
# NIXL's progress thread spins, and vLLM has no option that turns it off: this turns its default off, in these servers only.
_QUIET_NIXL = """try:
    import nixl._api as api
    made = api.nixl_agent_config.__init__
    def init(self, *args, **kw):
        kw.setdefault("enable_prog_thread", False)
        made(self, *args, **kw)
    api.nixl_agent_config.__init__ = init
except Exception:
    pass
"""


@dataclass(frozen=True)
class Place:
    """Where one server runs. ``folder``: for its files; ``role``: *prefill* or *decode* of a split; ``side_port``: NIXL's."""

    folder: Path
    port: int
    cpu: int
    role: str | None = None
    side_port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def vllm_python() -> str:
    """The Python that has vLLM. EnvironmentProblem if none is named, or it has none."""
    named = os.environ.get("HOPTRACE_VLLM_PYTHON")
    if not named:
        raise EnvironmentProblem(
            "HOPTRACE_VLLM_PYTHON names no Python that has vLLM.",
            hint="Install vLLM for CPU in an environment of its own (benchmarks/fidelity/README.md) and name its python there.",
        )
    if not Path(named).exists():
        raise EnvironmentProblem(f"HOPTRACE_VLLM_PYTHON is {named}, and that is not there.")
    return named


def arguments(flags: Mapping[str, Flag]) -> list[str]:
    """Flags as words: true is ``--flag``, false ``--no-flag``, a table JSON."""
    words: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def command(policy: Policy, flags: Mapping[str, Flag], place: Place, shared: Path) -> tuple[list[str], dict[str, str]]:
    """(words, environment) that start one server in the foreground. ``shared``: files of all servers (models, links).

    Raises:
        EnvironmentProblem: what it needs is not on this machine.
    """
    flags = {**_DEFAULTS[policy.engine], **flags}
    if policy.engine == "llamacpp":
        return _llamacpp(flags, place, policy.env)
    place.folder.mkdir(parents=True, exist_ok=True)
    python = vllm_python()
    model = _vllm_model(python) if policy.engine == "vllm" else _toy(shared / "toy")
    path = [str(plugin_path(shared / "path"))]
    env = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": str(place.cpu), "HOPTRACE_CHANNELS": str(place.folder.parent / "channels")}
    if policy.engine == "modelled":
        path.append(str(_BENCHMARKS / "support"))
        (place.folder / "times.json").write_text(json.dumps(policy.times))
        truth, times = str(place.folder / "truth.jsonl"), str(place.folder / "times.json")
        env |= {"MODELLED_TRUTH": truth, "MODELLED_TIMES": times}
    if place.role is not None:
        quiet = shared / "quiet"
        quiet.mkdir(exist_ok=True)
        (quiet / "sitecustomize.py").write_text(_QUIET_NIXL)
        path.append(str(quiet))
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}[place.role]
        flags["kv-transfer-config"] = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        env |= {
            "UCX_TLS": "tcp,self", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(place.side_port),
        }  # fmt: skip
    env |= policy.env
    env["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [policy.env.get("PYTHONPATH")])])
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "smol"]
    words += ["--host", "127.0.0.1", "--port", str(place.port), *arguments(flags)]
    return words, os.environ | env


def _llamacpp(flags: Mapping[str, Flag], place: Place, env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    model = fetch_model()
    slots = place.folder / "slots"
    slots.mkdir(parents=True, exist_ok=True)
    # Named as llama.cpp's own server, so that its flags are known for what they are; under another name Python does not see that
    # it belongs to an environment.
    program = place.folder / "llama-server"
    program.unlink(missing_ok=True)
    program.symlink_to(sys.executable)
    words = [str(program), str(_HERE.with_name("llama.py")), str(model), "--port", str(place.port)]
    words += ["--slot-save-path", str(slots), *(x.replace("{model}", str(model)) for x in arguments(flags))]
    return words, os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")} | dict(env)


def _toy(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TOY))
    return folder


def _vllm_model(python: str) -> Path:
    """The small model for vLLM: ``HOPTRACE_VLLM_MODEL``, or the demo's first layers in vLLM's form, made once (a minute)."""
    if named := os.environ.get("HOPTRACE_VLLM_MODEL"):
        if not (Path(named) / "config.json").exists():
            raise EnvironmentProblem(f"HOPTRACE_VLLM_MODEL is {named}, and no model's config.json is there.")
        return Path(named)
    cache = Path(os.environ.get("HOPTRACE_CACHE") or platformdirs.user_cache_dir("hoptrace")) / "models" / "smollm2-8-layers"
    if not (cache / "config.json").exists():
        done = subprocess.run(
            [python, str(_HERE.with_name("make_model.py")), str(fetch_model()), str(cache)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise EnvironmentProblem(
                f"The model for vLLM could not be made: {(done.stderr.strip().splitlines() or ['no word'])[-1][:300]}",
                hint="Install gguf, and accelerate with --no-deps, beside vLLM; or name a model in HOPTRACE_VLLM_MODEL.",
            )
    return cache
