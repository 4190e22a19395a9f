"""docs/costs.md: its example, its tables and its commands are what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hoptrace.breakeven import break_even_bytes_per_s
from hoptrace.cli.replay import command
from hoptrace.kv import geometry
from hoptrace.manifest import Server
from hoptrace.model_catalogue import load_model, models
from hoptrace.replay.cost import KINDS
from hoptrace.replay.costs.table import parse, read_table
from hoptrace.stepcost import roofline

ROOT = Path(__file__).parent
DOC = (ROOT.parent / "docs" / "costs.md").read_text(encoding="utf-8")


def test_the_example_table_gives_the_times_below_it(tmp_path: Path) -> None:
    text = re.findall(r"```csv\n(.*?)```", DOC, re.S)
    assert len(text) == 1
    (tmp_path / "t.csv").write_text(text[0])
    cost = read_table(str(tmp_path / "t.csv"), None)
    told = re.search(
        r"prompt of ([\d,]+) tokens takes ([\d.]+) ms, and (\d+) decoders over ([\d,]+) tokens each take ([\d.]+) ms", DOC
    )
    assert told is not None
    tokens, prompt_ms, batch, context, decode_ms = (float(v.replace(",", "")) for v in told.groups())
    assert cost.cost_ns(prefill_tokens=int(tokens)) == prompt_ms * 1e6
    assert cost.cost_ns(decode_requests=int(batch), decode_context_tokens=int(batch * context)) == decode_ms * 1e6


def test_the_models_are_those_that_there_are() -> None:
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.+/.+ \|.+) \|$", DOC, re.M))
    assert sorted(rows) == sorted(models())
    for name, row in rows.items():
        model = models()[name]
        g = geometry(model.on(Server(name="s")))
        assert g is not None
        want = [model.model, *(f"{n / 1e9:.2f} B" for n in (model.shape.parameters, model.shape.active_parameters))]
        assert row.split(" | ") == [*want, f"{g.bytes_per_token:,}"], name


def test_every_cost_is_named_and_every_option_is_one() -> None:
    for kind in KINDS:
        assert f"`{kind}`" in DOC
    known = {o for p in command.params for o in p.opts}
    used = set(re.findall(r"--[a-z-]+", " ".join(re.findall(r"^hoptrace replay (.*)$", DOC, re.M))))
    assert used and used <= known


@pytest.mark.parametrize("text", re.findall(r"--cost table:(\S+)", DOC))
def test_the_tables_of_the_commands_are_read(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ROOT / "data" / "costs"
    for name, source in (
        ("perf_model.csv", data / "splitwise_perf_model.csv"),
        *((f.name, f) for f in data.glob("vidur*/*.csv")),
    ):
        (tmp_path / name).write_bytes(source.read_bytes())
    monkeypatch.chdir(tmp_path)
    if text.startswith("FILE"):
        return
    server = load_model("llama-3.1-8b").shape.server("s", "m") if "mlp" in text else None
    assert parse(text).files and read_table(text, server).pieces


def test_the_break_even_is_what_is_said() -> None:
    server = load_model("llama-3.1-70b").on(Server(name="s", config={"tensor_parallel_size": 8}))
    ours = [
        break_even_bytes_per_s(roofline(server, {"flops_per_s": f, "memory_bytes_per_s": 2e12}), 327_680, 8192) / 1e9
        for f in (312e12, 989e12)
    ]
    assert f"gives {ours[0]:.1f} and {ours[1]:.1f}" in DOC
