"""The collector: which channels are a server's, what the probe says, restarts, losses; and real recordings replayed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support import rings

from hoptrace.collectors.base import Finding
from hoptrace.collectors.engines import vllm_rings
from hoptrace.collectors.engines.vllm_channel import DETAILS, SCHEDULER, VllmChannel, config_of
from hoptrace.collectors.engines.vllm_rings import folders, records_of, search, tree
from hoptrace.collectors.hardware.listener import Found
from hoptrace.collectors.inside import ring
from hoptrace.reader import Trace
from hoptrace.validate import validate

Work = Callable[[rings.Capture], Awaitable[None]]
API = {
    "role": "api",
    "config": {"iteration_details": True, "block_size_tokens": 16, "block_count": 10, "kv_capacity_tokens": 160},
}
ENGINE = {"role": "engine", "dp_rank": 0, "config": API["config"]}


@pytest.fixture(autouse=True)
def _no_channels_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM may run here whose channels are none of these tests'."""
    monkeypatch.setattr(vllm_rings, "folders", lambda folder, *_: [folder] if folder.exists() else [])


def record(folder: Path, work: Work, **options: Any) -> Trace:
    async def run() -> Trace:
        with rings.capture(folder, **options) as c:
            await work(c)
            await c.channel.close()
        assert c.trace is not None
        return c.trace

    return asyncio.run(run())


def a_step(index: int, t: int, **more: Any) -> dict[str, Any]:
    return {"k": "s", "t": t, "i": [index, 0, 0, 1, 1, 1000, 0, 0, 0], "r": 1, "w": 0, "u": 0.1, **more}


def probe(folder: Path, **options: Any) -> Finding:
    async def run() -> Finding:
        with rings.capture(folder, **options) as c:
            return await VllmChannel(c.ctx).probe()

    return asyncio.run(run())


# -- finding ----------------------------------------------------------------------------------------------------------


def test_the_tree_is_this_process_and_its_children() -> None:
    mine = tree(os.getpid())
    stat = Path("/proc/self/stat").read_text()
    assert (os.getpid(), int(stat[stat.rindex(")") + 2 :].split()[19])) in mine
    assert tree(1 << 30) == set()


def test_probe_says_what_is_missing(tmp_path: Path) -> None:
    assert "there is no" in (probe(tmp_path).reason or "") and "pip install 'hoptrace[vllm]'" in (
        probe(tmp_path, name="b").reason or ""
    )
    (tmp_path / "channels").mkdir()
    assert "no plug-in writes to" in (probe(tmp_path, name="c").reason or "")
    assert probe(tmp_path, name="d", find=lambda: Found(None, "another machine")) == Finding(False, "another machine")
    (tmp_path / "channels" / "x.ring").write_bytes(b"HOPTRACE" + bytes(40_000))
    assert "another version" in (probe(tmp_path, name="e").reason or "")
    (tmp_path / "channels" / "x.ring").unlink()
    api = rings.Plugin(tmp_path / "channels" / "vllm-api-1.ring", {"role": "api", "config": {}})
    assert "none of the channels" in (probe(tmp_path, name="f", find=lambda: Found(1 << 30)).reason or "")
    found = probe(tmp_path, name="g")
    assert found.available and DETAILS in (found.reason or "") and SCHEDULER in (found.reason or "")
    api.writer.close()
    assert not probe(tmp_path, name="h").available, "its writer has ended"


def test_probe_says_what_is_there(tmp_path: Path) -> None:
    keep = [rings.Plugin(tmp_path / "channels" / "vllm-engine-1.ring", ENGINE)]
    assert "stat logger is off" in (probe(tmp_path).reason or "")
    keep.append(rings.Plugin(tmp_path / "channels" / "vllm-api-1.ring", API))
    assert probe(tmp_path, name="b") == Finding(True)
    keep[0].writer.close()
    assert probe(tmp_path, name="c").reason == (
        f"each step, but not which request had what share of it: for that restart vLLM with {SCHEDULER}"
    )


def test_channels_of_other_processes_are_left_alone(tmp_path: Path) -> None:
    """The same number in another life, or another process, is another server's."""
    folder = tmp_path / "channels"
    folder.mkdir()
    other = ring.Writer(folder / "a.ring", 65536, ring.MSGPACK, API, pid=1 << 22)
    mine = ring.Writer(folder / "b.ring", 65536, ring.MSGPACK, API)
    assert [p.name for p in search(folder, os.getpid()).paths] == ["b.ring"]
    mine.close()
    other.close()


