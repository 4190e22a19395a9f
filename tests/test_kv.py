"""KV geometry against published sizes, bytes of a step, and the GGUF header."""

from __future__ import annotations

import struct
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoptrace.errors import InputError
from hoptrace.gguf_file import read_gguf
from hoptrace.kv import KvGeometry, geometry, step_bytes
from hoptrace.manifest import Server


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (KvGeometry(32, 8, 128, "bf16"), 131_072),  # Llama-3.1-8B
        (KvGeometry(36, 8, 128, "bf16"), 147_456),  # Qwen3-8B
        (KvGeometry(80, 8, 128, "bf16"), 327_680),  # Llama-3-70B
        (KvGeometry(94, 4, 128, "bf16"), 192_512),  # Qwen3-235B-A22B
        (KvGeometry(94, 4, 128, "bf16", tp=8), 385_024),  # … its 4 heads copied to 8 ranks
        (KvGeometry(64, 72, 128, "f16"), 2_359_296),  # OPT-66B
        (KvGeometry(61, 1, 576, "bf16", latent_size=576), 70_272),  # DeepSeek-V3
        (KvGeometry(30, 3, 64, "f16"), 23_040),  # SmolLM2-135M
        (KvGeometry(30, 3, 64, "q8_0"), 12_240),  # 34 bytes per 32 elements
        (KvGeometry(30, 3, 64, "q4_0"), 6_480),  # 18 bytes per 32
        (KvGeometry(30, 3, 64, "q8_0/f16"), 17_640),  # K and V apart
        (KvGeometry(32, 8, 128, "fp8"), 65_536),
    ],
)
def test_bytes_per_token_as_published(shape: KvGeometry, expected: int) -> None:
    assert shape.bytes_per_token == expected


def test_amplification_is_copies_held_per_copy() -> None:
    assert KvGeometry(94, 4, 128, "bf16", tp=8).amplification == 2
    assert KvGeometry(94, 4, 128, "bf16", tp=4).amplification == 1
    assert KvGeometry(61, 1, 576, "bf16", tp=8, latent_size=576).amplification == 8


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 4))
def test_more_ranks_never_hold_less(layers: int, heads: int, power: int) -> None:
    one, more = (KvGeometry(layers, heads, 64, "f16", tp=tp) for tp in (1, 2**power))
    assert more.bytes_per_token >= one.bytes_per_token
    assert more.bytes_per_token == one.bytes_per_token * more.amplification


