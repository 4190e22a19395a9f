"""Policies from their text to what the engine does, where the answer can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.vllm_reference import work_of

from hoptrace.errors import HoptraceError
from hoptrace.manifest import Server
from hoptrace.replay import plain
from hoptrace.replay.outcome import DONE, MOVE, REQUEST, Kept
from hoptrace.replay.planning import plan_of
from hoptrace.replay.policy import parse_policy, presets
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import StepCost, fixed

MS = 1_000_000
# A step takes 1 us a prompt token, and nothing else: prompts are served one after another, at no cost of batching.
COST = fixed(prefill_token_ns=1000)
SERVER = Server(name="s", max_sequences=1, max_batched_tokens=10_000, context_tokens=20_000, kv_capacity_tokens=100_000,
                block_size_tokens=10, prefix_caching=False)  # fmt: skip


def asked(*rows: tuple[int, int, int], blocks: Any = None, **more: Any) -> Workload:
    """(arrival in us, prompt, output) of each; ``blocks``: ids of 10 tokens."""
    found = [{"arrival_ns": a * 1000, "prompt": p, "output": o} for a, p, o in rows]
    for row, ids in zip(found, blocks or [], strict=False):
        row["blocks"] = ids
    return replace(work_of(found, 10), **more)


class Ran:
    """A replay by the plain engine: ``ran.first_token_ns`` and the like are columns of its requests."""

    def __init__(self, text: str, work: Workload, cost: StepCost = COST, server: Server = SERVER, **more: Any) -> None:
        self.planned = plan_of(parse_policy(text), server=server, work=work, costs=cost, **more)
        sink = Kept()
        self.rows = plain.simulate(work, self.planned.plan, sink).requests
        self.moves = [dict(zip(MOVE, row, strict=True)) for row in sink.rows("move").tolist()]

    def __getattr__(self, column: str) -> list[int]:
        return [int(v) for v in self.rows[:, REQUEST.index(column)]]

    @property
    def order(self) -> list[int]:
        """The requests in the order of their first token."""
        return [int(i) for i in np.argsort(self.rows[:, REQUEST.index("first_token_ns")], kind="stable")]


# The first holds the only place when the others come.
QUEUE = asked((0, 100, 1), (1, 300, 1), (2, 50, 1), (3, 200, 1))


def test_first_come_first_served() -> None:
    assert Ran("", QUEUE).order == [0, 1, 2, 3]


def test_shortest_first_and_what_it_gains() -> None:
    ran = Ran('[batching]\norder = "shortest"', QUEUE)
    assert ran.order == [0, 2, 3, 1]
    # Served one by one after 100 us: 50, 200, 300 long.
    assert ran.first_token_ns == [100_000, 650_000, 150_000, 350_000]
    # Smith's rule: no other order of the three has a smaller sum of completion times.
    assert sum(ran.first_token_ns) < sum(Ran("", QUEUE).first_token_ns)


def test_priority_first_then_arrival() -> None:
    ran = Ran('[batching]\norder = "priority"', replace(QUEUE, priority=np.array([5, 2, 2, 1])))
    assert ran.order == [0, 3, 1, 2]


def test_least_slack_first() -> None:
    # Due 1 ms after their arrival; a prompt of 900 tokens has 100 us less its queueing to lose, one of 50 has 950.
    work = asked((0, 100, 1), (1, 50, 1), (2, 900, 1), (3, 400, 1))
    assert Ran('[batching]\norder = "slack"\nslo_ttft_ms = 1', work).order == [0, 2, 3, 1]
    # Equal prompts: the deadline is the arrival's, so first come first served.
    even = asked((0, 100, 1), (1, 70, 1), (2, 70, 1), (3, 70, 1))
    assert Ran('[batching]\norder = "slack"\nslo_ttft_ms = 1', even).order == [0, 1, 2, 3]


def test_the_watermark_keeps_the_last_blocks_for_those_that_run() -> None:
    # Ten blocks. The first takes four; the second would take five and leave one.
    work = asked((0, 40, 50), (1, 50, 1))
    room = "[kv]\ncapacity_tokens = 100\n[batching]\nmax_sequences = 8\n"
    cost = fixed(step_ns=1000)
    free, kept = Ran(room, work, cost), Ran(room + "watermark = 0.2", work, cost)
    assert free.scheduled_ns[1] == 1000
    assert kept.scheduled_ns[1] == kept.last_token_ns[0] == 50_000


def test_a_session_stays_with_its_server() -> None:
    n = 60
    work = asked(*((i * 1000, 10, 1) for i in range(n)), session_id=np.arange(n) % 7)
    ran = Ran('[servers]\ncount = 3\n[routing]\nkind = "session"', work)
    for session in range(7):
        assert len({ran.engine[i] for i in range(session, n, 7)}) == 1
    assert len(set(ran.engine)) > 1


def test_prefix_aware_goes_where_the_prompt_is_and_weighs_load() -> None:
    # Two conversations of 100 tokens each, turn by turn; the cache of a server holds what it served.
    ids = [list(range(10)), list(range(20, 30))]
    rows = [(i * 1000, 100, 1) for i in range(8)]
    work = asked(*rows, blocks=[ids[i % 2] for i in range(8)])
    text = '[servers]\ncount = 2\n[prefix_cache]\nenabled = true\nkind = "pool"\n[routing]\nkind = "prefix_aware"\n'
    aware = Ran(text + "load_tokens = 1000", work)
    # Nothing is in flight when one comes. First: neither has anything, the first server is taken.
    assert aware.engine == [0] * 8
    assert aware.cached_tokens[:2] == [0, 0] and set(aware.cached_tokens[2:]) == {90}
    # All at once: those in flight weigh more than the cache, so they are spread.
    spread = Ran(text + "load_tokens = 1000", asked(*((0, 100, 1) for _ in range(8)), blocks=[ids[0]] * 8))
    assert sorted(spread.engine) == [0] * 4 + [1] * 4
    packed = Ran(text, asked((0, 100, 1), *((5000, 100, 1) for _ in range(7)), blocks=[ids[0]] * 8))
    assert packed.engine == [0] * 8


def test_kv_use_is_as_old_as_the_policy_says() -> None:
    # One of 10,000 tokens holds the first server. Fresh knowledge sends all others past it; an age of 1 s sends them all there.
    work = asked((0, 9000, 2), *((1000 + 10 * i, 10, 1) for i in range(5)))
    text = '[servers]\ncount = 2\n[batching]\nmax_sequences = 16\n[routing]\nkind = "kv_use"\n'
    assert Ran(text, work).engine == [0, 1, 1, 1, 1, 1]
    assert Ran(text + "knowledge_age_ms = 1000", work).engine == [0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("gbytes_per_s", [0.5, 0.9, 1.1, 2])
def test_a_tier_is_read_where_that_is_faster_than_computing(gbytes_per_s: float) -> None:
    """Mooncake's rule (FAST'25, eq. 2): reuse wins above KV bytes of a token ÷ time to compute it: 1000 bytes in 1 us, 1 GB/s."""
    # Room for one prompt at a time: the second drives the first's blocks out, the third asks for them again.
    ids = [list(range(10)), list(range(20, 30)), list(range(10))]
    work = asked((0, 105, 1), (10_000, 105, 1), (20_000, 105, 1), blocks=ids)
    text = f"""