def test_the_servers_own_folder_is_looked_into(tmp_path: Path) -> None:
    """hoptrace's own default is another user's folder, or another mount: the server's environment and its root tell."""
    proc = tmp_path / "proc"
    (proc / "7" / "root" / "in" / "there").mkdir(parents=True)
    (proc / "7" / "environ").write_bytes(b"A=b\0HOPTRACE_CHANNELS=/in/there\0C=d")
    (tmp_path / "mine").mkdir()
    assert folders(tmp_path / "mine", 7, proc) == [tmp_path / "mine", proc / "7" / "root" / "in" / "there"]
    assert folders(tmp_path / "none", 7, proc) == [proc / "7" / "root" / "in" / "there"]
    (proc / "7" / "environ").unlink()
    assert str(folders(tmp_path / "mine", 7, proc)[-1]) in (str(tmp_path / "mine"), f"/tmp/hoptrace-{os.getuid()}")
    # The same folder by two names is one
    (proc / "7" / "environ").write_bytes(f"HOPTRACE_CHANNELS={tmp_path / 'mine'}".encode())
    assert folders(tmp_path / "mine", 7, proc) == [tmp_path / "mine"]


def test_configuration_of_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "channels"
    keep = [
        rings.Plugin(folder / "vllm-api-1.ring", {"role": "api", "config": {"model": "m", "block_count": 20}}),
        rings.Plugin(folder / "vllm-engine-1.ring", {"role": "engine", "config": {"block_count": 10, "kv_groups": 1}}),
    ]
    with rings.capture(tmp_path) as c:
        assert config_of(c.ctx) == {"model": "m", "block_count": 10, "kv_groups": 1}
    assert len(keep) == 2
    with rings.capture(tmp_path, find=lambda: Found(None), name="b") as c:
        assert config_of(c.ctx) is None


# -- reading ----------------------------------------------------------------------------------------------------------


def test_recording_begins_now(tmp_path: Path) -> None:
    api = rings.Plugin(tmp_path / "channels" / "vllm-api-1.ring", API)
    api.put([a_step(0, 10**6), a_step(1, 2 * 10**6)])

    async def work(c: rings.Capture) -> None:
        await c.channel.start()
        api.put([a_step(2, 3 * 10**6)])
        await c.channel.sample()

    assert record(tmp_path, work).table("steps").collect()["step"].to_list() == [2]


def test_what_was_overwritten_is_counted(tmp_path: Path) -> None:
    api = rings.Plugin(tmp_path / "channels" / "vllm-api-1.ring", API, size=65536)

    async def work(c: rings.Capture) -> None:
        await c.channel.start()
        api.put([a_step(i, (i + 1) * 10**6) for i in range(2000)])
        api.put([b"\xc1", {"no": "kind"}, {"k": "s"}, {"k": "s", "t": 1, "i": [1]}, {"k": "new kind", "t": 1}])
        api.writer.lost()
        await c.channel.sample()

    trace = record(tmp_path, work)
    steps, lost = trace.table("steps").collect(), trace.manifest.rows_dropped
    assert steps["step"].to_list() == list(range(2000 - steps.height, 2000)) and steps.height < 1500
    assert lost == {
        "vllm-plugin: records missed in the channel": 2000 - steps.height,
        "vllm-plugin: records malformed in the channel": 3,
        "vllm-plugin: record that is not understood": 1,
        "vllm-plugin: records that the plug-in could not write": 1,
    }


def test_a_restart_is_read_to_the_end_and_then_on(tmp_path: Path) -> None:
    """The old server's last words come before the new one's first, and numbers go on, whoever tells of the steps."""
    folder = tmp_path / "channels"
    api, engine = rings.Plugin(folder / "vllm-api-1.ring", API), rings.Plugin(folder / "vllm-engine-1.ring", ENGINE)

    def c(n: int, t: int) -> dict[str, Any]:
        times = [t, t + 10, t + 500, t + 600]
        return {"k": "c", "n": n, "t": times, "q": [1], "z": [1], "b": [9], "o": [2], "new": [0], "r": 1, "y": [], "m": []}

    async def work(c_: rings.Capture) -> None:
        await c_.channel.start()
        engine.put([c(0, 1000), c(1, 2000)])
        api.put([a_step(0, 1700), a_step(1, 2700)])
        engine.writer.close()
        api.writer.close()
        new = rings.Plugin(folder / "vllm-api-2.ring", API)
        new.put([a_step(0, 900_000), a_step(1, 902_000)])
        c_.channel.restarted()
        for _ in range(3):
            await c_.channel.sample()
            c_.channel.restarted()
        # The life of a process is its number and its start: both are this process's here, so the channel is taken as a new one's
        assert c_.channel.steps_from == "stat logger"

    trace = record(tmp_path, work)
    steps = trace.table("steps").sort("step").collect()
    assert steps["step"].to_list() == [0, 1, 2, 3]
    assert steps["schedule_ns"].to_list() == [10, 10, None, None]
    assert any("2 steps are told alike" in n for n in trace.manifest.notes)