@pytest.mark.parametrize(("field", "message"), [({"dtype": "q9_9"}, "'q9_9' is unknown"), ({"layers": 0}, "positive sizes")])
def test_a_wrong_geometry_is_refused(field: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        KvGeometry(**({"layers": 1, "kv_heads": 1, "head_size": 1, "dtype": "f16"} | field))


def server(**fields: object) -> Server:
    return Server.model_validate({"name": "s", **fields})


FULL = server(layers=30, kv_heads=3, head_size=64, kv_dtype="f16", weight_bytes=1000, config={"n_ubatch": 512})
STEPS = pl.DataFrame(
    {
        "prefill_tokens": [600, 0, None], "prefill_context_tokens": [100, 0, 0], "decode_tokens": [2, 1, 1],
        "decode_context_tokens": [50, 30, 10], "weight_bytes": [None, None, None], "kv_read_bytes": [None, 7, None],
        "kv_write_bytes": [None, None, None],
    },
    schema_overrides=dict.fromkeys(("weight_bytes", "kv_read_bytes", "kv_write_bytes"), pl.Int64),
)  # fmt: skip


def test_step_bytes() -> None:
    got = step_bytes(STEPS, FULL)
    # 602 tokens in batches of 512 read the weights twice; what a row has is kept; an unknown composition stays unknown.
    assert got["weight_bytes"].to_list() == [2000, 1000, None]
    assert got["kv_read_bytes"].to_list() == [(100 + 600 + 50 + 2) * 23_040, 7, None]
    assert got["kv_write_bytes"].to_list() == [602 * 23_040, 23_040, None]


def test_layers_with_a_window_read_no_more_than_it() -> None:
    """Two layers of 32 bytes a position each, one of them with a window of 10."""
    server = Server(name="s", layers=2, kv_heads=1, head_size=8, kv_dtype="f16", config={"window_layers": 1, "window_tokens": 10})
    columns = ("prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_tokens",
               "decode_context_tokens")  # fmt: skip
    rows = [(0, 0, 0, 1, 1, 100), (0, 0, 0, 3, 3, 12), (2, 40, 200, 1, 1, 5), (None, 40, 200, 1, 1, 5), (None, 0, 0, 1, 1, 5)]
    steps = pl.DataFrame(rows, schema=columns, orient="row")
    steps = steps.with_columns(pl.lit(None, dtype=pl.Int64).alias(c) for c in ("weight_bytes", "kv_read_bytes", "kv_write_bytes"))
    got = step_bytes(steps, server)["kv_read_bytes"].to_list()
    assert got == [32 * (101 + 11), 32 * (15 + 15), 32 * (246 + 41 + 20 + 5), None, 32 * (6 + 6)]


@given(st.integers(1, 300), st.integers(0, 50), st.integers(0, 40), st.integers(1, 64))
def test_a_prompt_in_several_passes_reads_its_own_kv_again(prompt: int, context: int, decoders: int, ubatch: int) -> None:
    """Held against the passes played one by one: decoders first, then the prompt, ``ubatch`` tokens each."""
    read, passes, left, at = 0, 0, prompt, context
    queue = decoders
    while queue or left:
        passes += 1
        mine = min(queue, ubatch)
        queue -= mine
        read += mine * 11  # each decoder's context of 10 and its own token
        if n := min(left, ubatch - mine):
            left, at = left - n, at + n
            read += at
    steps = pl.DataFrame(
        {
            "prefill_requests": [1, 2], "prefill_tokens": [prompt] * 2, "prefill_context_tokens": [context] * 2,
            "decode_tokens": [decoders] * 2, "decode_context_tokens": [10 * decoders] * 2, "weight_bytes": [None] * 2,
            "kv_read_bytes": [None] * 2, "kv_write_bytes": [None] * 2,
        },
        schema_overrides=dict.fromkeys(("weight_bytes", "kv_read_bytes", "kv_write_bytes"), pl.Int64),
    )  # fmt: skip
    got = step_bytes(steps, FULL.model_copy(update={"config": {"n_ubatch": ubatch}}))
    assert got["weight_bytes"].to_list() == [passes * 1000] * 2
    once = prompt + context + 11 * decoders
    assert got["kv_read_bytes"].to_list() == [read * 23_040, once * 23_040], "which of several prompts was split is not known"


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_size", "kv_dtype"])
def test_bytes_are_null_where_the_geometry_is_unknown(field: str) -> None:
    partial = FULL.model_copy(update={field: None})
    assert geometry(partial) is None
    got = step_bytes(STEPS, partial)
    assert got["kv_write_bytes"].null_count() == 3 and got["kv_read_bytes"].to_list() == [None, 7, None]
    assert got["weight_bytes"].to_list() == [2000, 1000, None]


def gguf(path: Path) -> Path:
    from gguf import GGMLQuantizationType, GGUFWriter

    w = GGUFWriter(path, "llama")
    w.add_name("tiny")
    w.add_block_count(2)
    w.add_embedding_length(64)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_context_length(128)
    w.add_token_list([f"t{i}" for i in range(500)])
    w.add_token_scores([0.5] * 500)
    import numpy as np

    w.add_tensor("a", np.zeros((8, 64), dtype=np.float32))
    w.add_tensor("b", np.zeros((4, 36), dtype=np.uint8), raw_dtype=GGMLQuantizationType.Q8_0, raw_shape=(4, 34))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def test_a_gguf_header(tmp_path: Path) -> None:
    file = gguf(tmp_path / "m.gguf")
    m = read_gguf(file)
    assert (m.architecture, m.name, m.layers, m.heads, m.kv_heads, m.head_size, m.hidden_size, m.context_tokens) == (
        "llama", "tiny", 2, 4, 2, 16, 64, 128,
    )  # fmt: skip
    assert m.parameters == 8 * 64 + 4 * 32
    assert m.weight_bytes == 8 * 64 * 4 + 4 * 34
    assert m.file_bytes == file.stat().st_size


def test_sizes_of_tensor_types_are_ggmls() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    from hoptrace.gguf_file import _BLOCKS

    theirs = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    assert {kind: sizes for kind, sizes in _BLOCKS.items() if kind in theirs and theirs[kind] != sizes} == {}
    assert len(_BLOCKS.keys() & theirs.keys()) >= 30


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    whole = gguf(tmp_path / "m.gguf").read_bytes()
    for name, data in {
        "text": b"hello", "empty": b"", "cut": whole[:60], "old": b"GGUF" + struct.pack("<I", 1),
        "huge": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1),
        "long": b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 1 << 60),
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match="no GGUF file"):
            read_gguf(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read"):
        read_gguf(tmp_path / "missing")
