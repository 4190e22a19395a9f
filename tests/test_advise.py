"""Advice: what is known to be best is found, what cannot matter is left alone, and what is printed can be typed."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl
import pytest
from support import command, vllm_server
from support.advised import CHEAP_BATCH, DEAR_PROMPTS, recorded, requests
from support.workloads import server, store

from hoptrace.cli.advise_view import show
from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Server
from hoptrace.reader import open_trace
from hoptrace.replay.advise import Advice, advise
from hoptrace.replay.advise.catalogue import ENGINES, judge, named
from hoptrace.replay.advise.decide import CHANGE, KEEP, TRY, decide
from hoptrace.replay.advise.error import OwnError
from hoptrace.replay.advise.evidence import Evidence
from hoptrace.replay.advise.model import CANNOT_MATTER, NOT_JUDGED, Change, Left, Outlook, Verdict
from hoptrace.replay.advise.objective import objective_of
from hoptrace.replay.advise.scene import Scene
from hoptrace.replay.advise.trials import policy_of
from hoptrace.replay.policy import Policy
from hoptrace.replay.policy.resolve import resolve_server
from hoptrace.samples import sample

DRAWS = 8
"""Enough for an interval, and few enough to be quick."""


def run(*args: str | Path) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    ran = command.run(*args)
    return ran.returncode, ran.stdout, ran.stderr


def typed(advice: Advice) -> list[str]:
    """What the decision says to type."""
    v = advice.decision.verdict
    return [] if v is None else [t for c in v.changes for t in c.typed]


# --- traces whose best flag is known ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sequences at most, a queue behind them, and batching that is nearly free."""
    folder = tmp_path_factory.mktemp("crowded")
    return recorded(folder, requests(60, 25), max_sequences=2, max_batched_tokens=512).path


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests that never meet."""
    return recorded(tmp_path_factory.mktemp("idle"), requests(20, 900)).path


def test_more_sequences_where_a_queue_waits_for_places(crowded: Path) -> None:
    found = advise(open_trace(crowded), draws=DRAWS)
    assert found.decision.kind == TRY, "two decoders were recorded, so a step of more is extrapolated"
    first = typed(found)[0]
    assert first.startswith("--max-num-seqs ") and int(first.split()[1]) >= 8, found.decision.sentence
    best = found.decision.verdict
    assert best is not None and best.extrapolated is not None and best.extrapolated > 0.5
    assert best.low is not None and best.low > 0.5, "the queue is what they wait for"
    assert any(name.startswith("ITL") for name in best.worse), "larger batches make each step longer"
    assert found.evidence.stood["slots"] > 0.5
    # The recording was made at this very cost, so the own policy is met to the step.
    assert found.error is not None and abs(found.error.of[("e2e", "p50")]) < 0.002


def test_prefix_caching_where_prompts_begin_alike(tmp_path: Path) -> None:
    rows = requests(60, 60, prompt=160, shared_blocks=8)
    trace = recorded(tmp_path, rows, cost=DEAR_PROMPTS, max_batched_tokens=512)
    found = advise(trace, draws=DRAWS)
    assert found.decision.kind == CHANGE and typed(found) == ["--enable-prefix-caching"], found.decision.sentence
    # Eight of about ten blocks of each prompt but the first.
    assert found.evidence.reusable == pytest.approx(128 * 59 / int(rows["prompt_tokens"].sum()))
    caches = recorded(tmp_path / "on", rows, cost=DEAR_PROMPTS, max_batched_tokens=512, prefix_caching=True)
    again = advise(caches, draws=0)
    # A prompt is found only once it has been computed: those that come meanwhile compute theirs too.
    assert found.evidence.reusable is not None and 0.5 < again.evidence.reused / found.evidence.reusable <= 1
    spared = f"the cache spares {100 * again.evidence.reused:.0f} % of the prompt tokens"
    assert Left("no-enable-prefix-caching", CANNOT_MATTER, spared) in again.left


def test_leave_it_where_nothing_could_matter(idle: Path) -> None:
    found = advise(open_trace(idle), draws=DRAWS)
    assert found.decision.kind == KEEP and not found.verdicts and not found.idle and not typed(found)
    assert "none of those that can be judged could matter" in found.decision.sentence
    assert {x.flag for x in found.left if x.kind == CANNOT_MATTER} >= {
        "more of max-num-seqs", "less of max-num-seqs", "more of max-num-batched-tokens", "less of max-num-batched-tokens",
        "no-enable-chunked-prefill", "num-gpu-blocks-override", "watermark", "data-parallel-size", "kv-transfer-config",
    }  # fmt: skip


def test_smaller_chunks_for_the_time_between_tokens(tmp_path: Path) -> None:
    rows = requests(40, 150, prompt=600, output=40)
    trace = recorded(tmp_path, rows, cost=DEAR_PROMPTS, max_sequences=8, max_batched_tokens=1024)
    found = advise(trace, objective="itl_p99", draws=DRAWS)
    assert typed(found) == ["--max-num-batched-tokens 128"], found.decision.sentence
    best = found.decision.verdict
    assert best is not None and best.worse[0].startswith("TTFT"), "prompts pay for it"
    one = next(v for v in found.verdicts if v.text == "--max-num-seqs 1")
    assert (one.gain or 0) > (best.gain or 0) and max(o.ratio or 0 for o in one.figures.values()) > 2, "too dear"
    # The same trace, asked for the time to the first token: not that.
    other = advise(trace, objective="ttft_p95", draws=DRAWS)
    assert other.decision.kind == KEEP


def test_memory_is_named_and_not_decided(tmp_path: Path) -> None:
    trace = recorded(
        tmp_path, requests(40, 30, prompt=120, output=60), max_sequences=16, max_batched_tokens=512, kv_capacity_tokens=640,
        context_tokens=512,
    )  # fmt: skip
    found = advise(trace, draws=DRAWS)
    assert found.decision.kind == KEEP
    needs = {v.needs for v in found.verdicts}
    # 640 tokens more, of 2 layers × 2 (K, V) × 2 heads × 8 × 2 bytes = 128 bytes.
    assert "80 KiB more for KV" in needs and "another server like it" in needs
    assert any(s.startswith("With 80 KiB more for KV: ") for s in found.decision.also)


def test_two_flags_that_combine_are_tried_together(tmp_path: Path) -> None:
    rows = requests(60, 20, prompt=160, output=30, shared_blocks=8)
    trace = recorded(tmp_path, rows, cost=DEAR_PROMPTS, max_sequences=3, max_batched_tokens=512)
    found = advise(trace, draws=DRAWS)
    pairs = [v for v in found.verdicts if len(v.changes) == 2]
    assert pairs and {c.flag for c in pairs[0].changes} == {"max-num-seqs", "enable-prefix-caching"}
    alone = [v for v in found.verdicts if len(v.changes) == 1 and not v.needs]
    assert (pairs[0].gain or 0) > max(v.gain or 0 for v in alone)


def test_the_advice_on_a_real_server_holds_against_the_real_run() -> None:
    """llama.cpp was recorded with four slots and, on the same work, with one: what the advice on the first puts first is held
    against what the second did. (The interval is of one machine in one mood; two real runs differ by their moods as well.)"""
    from hoptrace.comparison import compare

    four = open_trace(sample("llamacpp-four-slots"))
    found = advise(four)
    best = next(v for v in found.verdicts if not v.needs)
    assert [t for c in best.changes for t in c.typed] == ["-np 1", "-c 2048"]
    real = compare(four, open_trace(sample("llamacpp-one-slot")))
    ratio = 1.0
    for s in ("p50", "p95"):
        d = real.get("e2e", s)
        assert d.observed and d.predicted
        ratio *= d.predicted / d.observed
    gain = 1 - ratio**0.5
    assert gain == pytest.approx(0.416, abs=0.005), "what the two recordings say"
    assert best.gain is not None and best.low is not None
    assert best.low < gain and abs(best.gain - gain) < 0.2
    eight = next(v for v in (*found.verdicts, *found.idle) if v.text == "-np 8 -c 16384")
    assert (eight.gain or 0) < best.gain


# --- what is weighed -------------------------------------------------------------------------------------------------------


def test_the_same_arguments_give_the_same_advice(crowded: Path) -> None:
    trace = open_trace(crowded)
    one, two = (advise(trace, draws=2, seed=3) for _ in range(2))
    assert [v.as_dict() for v in one.verdicts] == [v.as_dict() for v in two.verdicts]
    assert [v.as_dict() for v in one.verdicts] != [v.as_dict() for v in advise(trace, draws=2, seed=4).verdicts]


def test_goodput_counts_requests_within_all_limits(crowded: Path) -> None:
    trace = open_trace(crowded)
    rows = trace.table("requests").collect()
    within = ((rows["first_token_ns"] - rows["arrival_ns"]) <= 300_000_000) & (
        (rows["finish_ns"] - rows["arrival_ns"]) <= 800_000_000
    )  # fmt: skip
    found = advise(trace, slo={"ttft": 300_000_000, "e2e": 800_000_000}, draws=DRAWS)
    assert found.objective.name == "goodput"
    assert found.own[("goodput", "share")] == pytest.approx(int(within.sum()) / rows.height, abs=1 / rows.height)
    best = found.decision.verdict
    assert best is not None and best.gain == pytest.approx(1 - found.own[("goodput", "share")], abs=0.15)
    assert "points" in found.decision.sentence


def test_limits_on_the_time_between_tokens_are_by_request(crowded: Path) -> None:
    trace = open_trace(crowded)
    # A step of two decoders takes 10.4 ms, one beside a prompt about 0.4 ms more.
    share = {ms: advise(trace, slo={"itl_p99": round(ms * 1e6)}, draws=0).own[("goodput", "share")] for ms in (10, 12)}
    assert share == {10: 0.0, 12: 1.0}


def test_more_traffic_is_another_question(idle: Path) -> None:
    found = advise(open_trace(idle), draws=0, rate="40x")
    assert found.decision.kind == TRY and "it has no interval" in found.decision.sentence
    assert found.evidence.stood["slots"] > 0


def test_what_the_user_names_is_tried(crowded: Path) -> None:
    found = advise(open_trace(crowded), draws=0, tries=("max-num-seqs=3", "--max_num_batched_tokens=256"))
    shown = {t for v in found.verdicts for c in v.changes for t in c.typed}
    assert {"--max-num-seqs 3", "--max-num-batched-tokens 256"} <= shown
    with pytest.raises(UsageError, match="no change that vLLM and a replay both know"):
        advise(open_trace(crowded), tries=("gpu-memory-utilization=0.9",))
    with pytest.raises(UsageError, match="a whole number of 1 or more"):
        advise(open_trace(crowded), tries=("max-num-seqs=many",))


# --- errors ----------------------------------------------------------------------------------------------------------------


def test_a_trace_that_does_not_tell_its_engine(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not tell which engine"):
        advise(open_trace(sample("azure-2023-conv")))
    other = store(tmp_path / "t.trace", {"requests": requests(5, 10)}, server(engine="tensorrt-llm"))
    with pytest.raises(InputError, match=r"ran on tensorrt-llm; advice is about the flags of vLLM, SGLang, llama\.cpp"):
        advise(other)


def test_a_trace_without_steps_needs_a_cost(tmp_path: Path) -> None:
    rows = {"requests": requests(40, 10, prompt=200)}
    log = store(tmp_path / "log.trace", rows, server(max_batched_tokens=512, parameters=None, weight_bytes=None, layers=None))
    code, out, err = run("advise", log.path)
    assert code == 3 and not out and "Traceback" not in err and "--cost" in err, err
    shaped = store(tmp_path / "shaped.trace", rows, server(max_batched_tokens=512))
    with pytest.raises(InputError, match="no machine to compute it for") as refused:
        advise(shaped)  # a replay would assume a machine, and say so: not good enough for advice
    assert refused.value.hint and "--platform NAME" in refused.value.hint and "--model" not in refused.value.hint
    on = advise(shaped, platform="h100-sxm-80gb")
    assert on.cost == "roofline" and "by a replay with a roofline step cost" in on.decision.sentence
    code, out, err = run("advise", log.path, "--cost", "fixed:5,20", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["cost"] == "fixed" and found["draws"] == 0 and any("nothing is sure" in n for n in found["notes"])
    assert found["decision"] in (TRY, KEEP), "without an interval nothing is changed unseen"


def test_a_split_is_refused_by_name(tmp_path: Path) -> None:
    from hoptrace.replay.run import replay

    log = store(tmp_path / "log.trace", {"requests": requests(10, 10)}, server())
    split = replay(log, "pd-1-1", cost=CHEAP_BATCH, out=tmp_path / "split.trace")
    with pytest.raises(InputError, match="one kind of server"):
        advise(split)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--objective", "beauty"), "There is no objective 'beauty'"),
        (("--objective", "goodput"), "Goodput needs limits"),
        (("--objective", "ttft_p95", "--slo", "ttft=1s"), "--slo is for goodput"),
        (("--slo", "visible_ttft=1s"), "does not predict visible_ttft"),
        (("--slo", "ttft=fast"), "no time with a unit"),
        (("-o", "."), "is no ordinary file"),
    ],
)
def test_wrong_use(idle: Path, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run("advise", idle, *arguments)
    assert code == 2 and words in err and not out


def test_a_file_that_is_there_is_kept(idle: Path, tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    file.write_text("mine")
    code, out, err = run("advise", idle, "--draws", 0, "-o", file)
    assert code == 2 and "already there" in err and not out and file.read_text() == "mine"
    code, _, err = run("advise", idle, "--draws", 0, "-q", "-o", file, "--force")
    assert code == 0 and json.loads(file.read_text())["format"] == "advise/1", err
    code, out, err = run("advise", idle, "--draws", 0, "-o", tmp_path / "none" / "a.json")
    assert code == 4 and "there is no folder" in err and not out


def test_a_server_that_can_run_nothing_gets_no_advice(tmp_path: Path) -> None:
    shutil.copytree(sample("llamacpp-four-slots"), tmp_path / "tiny.trace")
    told = json.loads((tmp_path / "tiny.trace" / "manifest.json").read_text())
    told["servers"][0]["context_tokens"] = 2
    (tmp_path / "tiny.trace" / "manifest.json").write_text(json.dumps(told))
    with pytest.raises(InputError, match="refuses every request"):
        advise(open_trace(tmp_path / "tiny.trace"), draws=0)


def test_short_flags_are_tried_as_they_are_printed() -> None:
    found = advise(open_trace(sample("llamacpp-four-slots")), draws=0, tries=("-np=3", "-b=100"))
    shown = {c.typed for v in found.verdicts for c in v.changes}
    assert ("-np 3", "-c 6144") in shown and ("-b 100",) in shown


# --- what is printed -------------------------------------------------------------------------------------------------------


def test_json_has_all_of_it(crowded: Path, tmp_path: Path) -> None:
    file = tmp_path / "advice.json"
    code, out, err = run("advise", crowded, "--draws", 2, "--json", "-o", file)
    assert code == 0, err
    found = json.loads(out)
    assert json.loads(file.read_text()) == found
    assert found["format"] == "advise/1" and found["engine"] == "vLLM" and found["objective"] == "e2e"
    assert set(found) >= {"decision", "typed", "sentence", "also", "proof", "changes", "without_gain", "left_out", "evidence",
                          "own_policy", "own_policy_error", "notes"}  # fmt: skip
    assert found["typed"] and all(c["gain"] is not None for c in found["changes"])
    assert {x["kind"] for x in found["left_out"]} == {CANNOT_MATTER, NOT_JUDGED}
    stem = f"run-{found['typed'][0].strip('-').replace(' ', '-')}.trace"
    drive = f"hoptrace drive {crowded} --against http://127.0.0.1:8000 -o"
    assert found["proof"] == [
        {"flags": "now", "command": f"{drive} run-now.trace"},
        {"flags": "changed", "command": f"{drive} {stem}"},
        {"flags": "", "command": f"hoptrace fidelity run-now.trace {stem}"},
    ]


def test_quiet_prints_the_decision_alone(idle: Path) -> None:
    code, out, _ = run("advise", idle, "-q", "--draws", 0)
    assert code == 0 and out == (
        "Keep the flags as they are: by the trace's own evidence none of those that can be judged could matter.\n"
    )  # fmt: skip


def test_the_printed_commands_can_be_parsed(crowded: Path) -> None:
    """The proof's commands have the options that they name."""
    from hoptrace.cli import cli

    code, out, err = run("advise", crowded, "--draws", 0, "--json", "--rate", "1.5x")
    assert code == 0, err
    for step in json.loads(out)["proof"]:
        words = shlex.split(step["command"])
        assert words[0] == "hoptrace"
        verb = cli.get_command(None, words[1])  # type: ignore[arg-type]
        assert verb is not None
        parsed = verb.make_context(words[1], words[2:]).params
        assert words[1] != "drive" or parsed["rate"] == "1.5x"