def test_several_api_servers_tell_of_one_engine(tmp_path: Path) -> None:
    folder = tmp_path / "channels"
    two = [rings.Plugin(folder / f"vllm-api-{i}.ring", API) for i in (1, 2)]

    async def work(c: rings.Capture) -> None:
        await c.channel.start()
        for i in range(10):
            two[i % 3 == 0].put([a_step(i, (i + 1) * 10**6)])
        await c.channel.sample()

    trace = record(tmp_path, work)
    assert trace.table("steps").sort("step").collect()["step"].to_list() == list(range(10))
    assert trace.manifest.rows_dropped == {} and trace.manifest.notes == []


def test_asynchronous_scheduling_is_noted(tmp_path: Path) -> None:
    about = {"role": "api", "config": {**API["config"], "async_scheduling": True}}  # type: ignore[dict-item]
    keep = rings.Plugin(tmp_path / "channels" / "vllm-api-1.ring", about)

    async def work(c: rings.Capture) -> None:
        await c.channel.start()

    trace = record(tmp_path, work)
    assert keep.writer and trace.manifest.notes == [
        "vllm: asynchronous scheduling is on: a step's end − start is not device time, but the wait for its result."
    ]
    assert trace.manifest.servers[0].config["step_source"] == "stat logger"


# -- recordings of a real vLLM ----------------------------------------------------------------------------------------


def replayed(folder: Path, *names: str, **options: Any) -> Trace:
    """The recorded channels through the collector."""
    made = [(rings.recorded(n), n) for n in names]
    plugins = [rings.Plugin(folder / "channels" / f"vllm-{r.about['role']}-{n}.ring", r.about) for r, n in made]

    async def work(c: rings.Capture) -> None:
        await c.channel.start()
        for (r, _), p in zip(made, plugins, strict=True):
            p.put(r.frames)
        await c.channel.sample()

    return record(folder, work, **options)


def test_scheduler_and_stat_logger_tell_the_same(tmp_path: Path) -> None:
    """One run of vLLM 0.32, recorded by both: as many steps, of equal composition but for what was computed again."""
    both = replayed(tmp_path / "a", "api", "engine").table("steps").sort("step").collect()
    alone = replayed(tmp_path / "b", "api").table("steps").sort("step").collect()
    assert both.height == alone.height == len([r for r in rings.recorded("api").records if "i" in r])
    for name in ("step", "running", "waiting", "kv_used_tokens", "kv_capacity_tokens"):
        # The scheduler looks after choosing the batch, the stat logger's figures are from after the step.
        if name in ("step", "kv_capacity_tokens"):
            assert both[name].to_list() == alone[name].to_list()
    total = pl.col("prefill_tokens") + pl.col("decode_tokens")
    assert both.select(total).to_series().to_list() == alone.select(total).to_series().to_list()
    differ = both.filter(both["prefill_tokens"] != alone["prefill_tokens"])
    assert differ.height <= both["preempted"].sum() * 4
    # Times: the stat logger hears of a step after it; its own length is that of model and sampling only.
    gap = (alone["end_ns"] - both["end_ns"]).to_numpy()
    assert abs(float(gap.mean())) < 20e6


def test_the_recording_is_a_trace_that_keeps_the_laws(tmp_path: Path) -> None:
    trace = replayed(tmp_path, "api", "engine")
    assert [f for f in validate(trace) if f.check != "coverage_present"] == []
    assert trace.manifest.rows_dropped == {} and trace.manifest.values_dropped == {}
    requests = trace.table("requests").collect()
    finished = requests.filter(pl.col("finish_reason").is_not_null())
    told = [f for r in rings.recorded("api").records for f in r.get("f", ())]
    assert finished["output_tokens"].sum() == sum(f[4] for f in told)
    tokens = trace.table("tokens").group_by("request").agg(pl.col("count").sum()).collect()
    joined = finished.join(tokens, on="request")
    assert joined.height == finished.height and joined["count"].to_list() == joined["output_tokens"].to_list()
    assert finished.select((pl.col("engine_first_token_ns") - pl.col("first_token_ns")).abs().max()).item() == 0


