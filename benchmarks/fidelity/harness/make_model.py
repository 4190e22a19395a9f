"""The first layers of a GGUF model in the form that vLLM reads, in bfloat16: real weights and costs, text without sense.

Run with the Python that has vLLM (and ``gguf``, ``accelerate``): ``make_model.py MODEL.gguf FOLDER [LAYERS]``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
    "rms_norm_eps", "rope_parameters", "rope_theta", "tie_word_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip


def make(source: Path, folder: Path, layers: int) -> None:
    """Write ``folder``; it appears under its name when it is whole."""
    where = {"gguf_file": source.name}
    whole = AutoModelForCausalLM.from_pretrained(
        str(source.parent), **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    told = whole.config.to_dict()
    config = LlamaConfig(**{k: told[k] for k in _KEYS if told.get(k) is not None}, num_hidden_layers=layers)
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    kept = {
        k: v for k, v in whole.state_dict().items() if not (k.startswith("model.layers.") and int(k.split(".")[2]) >= layers)
    }  # fmt: skip
    model.load_state_dict(kept)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(str(source.parent), **where).save_pretrained(part)
    part.rename(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 8)