# --- the catalogue ---------------------------------------------------------------------------------------------------------

STRAINED = Evidence(
    requests=100, steps=1000, most_running=8, mean_running=6.0, most_waiting=40, stood={"slots": 0.5, "kv": 0.2, "budget": 0.1},
    most_step_tokens=512, budget_ns=0.3, most_beside=500, beside_ns=0.4, preemptions=7, most_kv_tokens=4000, reusable=0.5,
    reused=0.2, priorities=True,
)  # fmt: skip
"""A trace in which everything lacks."""
IDLE = replace(
    STRAINED, most_running=1, mean_running=1.0, most_waiting=1, stood=dict.fromkeys(("slots", "kv", "budget"), 0.0),
    most_step_tokens=90, budget_ns=0.0, most_beside=0, beside_ns=0.0, preemptions=0, most_kv_tokens=100, reusable=0.0, reused=0.0,
    priorities=False,
)  # fmt: skip


def scene(engine: str, evidence: Evidence, **changes: Any) -> Scene:
    own = Server(**{
        **server(engine=engine, max_sequences=8, max_batched_tokens=512, context_tokens=2048, block_size_tokens=32).model_dump(),
        **changes,
    })  # fmt: skip
    if engine == "llama.cpp":
        own.kv_capacity_tokens = 8 * 2048
    return Scene(own, resolve_server(Policy(), own), evidence, blocks_tokens=16)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_change_is_a_policy_that_keeps_the_rest(engine: str) -> None:
    s = scene(engine, STRAINED)
    changes, left = judge(ENGINES[engine], s)
    assert len(changes) >= 6
    for c in changes:
        policy = policy_of([c])
        assert policy.changes(), c.typed
        assert c.typed and c.now and c.size >= 0
        if not c.settings[0].startswith(("servers", "split")):
            now, then = s.resolved, resolve_server(policy, s.server)
            assert now.as_dict() != then.as_dict(), f"{c.text} changes nothing"
    flags = [f.flag for f in ENGINES[engine].families]
    assert len(flags) == len(set(flags))
    assert {c.flag for c in changes} <= set(flags) | {"no-enable-chunked-prefill"}
    assert all(x.why and not x.why.endswith(".") for x in left), "a reason stands inside a sentence"


