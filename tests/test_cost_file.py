"""Cost files: what is kept comes back, what is damaged, newer or another server's is refused by name, replays take it whole."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hoptrace
from hoptrace.errors import EnvironmentProblem, InputError, UsageError
from hoptrace.manifest import Server
from hoptrace.replay.calibration.cost_file import CostFile, cost_file, read_cost_file, write_cost_file
from hoptrace.replay.calibration.fitting import calibrate
from hoptrace.replay.calibration.use import merged, scaled, use
from hoptrace.replay.cost import choose
from hoptrace.replay.overheads import Overheads
from hoptrace.replay.prepare import prepare
from hoptrace.replay.sweep.grid import parse_grid
from hoptrace.samples import sample
from hoptrace.stepcost import RESIDUALS, StepCost
from hoptrace.stepcost_table import Grid, Piece

SERVER = Server(name="s", engine="vllm", engine_version="0.32.0", model="m", max_sequences=8, config={"dtype": "float16"})
COST = StepCost(
    {"step": 5_000_000_000, "decode_requests": 1_000_000_000}, "fitted", residuals={"decode": (1000, -1000, 2**40 + 5)},
    domain={"decode_requests": (0, 8)}, error={"n": 300, "p50": 0.05}, notes=("A note.",),
)  # fmt: skip
OUTSIDE = Overheads(received_to_enqueued_ns=7_000_000, step_to_token_ns=3_000, n=(0, 0, 40, 0, 0, 40, 0))
CONTENT = CostFile(COST, OUTSIDE, SERVER, "cpu", ({"trace": "run", "steps": 300},), made_utc="2026-01-01T00:00:00+00:00")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    out = tmp_path / "cost.json"
    write_cost_file(out, CONTENT)
    return out


def _changed(path: Path, change: dict[str, Any], *, checksum: bool = False) -> Path:
    """The file with keys set (dots go deeper); without its checksum, so that the content itself is judged."""
    d = json.loads(path.read_text())
    for key, value in change.items():
        at = d
        *way, last = key.split(".")
        for k in way:
            at = at[k]
        if value is _GONE:
            del at[last]
        else:
            at[last] = value
    if not checksum:
        d.pop("checksum", None)
    path.write_text(json.dumps(d))
    return path


_GONE = object()


def test_what_is_written_is_read(path: Path) -> None:
    got = read_cost_file(path)
    assert got.cost == COST and got.outside == OUTSIDE and got.platform == "cpu"
    assert (got.server.model, got.server.engine, got.server.config) == ("m", "vllm", {"dtype": "float16"})
    assert got.captures == ({"trace": "run", "steps": 300},)
    assert json.loads(path.read_text())["format"] == "hoptrace-cost/1"


@given(
    st.dictionaries(
        st.sampled_from(["step", "prefill_tokens", "decode_requests", "batched"]), st.integers(1, 10**15), min_size=1
    ),
    st.dictionaries(st.sampled_from(RESIDUALS), st.lists(st.integers(-(10**6), 2**41 - 1), max_size=5).map(tuple)),
    st.lists(st.integers(0, 10**12), min_size=7, max_size=7),
    st.text(max_size=20),
)
def test_any_cost_comes_back(coefficients: dict[str, int], residuals: Any, times: list[int], note: str) -> None:
    import tempfile

    cost = StepCost(coefficients, "fitted", residuals=residuals, notes=(note,))
    outside = Overheads(*times, n=(1,) * 7)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "c.json"
        write_cost_file(out, CostFile(cost, outside, SERVER, None, ()))
        got = read_cost_file(out)
    assert got.cost == cost and got.outside == outside


def test_nothing_of_the_machine_it_ran_on_is_kept(tmp_path: Path) -> None:
    told = SERVER.model_copy(update={"model_path": "/home/me/m", "url": "http://secret:8000", "host": "box", "pid": 7})
    write_cost_file(tmp_path / "c.json", replace(CONTENT, server=told))
    text = (tmp_path / "c.json").read_text()
    assert not [w for w in ("/home/me", "secret", "box") if w in text]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is no JSON"),
        ("{", "it is no JSON"),
        ("[1]", "holds a list, not a table"),
        ("null", "holds a NoneType"),
        ("[" * 100_000, "it is no JSON"),
        ('{"format": NaN}', "NaN is no number of JSON"),
        ("{}", "it names no format"),
        ('{"format": 1}', "its format is '1', not 'hoptrace-cost/1'"),
        ('{"format": "hoptrace-trace/1"}', "its format is 'hoptrace-trace/1'"),
        ('{"format": "hoptrace-cost/2"}', "newer than this hoptrace reads"),
        ('{"format": "hoptrace-cost/0"}', "there is no format"),
        ('{"format": "hoptrace-cost/1"}', "it has no cost"),
        ('{"format": "hoptrace-cost/1.7", "cost": 3}', "cost is a int, not a table"),
    ],
)
def test_what_is_no_cost_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    out = tmp_path / "cost.json"
    out.write_text(text)
    with pytest.raises(InputError) as e:
        read_cost_file(out)
    assert said in e.value.message and str(out) in e.value.message and e.value.hint


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cost.coefficients_ps": {"warp": 1}}, "no feature 'warp'"),
        ({"cost.coefficients_ps": {"step": -1}}, "whole picoseconds, 0 or more"),
        ({"cost.coefficients_ps": {"step": 1.5}}, "whole picoseconds"),
        ({"cost.coefficients_ps": {"step": True}}, "whole picoseconds"),
        ({"cost.coefficients_ps": {}}, "every step would cost nothing"),
        ({"cost.coefficients_ps": [1]}, "cost.coefficients_ps is a list, not a table"),
        ({"cost.origin": _GONE}, "origin"),
        ({"cost.residuals": {"decode": ["x"]}}, "cannot be read"),
        ({"cost.residuals": {"decode": [-2_000_000]}}, "residuals"),
        ({"cost.domain": {"decode_requests": [8, 0]}}, "begins at 8 and ends at 0"),
        ({"cost.domain": {"decode_requests": [8]}}, "cannot be read"),
        ({"cost.covariance_ps2": [[1e999]]}, "Infinity is no number"),
        ({"outside_steps": _GONE}, "it has no outside_steps"),
        ({"outside_steps.step_to_token_ns": {"ns": -5, "n": 3}}, "outside_steps.step_to_token_ns is no time"),
        ({"outside_steps.step_to_token_ns": {"ns": None, "n": 3}}, "is no time"),
        ({"outside_steps.step_to_token_ns": {"ns": 1 << 62, "n": 3}}, "is no time"),
        ({"outside_steps.step_to_token_ns": 5}, "not a table"),
        ({"server": {"name": 5}}, "server.name"),
        ({"server": _GONE}, "it has no server"),
        ({"server.max_sequences": "many"}, "server.max_sequences"),
        ({"platform": 5}, "platform is no name"),
        ({"captures": "run"}, "captures is a str, not a list"),
        ({"covers": [1]}, "covers is a int, not a table"),
    ],
)
def test_damage_is_named(path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as e:
        read_cost_file(_changed(path, change))
    assert said in str(e.value) and str(path) in e.value.message


def test_a_changed_digit_is_found(path: Path) -> None:
    """One that leaves the file readable: without a checksum it would be a wrong number."""
    text = path.read_text()
    path.write_text(text.replace("5000000000", "5000000001"))
    with pytest.raises(InputError, match="damaged, or was changed by hand"):
        read_cost_file(path)
    assert read_cost_file(_changed(path, {})).cost.coefficients_ps["step"] == 5_000_000_001


@given(st.data())
def test_no_damage_gets_through_as_anything_but_an_input_error(data: st.DataObject) -> None:
    import tempfile

    text = json.dumps(CONTENT.to_dict()).encode()
    at = data.draw(st.integers(0, len(text) - 1))
    how = data.draw(st.sampled_from(["cut", "flip", "double"]))
    flipped = bytes([text[at] ^ data.draw(st.integers(1, 255))])
    bad = {"cut": text[:at], "flip": text[:at] + flipped + text[at + 1 :], "double": text[:at] + text}[how]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "c.json"
        out.write_bytes(bad)
        try:
            assert read_cost_file(out).to_dict() == CONTENT.to_dict()
        except InputError as e:
            assert str(out) in e.message


def test_what_is_not_there_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no cost file"):
        read_cost_file(tmp_path / "no.json")
    with pytest.raises(InputError, match="is a folder"):
        read_cost_file(tmp_path)
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        write_cost_file(tmp_path / "no" / "c.json", CONTENT)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not text in UTF-8"):
        read_cost_file(tmp_path / "b.json")


# On whose server


def test_another_model_or_engine_is_refused_by_name(path: Path) -> None:
    with pytest.raises(InputError, match="measured on the model m; the trace's server has n"):
        use(str(path), Server(name="x", engine="vllm", model="n"), None)
    with pytest.raises(InputError, match="measured on the engine vllm; the trace's server has sglang"):
        use(str(path), Server(name="x", engine="sglang", model="m"), None)
    with pytest.raises(UsageError, match=r"--model llama-3\.1-8b is another"):
        choose(f"file:{path}", None, Server(name="x"), model="llama-3.1-8b")
    assert use(str(path), Server(name="x", model="m"), None, model="m").notes == ()


def test_what_may_change_a_steps_time_is_warned_about_by_name(path: Path) -> None:
    here = Server(name="x", engine="vllm", engine_version="0.33.0", model="m", config={"dtype": "float32"})
    got = use(str(path), here, None, platform="h100-sxm-80gb")
    assert got.notes == (
        "cost.json was measured with engine version 0.32.0, here 0.33.0; dtype float16, here float32: its costs may not hold "
        "here.",
        "The step cost was measured on cpu and is not scaled to h100-sxm-80gb: that is where transfers and memory are taken "
        "from.",
    )
    assert got.cost.notes[:2] == got.notes and got.cost.notes[-1] == "A note."


def test_a_trace_that_names_no_server_gets_the_files_sizes(path: Path) -> None:
    got = use(str(_changed(path, {"server.layers": 30, "server.kv_capacity_tokens": 4096})), Server(name="engine"), None)
    assert (got.server.layers, got.server.kv_capacity_tokens, got.server.model) == (30, 4096, "m")
    told = use(str(path), Server(name="engine", block_count=10, block_size_tokens=16), None)
    assert told.server.kv_capacity_tokens is None and told.server.block_count == 10


@pytest.mark.parametrize("differs", [None, "max_sequences", "context_tokens"])
def test_the_kv_space_of_a_server_set_otherwise_is_not_the_traces(path: Path, differs: str | None) -> None:
    sizes = {"max_sequences": 2, "context_tokens": 2048}
    there = _changed(path, {f"server.{k}": v for k, v in {**sizes, "kv_capacity_tokens": 4096}.items()})
    here = Server(name="x", model="m", **{k: 2 * v if k == differs else v for k, v in sizes.items()})
    got = use(str(there), here, None)
    assert got.server.kv_capacity_tokens == (None if differs else 4096)
    assert any("The trace tells no KV space: 4,096 tokens" in n for n in got.notes) == (differs is None)


# At what speed


def _steps(factor: float, n: int = 30) -> Any:
    import polars as pl

    took = round(9_000_000 * factor)  # 5 ms and four decoders
    return pl.DataFrame(
        {
            "start_ns": [i * took for i in range(n)], "end_ns": [(i + 1) * took for i in range(n)], "prefill_requests": [0] * n,
            "prefill_tokens": [0] * n, "prefill_context_tokens": [0] * n, "decode_requests": [4] * n,
            "decode_context_tokens": [40] * n,
        }
    )  # fmt: skip


def test_the_traces_own_steps_set_the_speed_and_that_is_said(path: Path) -> None:
    got = use(str(path), SERVER, _steps(1.25))
    assert got.cost.coefficients_ps == {"step": 6_250_000_000, "decode_requests": 1_250_000_000}
    assert got.how["speed"] == 1.25 and "25 % longer than cost.json says" in got.notes[0]
    assert got.cost.residuals == COST.residuals
    near = use(str(path), SERVER, _steps(1.01))
    assert near.notes == () and near.how["speed"] == 1.01
    few = use(str(path), SERVER, _steps(1.25, n=19))
    assert few.how["speed"] == 1.0


def test_steps_beyond_the_cost_say_nothing_of_the_machine(path: Path) -> None:
    import polars as pl

    far = _steps(3.0).with_columns(decode_requests=pl.lit(9))  # the file saw up to eight
    assert use(str(path), SERVER, far).how["speed"] == 1.0
    assert use(str(path), SERVER, pl.concat([far, _steps(1.25)], how="vertical_relaxed")).how["speed"] == 1.25


def test_a_speed_that_no_mood_explains_is_doubted(path: Path) -> None:
    got = use(str(path), SERVER, _steps(1.8))
    assert got.notes[1] == "That is more than one machine's speed drifts by: is it the machine that the cost was measured on?"
    assert len(use(str(path), SERVER, _steps(1.4)).notes) == 1


def test_stalls_that_the_cost_is_without_are_no_slower_machine(path: Path) -> None:
    """The steps of the capture itself, stalls and all, set the speed to 1: a replay draws the stalls from the residuals."""
    stalled = _steps(1.2)  # a fifth of the time, say, is stalls
    assert use(str(_changed(path, {"stalls": 1.2})), SERVER, stalled).how["speed"] == 1.0
    with pytest.raises(InputError, match="stalls is no ratio"):
        read_cost_file(_changed(path, {"stalls": 0}))


@pytest.mark.parametrize(("given_", "step"), [("measured", 5_000_000_000), ("1.1", 5_500_000_000), ("0.5", 2_500_000_000)])
def test_another_speed_can_be_asked_for(path: Path, given_: str, step: int) -> None:
    assert use(f"{path},speed={given_}", SERVER, _steps(1.25)).cost.coefficients_ps["step"] == step


@pytest.mark.parametrize("given_", ["", "0", "-1", "nan", "1e3", "101", "fast", "0.001"])
def test_a_speed_that_is_none_is_refused(path: Path, given_: str) -> None:
    with pytest.raises(UsageError, match="is no speed of a cost file"):
        use(f"{path},speed={given_}", SERVER, None)


def test_a_scaled_cost_prices_every_step_so_much_longer() -> None:
    piece = Piece(Grid((0,), (((0, 10**9), (100, 3 * 10**9)),)), "tokens")
    cost = replace(COST, pieces=(piece,), covariance_ps2=((4.0,),), residuals={})
    twice = scaled(cost, 2.0)
    for d in (1, 5, 50):
        assert twice.cost_ns(decode_requests=d) == 2 * cost.cost_ns(decode_requests=d)
    assert twice.covariance_ps2 == ((16.0,),) and scaled(cost, 1) is cost


# Times outside steps


def test_the_servers_times_are_the_files_and_the_clients_the_traces() -> None:
    file = Overheads(1, 2, 3, 4, 5, 6, 7, n=(1, 1, 1, 1, 0, 1, 1))
    trace = Overheads(10, 20, 30, 40, 50, 60, 70, n=(2, 0, 2, 2, 2, 2, 2))
    assert merged(file, trace) == Overheads(10, 2, 3, 4, 50, 6, 7, n=(2, 1, 1, 1, 2, 1, 1))
    assert merged(file, Overheads()) == file


def _prepared(trace: str, cost: str) -> Any:
    return prepare(
        hoptrace.open(sample(trace)), "as-recorded", cost=cost, platform=None, model=None, recorded_on=None, seed=0, rate=1,
        arrivals=None, until=None, say=lambda _: None,
    )  # fmt: skip


def test_a_replay_takes_the_files_cost_and_times(tmp_path: Path) -> None:
    """Fitted to four slots, used on one: same model, same engine."""
    made = calibrate([hoptrace.open(sample("llamacpp-four-slots"))])
    out = tmp_path / "cost.json"
    write_cost_file(out, cost_file(made))
    p = _prepared("llamacpp-one-slot", f"file:{out},speed=measured")
    assert p.planned.plan.costs[0].coefficients_ps == made.cost.coefficients_ps
    assert p.planned.overheads.received_to_enqueued_ns == made.outside.received_to_enqueued_ns
    assert p.planned.overheads.arrival_to_sent_ns != made.outside.arrival_to_sent_ns
    assert p.how["kind"] == "file" and p.how["captures"] == ["llamacpp-four-slots"]
    assert any("Step cost and times outside steps from cost.json" in n for n in p.planned.plan.costs[0].notes)


def test_a_request_log_is_replayed_with_a_cost_file(path: Path) -> None:
    p = _prepared("azure-2023-conv", f"file:{path}")
    assert p.planned.plan.costs[0].coefficients_ps == COST.coefficients_ps
    assert p.planned.overheads == OUTSIDE


def test_another_content_is_another_point_of_a_sweep(path: Path) -> None:
    def identity() -> str:
        grid = parse_grid(f'[base]\ncost = "file:{path},speed=measured"\n[axes]\nseed = [1]')
        return next(iter(grid.points())).identity("trace", "1")

    first = identity()
    assert identity() == first
    _changed(path, {"cost.coefficients_ps.step": 6_000_000_000})
    assert identity() != first


def test_every_time_outside_steps_is_kept() -> None:
    """A new one must come back from the file too."""
    names = [f.name for f in fields(Overheads) if f.name != "n"]
    assert set(Overheads().as_dict()) == set(names) and len(Overheads().n) == len(names)


def test_the_page_lists_every_key() -> None:
    page = (Path(__file__).parents[1] / "docs" / "calibrate.md").read_text()
    table = page[page.index("| key | |") :]
    told = {
        key for line in table.splitlines()[2:] for key in line.split(" | ")[0].strip("| *").replace("`", "").split(", ") if key
    }
    assert {k.strip(" *") for k in told} == set(CONTENT.to_dict())
