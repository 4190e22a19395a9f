"""Policies become plans: what every field of a plan is for hand-written policies, what is refused, and laws over random ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoptrace.errors import HoptraceError, InputError, UsageError
from hoptrace.manifest import Server
from hoptrace.replay.overheads import Overheads
from hoptrace.replay.plan import Order, Routing, Way
from hoptrace.replay.planning import Planned, plan_of
from hoptrace.replay.planning.parts import acceptance_ppm
from hoptrace.replay.policy import Policy, load_policy, parse_policy, presets
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import StepCost, fixed

COST = fixed(step_ns=1_000_000, prefill_token_ns=10_000)
# Llama-3.1-8B in BF16: 2 x 32 layers x 8 heads x 128 x 2 bytes = 131,072 bytes a token.
SERVER = Server(
    name="gpu", engine="vllm", layers=32, kv_heads=8, head_size=128, kv_dtype="bf16", max_sequences=64, max_batched_tokens=2048,
    kv_capacity_tokens=100_000, block_size_tokens=16, prefix_caching=True, context_tokens=8192,
)  # fmt: skip
GIB = 1 << 30


def work(prompts: tuple[int, ...] = (100, 50, 200)) -> Workload:
    n = len(prompts)
    none = np.zeros(0, dtype=np.int64)
    return Workload(
        np.arange(n), np.arange(n) * 1000, np.array(prompts, dtype=np.int64), np.full(n, 5), np.zeros(n + 1, dtype=np.int64),
        none, none, none,
    )  # fmt: skip


def planned(
    text: str = "", *, server: Server | None = SERVER, cost: object = COST, w: Workload | None = None, **more: object
) -> Planned:
    return plan_of(parse_policy(text), server=server, work=w or work(), costs=cost, **more)  # type: ignore[arg-type]


def test_the_traces_own_server() -> None:
    oh = Overheads(1, 2, 3, 4, 50, 6, 7, n=(1,) * 7)
    p = planned(overheads=oh, seed=9)
    (e,) = p.plan.engines
    assert (e.name, e.role, e.cost, e.gap_ns) == ("gpu", "both", 0, 50)
    assert (e.max_sequences, e.max_batched_tokens, e.mode, e.chunked_prefill) == (64, 2048, "mixed", True)
    assert (e.capacity_tokens, e.block_size_tokens, e.context_tokens, e.cache) == (100_000, 16, 8192, "pool")
    assert (p.plan.before_ns, p.plan.after_ns, p.plan.seed, p.plan.kv_token_bytes) == (10, 13, 9, 131_072)
    assert p.plan.routing == Routing() and p.plan.order == Order()
    assert p.plan.handover is None and p.plan.tiers == () and p.plan.speculation is None
    assert p.notes == () and p.overheads == oh and p.parts is None
    (s,) = p.servers
    assert s.name == "gpu" and s.kv_capacity_tokens == 100_000 and "role" not in s.config


def test_what_is_unknown_is_said() -> None:
    p = planned(server=None)
    assert p.plan.engines[0].name == "engine" and p.plan.kv_token_bytes == 0
    assert len(p.notes) == 5 and all("unknown" in n for n in p.notes)


def test_four_servers_each_like_the_traces_own() -> None:
    p = planned('[servers]\ncount = 4\n[routing]\nkind = "kv_use"\nknowledge_age_ms = 2.5')
    assert [e.name for e in p.plan.engines] == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    assert {replace(e, name="x") for e in p.plan.engines} == {replace(p.plan.engines[0], name="x")}
    assert p.plan.routing == Routing("kv_use", 2_500_000, 0)
    assert [s.name for s in p.servers] == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    assert len(p.plan.costs) == 1


def test_a_split_with_links_of_its_own() -> None:
    p = planned("""