[kv]
capacity_tokens = 110
bytes_per_token = 1000
[prefix_cache]
enabled = true
kind = "pool"
reuse = "break_even"
[[tiers]]
kind = "dram"
capacity_tokens = "unlimited"
write = "through"
link = "pcie"
[links.pcie]
gbytes_per_s = {gbytes_per_s}
"""
    ran = Ran(text, work)
    reused = gbytes_per_s > 1
    assert ran.cached_tier0_tokens[2] == (100 if reused else 0)
    took = 100_000 / gbytes_per_s + 5000 if reused else 105_000
    assert ran.first_token_ns[2] - ran.arrival_ns[2] == pytest.approx(took, abs=1)
    # Always: read even where it is slower.
    always = Ran(text.replace('reuse = "break_even"', ""), work)
    assert always.cached_tier0_tokens[2] == 100
    assert always.first_token_ns[2] - always.arrival_ns[2] == pytest.approx(100_000 / gbytes_per_s + 5000, abs=1)


def test_what_a_tier_evicts_goes_to_the_next() -> None:
    """One prompt fits the device, one the first tier: with a, b, c, a the last a lies in the second one, and b in the first."""
    a, b, c = (list(range(i, i + 10)) for i in (0, 20, 40))
    work = asked(*((10_000 * i, 105, 1) for i in range(5)), blocks=[a, b, c, a, c])
    ran = Ran(
        """