def test_requests_wait_for_a_primary_that_names_them(tmp_path: Path) -> None:
    """With a proxy about, rows of the engine go to the requests that it saw, and say nothing of what is seen from outside."""
    made = rings.recorded("engine")
    plugin = rings.Plugin(tmp_path / "channels" / "vllm-engine-1.ring", made.about)
    names = [row[1] for r in made.records if r["k"] == "a" for row in r["l"]]
    first = names[0].rsplit("-", 2)[0]

    async def work(c: rings.Capture) -> None:
        await c.channel.start()
        number = c.links.new()
        c.writer.append("requests", [{"request": number, "arrival_ns": 1, "request_id": first, "source": "proxy"}])
        plugin.put(made.frames)
        await c.channel.sample()
        c.links.claim(number, first)

    trace = record(tmp_path, work, primary=True)
    row = trace.table("requests").filter(pl.col("request") == 0).collect().row(0, named=True)
    assert row["arrival_ns"] == 1 and row["queued_ns"] > 1 and row["engine_first_token_ns"] > row["queued_ns"]
    assert row["first_token_ns"] is None
    assert trace.table("residency").filter(pl.col("request") == 0).collect().height >= 2


def test_a_channel_can_be_read_after_a_crash(tmp_path: Path) -> None:
    made = rings.recorded("engine")
    plugin = rings.Plugin(tmp_path / "channels" / "vllm-engine-1.ring", made.about)
    plugin.put(made.frames)
    plugin.writer.close()
    assert list(records_of(plugin.path)) == made.records


def test_whatever_stands_in_a_channel_harms_nothing(tmp_path: Path) -> None:
    """Records of other shapes are counted one by one."""
    api, engine = (rings.Plugin(tmp_path / "channels" / f"vllm-{r['role']}-1.ring", r) for r in (API, ENGINE))
    odd: list[Any] = [
        {"k": "s", "t": "x"}, {"k": "s", "t": 5, "i": [1]}, {"k": "s", "t": 5, "f": [[1]]}, {"k": "s", "t": 5, "f": [[]]},
        {"k": "s", "t": 5, "p": 3},
    ]  # fmt: skip

    async def work(c: rings.Capture) -> None:
        await c.channel.start()
        api.put(odd)
        engine.put(
            [{"k": "c", "t": []}, {"k": "c", "n": 1, "t": [1]}, {"k": "a", "l": [[1]], "t": 1}, {"k": "x", "l": 5, "t": 1}]
        )
        await c.channel.sample()

    trace = record(tmp_path, work)
    assert trace.manifest.rows_dropped == {
        "vllm-plugin: record that is not understood": 8, "vllm-plugin: records malformed in the channel": 1,
    }  # fmt: skip


def test_what_a_preemption_costs_is_repeated_work(tmp_path: Path) -> None:
    """Two requests of the recording were preempted: 61 and 1 tokens were computed a second time, and the accounting says so."""
    from hoptrace.analysis.latency.accounting import account

    trace = replayed(tmp_path, "api", "engine")
    stays = trace.table("stages").filter(pl.col("recomputed_tokens") > 0).sort("recomputed_tokens").collect()
    assert stays.select("resumed_tokens", "recomputed_tokens").rows() == [(160, 1), (256, 61)]
    parts = account(trace).parts
    again = parts.filter(pl.col("recompute_ns") > 0)["request"].to_list()
    assert sorted(again) == sorted(stays["request"].to_list())
    assert parts["unexplained_ns"].sum() == 0


def test_a_decode_servers_transfers_are_what_vllm_counted(tmp_path: Path) -> None:
    """The decode side of a pair over NIXL: bytes, descriptors and times equal vLLM's own totals, each transfer its request's."""
    import json

    totals = json.loads((rings.DATA / "decode.json").read_text())
    trace = replayed(tmp_path, "decode_api", "decode_engine")
    moves, waits = trace.table("moves").sort("start_ns").collect(), trace.table("waits").collect()
    assert (moves.height, moves["bytes"].sum(), moves["transfers"].sum()) == (6, totals["bytes"], totals["descriptors"])
    for rows in (moves, waits):
        assert (rows["end_ns"] - rows["start_ns"]).sum() == round(totals["seconds"] * 1e9)
    assert moves["mechanism"].to_list() == ["message"] * 6, "UCX_TLS was tcp,self"
    stages = trace.table("stages").sort("scheduled_ns").collect()
    assert moves["request"].to_list() == stages["request"].to_list()
    assert stages["cached_peer_tokens"].to_list() == stages["cached_tokens"].to_list() == totals["prompts"]
    assert stages["role"].to_list() == ["decode"] * 6 and stages["recomputed_tokens"].to_list() == [1] * 6
