"""Law 3 for plans: what a replay's manifest says of its policy gives the same plan again; what is asked for goes on top of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planning import COST, SERVER, planned, random_policy, work

from hoptrace.errors import HoptraceError, InputError
from hoptrace.manifest import Manifest, ReplayInfo, Server
from hoptrace.replay.overheads import Overheads
from hoptrace.replay.plan import EngineSpec, Plan
from hoptrace.replay.planning import Planned, plan_of
from hoptrace.replay.policy import Policy, load_policy, parse_policy, presets
from hoptrace.replay.policy.own import on_top, own_policy


def manifest(p: Planned) -> Manifest:
    """As a replay writes it."""
    said = {"name": p.policy.name, "description": "", "changes": p.policy.changes(), **p.as_dict()}
    info = ReplayInfo(parent="x", policy=json.loads(json.dumps(said)), cost_model={})
    return Manifest(origin="replayed", servers=list(p.servers), replay=info)


def again(p: Planned, **more: object) -> Plan:
    own = own_policy(manifest(p))
    return plan_of(
        own.policy, server=own.server, work=work(), costs=COST, platform=own.platform, overheads=p.overheads, **more
    ).plan  # type: ignore[arg-type]


TEXTS = {
    "slack": '[batching]\norder = "slack"\nslo_ttft_ms = 5\nwatermark = 0.5',
    "static": '[batching]\nmode = "static"',
    "fp8 split": '[kv]\ndtype = "fp8"\n[split]\nprefill = 1\ndecode = 2\nlink = "x"\n[links.x]\ngbytes_per_s = 3\n'
    "[split.prefill_server.batching]\nmax_batched_tokens = 77\n[split.decode_server.kv]\ncapacity_tokens = 555\n"
    "[split.decode_server.prefix_cache]\nenabled = false",
    "cached split": '[split]\nprefill = 1\ndecode = 1\nlink = "x"\n[links.x]\ngbytes_per_s = 3\n[batching]\norder = "shortest"',
    "paths": '[split]\nprefill = 1\ndecode = 2\n[[tiers]]\nkind = "dram"\ncapacity_tokens = 9\n[kv]\ncontiguous = "block"',
    "unlimited": '[kv]\ncapacity_tokens = "unlimited"\n[batching]\nmax_sequences = "unlimited"',
    "speculation": "[speculation]\ntokens = 2\nacceptance = 0.5",
}  # fmt: skip


@pytest.mark.parametrize("name", [*presets(), *TEXTS])
def test_a_replays_manifest_gives_its_plan_again(name: str) -> None:
    if name in ("priority", "ngram-speculation", "ceiling-host"):
        pytest.skip("needs what this workload does not tell")
    policy = parse_policy(TEXTS[name]) if name in TEXTS else load_policy(name)
    oh = Overheads(1, 2, 3, 4, 50, 6, 7, n=(1,) * 7)
    p = plan_of(policy, server=SERVER, work=work(), costs=COST, platform="h100-sxm-80gb", overheads=oh)
    found = again(p)
    # The cost that a ceiling changed is in the manifest as such.
    a, b = replace(found, order=p.plan.order, costs=()), replace(p.plan, costs=())
    assert a == b
    assert (found.order.key is None) == (p.plan.order.key is None)
    # And once more, from the second's own.
    own = own_policy(manifest(p))
    second = plan_of(own.policy, server=own.server, work=work(), costs=COST, platform=own.platform, overheads=p.overheads)
    assert replace(again(second), order=p.plan.order, costs=()) == b


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_replays_manifest_gives_its_plan_again(data: st.DataObject) -> None:
    try:
        p = planned(random_policy(data))
    except HoptraceError:
        return
    assert again(p) == p.plan


def test_a_recorded_trace_runs_under_its_own_server() -> None:
    own = own_policy(Manifest(origin="recorded", servers=[SERVER]))
    assert own.policy == Policy(name="as-recorded") and own.server == SERVER and own.platform is None
    assert own_policy(Manifest(origin="imported")).server.name == "engine"
    with pytest.raises(InputError, match="2 servers"):
        own_policy(Manifest(origin="recorded", servers=[SERVER, Server(name="b")]))


def test_a_manifest_that_cannot_be_read_is_said() -> None:
    info = ReplayInfo(parent="x", policy={"batching": {"max_sequences": "lots"}}, cost_model={})
    with pytest.raises(InputError, match=r"batching.max_sequences"):
        own_policy(Manifest(origin="replayed", servers=[SERVER], replay=info))


def test_what_is_asked_for_goes_on_top() -> None:
    own = own_policy(
        manifest(planned(TEXTS["fp8 split"] + '\n[routing]\nkind = "least_load"\n[routing.decode]\nkind = "kv_use"'))
    ).policy
    asked = on_top(own, parse_policy('name = "a"\n[batching]\nmax_sequences = 3\n[links.x]\ngbytes_per_s = 9'))
    assert asked.name == "a" and asked.batching.max_sequences == 3
    assert asked.links["x"].gbytes_per_s == 9 and asked.routing == own.routing
    # What a replay's manifest says of each kind of server makes way for what is asked for in general; the rest stays.
    p = plan_of(asked, server=SERVER, work=work(), costs=COST).plan
    assert [e.max_sequences for e in p.engines] == [3, 3, 3]
    assert [e.max_batched_tokens for e in p.engines] == [77, 2048, 2048]
    with pytest.raises(InputError, match=r'a on top of what the trace ran under: mode = "static" does not go with \[split\]'):
        on_top(own, parse_policy('name = "a"\n[batching]\nmode = "static"'))
    # A number of servers takes the place of the split, and the other way round.
    four = on_top(own, load_policy("four-servers-session"))
    assert four.split is None and four.servers.count == 4 and four.routing.decode is None and four.routing.kind == "session"
    back = on_top(four, load_policy("pd-2-6"))
    assert back.split is not None and back.split.decode == 6 and back.servers.count is None
    tiers = on_top(on_top(own, load_policy("host-tier")), parse_policy("[speculation]\ntokens = 1\nacceptance = 1.0"))
    assert len(tiers.tiers) == 1 and tiers.speculation is not None
    assert on_top(own, Policy(name="as-recorded")) == own


def test_what_is_decided_anew_does_not_stay_behind() -> None:
    own = own_policy(manifest(planned('[batching]\norder = "slack"\nslo_ttft_ms = 3\n[prefix_cache]\ncapacity_tokens = 50')))

    def engine(text: str) -> EngineSpec:
        return plan_of(on_top(own.policy, parse_policy(text)), server=own.server, work=work(), costs=COST).plan.engines[0]

    assert engine('[batching]\nmode = "prefill_first"').chunked_prefill is False
    assert engine('[batching]\norder = "fcfs"').mode == "mixed"
    # 100,000 tokens of two bytes an element.
    assert engine('[kv]\ndtype = "fp8"').capacity_tokens == 200_000
    assert engine('[ceilings]\nkv = "infinite"').capacity_tokens is None
    assert engine('[ceilings]\nlimits = "none"').max_batched_tokens is None
    slots = engine('[prefix_cache]\nkind = "slot"\n[kv]\ncapacity_tokens = "unlimited"')
    assert (slots.cache, slots.cache_capacity_tokens) == ("slot", None)
    assert engine("[batching]\nmax_sequences = 2").cache_capacity_tokens == 50