[split]
prefill = 2
decode = 1
arrange_ms = 7
first_token = "recompute"
local_below_tokens = 64
link = "nic"
[split.decode_server.batching]
max_sequences = 7
[split.prefill_server.kv]
capacity_tokens = 5000
[routing]
kind = "least_load"
[routing.decode]
kind = "prefix_aware"
load_tokens = 9
[links.nic]
gbytes_per_s = 50
latency_us = 2.5
per_block_us = 0.7
""")
    assert [(e.name, e.role) for e in p.plan.engines] == [
        ("prefill-0", "prefill"),
        ("prefill-1", "prefill"),
        ("decode-0", "decode"),
    ]
    assert [e.max_sequences for e in p.plan.engines] == [64, 64, 7]
    assert [e.capacity_tokens for e in p.plan.engines] == [5000, 5000, 100_000]
    assert p.plan.entry == (0, 1) and p.plan.decoders == (2,)
    h = p.plan.handover
    assert h is not None and (h.start, h.layers, h.first_token) == ("pull", 1, "recompute")
    assert (h.arrange_ns, h.local_below_tokens) == (7_000_000, 64)
    names = [k.name for k in p.plan.links]
    for sender, (index,) in enumerate(h.ways):
        way = p.plan.ways[index]
        assert (way.base_ns, way.per_block_ns, way.mechanism) == (2500, 700, "rdma")
        assert (way.src, way.dst) == (f"memory:prefill-{sender}", "memory:decode-0")
        assert [names[k] for k in way.links] == [f"nic@prefill-{sender}:out", "nic@decode-0:in"] == list(way.path)
        # Per link: two DMA and the wire carry; entry, doorbell, fetch, completion and poll do not.
        assert (way.payload_hops, way.control_ops) == (4, 5)
    assert {k.bytes_per_s for k in p.plan.links} == {50_000_000_000} and len(p.plan.links) == 3
    assert p.plan.routing.kind == "least_load" and p.plan.decode_routing == Routing("prefix_aware", 0, 9)
    assert [s.config["role"] for s in p.servers] == ["prefill", "prefill", "decode"]
    assert p.as_dict()["split"]["decode_server"]["batching"]["max_sequences"] == 7


def test_a_tier_of_less_than_a_block_is_said_to_keep_nothing() -> None:
    text = '[[tiers]]\nkind = "dram"\ncapacity_tokens = {}\nlink = "x"\n[links.x]\ngbytes_per_s = 1'
    assert "Tier dram holds 15 tokens, less than one KV block: nothing is kept in it." in planned(text.format(15)).notes
    assert not any("KV block" in n for n in planned(text.format(16)).notes)


def test_what_goes_through_the_hosts_memory_crosses_the_hosts_own_links() -> None:
    """From the pool to another server: each server reads the pool by its own adapter and sends by its own."""
    plan = planned(
        '[servers]\ncount = 2\n[[tiers]]\nkind = "cxl_pool"\ncapacity_tokens = 9\n[[tiers]]\nkind = "remote_dram"\n'
        "capacity_tokens = 99\n",
        platform="h100-sxm-80gb",
    ).plan
    paths = [plan.ways[i].path for i in plan.tiers[0].demote]
    assert paths == [
        (f"cxl.read@gpu-{i}", "pool", f"nic.tx@gpu-{i}", "nic.rx@remote_dram:remote_dram") for i in range(2)
    ]  # fmt: skip


def test_a_shared_link_is_one_for_all() -> None:
    p = planned(
        '[split]\nprefill = 2\ndecode = 2\nlink = ["nic", "switch"]\n'
        "[links.nic]\ngbytes_per_s = 50\n[links.switch]\ngbytes_per_s = 100\nshared = true\nlatency_us = 1"
    )
    assert sorted(k.name for k in p.plan.links) == [
        "nic@decode-0:in", "nic@decode-1:in", "nic@prefill-0:out", "nic@prefill-1:out", "switch:out",
    ]  # fmt: skip
    assert p.plan.handover is not None
    ways = [p.plan.ways[w] for row in p.plan.handover.ways for w in row]
    switch = next(i for i, k in enumerate(p.plan.links) if k.name == "switch:out")
    assert len(ways) == 4 and all(switch in w.links and len(w.links) == 3 and w.base_ns == 1000 for w in ways)


def test_per_layer_pushes_as_many_layers_as_the_model_has() -> None:
    text = '[split]\nprefill = 1\ndecode = 1\ntransfer = "per_layer"\nlink = "x"\n[links.x]\ngbytes_per_s = 1\n'
    h = planned(text).plan.handover
    assert h is not None and (h.layers, h.start) == (32, "push")
    h = planned(text, server=SERVER.model_copy(update={"layers": 61})).plan.handover
    assert h is not None and h.layers == 61
    bare = Server(name="s")
    with pytest.raises(InputError, match="how many layers"):
        planned(text + "[kv]\nbytes_per_token = 5", server=bare)
    h = planned(text.replace("[links.x]", "layers = 4\n[links.x]") + "[kv]\nbytes_per_token = 5", server=bare).plan.handover
    assert h is not None and h.layers == 4


def test_tiers_in_their_order() -> None:
    p = planned("""