@pytest.mark.parametrize("engine", ENGINES)
def test_an_idle_trace_settles_everything(engine: str) -> None:
    changes, left = judge(ENGINES[engine], scene(engine, IDLE, prefix_caching=True))
    assert not changes
    assert any(x.kind == CANNOT_MATTER for x in left)


@pytest.mark.parametrize("engine", ENGINES)
def test_unknown_settings_are_not_judged(engine: str) -> None:
    own = Server(name="s", engine=engine)
    s = Scene(own, resolve_server(Policy(), own), STRAINED)
    changes, left = judge(ENGINES[engine], s)
    assert not any(c.flag in ("max-num-seqs", "max-running-requests", "parallel", "batch-size") for c in changes)
    assert any("does not tell" in x.why for x in left if x.kind == NOT_JUDGED)


def test_vllm_keeps_the_budget_above_the_sequences() -> None:
    s = scene("vllm", STRAINED)
    one = named(ENGINES["vllm"], s, ["max-num-seqs=1024"])[0]
    assert one.typed == ("--max-num-seqs 1024", "--max-num-batched-tokens 1024")
    with pytest.raises(UsageError, match="8 or more"):
        named(ENGINES["vllm"], s, ["max-num-batched-tokens=4"])
    whole = next(c for c in judge(ENGINES["vllm"], s)[0] if c.flag == "no-enable-chunked-prefill")
    assert whole.typed == ("--no-enable-chunked-prefill", "--max-num-batched-tokens 2048")


