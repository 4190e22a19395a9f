"""config.json and safetensors headers of Hugging Face models."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoptrace.errors import InputError
from hoptrace.hf_config import ModelConfig, find_config, read_config, weights_of


def config(folder: Path, data: Any) -> ModelConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(data if isinstance(data, str) else json.dumps(data))
    return read_config(folder)


# The fields as the published configurations have them: Llama-3.1-8B, Mixtral-8x7B, DeepSeek-V3, gpt2, Gemma 3, falcon-7b.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama 3.1 8B": (
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
         "torch_dtype": "bfloat16", "model_type": "llama"},
        {"layers": 32, "heads": 32, "kv_heads": 8, "head_size": 128, "hidden_size": 4096, "dtype": "bfloat16",
         "architecture": "LlamaForCausalLM", "context_tokens": 131072, "experts": None, "mla": False},
    ),
    "mixtral": (
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        {"experts": 8, "experts_per_token": 2, "window_tokens": None, "head_size": 128},
    ),
    "deepseek v3": (
        {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
         "kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_routed_experts": 256, "num_experts_per_tok": 8,
         "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}},
        {"kv_heads": 1, "head_size": 576, "mla": True, "experts": 256, "experts_per_token": 8, "quantisation": "fp8"},
    ),
    "gpt2": ({"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
             {"layers": 12, "heads": 12, "kv_heads": 12, "head_size": 64, "hidden_size": 768, "context_tokens": 1024}),
    "gemma 3, multimodal": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
         "text_config": {"hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
                         "head_dim": 256, "sliding_window": 1024}},
        {"layers": 34, "heads": 8, "kv_heads": 4, "head_size": 256, "hidden_size": 2560, "window_tokens": 1024},
    ),
    "falcon 7b": ({"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True},
                  {"kv_heads": 1, "head_size": 64}),
    "awq": ({"quantization_config": {"quant_method": "awq", "bits": 4}}, {"quantisation": "awq 4 bit", "layers": None}),
    "window that is off": ({"sliding_window": 4096, "use_sliding_window": False}, {"window_tokens": None}),
    "odd types": ({"num_hidden_layers": "32", "num_attention_heads": -1, "hidden_size": True, "architectures": "x"},
                  {"layers": None, "heads": None, "hidden_size": None, "architecture": None, "kv_heads": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_published_configurations(tmp_path: Path, name: str) -> None:
    data, expected = CASES[name]
    found = config(tmp_path / "m", data)
    assert {k: getattr(found, k) for k in expected} == expected


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, '"x"'])
def test_what_is_no_configuration_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        config(tmp_path / "m", text)


def test_files_that_are_not_there_or_too_long(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be read"):
        read_config(tmp_path / "nothing")
    (tmp_path / "config.json").write_text(" " * (5 << 20))
    with pytest.raises(InputError, match="longer than 4 MiB"):
        read_config(tmp_path)


_INNER = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda x: st.lists(x, max_size=2) | st.dictionaries(st.sampled_from(["hidden_size", "text_config"]), x, max_size=2),
)
_NAMES = st.sampled_from(["hidden_size", "num_attention_heads", "text_config", "head_dim", "quantization_config"])


@given(st.dictionaries(_NAMES, _INNER))
def test_whatever_stands_there_it_reads(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]) -> None:
    found = config(tmp_path_factory.mktemp("m"), data)
    assert found.head_size is None or found.head_size > 0


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]], width: dict[str, int]) -> None:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        n = width[dtype]
        for x in shape:
            n *= x
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n]}  # type: ignore[dict-item]
        at += n
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))


WIDTH = {"BF16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1}


def test_size_and_parameters_from_the_headers(tmp_path: Path) -> None:
    safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": ("BF16", [10, 20]), "b": ("F32", [3])}, WIDTH)
    safetensors(tmp_path / "model-00002-of-00002.safetensors", {"c": ("BF16", [5])}, WIDTH)
    assert weights_of(tmp_path) == (208, 2 * 205 + 12)
    safetensors(tmp_path / "consolidated.safetensors", {"a": ("BF16", [10, 20])}, WIDTH)
    assert weights_of(tmp_path) == (208, 422), "the same weights a second time are no more weights"


def test_bytes_in_the_type_that_the_server_holds(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors", {"a": ("BF16", [10, 20]), "b": ("F32", [3])}, WIDTH)
    assert weights_of(tmp_path, 4) == (203, 812) and weights_of(tmp_path, 2) == (203, 406)
    safetensors(tmp_path / "model.safetensors", {"a": ("F8_E4M3", [10, 20]), "b": ("F32", [3])}, WIDTH)
    assert weights_of(tmp_path, 2) == (203, 212), "quantised: the file's size"


def test_packed_weights_have_a_size_and_no_number(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors", {"q": ("I32", [100]), "s": ("BF16", [4])}, WIDTH)
    assert weights_of(tmp_path) == (None, 408)


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, struct.pack("<Q", 10) + b"{}", struct.pack("<Q", 2) + b"[]"])
def test_files_that_are_no_safetensors(tmp_path: Path, data: bytes) -> None:
    assert weights_of(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(data)
    assert weights_of(tmp_path) is None


def test_where_a_model_lies(tmp_path: Path) -> None:
    """A path, or the Hugging Face cache, as a process in another root sees it."""
    root, home = tmp_path / "root", Path("/home/me")
    hub = root / "home/me/.cache/huggingface/hub/models--org--name"
    for revision in ("abc", "def"):
        (hub / "snapshots" / revision).mkdir(parents=True)
        (hub / "snapshots" / revision / "config.json").write_text("{}")
    assert find_config("org/name", root=root, home=home) is None, "two revisions, and nobody says which"
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("def\n")
    assert find_config("org/name", root=root, home=home) == hub / "snapshots/def"
    assert find_config("org/name", root=root, cache=Path("/home/me/.cache/huggingface/hub")) == hub / "snapshots/def"
    (root / "models/m").mkdir(parents=True)
    assert find_config("/models/m", root=root) is None
    (root / "models/m/config.json").write_text("{}")
    assert find_config("/models/m", root=root) == root / "models/m"
    for name in ("../../etc/passwd", "a/b/c", "~/m", "--model", "org/other"):
        assert find_config(name, root=root, home=home) is None
