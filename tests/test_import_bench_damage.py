"""Damaged outputs of benchmarks and engines: whatever is done to a real file, the answer is a trace or a sentence."""

from __future__ import annotations

import errno
import io
import os
import re
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest

import hoptrace
from hoptrace.collectors.files.kinds import kind_of
from hoptrace.collectors.files.run import import_files
from hoptrace.errors import EnvironmentProblem, InputError
from hoptrace.validate import validate

DATA = Path(__file__).parent / "data" / "bench"
KINDS = {
    "aibrix_qps0.5.csv": "multi-round-qa", "aiperf_llamacpp.jsonl": "aiperf", "aiperf_llamacpp_figures.json": "aiperf-figures",
    "aiperf_qwen.jsonl": "aiperf", "guidellm.json": "guidellm", "guidellm_no_requests.json": "guidellm",
    "inference_perf_kubecon_stage_0.json": "inference-perf", "inference_perf_requests.json": "inference-perf",
    "inference_perf_stage_0.json": "inference-perf", "llamacpp.jsonl": "llamacpp-log", "llamacpp.log": "llamacpp-log",
    "llmperf_anyscale_70b.json": "llmperf", "llmperf_bedrock_13b.json": "llmperf",
    "llmservingsim/requests.jsonl": "llmservingsim-run",
    "sglang.jsonl": "sglang-bench", "vcr_edge_cases.jsonl": "vllm-vcr", "vcr_simple.jsonl": "vllm-vcr",
    "vcr_spec_decode.jsonl": "vllm-vcr", "vllm_detailed.json": "vllm-bench", "vllm_llamacpp.json": "vllm-bench",
    "vllm_server.log": "vllm-log", "vllm_summary.json": "vllm-bench",
}  # fmt: skip


_VALUES = [
    b"null",
    b"NaN",
    b"-1",
    b"1e400",
    b'"x"',
    b"[]",
    b"{}",
    b"1" * 400,
    b'"\\ud800"',
    b"true",
    b"Infinity",
    b"18446744073709551616",
]
_PLACES = re.compile(rb'(?<=[:\[, ])(-?[0-9.]+|"[^"\n]{0,40}"|null)(?=[,\]}\n])')


@pytest.mark.parametrize("name", sorted(KINDS))
def test_no_damage_ends_in_anything_but_a_sentence(tmp_path: Path, name: str) -> None:
    """Values replaced, bytes lost: each file is read, or refused with a sentence, and what is read is a valid trace."""
    whole = (DATA / name).read_bytes()[:40_000]
    kind = KINDS[name]
    assert kind_of(DATA / name, None).kind == kind
    random = Random(name)
    for i in range(3):
        raw = bytearray(whole)
        for _ in range(1 + i):
            place = random.choice(list(_PLACES.finditer(raw)))
            raw[place.start() : place.end()] = random.choice(_VALUES)
        if i % 2:
            at = random.randrange(len(raw))
            del raw[at : at + random.randint(1, 900)]
        (tmp_path / f"{i}").write_bytes(raw)
        try:
            done = import_files([tmp_path / f"{i}"], tmp_path / f"{i}.trace", kind=kind)
        except InputError:
            continue
        assert done.read == done.written + done.rejected
        assert not [f for f in validate(hoptrace.open(tmp_path / f"{i}.trace")) if f.level == "error"]


def test_every_kind_is_in_the_documentation() -> None:
    page = Path(__file__).parents[1] / "docs" / "benchmarks-import.md"
    section = page.read_text().split("## The kinds")[1].split("\n## ")[0]
    table = re.findall(r"^\| `([a-z][a-z-]+)` \| ", section, re.M)
    assert sorted(table) == sorted({*KINDS.values(), "genai-perf", "sglang-export"})


def test_no_room_for_the_copy_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    with pytest.raises(EnvironmentProblem, match=r"A copy of .*vllm_detailed\.json cannot be made in .*TMPDIR"):
        import_files([DATA / "vllm_detailed.json"], tmp_path / "t.trace")
    assert not list(tmp_path.iterdir())