def test_vllm_counts_the_null_block() -> None:
    more = named(ENGINES["vllm"], scene("vllm", STRAINED), ["num-gpu-blocks-override=101"])[0]
    assert more.typed == ("--num-gpu-blocks-override 101",) and more.settings == (f"kv.capacity_tokens={100 * 32}",)


def test_llamacpp_keeps_each_slots_context() -> None:
    s = scene("llama.cpp", STRAINED)
    two = named(ENGINES["llama.cpp"], s, ["parallel=16"])[0]
    assert two.typed == ("-np 16", "-c 32768") and two.now == "-np 8 -c 16384"
    assert "kv.capacity_tokens=32768" in two.settings and "1 MiB" not in two.now
    shared = replace(s, server=s.server.model_copy(update={"config": {"kv_unified": True}}))
    assert named(ENGINES["llama.cpp"], shared, ["parallel=16"])[0].typed == ("-np 16",)


KNOWN = {
    # vllm/engine/arg_utils.py of vLLM 0.32.0
    "vllm": {"--max-num-seqs", "--max-num-batched-tokens", "--enable-prefix-caching", "--no-enable-prefix-caching",
             "--enable-chunked-prefill", "--no-enable-chunked-prefill", "--scheduling-policy", "--num-gpu-blocks-override",
             "--kv-cache-dtype", "--block-size", "--watermark", "--data-parallel-size", "--kv-transfer-config"},
    # python/sglang/srt/server_args.py of SGLang 0.5.23
    "sglang": {"--max-running-requests", "--chunked-prefill-size", "--enable-mixed-chunk", "--max-total-tokens",
               "--kv-cache-dtype", "--dp-size", "--load-balance-method", "--disaggregation-mode", "--disable-radix-cache"},
    # common/arg.cpp of llama.cpp (build 11434)
    "llama.cpp": {"-np", "-c", "-b", "--cache-prompt"},
}  # fmt: skip