[servers]
count = 2
[prefix_cache]
reuse = "break_even"
[[tiers]]
kind = "dram"
capacity_bytes = 1073741824
write = "through"
link = "pcie"
[[tiers]]
kind = "cxl_pool"
name = "far"
capacity_tokens = "unlimited"
link = ["pcie", "pool"]
[links.pcie]
gbytes_per_s = 25
latency_us = 7
[links.pool]
gbytes_per_s = 1000
shared = true
latency_us = 2
mechanism = "load_store"
""")
    near, far = p.plan.tiers
    assert (near.name, near.kind, near.shared, near.policy) == ("dram", "dram", False, "through")
    assert near.capacity_tokens == 8192  # 1 GiB of 131,072 bytes a token
    assert (far.name, far.kind, far.shared, far.policy, far.capacity_tokens) == ("far", "cxl_pool", True, "back", None)
    assert p.plan.reuse == "break_even"
    ways = p.plan.ways

    def told(w: int) -> tuple[str, str, tuple[str, ...], int, str]:
        return ways[w].src, ways[w].dst, ways[w].path, ways[w].base_ns, ways[w].mechanism

    assert told(near.write[0]) == ("memory:gpu-0", "dram:dram@gpu-0", ("pcie@gpu-0:out",), 7000, "dma")
    assert told(near.read[1]) == ("dram:dram@gpu-1", "memory:gpu-1", ("pcie@gpu-1:in",), 7000, "dma")
    assert told(near.demote[1]) == ("dram:dram@gpu-1", "cxl_pool:far", ("pcie@gpu-1:out", "pool:out"), 9000, "load_store")
    assert told(far.read[0]) == ("cxl_pool:far", "memory:gpu-0", ("pool:in", "pcie@gpu-0:in"), 9000, "load_store")
    assert far.demote == (-1, -1)
    # Both directions of the pool's own link are one for the two servers.
    assert sum(k.name.startswith("pool:") for k in p.plan.links) == 2


def test_infinite_links_take_no_time() -> None:
    p = planned(
        '[split]\nprefill = 1\ndecode = 1\nlink = "x"\n[links.x]\ngbytes_per_s = 1\nlatency_us = 5\nper_block_us = 3\n'
        '[[tiers]]\nkind = "dram"\ncapacity_tokens = 5\n[ceilings]\nlinks = "infinite"'
    )
    assert all(w.links == () and w.base_ns == 0 and w.per_block_ns == 0 for w in p.plan.ways)
    assert planned(
        '[links.x]\ngbytes_per_s = "infinite"\nlatency_us = 5\n[split]\nprefill = 1\ndecode = 1\nlink = "x"'
    ).plan.ways == (Way((), 5000, 0, "memory:prefill-0", "memory:decode-0", ("x@prefill-0:out", "x@decode-0:in"), "rdma", 4, 5),)


def test_paths_of_a_platform() -> None:
    """Figures of docs/platforms.md, H100: PCIe 55 GB/s, one 400 Gbit/s adapter 44 GB/s attained; 64 pieces of a block."""
    p = planned("[split]\nprefill = 1\ndecode = 1", platform="h100-sxm-80gb")
    (way,) = p.plan.ways
    assert way.derived
    rates = {k.name: k.bytes_per_s for k in p.plan.links}
    ends = ("pcie.d2h@prefill-0", "nic.tx@prefill-0", "nic.rx@decode-0", "pcie.h2d@decode-0")
    assert [n for n in way.path if n in ends] == list(ends)
    assert [rates[n] for n in ends] == [55_000_000_000, 44_000_000_000, 44_000_000_000, 55_000_000_000]
    assert way.mechanism == "rdma" and way.transfers_per_block == 64 and way.base_ns > 0
    assert any("Beluga" in s for s in p.sources) and p.as_dict()["sources"] == list(p.sources)
    assert "Transfers go by the catalogue's figures of h100-sxm-80gb; their sources are in the manifest." in p.notes
    # One copy a piece: a block in one piece pays a 64th of its fixed time.
    tier = '[[tiers]]\nkind = "dram"\ncapacity_tokens = 1000\n'
    apart = planned(tier, platform="h100-sxm-80gb").plan
    whole = planned(tier + '[kv]\ncontiguous = "block"', platform="h100-sxm-80gb").plan
    assert apart.ways[0].per_block_ns == 64 * whole.ways[0].per_block_ns > 0
    # Two devices have a PCIe link each.
    both = planned(
        "[split]\nprefill = 1\ndecode = 1\n[servers]\ntensor_parallel = 2", platform="h100-sxm-80gb", cost=lambda s, n: COST
    )
    assert {k.name: k.bytes_per_s for k in both.plan.links}[ends[0]] == 2 * rates[ends[0]]
    # An RDMA server of its own: its adapter is one for all.
    far = planned('[servers]\ncount = 2\n[[tiers]]\nkind = "remote_dram"\ncapacity_tokens = 9', platform="h100-sxm-80gb").plan
    theirs = [k.name for k in far.links if k.name.startswith("nic.rx@")]
    assert sorted(theirs) == ["nic.rx@gpu-0", "nic.rx@gpu-1", "nic.rx@remote_dram:remote_dram"]
    with pytest.raises(UsageError, match="no mechanism"):
        planned(tier + 'mechanism = "magic"', platform="h100-sxm-80gb")
    with pytest.raises(InputError, match="names no link, and no platform"):
        planned(tier)
    with pytest.raises(InputError, match=r"\[split\] names no link"):
        planned("[split]\nprefill = 1\ndecode = 1")


def test_blocks_of_a_transfer_are_the_receivers() -> None:
    text = '[kv]\ncontiguous = "block"\n[split]\nprefill = 1\ndecode = 1\nmechanism = "peer_copy"\n'
    same = planned(text, platform="h100-sxm-80gb").plan.ways[0]
    large = planned(text + "[split.prefill_server.kv]\nblock_size_tokens = 64", platform="h100-sxm-80gb").plan.ways[0]
    assert large == same
    told = planned(text, platform="h100-sxm-80gb", server=SERVER.model_copy(update={"block_size_tokens": None}))
    assert any("taken as one" in n for n in told.notes)
    assert not any("taken as one" in n for n in planned(text, platform="h100-sxm-80gb").notes)


def test_kv_types_scale_bytes_and_room() -> None:
    p = planned('[kv]\ndtype = "fp8"')
    assert p.plan.kv_token_bytes == 65_536 and p.plan.engines[0].capacity_tokens == 200_000
    assert planned('[kv]\ndtype = "fp8"\ncapacity_tokens = 100').plan.engines[0].capacity_tokens == 100
    untold = planned('[kv]\ndtype = "fp8"', server=Server(name="s", kv_capacity_tokens=100))
    assert untold.plan.engines[0].capacity_tokens == 100 and any("fp8 changes nothing" in n for n in untold.notes)
    assert planned("[kv]\nbytes_per_token = 77").plan.kv_token_bytes == 77
    # Whole blocks: 0.01 of 6,250 blocks of 16 tokens are 62.
    assert planned("[batching]\nwatermark = 0.01").plan.engines[0].watermark_tokens == 62 * 16
    small = planned("[batching]\nwatermark = 0.01\n[kv]\ncapacity_tokens = 4608")
    assert small.plan.engines[0].watermark_tokens == 2 * 16  # vLLM: int(0.01 × 288) blocks


def test_kv_that_has_to_move_and_is_of_unknown_size_is_refused() -> None:
    text = '[split]\nprefill = 1\ndecode = 1\nlink = "x"\n[links.x]\ngbytes_per_s = 1\n'
    with pytest.raises(InputError, match="how large it is is not known") as e:
        planned(text, server=Server(name="s"))
    assert "kv.bytes_per_token" in (e.value.hint or "")
    assert planned(text + "[kv]\nbytes_per_token = 4", server=Server(name="s")).plan.kv_token_bytes == 4


def test_costs_by_kind_of_server() -> None:
    asked = []

    def of(server: Server, platform: str | None) -> StepCost:
        asked.append((server.config.get("tensor_parallel_size"), server.kv_dtype, server.max_sequences, platform))
        return fixed(step_ns=1000 if platform == "h100-sxm-80gb" else 2000)

    p = planned(
        '[kv]\ndtype = "fp8"\n[split]\nprefill = 2\ndecode = 3\nlink = "x"\n[links.x]\ngbytes_per_s = 1\n'
        '[split.decode_server]\nplatform = "h100-sxm-80gb"\ntensor_parallel = 8\n'
        "[split.decode_server.batching]\nmax_sequences = 3",
        cost=of,
    )  # fmt: skip
    assert asked == [(None, "fp8", 64, None), (8, "fp8", 3, "h100-sxm-80gb")]
    assert [e.cost for e in p.plan.engines] == [0, 0, 1, 1, 1]
    assert [c.coefficients_ps["step"] for c in p.plan.costs] == [2_000_000, 1_000_000]
    assert any("8 tensor-parallel ranks" in n for n in p.notes)
    # What was measured on one machine says nothing of another.
    for text in ('[servers]\nplatform = "l40s"', "[servers]\ntensor_parallel = 2"):
        with pytest.raises(InputError, match="cannot tell another's"):
            planned(text)
    planned("[servers]\ntensor_parallel = 1")
    planned('[servers]\nplatform = "l40s"', platform="l40s")


def test_orders() -> None:
    w = work((100, 50, 200))
    assert planned('[batching]\norder = "shortest"', w=w).plan.order.key.tolist() == [100, 50, 200]  # type: ignore[union-attr]
    slack = planned('[batching]\norder = "slack"\nslo_ttft_ms = 10', w=w).plan.order
    # Due after 10 ms, less 1 ms a step and 10 us a token.
    assert slack.key.tolist() == [8_000_000, 8_500_000, 7_000_000] and slack.from_arrival and not slack.requeue  # type: ignore[union-attr]
    with pytest.raises(InputError, match="tells no priorities"):
        planned('[batching]\norder = "priority"', w=w)


def test_speculation_in_integers() -> None:
    text = '[speculation]\ntokens = 3\nacceptance = 0.7\nkind = "eagle"\ndraft_ms_per_token = 0.25\noff_above = 32'
    p = planned(text)
    s = p.plan.speculation
    assert s is not None and (s.tokens, s.accept_ppm, s.draft_ns, s.off_above) == (3, 700_000, 250_000, 32)
    assert any("draft's own KV" in n for n in p.notes)


@pytest.mark.parametrize(("k", "alpha"), [(1, 0.5), (3, 0.5), (3, 0.0), (3, 1.0), (5, 0.8)])
def test_acceptance_from_a_trace(k: int, alpha: float) -> None:
    """Leviathan et al., ICML 2023: of k proposals alpha + ... + alpha^k are taken on average."""
    decoders = 1_000_000
    accepted = round(decoders * sum(alpha**j for j in range(1, k + 1)))
    steps = pl.DataFrame(
        {"draft_proposed": [decoders * k, None], "draft_accepted": [accepted, None], "decode_requests": [decoders, 7]}
    )
    notes: list[str] = []
    assert acceptance_ppm(steps, notes) == pytest.approx(alpha * 1e6, abs=2)
    assert len(notes) == 1
    p = planned('[speculation]\ntokens = 4\nacceptance = "trace"', steps=steps)
    assert p.plan.speculation is not None and p.plan.speculation.accept_ppm == pytest.approx(alpha * 1e6, abs=2)


def test_acceptance_that_a_trace_does_not_tell() -> None:
    text = '[speculation]\ntokens = 4\nacceptance = "trace"'
    for steps in (
        None,
        pl.DataFrame({"x": [1]}),
        pl.DataFrame({"draft_proposed": [0], "draft_accepted": [0], "decode_requests": [1]}),
        pl.DataFrame({"draft_proposed": [3], "draft_accepted": [4], "decode_requests": [1]}),
    ):
        with pytest.raises(InputError, match="acceptance"):
            planned(text, steps=steps)


def test_routers_that_find_nothing_to_go_by_say_so() -> None:
    for kind, what in (("session", "tells no sessions"), ("prefix_aware", "has no prefix blocks")):
        p = planned(f'[servers]\ncount = 2\n[routing]\nkind = "{kind}"')
        assert any(what in n for n in p.notes)
    told = replace(work(), session_id=np.array([0, -1, 0]))
    assert planned('[servers]\ncount = 2\n[routing]\nkind = "session"', w=told).notes == ()
    tier = planned('[[tiers]]\nkind = "dram"\ncapacity_tokens = 9\nlink = "x"\n[links.x]\ngbytes_per_s = 1')
    assert any("nothing is found in the tiers" in n for n in tier.notes)


def test_parts_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from hoptrace.replay.plain import parts

    class Longest:
        def key(self, request: parts.RequestView) -> int:
            return -request.prompt_tokens

    class Last:
        def __init__(self, routing: Routing) -> None:
            self.age_ns = routing.age_ns

        def choose(self, request: parts.RequestView, engines: object, draw: object) -> int:
            return 0

    class Entry:
        def __init__(self, name: str, part: object) -> None:
            self.name, self.value, self.load = name, f"mine:{name}", lambda: part

    monkeypatch.setattr(parts, "entry_points", lambda group: [Entry("longest", Longest), Entry("last", Last)])
    p = planned('[servers]\ncount = 2\n[batching]\norder = "python:longest"\n[routing]\nkind = "python:last"')
    assert p.parts is not None and isinstance(p.parts.order, Longest) and p.parts.router is not None
    assert isinstance(p.parts.router(Routing()), Last)
    assert p.parts.victim is None and p.plan.routing.kind == "round_robin" and p.plan.order == Order()
    assert p.as_dict()["batching"]["order"] == "python:longest"
    with pytest.raises(InputError, match="There is no plug-in 'python:shortest'"):
        planned('[batching]\norder = "python:shortest"')


def test_overheads_and_what_is_taken_away() -> None:
    oh = Overheads(1, 2, 3, 4, 50, 6, 7, n=(1,) * 7)
    p = planned("[overheads]\nbefore_ms = 2\ngap_ms = 0.5\nafter_ms = 1", overheads=oh).plan
    assert (p.before_ns, p.engines[0].gap_ns, p.after_ns) == (2_000_000, 500_000, 1_000_000)
    front = planned('[ceilings]\nfront_cost = "zero"', overheads=oh)
    assert (front.plan.before_ns, front.plan.engines[0].gap_ns, front.plan.after_ns) == (4, 50, 0)
    host = planned('[ceilings]\nhost_cost = "zero"', overheads=oh)
    assert (host.plan.before_ns, host.plan.engines[0].gap_ns) == (6, 0)
    assert host.taken_away == "50 ns between steps, 4 ns before the engine takes a request"
    with pytest.raises(InputError, match="tells no host time"):
        planned('[ceilings]\nhost_cost = "zero"')
    kv = planned('[ceilings]\nkv = "infinite"').plan.engines[0]
    assert kv.capacity_tokens is None and kv.max_sequences == 64
    limits = planned('[ceilings]\nlimits = "none"').plan.engines[0]
    assert (limits.capacity_tokens, limits.max_batched_tokens, limits.max_sequences) == (None, None, 64)
    prompts = planned('[ceilings]\nprompts = "cached"').plan.costs[0]
    assert prompts.coefficients_ps == {"step": 1_000_000_000}


def test_what_does_not_go_with_the_traces_own_server() -> None:
    llama = Server(
        name="s", engine="llama.cpp", max_sequences=4, context_tokens=2048, kv_capacity_tokens=8192, prefix_caching=True
    )
    link = "\n[links.x]\ngbytes_per_s = 1\n[kv]\nbytes_per_token = 5\n"
    for text, message in (
        ('[split]\nprefill = 1\ndecode = 1\nlink = "x"', "keeps prompts in slots, which are not handed over"),
        ('[[tiers]]\nkind = "dram"\ncapacity_tokens = 5\nlink = "x"', "keeps prompts in slots"),
        ('[routing]\nkind = "prefix_aware"', "needs a prefix cache of kind pool"),
    ):
        with pytest.raises(InputError, match=message):
            planned(text + link, server=llama)
    with pytest.raises(InputError, match="the trace's server reuses none"):
        planned('[[tiers]]\nkind = "dram"\ncapacity_tokens = 5\nlink = "x"' + link, server=Server(name="s", prefix_caching=False))
    static = SERVER.model_copy(update={"config": {"batching_mode": "static"}})
    with pytest.raises(InputError, match="batches statically"):
        planned('[split]\nprefill = 1\ndecode = 1\nlink = "x"' + link, server=static)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[batching]\nslo_ttft_ms = 5", 'batching.slo_ttft_ms decides nothing without order = "slack".'),
        ('[batching]\norder = "slack"', 'order = "slack" needs batching.slo_ttft_ms'),
        ('[routing.decode]\nkind = "random"', "[routing.decode] without [split]"),
        ("[routing]\nknowledge_age_ms = 3", 'routing.knowledge_age_ms decides nothing without kind = "kv_use".'),
        ("[routing]\nload_tokens = 3", 'routing.load_tokens decides nothing without kind = "prefix_aware".'),
        ('[prefix_cache]\nreuse = "always"', "prefix_cache.reuse decides nothing without [[tiers]]."),
        ('[ceilings]\nlinks = "infinite"', "nothing moves between servers or tiers"),
    ],
)
def test_what_decides_nothing_on_this_trace_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as e:
        planned(text)
    assert message in str(e.value) and e.value.hint


def test_every_preset_becomes_a_plan_or_says_what_it_needs() -> None:
    missing = {"priority": "priorities", "ngram-speculation": "acceptance", "ceiling-host": "host time"}
    for name, policy in presets().items():
        if name in missing:
            with pytest.raises(InputError, match=missing[name]):
                plan_of(policy, server=SERVER, work=work(), costs=COST)
            continue
        p = plan_of(policy, server=SERVER, work=work(), costs=COST)
        assert p.plan.engines and not any(i < 0 or i >= len(p.plan.ways) for t in p.plan.tiers for i in t.read + t.write)


def test_published_transfer_times_by_the_preset_link() -> None:
    """X5: Qwen3-8B in BF16, 147,456 bytes a token: 128 … 32,768 tokens in 0.54 … 31.65 ms; within 10 %, as the fit is."""
    plan = plan_of(load_policy("pd-1-1"), server=SERVER, work=work(), costs=COST).plan
    (way,) = plan.ways
    rate = min(plan.links[k].bytes_per_s for k in way.links)
    for tokens, ms in zip((128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
                          (0.54, 0.61, 0.92, 1.50, 2.51, 4.75, 8.84, 16.43, 31.65), strict=True):  # fmt: skip
        assert way.base_ns / 1e6 + tokens * 147_456 / rate * 1e3 == pytest.approx(ms, rel=0.1)


def test_a_replays_server_resolves_to_the_same_plan() -> None:
    """Law 3: a replay's manifest says what it ran under, so its own policy gives the plan again."""
    for text in (
        '[batching]\norder = "shortest"\nwatermark = 0.1',
        '[batching]\nmode = "static"',
        '[batching]\nmode = "prefill_first"',
        "[kv]\ncapacity_tokens = 333\nblock_size_tokens = 3\n[prefix_cache]\ncapacity_tokens = 99",
    ):
        p = planned(text)
        again = planned(server=p.servers[0])
        assert again.plan.engines == p.plan.engines
        assert (again.plan.order.key is None) == (p.plan.order.key is None)


