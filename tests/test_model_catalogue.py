"""The catalogue of models: shapes give the published numbers of parameters, KV bytes and weights; a config.json is read alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hoptrace.errors import InputError, UsageError
from hoptrace.kv import geometry
from hoptrace.manifest import Server
from hoptrace.model_catalogue import known_as, load_model, models
from hoptrace.model_shape import Shape

# Totals of the safetensors indices on Hugging Face (elements of all tensors); of DeepSeek-V3 as its report counts, without the
# layer of multi-token prediction.
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "mixtral-8x7b": 46_702_792_704,
    "smollm2-135m": 134_515_008,
}
# Active ones as the publishers state them, in billions. They count the embedding table or not, so 10 % either way; Qwen3-30B-A3B:
# 3.3, 235B-A22B: 22, DeepSeek-V3: 37, gpt-oss: 3.6 and 5.1, Mixtral: 12.9.
ACTIVE = {
    "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22, "deepseek-v3": 37, "gpt-oss-20b": 3.6, "gpt-oss-120b": 5.1, "mixtral-8x7b": 12.9,
}  # fmt: skip
# Bytes of KV for a token, BF16: the platform constants of the project, section 10.
KV_BYTES = {
    "llama-3.1-8b": 131_072, "qwen3-8b": 147_456, "llama-3.1-70b": 327_680, "qwen3-235b-a22b": 192_512, "deepseek-v3": 70_272,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_follow_from_the_shape(name: str) -> None:
    shape = models()[name].shape
    assert shape.parameters == PARAMETERS[name]
    assert 0 < shape.active_parameters <= shape.parameters
    if name in ACTIVE:
        assert shape.active_parameters / 1e9 == pytest.approx(ACTIVE[name], rel=0.1)
    else:
        table = 0 if shape.tied else shape.vocabulary * shape.hidden_size
        assert shape.active_parameters == shape.parameters - table


def test_every_file_says_what_follows_from_it_and_where_it_is_from() -> None:
    import tomllib
    from importlib.resources import files

    assert set(models()) == set(PARAMETERS)
    for entry in files("hoptrace.models").iterdir():
        if entry.name.endswith(".toml"):
            data = tomllib.loads(entry.read_text(encoding="utf-8"))
            shape = models()[data["name"]].shape
            assert (data["parameters"], data["active_parameters"]) == (shape.parameters, shape.active_parameters), entry.name
            assert entry.name == f"{data['name']}.toml" and data["sources"]["shape"].startswith(("config.json of ", "Header of "))


@pytest.mark.parametrize("name", KV_BYTES)
def test_kv_of_a_token(name: str) -> None:
    g = geometry(models()[name].on(Server(name="s")))
    assert g is not None and g.bytes_per_token == KV_BYTES[name]


def test_kv_under_tensor_parallelism_and_windows() -> None:
    qwen = geometry(models()["qwen3-235b-a22b"].on(Server(name="s", config={"tensor_parallel_size": 8})))
    assert qwen is not None and qwen.bytes_per_token == 385_024  # 4 heads on 8 ranks are copied
    oss = geometry(models()["gpt-oss-20b"].on(Server(name="s")))
    assert oss is not None and (oss.window_layers, oss.window_tokens, oss.bytes_per_token) == (12, 128, 49_152)
    assert oss.bytes_of(1000) == 12 * 2048 * 1000 + 12 * 2048 * 128


def test_weights() -> None:
    # The published checkpoints: 13.8 and 65.2 GB of gpt-oss in MXFP4, 16.06 GB of Llama-3.1-8B in BF16.
    assert models()["gpt-oss-20b"].shape.weight_bytes == pytest.approx(13.76e9, rel=0.002)
    assert models()["gpt-oss-120b"].shape.weight_bytes == pytest.approx(65.25e9, rel=0.002)
    assert models()["llama-3.1-8b"].shape.weight_bytes == 16_060_522_496


@pytest.mark.parametrize(
    "text, name",
    [("llama-3.1-8b", "llama-3.1-8b"), ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"), ("Qwen/Qwen3-8B", "qwen3-8b"),
     ("DeepSeek-R1", "deepseek-v3"), ("OpenAI/GPT-OSS-20B", "gpt-oss-20b"), (" mixtral-8x7b ", "mixtral-8x7b")],
)  # fmt: skip
def test_names(text: str, name: str) -> None:
    found = known_as(text)
    assert found is not None and found.name == name and load_model(text) is found


def test_what_is_no_model() -> None:
    assert known_as("llama") is None and known_as("") is None
    with pytest.raises(UsageError, match="Did you mean 'qwen3-32b'"):
        load_model("qwen3-33b")


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "head_dim": 128,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "max_position_embeddings": 40960,
}  # fmt: skip
MLA = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}, "max_position_embeddings": 163840,
}  # fmt: skip
OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088, "num_local_experts": 32, "num_experts_per_tok": 4,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"}, "max_position_embeddings": 131072,
}  # fmt: skip


def config(folder: Path, data: Any) -> Path:
    (folder / "config.json").write_text(data if isinstance(data, str) else json.dumps(data))
    return folder / "config.json"


@pytest.mark.parametrize(
    "data, name", [(LLAMA, "llama-3.1-8b"), (MOE, "qwen3-30b-a3b"), (MLA, "deepseek-v3"), (OSS, "gpt-oss-20b")]
)
def test_a_config_json_gives_the_catalogues_shape(tmp_path: Path, data: dict[str, Any], name: str) -> None:
    assert load_model(str(config(tmp_path, data))).shape == models()[name].shape
    assert load_model(str(tmp_path)).shape == models()[name].shape


@pytest.mark.parametrize(
    "data, message",
    [
        ("{", "no JSON"),
        ("[]", "no object"),
        ({**LLAMA, "model_type": "mamba2"}, "type 'mamba2' can't be told"),
        ({k: v for k, v in LLAMA.items() if k != "intermediate_size"}, "does not say intermediate_size"),
        ({k: v for k, v in MLA.items() if k != "v_head_dim"}, "does not say all of"),
        ({**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}}, "awq 4 bit"),
        ({**MOE, "num_experts_per_tok": 200}, "experts_per_token"),
        ({**LLAMA, "torch_dtype": "int3"}, "weight type 'int3' is unknown"),
    ],
)
def test_a_config_that_does_not_tell_is_refused(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(str(config(tmp_path, data)))


def test_a_server_takes_the_models_sizes_and_keeps_its_own_configuration() -> None:
    own = Server(name="s", model="other", max_sequences=8, config={"tensor_parallel_size": 2, "experts": 4, "window_tokens": 9})
    got = models()["llama-3.1-8b"].on(own)
    assert (got.model, got.max_sequences, got.layers, got.context_tokens) == ("meta-llama/Llama-3.1-8B", 8, 32, 131_072)
    assert got.config["tensor_parallel_size"] == 2 and "experts" not in got.config and "window_tokens" not in got.config
    assert own.config["experts"] == 4


def test_shapes_that_cannot_be_are_refused() -> None:
    good = {"layers": 2, "hidden_size": 8, "intermediate_size": 8, "heads": 2, "kv_heads": 2, "head_size": 4, "vocabulary": 16}
    assert Shape(**good).parameters == 2 * 16 * 8 + 2 * (4 * 64 + 3 * 64) + 5 * 8
    for bad in ({"layers": 0}, {"experts": 4}, {"dense_layers": 3}, {"window_layers": 3}, {"dtype": "bf17"}):
        with pytest.raises(InputError):
            Shape(**{**good, **bad})  # type: ignore[arg-type]


def test_models_of_the_same_shape_keep_their_own_context() -> None:
    """Llama 3 was trained to 8,192 tokens, 3.1 to 131,072; all else is alike."""
    for name, context in (("llama-3-8b", 8192), ("meta-llama/Meta-Llama-3-8B", 8192), ("meta-llama/Llama-3.1-8B", 131_072)):
        model = load_model(name)
        assert model.shape.context_tokens == context and model.shape.parameters == 8_030_261_248
    assert load_model("Meta-Llama-3-70B").shape.context_tokens == 8192


_PLAIN = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "intermediate_size": 14_336, "vocab_size": 128_256, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"quantization_config": {"quant_method": " "}}, "quantised by"),
        ({"num_key_value_heads": 64}, "32 attention heads do not share 64 KV heads evenly"),
        ({"num_key_value_heads": 7}, "32 attention heads do not share 7 KV heads evenly"),
        ({"torch_dtype": "int4"}, "weight type 'int4' is unknown"),
        ({"num_hidden_layers": 1 << 39}, "must be positive"),
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 20}, "needs experts_per_token"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}, "take turns"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]}, "take turns"),
    ],
)
def test_a_config_that_cannot_be_right_is_refused_by_its_file(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    file = tmp_path / "odd.json"
    file.write_text(json.dumps({**_PLAIN, **changed}), encoding="utf-8")
    with pytest.raises(InputError, match=said) as caught:
        load_model(str(file))
    assert "odd.json" in str(caught.value)


@pytest.mark.parametrize("name", ["", " ", "x" * 5000, "a\0b"])
def test_a_name_that_is_no_path_is_no_model(name: str) -> None:
    with pytest.raises(UsageError, match="There is no model"):
        load_model(name)