def lines(engine: str) -> list[list[str]]:
    """What every change types, as the words of a command line; advice in words left out."""
    found: list[Change] = []
    for evidence in (STRAINED, replace(STRAINED, reused=0.0)):
        for more in ({"prefix_caching": False}, {"prefix_caching": True}, {"config": {"chunked_prefill": False}}):
            found += judge(ENGINES[engine], scene(engine, evidence, **more))[0]
    found += named(ENGINES["vllm"], scene("vllm", STRAINED), ["enable-prefix-caching=off"]) if engine == "vllm" else []
    return [[w for t in c.typed if t.startswith("-") for w in shlex.split(t)] for c in found]


@pytest.mark.parametrize("engine", ENGINES)
def test_only_known_flags_are_typed(engine: str) -> None:
    used = {w for line in lines(engine) for w in line if w.startswith("-") and not w[1:2].isdigit()}
    assert used <= KNOWN[engine], used - KNOWN[engine]
    spoken = {"--disable-radix-cache"}  # named in words: it is left out
    assert used >= KNOWN[engine] - spoken, "a flag of the catalogue is never tried"


@pytest.mark.vllm
@pytest.mark.skipif(vllm_server.python() is None, reason="HOPTRACE_VLLM_PYTHON names no Python with vLLM")
def test_vllm_itself_takes_every_flag() -> None:
    code = (
        "import json, sys\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "parser = EngineArgs.add_cli_args(FlexibleArgumentParser())\n"
        "for line in json.load(sys.stdin):\n"
        "    parser.parse_args(['--model', 'm', *line])\n"
        "print('all')\n"
    )
    env = {**vllm_server.ENVIRONMENT, "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    done = subprocess.run(
        [str(vllm_server.python()), "-c", code], input=json.dumps(lines("vllm")), text=True, capture_output=True, timeout=300,
        check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.split()[-1] == "all", done.stderr[-2000:]


def test_priorities_and_prefixes_are_read_from_the_work(tmp_path: Path) -> None:
    rows = requests(30, 20, shared_blocks=1, priority=lambda i: i % 2)
    found = advise(recorded(tmp_path, rows, max_sequences=2, max_batched_tokens=512), draws=0)
    assert found.evidence.priorities and found.evidence.reusable == pytest.approx(
        16 * 29 / int(rows["prompt_tokens"].sum())
    )  # fmt: skip
    every = {t for v in (*found.verdicts, *found.idle) for c in v.changes for t in c.typed}
    assert "--scheduling-policy priority" in every
    without = pl.DataFrame({k: rows[k] for k in rows.columns if not k.startswith(("prefix", "hash", "block"))})
    told = advise(recorded(tmp_path / "w", without, max_sequences=2, max_batched_tokens=512), draws=0)
    assert told.evidence.reusable is None
    assert any(x.flag == "enable-prefix-caching" and "holds no prefix blocks" in x.why for x in told.left)


# --- the screen ------------------------------------------------------------------------------------------------------------


def _verdict(change: Change, gain: float, **more: Any) -> Verdict:
    return Verdict(changes=(change,), gain=gain, low=gain - 0.1, high=gain + 0.05, **more)


def _advice(*verdicts: Verdict, **changes: Any) -> Advice:
    aim = objective_of(None, None)
    found: dict[str, Any] = {
        "engine": "vLLM", "objective": aim, "decision": decide(aim, verdicts, 9), "verdicts": verdicts,
        "idle": tuple(_verdict(Change("max-num-seqs", (f"--max-num-seqs {n}",), (), "8"), -0.1) for n in (2, 4)),
        "left": (Left("watermark", CANNOT_MATTER, "no request was preempted"), Left("enforce-eager", NOT_JUDGED, "one side only"),
                 Left("stream-interval", NOT_JUDGED, "when a client reads")),
        "evidence": STRAINED, "own": {("e2e", "p50"): 1e9},
        "error": OwnError({("e2e", "p50"): 0.021, ("e2e", "p95"): -0.043, ("ttft", "p50"): 0.1}), "cost": "fitted",
        "arrivals": "recorded", "draws": 20, "url": "http://10.0.0.1:8000", "notes": ("4 of 62 requests are left out: failed.",),
        "driven": True,
    }  # fmt: skip
    return Advice(**(found | changes))


MORE = Change("max-num-seqs", ("--max-num-seqs 16",), ("batching.max_sequences=16",), "8", 1.0, notes=("A note of its own.",))
SERVER = Change("data-parallel-size", ("--data-parallel-size 2",), ("servers.count=2",), "1", needs="another server like it")
CHUNKS = Change("max-num-batched-tokens", ("--max-num-batched-tokens 256",), ("batching.max_batched_tokens=256",), "512", 1.0)


def _screen(advice: Advice, trace: Path = Path("runs/a day.trace"), rate: str = "1x") -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), mock.patch.dict("os.environ", {"COLUMNS": "110", "TERM": "dumb", "NO_COLOR": "1"}):
        show(advice, trace, rate)
    return "\n".join(x.rstrip() for x in out.getvalue().splitlines()) + "\n"


