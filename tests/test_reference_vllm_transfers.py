"""Both engines against vLLM 0.32's own schedulers where KV moves: a host tier (OffloadingConnector), a prefill/decode pair."""

from __future__ import annotations

from typing import Any

import pytest
from support.vllm_reference import ENGINES, engine_of, first_difference, names, ours, plan_of, scenario, theirs, work_of

from hoptrace.replay import outcome
from hoptrace.replay.plan import Handover, Plan, TierSpec, Way

FOLDER = "vllm_transfers"
TIERS = [n for n in names(FOLDER) if n.startswith("tier")]
PAIRS = [n for n in names(FOLDER) if n.startswith("pair")]


def tiered(said: dict[str, Any]) -> Plan:
    """An engine with a host tier that is written through at no cost and read in the scenario's time."""
    s, load = said["settings"], said["load_ns"]
    ways = (Way(base_ns=load["base"], per_block_ns=load["block"]), Way())
    host = TierSpec("host", "host", s["host_blocks"] * s["block"], False, read=(0,), write=(1,), demote=(-1,), policy="through")
    return plan_of(said, ways=ways, tiers=(host,), kv_token_bytes=1)


def paired(said: dict[str, Any]) -> Plan:
    """A prefill and a decode engine; the decode side pulls and computes the last prompt token again."""
    load = said["load_ns"]
    engines = (
        engine_of(said["settings"], "prefill", role="prefill"),
        engine_of(said["decode_settings"], "decode", role="decode"),
    )
    handover = Handover(((0,),), start="pull", first_token="recompute", arrange_ns=said["arrange_ns"])
    ways = (Way(base_ns=load["base"], per_block_ns=load["block"]),)
    return plan_of(said, engines=engines, ways=ways, handover=handover, kv_token_bytes=1)


def test_the_scenarios_are_all_there() -> None:
    assert len(TIERS) >= 5
    assert len(PAIRS) >= 5
    assert sum(len(s["loads"]) for n in TIERS for s in scenario(FOLDER, n)["steps"]) > 100


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", TIERS)
def test_a_host_tier_is_vllms(name: str, engine: str) -> None:
    said = scenario(FOLDER, name)
    work = work_of(said["requests"], said["settings"]["block"])
    (steps,), columns, moves = ours(ENGINES[engine], work, tiered(said))
    assert not first_difference(steps, theirs(said))
    reads = [(m["start_ns"], m["request"], m["blocks"]) for m in moves if m["kind"] == outcome.MOVE_READ]
    assert sorted(reads) == sorted((s["start_ns"], r, n) for s in said["steps"] for r, n in s["loads"])
    assert columns["generated_tokens"] == work.output_tokens.tolist()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PAIRS)
def test_a_prefill_decode_pair_is_vllms(name: str, engine: str) -> None:
    said = scenario(FOLDER, name)
    work = work_of(said["requests"], said["settings"]["block"])
    (prefill, decode), columns, moves = ours(ENGINES[engine], work, paired(said))
    assert not first_difference(prefill, theirs(said))
    assert not first_difference(decode, theirs(said, "decode_"))
    sent = [(m["start_ns"], m["request"], m["blocks"]) for m in moves if m["kind"] == outcome.MOVE_HANDOVER]
    assert sorted(sent) == sorted((s["start_ns"], r, n) for s in said["decode_steps"] for r, n in s["loads"])
    assert columns["generated_tokens"] == work.output_tokens.tolist()
