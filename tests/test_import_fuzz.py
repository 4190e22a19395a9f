"""Files that were bent at random: an import reads and counts them, or says in a sentence why not; it leaves nothing half done."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from hoptrace.collectors.files.base import Options
from hoptrace.collectors.files.run import import_files
from hoptrace.errors import HoptraceError

_LINE = '1.2.3.4 - - [10/Oct/2026:13:55:36 +0000] "POST /v1/completions HTTP/1.1" 200 26 "-" "curl" 1.234 1.230\n'
_SEEDS: list[tuple[str, str | None]] = [
    ('TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,9,"1"\n', None),
    ('{"timestamp": 0, "input_length": 1200, "hash_ids": [0, 1, 2]}\n{"session_id":"a","delay":5,"input_length":3}\n', None),
    ('{"chat_id":1,"parent_chat_id":-1,"timestamp":0.5,"input_length":9,"hash_ids":[1]}\n' * 2, None),
    ("Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens\n5,s1,1.5,a,472,18\n45.25,,2,b,1087,0\n", None),
    (
        '{"ts":"2026-05-10T12:00:00.5Z","d":15,"u":{"in":1,"c":2},"s":200}\n',
        "arrival=ts,duration_ms=d,prompt_tokens=u.in,status=s",
    ),
    (_LINE, None),
    ('{"input_toks": 9, "output_toks": 2, "arrival_time_ns": 5}\n', None),
]
_BYTES = b'\x00",{}[]:\n\r\xff\xef\xbb\xbf 0-.eN9\\'


def _bent(rng: random.Random, text: str) -> bytes:
    data = bytearray(text.encode() * rng.randint(1, 3))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0 if data:
                data[min(at, len(data) - 1)] = rng.choice(_BYTES)
            case 1:
                del data[at : at + rng.randint(1, 9)]
            case 2:
                data[at:at] = bytes(rng.choice(_BYTES) for _ in range(rng.randint(1, 4)))
            case _:
                data = data[:at] + data[max(0, at - 20) :]
    return bytes(data)


@pytest.mark.parametrize("seed", range(6))
def test_bent_files(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    read = 0
    for _ in range(12):
        text, mapping = rng.choice(_SEEDS)
        (tmp_path / "x").write_bytes(_bent(rng, text))
        try:
            done = import_files([tmp_path / "x"], tmp_path / "o.trace", options=Options(mapping=mapping, context_tokens=5))
        except HoptraceError as e:
            assert str(e)
        else:
            read += 1
            assert done.read == done.written + done.rejected
            shutil.rmtree(tmp_path / "o.trace")
        assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert read
