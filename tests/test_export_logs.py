"""Exports to other tools' request logs: what goes out comes back, and what a format cannot hold is counted."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.imports import DATA, SHARED, rows, run

import hoptrace
from hoptrace.analysis.export.export_azure import export_azure
from hoptrace.analysis.export.export_mooncake import export_aiperf, export_mooncake
from hoptrace.analysis.export.whole_file import check_target
from hoptrace.cli.export import command
from hoptrace.collectors.files.run import import_files
from hoptrace.errors import EnvironmentProblem, InputError, UsageError
from hoptrace.manifest import Manifest
from hoptrace.reader import Trace
from hoptrace.samples import sample
from hoptrace.writer import TraceWriter

AZURE = DATA / "requests" / "azure_conv_first200.csv"
MOONCAKE = DATA / "reference" / "mooncake_slice.jsonl"


def _trace(path: Path, requests: list[dict[str, Any]]) -> Trace:
    with TraceWriter(path, Manifest(origin="recorded"), background=False) as w:
        base = {"source": "test", "arrival_of": "received"}
        w.append("requests", [base | {"request": i, **r} for i, r in enumerate(requests)])
    return hoptrace.open(path)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _renumbered(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    numbers: dict[int, int] = {}
    return [
        line | ({"hash_ids": [numbers.setdefault(h, len(numbers)) for h in line["hash_ids"]]} if "hash_ids" in line else {})
        for line in lines
    ]


# -- round trips --------------------------------------------------------------------------------------------------------


def test_azure_comes_back_as_it_was(tmp_path: Path) -> None:
    import_files([AZURE], tmp_path / "a.trace")
    done = export_azure(hoptrace.open(tmp_path / "a.trace"), tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text().splitlines() == AZURE.read_text().splitlines()
    assert (done.requests, done.left_out, done.unheld, done.notes) == (200, {}, {}, ())


def test_mooncake_comes_back_as_it_was(tmp_path: Path) -> None:
    import_files([MOONCAKE], tmp_path / "m.trace")
    done = export_mooncake(hoptrace.open(tmp_path / "m.trace"), tmp_path / "m.jsonl")
    before, after = _lines(MOONCAKE), _lines(tmp_path / "m.jsonl")
    assert after == _renumbered(before)
    assert (done.requests, done.left_out, done.unheld, done.notes) == (400, {}, {}, ())
    import_files([tmp_path / "m.jsonl"], tmp_path / "again.trace")
    export_mooncake(hoptrace.open(tmp_path / "again.trace"), tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "m.jsonl").read_bytes()


def test_aiperf_comes_back_as_it_was(tmp_path: Path) -> None:
    text = "".join(
        json.dumps(x) + "\n"
        for x in (
            {"session_id": "a", "timestamp": 0, "input_length": 1200, "output_length": 52, "hash_ids": [0, 1, 2]},
            {"timestamp": 105.5, "input_length": 600, "output_length": 26, "hash_ids": [0, 3]},
            {"session_id": "a", "delay": 2000, "input_length": 1800, "output_length": 9, "hash_ids": [0, 1, 4, 5]},
            {"timestamp": 274, "input_length": 100, "output_length": 5},
        )
    )
    run(tmp_path, text, "in.jsonl")
    done = export_aiperf(hoptrace.open(tmp_path / "out.trace"), tmp_path / "x.jsonl")
    assert _lines(tmp_path / "x.jsonl") == [json.loads(x) for x in text.splitlines()]
    assert done.unheld == {"requests.parent_request": 1}
    assert "Requests without block hashes, written without hash_ids: 1." in done.notes


@pytest.mark.parametrize(
    ("name", "export"),
    [
        ("requests/azure2023/AzureLLMInferenceTrace_conv.csv", export_azure),
        ("requests/mooncake/conversation_trace.jsonl", export_mooncake),
    ],
)  # fmt: skip
def test_whole_public_files_come_back(tmp_path: Path, name: str, export: Any) -> None:
    path = SHARED / name
    if not path.exists():
        pytest.skip("extra check: needs ../shared, which a user's clone lacks")
    import_files([path], tmp_path / "x.trace")
    export(hoptrace.open(tmp_path / "x.trace"), tmp_path / "x")
    if path.suffix == ".csv":
        assert (tmp_path / "x").read_text().splitlines() == path.read_text().splitlines()
    else:
        assert _lines(tmp_path / "x") == _renumbered(_lines(path))


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**15), st.integers(1, 3000), st.integers(0, 500),
            st.one_of(st.none(), st.lists(st.integers(-(2**62), 2**62), max_size=8)),
        ),
        min_size=1, max_size=20,
    ),
    st.sampled_from([0, 1_700_000_000_000_000_000]),
)  # fmt: skip
def test_any_trace_goes_out_and_comes_back(
    tmp_path: Path, requests: list[tuple[int, int, int, list[int] | None]], start: int
) -> None:
    """Arrivals, lengths and which blocks are equal, from any trace through either format."""
    n = len(list(tmp_path.iterdir()))
    # Hashes of a trace are chained: equal ones have equal ones before them, so name a block by the list up to it.
    chain: dict[tuple[int, ...], int] = {}
    made = []
    for at, prompt, output, blocks in requests:
        row: dict[str, Any] = {
            "arrival_ns": start + at,
            "received_ns": start + at,
            "prompt_tokens": prompt,
            "output_tokens": output,
        }
        if blocks is not None:
            blocks = blocks[: prompt // 512]
            row |= {"prefix_blocks": [chain.setdefault(tuple(blocks[: k + 1]), len(chain)) for k in range(len(blocks))]}
            row |= {"block_size": 512, "block_unit": "tokens", "hash_space": "s"}
        made.append(row)
    trace = _trace(tmp_path / f"{n}.trace", made)
    before = trace.table("requests").collect().sort("arrival_ns", "request")
    shift = int(before["arrival_ns"][0]) if start else 0
    export_azure(trace, tmp_path / f"{n}.csv")
    import_files([tmp_path / f"{n}.csv"], tmp_path / f"{n}a.trace")
    azure = rows(tmp_path, out=f"{n}a.trace")
    lengths = ["prompt_tokens", "output_tokens"]
    assert azure.select("arrival_ns", *lengths).rows() == before.select("arrival_ns", *lengths).rows()
    export_mooncake(trace, tmp_path / f"{n}.jsonl")
    import_files([tmp_path / f"{n}.jsonl"], tmp_path / f"{n}m.trace", kind="mooncake")
    mooncake = rows(tmp_path, out=f"{n}m.trace")
    assert mooncake.select(*lengths).rows() == before.select(*lengths).rows()
    # Milliseconds as floats: exact to the ns up to 104 days.
    assert mooncake["arrival_ns"].to_list() == (before["arrival_ns"] - shift).to_list()
    pairs = [
        (a, b)
        for x, y in zip(before["prefix_blocks"], mooncake["prefix_blocks"], strict=True)
        if x is not None
        for a, b in zip(x, y, strict=True)
    ]
    assert len(set(pairs)) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


# -- what is lost -------------------------------------------------------------------------------------------------------


def test_requests_without_lengths_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = _trace(
        tmp_path / "x.trace",
        [
            {"arrival_ns": 5, "prompt_tokens": 1, "output_tokens": 2, "model": "m"}, {"arrival_ns": 6, "prompt_tokens": 1},
            {"arrival_ns": 7, "output_tokens": 1}, {"arrival_ns": 2, "prompt_tokens": 4, "output_tokens": 0, "error": "no"},
        ],
    )  # fmt: skip
    for export in (export_azure, export_mooncake, export_aiperf):
        done = export(trace, tmp_path / f"{export.__name__}")
        assert (done.requests, done.left_out) == (2, {"no prompt_tokens": 1, "no output_tokens": 1})
        assert done.unheld == {"requests.model": 1, "requests.error": 1}
    assert (tmp_path / "export_azure").read_text() == (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n1970-01-01 00:00:00.000000002,4,0\n1970-01-01 00:00:00.000000005,1,2\n"
    )
    empty = _trace(tmp_path / "y.trace", [{"arrival_ns": 6, "prompt_tokens": 1}])
    with pytest.raises(InputError, match=r"no request that can be written: 1 no output_tokens"):
        export_azure(empty, tmp_path / "y.csv")
    assert not (tmp_path / "y.csv").exists()


def test_hashes_that_a_format_cannot_hold(tmp_path: Path) -> None:
    tokens = {"block_unit": "tokens", "hash_space": "s"}
    base = {"arrival_ns": 0, "prompt_tokens": 40, "output_tokens": 1}
    trace = _trace(
        tmp_path / "x.trace",
        [
            base | tokens | {"prefix_blocks": [7, 8], "block_size": 16},
            base | tokens | {"prefix_blocks": [7], "block_size": 16},
            base | tokens | {"prefix_blocks": [7], "block_size": 16, "hash_space": "other"},
            base | tokens | {"prefix_blocks": [9], "block_size": 32},
            base | {"prefix_blocks": [9], "block_size": 64, "hash_space": "s"},
        ],
    )
    done = export_mooncake(trace, tmp_path / "m")
    assert [x.get("hash_ids") for x in _lines(tmp_path / "m")] == [[0, 1], [0], [2], None, None]
    assert done.unheld["requests.prefix_blocks"] == 2
    assert any("A hash stands for 16 tokens, not 512" in n and "--isl-block-size 16" in n for n in done.notes)
    # AIPerf wants a hash for each block: what none covers is unlike any other text.
    done = export_aiperf(trace, tmp_path / "p")
    assert [x.get("hash_ids") for x in _lines(tmp_path / "p")] == [[0, 1, 2], [0, 3, 4], [5, 6, 7], None, None]
    assert "Blocks that no hash covered, given numbers of their own: 5." in done.notes


def test_a_recorded_trace_says_what_the_format_has_no_place_for(tmp_path: Path) -> None:
    done = export_mooncake(hoptrace.open(sample("llamacpp-four-slots")), tmp_path / "x")
    assert done.requests == 48
    assert done.unheld["tokens"] == 736 and done.unheld["requests.first_token_ns"] == 48
    assert _lines(tmp_path / "x")[0]["timestamp"] == 0
    assert any("count from the first arrival" in n for n in done.notes)
    # Its prompts have 16 tokens and more, but no whole block of 512.
    assert "Requests too short for a whole block, written without hashes: 48." in done.notes


def test_blocks_in_characters_are_joined_to_blocks_of_tokens(tmp_path: Path) -> None:
    """4 characters a token and blocks of 64 characters: 32 of them are a block of 512 tokens."""
    text = {"block_size": 64, "block_unit": "characters", "hash_space": "s", "arrival_ns": 0, "output_tokens": 1}
    shared = list(range(1000, 1064))
    trace = _trace(
        tmp_path / "x.trace",
        [
            text | {"prompt_tokens": 1600, "prompt_chars": 6400, "prefix_blocks": [*shared, *range(36)]},
            text | {"prompt_tokens": 1100, "prompt_chars": 4400, "prefix_blocks": [*shared, *range(50, 54)]},
            text | {"prompt_tokens": 1300, "prompt_chars": 5200, "prefix_blocks": [*shared[:40], *range(60, 101)]},
            text | {"prompt_tokens": 100, "prompt_chars": 400, "prefix_blocks": shared[:6]},
        ],
    )
    done = export_mooncake(trace, tmp_path / "m")
    assert [x.get("hash_ids") for x in _lines(tmp_path / "m")] == [[0, 1, 2], [0, 1], [0, 3], None]
    assert any("of 64 characters were joined to blocks of 512 tokens at 4.00 characters a token" in n for n in done.notes)
    assert "requests.prefix_blocks" not in done.unheld
    done = export_aiperf(trace, tmp_path / "p")
    assert [len(x.get("hash_ids", ())) for x in _lines(tmp_path / "p")] == [4, 3, 3, 0]


# -- the command --------------------------------------------------------------------------------------------------------


def test_one_format_at_a_time_and_no_file_lost(tmp_path: Path) -> None:
    trace = str(sample("azure-2023-conv"))
    out = tmp_path / "x.csv"
    with pytest.raises(UsageError, match="one format, not 2"):
        CliRunner().invoke(command, [trace, "-o", str(out), "--azure", "--mooncake"], catch_exceptions=False)
    result = CliRunner().invoke(command, [trace, "-o", str(out), "--azure"])
    assert result.exit_code == 0 and f"{out}: 1,000 requests" in result.stderr
    with pytest.raises(UsageError, match="already there"):
        CliRunner().invoke(command, [trace, "-o", str(out), "--azure"], catch_exceptions=False)
    out.write_text("")
    quiet = CliRunner().invoke(command, [trace, "-o", str(out), "--azure", "--force", "-q"])
    assert quiet.exit_code == 0 and quiet.output == "" and len(out.read_text().splitlines()) == 1_001
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        export_azure(hoptrace.open(sample("azure-2023-conv")), tmp_path / "no" / "x.csv")
    assert [p.name for p in tmp_path.iterdir()] == ["x.csv"]


def test_arrivals_are_in_order_whatever_the_traces(tmp_path: Path) -> None:
    trace = _trace(tmp_path / "x.trace", [{"arrival_ns": t, "prompt_tokens": 1, "output_tokens": 1} for t in (3, 1, 2)])
    export_mooncake(trace, tmp_path / "x")
    stamps = pl.Series([x["timestamp"] for x in _lines(tmp_path / "x")])
    assert stamps.to_list() == [1e-06, 2e-06, 3e-06]


@pytest.mark.parametrize("option", ["--azure", "--mooncake", "--aiperf", None])
def test_what_is_no_ordinary_file_is_never_replaced(tmp_path: Path, option: str | None) -> None:
    trace = str(sample("azure-2023-conv"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="is no ordinary file"):
        CliRunner().invoke(command, [trace, "-o", str(pipe), "--force", *([option] if option else [])], catch_exceptions=False)
    with pytest.raises(UsageError, match="is no ordinary file"):
        export_azure(hoptrace.open(trace), pipe, force=True)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    # Only looked at, never written to: a fault here must not cost root its devices.
    for device in ("/dev/null", "/dev/full", "/dev/stdout", "/proc/self/fd/1"):
        with pytest.raises(UsageError, match="is no ordinary file"):
            check_target(Path(device), force=True)


def test_arrivals_that_nobody_knows_are_not_made_up(tmp_path: Path) -> None:
    run(tmp_path, (DATA / "bench" / "llmperf_anyscale_70b.json").read_text(), "f.json")
    trace = hoptrace.open(tmp_path / "out.trace")
    with pytest.raises(InputError, match=r"does not know when its requests arrived.*--mooncake"):
        export_azure(trace, tmp_path / "a.csv")
    done = export_mooncake(trace, tmp_path / "m.jsonl")
    assert "timestamp" not in _lines(tmp_path / "m.jsonl")[0]
    assert done.notes == (f"Requests whose arrival nobody saw, written without a timestamp: {done.requests}.",)


def test_the_engines_queue_is_an_arrival(tmp_path: Path) -> None:
    import_files([DATA / "bench" / "llmservingsim" / "requests.jsonl"], tmp_path / "t.trace")
    trace = hoptrace.open(tmp_path / "t.trace")
    done = export_mooncake(trace, tmp_path / "m.jsonl")
    arrivals = trace.table("requests").sort("arrival_ns", "request").collect()["arrival_ns"].to_list()
    assert [round(line["timestamp"] * 1e6) for line in _lines(tmp_path / "m.jsonl")] == arrivals
    assert done.notes == (f"The first timestamp is {arrivals[0] / 1e9:,.0f} s: they are the trace's own clock, unchanged.",)
    early = _trace(tmp_path / "e.trace", [{"arrival_ns": 59 * 10**9, "prompt_tokens": 1, "output_tokens": 1}])
    assert export_mooncake(early, tmp_path / "e.jsonl").notes == ()


def test_a_row_without_a_time_is_told(tmp_path: Path) -> None:
    run(tmp_path, '{"timestamp": 5, "input_length": 1, "output_length": 1}\n{"input_length": 2, "output_length": 1}\n')
    done = export_azure(hoptrace.open(tmp_path / "out.trace"), tmp_path / "a.csv")
    assert "Requests whose arrival nobody saw, dated with the request before: 1." in done.notes
