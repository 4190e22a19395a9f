"""What runs inside vLLM: records by attribute, times that are not handed out, a configuration; nothing harms the engine."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import vllm_fakes as fakes

from hoptrace.collectors.inside import channel, ring, vllm_times
from hoptrace.collectors.inside.channel import decoder
from hoptrace.collectors.inside.vllm_config import config_of_vllm, dp_rank_of
from hoptrace.collectors.inside.vllm_record import plain, record_of
from hoptrace.collectors.inside.vllm_steps import StepRecorder


def records_in(folder: Path, role: str) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"vllm-{role}-*.ring")
    reader = ring.Reader(path)
    return [decoder(reader.header.encoding)(f) for f in reader.read()]


def test_a_step_as_a_record() -> None:
    it = fakes.IterationStats(time.time() - 0.25)
    it.num_generation_tokens = 3
    it.prompt_token_stats = SimpleNamespace(computed=7, local_cache_hit=32, external_kv_transfer=0, cached_tokens=32, total=39)
    before = time.monotonic_ns()
    record = record_of(
        fakes.scheduler_stats(
            num_running_reqs=4, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.5,
            iteration_details=fakes.details(14, 1, 7, 3, 3, 12.5, num_encoder_inputs=2, num_encoder_output_tokens=90),
            prefix_cache_stats=fakes.prefix(1, 39, 32),
            connector_prefix_cache_stats=fakes.prefix(1, 7, 4, host=3, p2p=1),
            kv_cache_eviction_events=[
                SimpleNamespace(lifetime_seconds=1.5, idle_seconds=0.5, reuse_gaps_seconds=(0.25, 0.25)),
                SimpleNamespace(lifetime_seconds=2.0, idle_seconds=1.0, reuse_gaps_seconds=()),
            ],
            spec_decoding_stats=SimpleNamespace(num_drafts=3, num_draft_tokens=12, num_accepted_tokens=5),
            kv_connector_stats={"transfer_duration": [0.01], "bytes_transferred": [4096]},
            num_kv_fetch_reqs_by_stage={"in_progress": 1},
        ),
        it, 2,
    )  # fmt: skip
    assert record is not None
    received = record.pop("t")
    # When the API server began with the message, not when the plug-in was called.
    assert received - before <= -200_000_000
    assert record == {
        "k": "s", "e": 2, "r": 4, "w": 2, "d": 1, "u": 0.5, "i": [14, 1, 7, 3, 3, 12_500_000, 2, 90, 0],
        "p": [1, 39, 32, 0, 0, 0], "c": [1, 7, 4, 0, 0, 0], "ch": {"host": 3, "p2p": 1},
        "ev": [2, 3_500_000_000, 1_500_000_000, 2, 500_000_000],
        "sd": [3, 12, 5], "kv": {"transfer_duration": [0.01], "bytes_transferred": [4096]}, "kf": {"in_progress": 1},
        "n": [3, 7, 32, 0, 32, 39, 0],
    }  # fmt: skip


def test_nothing_said_is_no_record() -> None:
    assert record_of(None, None, 0) is None
    assert record_of(None, fakes.IterationStats(time.time()), 0) is None


def test_what_a_version_does_not_have_is_null_or_left_out() -> None:
    record = record_of(SimpleNamespace(num_running_reqs=1), SimpleNamespace(), 0)
    assert record is not None
    record.pop("t")
    assert record == {"k": "s", "r": 1, "w": None}
    odd = record_of(SimpleNamespace(iteration_details=SimpleNamespace(iteration_index=3)), None, 0)
    assert odd is not None and odd["i"] == [3, None, None, None, None, 0, 0, 0, 0]


@given(
    st.recursive(
        st.one_of(
            st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=300), st.builds(object)
        ),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
        max_leaves=20,
    )
)
def test_statistics_of_any_shape_can_be_said(value: Any) -> None:
    """Whatever a connector reports, it is bounded and can be encoded; nested objects carry their values in ``data``."""
    import msgspec

    made = plain(SimpleNamespace(data={"x": value}))
    assert set(made) == {"x"}
    assert len(msgspec.msgpack.encode(made)) < 100_000


def test_the_engines_own_times_are_taken_where_vllm_has_them() -> None:
    class Stats(fakes.IterationStats):
        pass

    assert vllm_times.install(Stats) and vllm_times.install(Stats), "twice is once"
    it = Stats(time.time())
    stats = SimpleNamespace(queued_ts=10.0, scheduled_ts=10.5, first_token_ts=0.0, last_token_ts=12.25)
    assert it.update_from_finished_request("length", "a", req_stats=stats) == "as before"
    it.update_from_finished_request("stop", "b", req_stats=SimpleNamespace())
    assert vllm_times.take(it) == {
        0: [10_000_000_000, 10_500_000_000, None, 12_250_000_000],
        1: [None, None, None, None],
    }
    record = record_of(None, it, 0, vllm_times.take(it))
    assert record is not None and record["f"][0][:3] == ["a", "length", 1_000_000_000]
    assert record["f"][0][11:] == [10_000_000_000, 10_500_000_000, None, 12_250_000_000]
    assert vllm_times.take(fakes.IterationStats(0.0)) == {} and vllm_times.take(None) == {}
    assert not vllm_times.install(SimpleNamespace)


def test_configuration_by_attribute() -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="/models/x", served_model_name=["x"], max_model_len=2048, dtype="torch.bfloat16",
            hf_text_config=SimpleNamespace(num_hidden_layers=30, num_attention_heads=9), get_total_num_kv_heads=lambda: 3,
            get_head_size=lambda: 64, get_hidden_size=lambda: 1 / 0,
        ),
        cache_config=SimpleNamespace(block_size=16, cache_dtype="auto", num_gpu_blocks=2002, kv_cache_size_tokens=16016),
        scheduler_config=SimpleNamespace(max_num_seqs=8, async_scheduling=True),
        parallel_config=SimpleNamespace(data_parallel_size=2, data_parallel_index=1, data_parallel_rank=0),
    )  # fmt: skip
    found = config_of_vllm(config)
    assert found | {"version": None, "ucx_tls": None} == {
        "model_path": "/models/x", "model": "x", "context_tokens": 2048, "dtype": "bfloat16", "layers": 30, "heads": 9,
        "kv_heads": 3, "head_size": 64, "block_size_tokens": 16, "kv_dtype": "bfloat16",
        "max_sequences": 8, "async_scheduling": True,
        "data_parallel_size": 2,
        # 2002 is the sum over two engines, and one block of each is never handed out
        "block_count": 1000, "kv_capacity_tokens": 16000, "version": None, "ucx_tls": None,
    }  # fmt: skip
    assert dp_rank_of(config) == 1 and dp_rank_of(SimpleNamespace()) == 0
    assert config_of_vllm(object()).keys() <= {"version", "ucx_tls"}


def test_capacity_of_models_whose_groups_share_blocks_is_vllms_own() -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=100, kv_cache_size_tokens=900))
    found = config_of_vllm(config, kv_cache_config=SimpleNamespace(num_blocks=100, kv_cache_groups=[1, 2]))
    assert (found["block_count"], found["kv_capacity_tokens"], found["kv_groups"]) == (99, 900, 2)


# -- in vLLM's place --------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Modules of the names that the plug-in imports, with classes of the same shape."""
    loggers, stats = types.ModuleType("vllm.v1.metrics.loggers"), types.ModuleType("vllm.v1.metrics.stats")
    loggers.StatLoggerBase = type("StatLoggerBase", (), {})  # type: ignore[attr-defined]
    stats.IterationStats = type("IterationStats", (fakes.IterationStats,), {})  # type: ignore[attr-defined]
    sync, other = types.ModuleType("vllm.v1.core.sched.scheduler"), types.ModuleType("vllm.v1.core.sched.async_scheduler")
    sync.Scheduler = fakes.Scheduler  # type: ignore[attr-defined]
    other.AsyncScheduler = type("AsyncScheduler", (fakes.Scheduler,), {})  # type: ignore[attr-defined]
    for module in (loggers, stats, sync, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setenv("HOPTRACE_CHANNELS", str(tmp_path / "channels"))
    ours = ("hoptrace.collectors.inside.vllm_stats", "hoptrace.collectors.inside.vllm_scheduler")
    for name in ours:
        sys.modules.pop(name, None)
    yield tmp_path / "channels"
    for name in ours:
        sys.modules.pop(name, None)


def test_stat_logger_writes_and_never_raises(fake_vllm: Path) -> None:
    from hoptrace.collectors.inside.vllm_stats import StatLogger

    first, second = StatLogger(SimpleNamespace(), 0), StatLogger(SimpleNamespace(), 1)
    first.record(fakes.scheduler_stats(num_running_reqs=1), fakes.IterationStats(time.time()), mm_cache_stats=None, engine_idx=0)
    second.record(fakes.scheduler_stats(), None, engine_idx=1)

    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    second.record(Hostile(), Hostile(), engine_idx=1)
    second.record(fakes.scheduler_stats(kv_connector_stats={"x": 1 << 80}), None)
    for logger in (first, second):
        logger.log_engine_initialized()
        logger.log()
        logger.record_sleep_state(1, 2)
    records = records_in(fake_vllm, "api")
    assert [(r["k"], r.get("e", 0), r["r"]) for r in records] == [("s", 0, 1), ("s", 1, 0)], "one channel for both engines"
    (path,) = fake_vllm.glob("*.ring")
    assert ring.Reader(path).lost == 2


def test_stat_logger_without_a_channel_does_nothing(fake_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPTRACE_CHANNELS", "/proc/nothing/here")
    from hoptrace.collectors.inside.vllm_stats import StatLogger

    StatLogger(SimpleNamespace(), 0).record(fakes.scheduler_stats(), None)


def test_an_unknown_interface_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reports a plug-in whose loading fails and goes on without it."""
    sys.modules.pop("hoptrace.collectors.inside.vllm_stats", None)
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.v1", None)
    with pytest.raises(ImportError):
        import hoptrace.collectors.inside.vllm_stats  # noqa: F401


@pytest.mark.parametrize(("asynchronous", "kind"), [(False, "RecordingScheduler"), (True, "RecordingAsyncScheduler")])
def test_the_recording_scheduler_fits_the_configuration(fake_vllm: Path, asynchronous: bool, kind: str) -> None:
    from hoptrace.collectors.inside.vllm_scheduler import RecordingScheduler

    made = RecordingScheduler(vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=asynchronous)))
    assert type(made).__name__ == kind and isinstance(made, fakes.Scheduler)
    assert (type(made).__mro__[1].__name__ == "AsyncScheduler") is asynchronous
    assert ring.read_header(next(fake_vllm.glob("*.ring"))).about["scheduler"] == kind


def test_a_scheduler_of_ones_own_can_be_wrapped(fake_vllm: Path) -> None:
    from hoptrace.collectors.inside.vllm_scheduler import recording

    class Mine(fakes.Scheduler):
        pass

    made = recording(Mine)()
    made.add_request(fakes.Request("a", 4, max_tokens=1))
    made.update_from_output(made.schedule(), None)
    assert [r["k"] for r in records_in(fake_vllm, "engine")] == ["a", "a", "c"]


def test_a_broken_recorder_leaves_the_scheduler_alone(fake_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hoptrace.collectors.inside.vllm_scheduler import recording

    made = recording(fakes.Scheduler)()
    monkeypatch.setattr(channel.Channel, "send", lambda *a: 1 / 0)
    made.add_request(fakes.Request("a", 4, max_tokens=2))
    for _ in range(3):
        made.update_from_output(made.schedule(), None)
    assert made.finish_requests("a", "FINISHED_ABORTED") == [] and made.requests == {}


Deed = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 6)),
    st.just(("step",)),
    st.just(("preempt",)),
    st.just(("abort",)),
)


@given(st.lists(Deed, max_size=40))
def test_the_record_of_a_step_is_its_composition(tmp_path_factory: pytest.TempPathFactory, deeds: list[Any]) -> None:
    """Each step with tokens is one record, numbered on, with each request's tokens and what was computed before."""
    folder = tmp_path_factory.mktemp("steps")
    scheduler = fakes.Scheduler()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOPTRACE_CHANNELS", str(folder))
        recorder = StepRecorder.of(scheduler)
    now = 0
    for i, deed in enumerate(deeds):
        now += 10
        if deed[0] == "add":
            request = fakes.Request(f"r{i}", deed[1], max_tokens=deed[2])
            recorder.added(request, now)
            scheduler.add_request(request)
        elif deed[0] == "abort":
            if scheduler.requests:
                recorder.finished(scheduler.finish_requests(next(iter(scheduler.requests)), "x"), "FINISHED_ABORTED", now)
        else:
            output = scheduler.schedule(preempt=deed[0] == "preempt")
            recorder.scheduled(scheduler, output, now, now + 1)
            recorder.updated(output, None, scheduler.update_from_output(output, None), now + 5, now + 6)
    records = records_in(folder, "engine")
    names = {number: name for r in records if r["k"] == "a" for number, name, *_ in r["l"]}
    steps = [r for r in records if r["k"] == "c"]
    assert [r["n"] for r in steps] == list(range(len(scheduler.books)))
    for r, book in zip(steps, scheduler.books, strict=True):
        assert {names[q]: (z, b) for q, z, b in zip(r["q"], r["z"], r["b"], strict=True)} == book
        assert len(r["q"]) == len(r["o"]) and r["t"][1] == r["t"][0] + 1 and r["t"][3] == r["t"][2] + 1


def test_drafts_are_counted_before_a_stop_cuts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPTRACE_CHANNELS", str(tmp_path))
    recorder = StepRecorder.of(fakes.Scheduler())
    output = fakes.Output(
        {"a": 4, "b": 4, "c": 4}, [], None, scheduled_spec_decode_tokens={"a": [1, 2, 3], "b": [1, 2, 3], "c": [1]}
    )
    output.num_invalid_spec_tokens = {"b": 1}
    results = SimpleNamespace(sampled_token_ids=[[5, 6, 7], [5], []], req_id_to_index={"a": 0, "b": 1, "c": 2})
    # a: 2 of 3 accepted, b: 0 of 2, c: sampled nothing
    assert recorder.sampled(output, results) == [5, 2]
    assert recorder.sampled(fakes.Output({}, [], None), results) is None
    assert recorder.sampled(output, object()) is None
