"""A llama.cpp server in the foreground, with the settings that cells change. It is the C++ llama-server inside a Python process
(``xllamacpp``, extra ``demo``); flags are named as llama-server's own.

Run: ``python llama.py MODEL --port N [--parallel 4] [--cache-type-k q8_0] [--no-cache-prompt] …``.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

_TYPES = {"f16": "GGML_TYPE_F16", "f32": "GGML_TYPE_F32", "q8_0": "GGML_TYPE_Q8_0", "q4_0": "GGML_TYPE_Q4_0"}


def main() -> None:
    """Parse and serve."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # not to outlive who started it
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    p = argparse.ArgumentParser()
    p.add_argument("model", type=Path)
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--parallel", type=int, default=4, help="slots")
    p.add_argument("--ctx-size", type=int, help="of all slots together; else 2048 for each")
    p.add_argument("--batch-size", type=int, default=2048)
    p.add_argument("--ubatch-size", type=int, default=512)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--cache-type-k", choices=_TYPES, default="f16")
    p.add_argument("--cache-type-v", choices=_TYPES, default="f16")
    p.add_argument("--flash-attn", choices=("on", "off", "auto"), default="auto")
    p.add_argument("--cache-reuse", type=int, default=0)
    p.add_argument("--cache-prompt", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--kv-unified", action=argparse.BooleanOptionalAction, default=False)
    p.add_argument("--slot-save-path", type=Path, required=True, help="needed to clear slots")
    p.add_argument("--spec-type", choices=("none", "draft-simple"), default="none")
    p.add_argument("--model-draft", type=Path)
    p.add_argument("--spec-draft-n-max", type=int, default=4)
    a = p.parse_args()
    try:
        import xllamacpp
    except ImportError:
        sys.exit("xllamacpp is not installed; run: pip install 'hoptrace[demo]'")
    c = xllamacpp.CommonParams()
    c.model.path = str(a.model)
    c.port = a.port
    c.n_parallel = a.parallel
    c.n_ctx = a.ctx_size or 2048 * a.parallel
    c.n_batch, c.n_ubatch = a.batch_size, a.ubatch_size
    c.endpoint_metrics = c.endpoint_slots = c.endpoint_props = True
    c.slot_save_path = f"{a.slot_save_path}/"
    # Fitting parameters to free memory would make two runs differ; the cache in host memory would serve prompts across slots.
    c.fit_params = False
    c.cache_ram_mib = 0
    c.kv_unified = a.kv_unified
    c.cache_prompt, c.n_cache_reuse = a.cache_prompt, a.cache_reuse
    c.cpuparams.n_threads = c.cpuparams_batch.n_threads = a.threads
    c.cache_type_k, c.cache_type_v = (getattr(xllamacpp.ggml_type, _TYPES[t]) for t in (a.cache_type_k, a.cache_type_v))
    c.flash_attn_type = xllamacpp.llama_flash_attn_type({"auto": -1, "off": 0, "on": 1}[a.flash_attn])
    if a.spec_type != "none":
        if a.model_draft is None:
            sys.exit("--spec-type draft-simple needs --model-draft.")
        c.speculative.draft.mparams.path = str(a.model_draft)
        c.speculative.draft.n_max = a.spec_draft_n_max
        c.speculative.draft.cpuparams.n_threads = c.speculative.draft.cpuparams_batch.n_threads = a.threads
        c.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    server = xllamacpp.Server(c)
    print(f"listening on {server.listening_address}", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