[kv]
capacity_tokens = 110
bytes_per_token = 1000
[prefix_cache]
enabled = true
kind = "pool"
[[tiers]]
kind = "dram"
capacity_tokens = 100
link = "pcie"
[[tiers]]
kind = "nvme"
capacity_tokens = "unlimited"
link = "flash"
[links.pcie]
gbytes_per_s = 1
[links.flash]
gbytes_per_s = 0.1
""",
        work,
    )
    assert ran.cached_tier0_tokens == [0, 0, 0, 0, 100]
    assert ran.cached_tier1_tokens == [0, 0, 0, 100, 0]
    # 100,000 bytes at 0.1 GB/s, then five tokens; and at 1 GB/s.
    took = [f - a for f, a in zip(ran.first_token_ns, ran.arrival_ns, strict=True)]
    assert took == [105_000, 105_000, 105_000, 1_005_000, 105_000]


PD = """
[batching]
max_sequences = 8
[kv]
bytes_per_token = 1000
[split]
prefill = 1
decode = 1
link = "nic"
[links.nic]
gbytes_per_s = 1
latency_us = 50
per_block_us = 2
"""


def test_a_hand_over_costs_latency_blocks_and_bytes() -> None:
    ran = Ran(PD, asked((0, 100, 2)), fixed(prefill_token_ns=1000, any_decode_ns=3000))
    # 100 us of prompt; 50 us + 10 blocks of 2 us + 100,000 bytes at 1 GB/s; one decode step of 3 us.
    assert ran.first_token_ns == [100_000]
    assert (ran.handover_start_ns, ran.handover_end_ns) == ([100_000], [270_000])
    assert ran.last_token_ns == [273_000]
    (move,) = ran.moves
    assert (move["bytes"], move["blocks"]) == (100_000, 10)


def test_short_prompts_stay_on_the_decode_server() -> None:
    ran = Ran(PD.replace('link = "nic"\n', 'link = "nic"\nlocal_below_tokens = 60\n', 1), asked((0, 59, 2), (0, 60, 2)))
    assert ran.decode_engine == [-1, 1] and ran.engine == [1, 0]
    assert len(ran.moves) == 1


def test_time_to_arrange_is_paid_once_and_infinite_links_take_none() -> None:
    late = Ran(PD.replace('link = "nic"\n', 'link = "nic"\narrange_ms = 3\n', 1), asked((0, 100, 2)))
    assert late.handover_start_ns == [100_000 + 3 * MS]
    free = Ran(PD + '[ceilings]\nlinks = "infinite"', asked((0, 100, 2)))
    assert free.handover_end_ns == [100_000] and free.last_token_ns == [100_001]


def test_overheads_come_before_and_between() -> None:
    ran = Ran("[overheads]\nbefore_ms = 1\ngap_ms = 0.5", asked((0, 10, 3)), fixed(step_ns=1000))
    assert ran.first_token_ns == [1_001_000]
    assert ran.last_token_ns == [1_001_000 + 2 * 501_000]


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_ends_with_all_requests_served(name: str) -> None:
    """On a server with a little room: what is asked for comes out, whatever the policy."""
    rng = np.random.default_rng(1)
    n = 30
    rows = [(int(a), int(p), int(o)) for a, p, o in zip(np.cumsum(rng.integers(0, 400, n)), rng.integers(20, 400, n),
                                                        rng.integers(1, 30, n), strict=True)]  # fmt: skip
    work = asked(*rows, blocks=[[int(rng.integers(0, 3))] for _ in range(n)], session_id=np.arange(n) % 4,
                 priority=rng.integers(0, 3, n))  # fmt: skip
    server = SERVER.model_copy(update={"max_sequences": 8, "max_batched_tokens": 1000, "kv_capacity_tokens": 2000, "layers": 4})
    text = presets()[name].to_toml() + "\n"
    if name == "ngram-speculation":
        text = text.replace('"trace"', "0.5")
    if name == "ceiling-host":
        pytest.skip("needs recorded steps")
    if "kv]" not in text:
        text += "[kv]\nbytes_per_token = 1000\n"
    try:
        ran = Ran(text, work, fixed(step_ns=10_000, prefill_token_ns=1000), server)
    except HoptraceError as e:
        pytest.fail(f"{name}: {e}")
    assert set(ran.status) == {DONE}
    assert ran.generated_tokens == [o for _, _, o in rows]
    assert all(f <= end for f, end in zip(ran.first_token_ns, ran.last_token_ns, strict=True))
    split = ran.planned.plan.handover is not None
    assert all((d >= 0) == (split and o > 1) for d, (_, _, o) in zip(ran.decode_engine, rows, strict=True))