def random_policy(data: st.DataObject) -> str:
    """A policy file of some servers, tiers, links and routing; not always one that makes sense."""
    d = data.draw
    some = st.sampled_from
    lines = ["[links.a]", f"gbytes_per_s = {d(some([1, 25.5, 400]))}", f"shared = {d(some(['true', 'false']))}", "[links.b]",
             f"gbytes_per_s = {d(some([1, 25.5]))}", f"latency_us = {d(st.integers(0, 100))}"]  # fmt: skip
    link = lambda: d(some(['"a"', '"b"', '["a", "b"]', '["b", "a"]']))  # noqa: E731
    if d(st.booleans()):
        lines += ["[split]", f"prefill = {d(st.integers(1, 4))}", f"decode = {d(st.integers(1, 4))}", f"link = {link()}"]
        if d(st.booleans()):
            lines.append('transfer = "per_layer"')
    else:
        lines += ["[servers]", f"count = {d(st.integers(1, 5))}"]
    for kind in d(st.lists(some(["dram", "cxl_pool", "nvme", "remote_dram"]), max_size=3)):
        lines += ["[[tiers]]", f'kind = "{kind}"', f"capacity_tokens = {d(st.integers(1, 1000))}", f"link = {link()}"]
    lines += ["[batching]", f'mode = "{d(some(["mixed", "prefill_first", "static"]))}"']
    lines += ["[routing]", f'kind = "{d(some(["round_robin", "session", "prefix_aware", "kv_use"]))}"']
    return "\n".join(lines)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_policies_give_consistent_plans_or_an_error_in_a_sentence(data: st.DataObject) -> None:
    text = random_policy(data)
    try:
        p = planned(text)
    except HoptraceError as e:
        assert e.message
        return
    plan = p.plan
    n = len(plan.engines)
    assert len({e.name for e in plan.engines}) == n == len(p.servers) == len(p.resolved)
    assert len({k.name for k in plan.links}) == len(plan.links) and all(k.bytes_per_s > 0 for k in plan.links)
    assert all(0 <= k < len(plan.links) for w in plan.ways for k in w.links)
    assert all(len(set(w.links)) == len(w.links) for w in plan.ways)
    assert all(0 <= e.cost < len(plan.costs) for e in plan.engines)
    for t in plan.tiers:
        assert len(t.read) == len(t.write) == len(t.demote) == n
    assert all(len({t.demote[i] for i in range(n)}) == 1 for t in plan.tiers[-1:])
    if "[split]" in text:
        assert plan.handover is not None and plan.kv_token_bytes > 0
        assert len(plan.handover.ways) == len(plan.entry) and all(len(r) == len(plan.decoders) for r in plan.handover.ways)
    assert plan_of(parse_policy(parse_policy(text).to_toml()), server=SERVER, work=work(), costs=COST).plan.ways == plan.ways


def test_the_policy_without_anything_changes_nothing() -> None:
    assert planned().as_dict() == {
        "batching": {"max_sequences": 64, "max_batched_tokens": 2048, "mode": "mixed", "chunked_prefill": True},
        "kv": {"capacity_tokens": 100_000, "block_size_tokens": 16, "context_tokens": 8192},
        "prefix_cache": {"enabled": True, "kind": "pool", "capacity_tokens": "unlimited"},
    }
    assert Policy().changes() == {}