def test_screen_of_a_change(snapshot: Any) -> None:
    advice = _advice(
        _verdict(MORE, 0.4, worse=("ITL p99 +21 %",), extrapolated=0.04), _verdict(SERVER, 0.6, extrapolated=0.0),
        _verdict(CHUNKS, 0.02, extrapolated=0.5),
    )  # fmt: skip
    assert advice.decision.kind == CHANGE
    assert _screen(replace(advice, driven=False)) == snapshot


def test_screen_of_a_try(snapshot: Any) -> None:
    advice = _advice(_verdict(MORE, 0.4, extrapolated=0.93), _verdict(CHUNKS, 0.25, extrapolated=0.1))
    assert advice.decision.kind == CHANGE and typed(advice) == ["--max-num-batched-tokens 256"], "its least is not 5 points above"
    far = _advice(_verdict(MORE, 0.7, extrapolated=0.93), _verdict(CHUNKS, 0.25, extrapolated=0.1))
    assert far.decision.kind == TRY and typed(far) == ["--max-num-seqs 16"]
    assert _screen(far) == snapshot


def test_screen_of_nothing_to_do(snapshot: Any) -> None:
    advice = _advice(_verdict(CHUNKS, 0.04, extrapolated=0.0), _verdict(SERVER, 0.5, extrapolated=0.0))
    assert advice.decision.kind == KEEP
    assert _screen(advice) == snapshot


