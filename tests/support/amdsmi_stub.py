"""A libamd_smi.so of ours under AMD's real Python package: one GPU whose metrics table and error code are read from files."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

__all__ = ["build", "missing"]

_GPU = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int told(const char *name, void *to, size_t n) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("ROCM_PATH"), name);
    FILE *f = fopen(path, "rb");
    if (!f) return -1;
    size_t got = fread(to, 1, n, f);
    fclose(f);
    return (int)got;
}

static int error(void) {
    char text[16] = {0};
    return told("error", text, 15) > 0 ? atoi(text) : 0;
}

int amdsmi_init(uint64_t flags) { return error() == 34 ? 34 : 0; }
int amdsmi_shut_down(void) { return 0; }
int amdsmi_get_socket_handles(uint32_t *n, void **to) { *n = 1; if (to) to[0] = (void *)1; return 0; }
int amdsmi_get_processor_handles(void *socket, uint32_t *n, void **to) { *n = 1; if (to) to[0] = (void *)2; return 0; }
int amdsmi_get_gpu_device_bdf(void *gpu, uint64_t *bdf) { *bdf = (uint64_t)0xc1 << 8; return 0; }
int amdsmi_get_gpu_device_uuid(void *gpu, unsigned *n, char *to) { strcpy(to, "fcff7460-0000-1000-80d1-2f3b9d2c9a11"); return 0; }
int amdsmi_get_energy_count(void *gpu, uint64_t *n, float *each, uint64_t *at) { *n = 7; *each = 15.3f; *at = 1; return error(); }
int amdsmi_get_gpu_vram_usage(void *gpu, uint32_t *to) { to[0] = 196592; to[1] = 283; return error(); }
int amdsmi_get_gpu_metrics_info(void *gpu, void *to) { int e = error(); if (!e) told("metrics", to, 1 << 16); return e; }
"""


def missing() -> str | None:
    """Why it can't be built; null: it can."""
    if shutil.which("cc") is None:
        return "no C compiler here"
    if importlib.util.find_spec("amdsmi") is None:
        return "the package amdsmi is not installed (pip install amdsmi==7.0.2)"
    return None


def build(folder: Path) -> None:
    """``folder``/lib/libamd_smi.so, with every function that the package looks for at import: those that are not of ours
    answer "not supported" (2). ``folder`` is to be ROCM_PATH."""
    spec = importlib.util.find_spec("amdsmi")
    assert spec is not None and spec.origin is not None
    wrapper = (Path(spec.origin).parent / "amdsmi_wrapper.py").read_text()
    names = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", wrapper))
    own = set(re.findall(r"^int (\w+)\(", _GPU, re.M))
    source = _GPU + "".join(f"int {name}(void) {{ return 2; }}\n" for name in sorted(names - own))
    (folder / "lib").mkdir(parents=True)
    (folder / "stub.c").write_text(source)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", folder / "lib/libamd_smi.so", folder / "stub.c"], check=True, capture_output=True
    )