def test_a_trace_cannot_put_words_into_the_commands() -> None:
    advice = _advice(_verdict(MORE, 0.4, extrapolated=0.0), url="http://x; rm -rf ~\x1b[2J")
    text = _screen(advice, Path("$(reboot).trace"))
    assert "\x1b" not in text
    drive = next(x for x in text.splitlines() if "hoptrace drive" in x)
    words = shlex.split(drive)
    assert words[:3] == ["hoptrace", "drive", "$(reboot).trace"] and words[4].startswith("http://x; rm -rf ~")


def test_a_decision_needs_a_gain_beyond_doubt() -> None:
    aim = objective_of(None, None)
    sure, lost = _verdict(MORE, 0.4, extrapolated=0.0), _verdict(MORE, 0.4, extrapolated=0.0, lost=1)
    assert decide(aim, [sure], 1).kind == CHANGE
    assert decide(aim, [lost], 1).kind == KEEP, "a request is lost"
    assert decide(aim, [_verdict(MORE, 0.09, extrapolated=0.0)], 1).kind == KEEP, "its interval holds 0"
    small = Verdict((MORE,), 0.02, 0.01, 0.03, extrapolated=0.0)
    assert decide(aim, [small], 1).kind == KEEP, "under 3 %"
    tail = replace(sure, figures={"end to end p50": Outlook(0.5, 0.4, 0.6), "end to end p95": Outlook(1.1, 1.05, 1.2)})
    assert decide(aim, [tail], 1).kind == KEEP, "p95 of the objective becomes worse"
    assert decide(objective_of("e2e_p50", None), [tail], 1).kind == CHANGE
    dear = replace(sure, figures={"TTFT p95": Outlook(2.5, 2.0, 3.0)})
    assert decide(aim, [dear], 1).kind == KEEP, "TTFT more than twice as long"
    assert decide(aim, [replace(dear, worse=("TTFT p95 +150 %",))], 1).sentence == (
        "Keep the flags as they are: --max-num-seqs 16 would bring end-to-end time (p50 and p95) -40.0 % (-45.0 to -30.0 %), "
        "but at TTFT p95 +150 %."
    )
    slow = replace(sure, figures={"output tokens/s": Outlook(0.4, 0.3, 0.5)})
    assert decide(aim, [slow], 1).kind == KEEP, "less than half the throughput"
    assert decide(objective_of(None, {"ttft": 1}), [dear], 1).kind == CHANGE, "limits say what matters"
    assert decide(aim, [sure], 1, off=0.3).kind == TRY, "the replay of what was recorded is 30 % off"
    assert decide(aim, [Verdict((MORE,), 0.4, None, None, extrapolated=0.0)], 1).kind == TRY, "no interval"


def test_of_two_that_are_as_good_the_smaller_change_is_taken() -> None:
    larger = Change("max-num-seqs", ("--max-num-seqs 64",), ("batching.max_sequences=64",), "8", 3.0)
    best = decide(objective_of(None, None), [_verdict(larger, 0.41, extrapolated=0.0), _verdict(MORE, 0.4, extrapolated=0.0)], 2)
    assert best.verdict is not None and best.verdict.changes == (MORE,)


def test_the_page_names_every_flag() -> None:
    page = (Path(__file__).parents[1] / "docs" / "advise.md").read_text(encoding="utf-8")
    known = {flag.removeprefix("--no-").removeprefix("--") for flags in KNOWN.values() for flag in flags}
    missing = [f for f in known if f not in page and f not in ("load-balance-method",)]
    assert not missing, missing


# --- the proof -------------------------------------------------------------------------------------------------------------


@pytest.mark.server
def test_the_printed_commands_run_against_a_real_server(model: Path, tmp_path: Path) -> None:
    from hoptrace.demo_server import DemoServer

    with DemoServer(model, slots=4, log=tmp_path / "server.log") as real:
        own = Server(
            name="llamacpp", url=real.url, engine="llama.cpp", model=model.name, max_sequences=1, max_batched_tokens=2048,
            context_tokens=2048, prefix_caching=True, kv_dtype="f16", config={"cache_ram_mib": 0},
        )  # fmt: skip
        trace = recorded(tmp_path, requests(8, 30, prompt=24, output=5), own)
        code, out, err = run("advise", trace.path, "--json", "--draws", 2)
        assert code == 0, err
        found = json.loads(out)
        assert found["decision"] == TRY and found["typed"][0].startswith("-np ")
        for step in found["proof"][:2]:
            done = subprocess.run(
                [sys.executable, "-m", *shlex.split(step["command"])], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
    answered = open_trace(tmp_path / "run-now.trace").table("requests").collect()
    assert answered.height == 8 and answered["error"].null_count() == 8
    code, out, err = run(
        *(str(tmp_path / w) if w.endswith(".trace") else w for w in shlex.split(found["proof"][2]["command"])[1:])
    )
    assert code == 0 and out, err
