"""Re-use by tier, apart from resumption; engines' own rates with their windows; bytes moved to keep the cache; KV geometry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.memory import MemoryTrace

import hoptrace
from hoptrace.analysis.moves.ledger import ledger
from hoptrace.analysis.moves.ledger_geometry import server_kv
from hoptrace.analysis.moves.ledger_reuse import engine_rates
from hoptrace.hf_config import read_config
from hoptrace.kv import KvGeometry, geometry
from hoptrace.manifest import Manifest, Server

REAL = Path(__file__).parent / "data/vllm_traces"
TIERED = Server(name="s", layers=2, kv_heads=1, head_size=4, kv_dtype="f16", block_size_tokens=16)
MANIFEST = Manifest(
    origin="recorded",
    servers=[TIERED],
    platform={"nodes": [{"name": "hbm", "kind": "hbm"}, {"name": "ram", "kind": "dram"}, {"name": "other", "kind": "hbm"}]},
)
KV = 2 * 2 * 1 * 4 * 2  # bytes of a token on it


def stay(request: int, **more: Any) -> dict[str, Any]:
    return {"request": request, "stage": 0, "server": "s", **more}


def asked(*prompts: int) -> list[dict[str, Any]]:
    return [
        {"request": i, "arrival_ns": i, "finish_ns": 9 + i, "prompt_tokens": n, "output_tokens": 1} for i, n in enumerate(prompts)
    ]


def test_a_real_capture_agrees_with_the_engine() -> None:
    """vLLM's own counters of the same run: 1,600 hits of 13,533 tokens looked up; 288 more were found after preemptions."""
    book = ledger(hoptrace.open(REAL / "preempted.trace"))
    r = book.reuse
    assert (r.cached_tokens, r.prompt_tokens, r.resumed_tokens, r.by_tier["device"]) == (1600, 13_533, 288, 1600)
    # The plug-in's own counters of the look-ups after preemptions: 288 of 367, of which each computes its last token again.
    assert r.share_with_resumption == pytest.approx((1600 + 288) / (13_533 + 367), rel=2e-4)
    own = next(e for e in book.engine_rates if e.name == "vllm:prefix_cache")
    assert (own.hits, own.queries) == (1600, 13_533) and own.share == r.share
    assert book.upkeep is not None and book.upkeep.served_bytes == 1600 * 12_288 and book.upkeep.moved_bytes == 0
    assert book.geometry[0].shape is not None and book.geometry[0].shape.bytes_per_token == 12_288


def test_a36_resumption_is_no_reuse() -> None:
    """Preempted requests find their own blocks: a counter that takes that for hits shows 30 % where truly 0.2 % is re-used."""
    stays = [stay(0, cached_tokens=2, resumed_tokens=425), stay(1, cached_tokens=0)]
    r = ledger(MemoryTrace({"requests": asked(500, 500), "stages": stays}, MANIFEST)).reuse
    assert r.share == 0.002 and r.resumed_tokens == 425
    assert r.share_with_resumption == pytest.approx(427 / 1425)  # 0.2996


def test_a40_which_tier_served_the_hit() -> None:
    stays = [
        stay(0, cached_tokens=0, cached_device_tokens=0, cached_host_tokens=0),
        stay(1, cached_tokens=14_800, cached_device_tokens=14_784, cached_host_tokens=16),
    ]
    r = ledger(MemoryTrace({"requests": asked(14_800, 14_800), "stages": stays}, MANIFEST)).reuse
    assert r.by_tier == {"device": 14_784, "host": 16, "peer": None, "pool": None, "disk": None}


def test_a48_over_what_window_is_this_figure() -> None:
    gauge = {"entity": "server:s", "name": "log:prefix_cache_hit_rate", "semantics": "gauge", "unit": "ratio"}
    count = {"entity": "server:s", "semantics": "cumulative", "unit": "tokens"}
    hits, queries = 'vllm:prefix_cache_hits_total{engine="0"}', 'vllm:prefix_cache_queries_total{engine="0"}'
    rows = [gauge | {"time_ns": t, "value_float": v} for t, v in ((0, 0.9), (10, 0.213))]
    for name, values in ((hits, (1000, 1500)), (queries, (5000, 6000))):
        rows += [count | {"name": name, "time_ns": 10 * i, "value_int": v} for i, v in enumerate(values)]
    exact, moving = engine_rates(MemoryTrace({"counters": rows}))
    assert (exact.share, exact.hits, exact.queries) == (0.5, 500, 1000), "what came before the recording is not in it"
    assert (moving.share, moving.hits) == (0.213, None) and "last 1,000 requests" in moving.window
    assert engine_rates(MemoryTrace({})) == []


def test_several_sequences_count_their_own_prompts() -> None:
    """n = 2 looks the same prompt up twice; a list of two prompts looks each up once: the residency tells them apart."""
    stays = [stay(r, sequence=q, cached_tokens=4) for r in (0, 1) for q in (0, 1)]
    runs = [
        {"request": r, "sequence": q, "server": "s", "first_step": 1, "last_step": 2, "phase": "decode", "context_at_start": n}
        for r, q, n in ((0, 0, 100), (0, 1, 100), (1, 0, 64), (1, 1, 36))
    ]
    r = ledger(MemoryTrace({"requests": asked(100, 100), "stages": stays, "residency": runs}, MANIFEST)).reuse
    assert (r.prompt_tokens, r.cached_tokens) == (300, 16)
    blind = ledger(MemoryTrace({"requests": asked(100, 100), "stages": [*stays, stay(2, cached_tokens=1)]}, MANIFEST))
    assert blind.reuse.unsure == 4 and any("nobody tells their own prompts" in u for u in blind.unseen)


def test_bytes_moved_to_keep_one_byte_cached() -> None:
    stays = [stay(0, cached_tokens=10, cached_host_tokens=10)]
    move = {"start_ns": 0, "object": "kv", "mechanism": "dma", "basis": "counted"}
    moves = [
        move | {"src": "hbm", "dst": "ram", "bytes": 40 * KV},
        move | {"src": "ram", "dst": "hbm", "bytes": 10 * KV},
        move | {"src": "hbm", "dst": "other", "bytes": 999 * KV},  # a hand-over keeps no cache
    ]
    kept = ledger(MemoryTrace({"requests": asked(20), "stages": stays, "moves": moves}, MANIFEST)).upkeep
    assert kept is not None and (kept.moved_bytes, kept.moved_basis, kept.moved_from) == (50 * KV, "counted", "moves")
    assert kept.served_bytes == 10 * KV and kept.moved_per_byte_served == 5.0
    # Without moves, what the block events say was copied.
    block = {"time_ns": 0, "server": "s", "hash": 1, "bytes": 16 * KV}
    blocks = [block | {"event": "stored", "medium": "device"}, block | {"event": "copied", "medium": "host"}]
    kept = ledger(MemoryTrace({"requests": asked(20), "stages": stays, "blocks": blocks}, MANIFEST)).upkeep
    assert kept is not None and (kept.moved_bytes, kept.moved_from, kept.moved_per_byte_served) == (16 * KV, "blocks", 1.6)
    assert kept.by_medium["host"] == {"stored": None, "copied_in": 16 * KV, "evicted": None, "hit": None}
    # Neither: unknown, and no geometry: unknown what was served.
    none = ledger(MemoryTrace({"requests": asked(20), "stages": stays}, Manifest(origin="recorded", servers=[Server(name="s")])))
    assert none.upkeep is not None and none.upkeep.moved_bytes is None and none.upkeep.served_bytes is None
    assert len([u for u in none.unseen if "upkeep moved" in u or "cache hits served" in u]) == 2


# -- geometry ----------------------------------------------------------------------------------------------------------


def test_x7_kv_of_a_request_and_the_link_that_it_needs() -> None:
    opt = KvGeometry(64, 72, 128, "f16")
    assert round(opt.bytes_of(512) / 2**30, 3) == 1.125  # published: 1.13 GB, which are GiB
    # 10 requests a second: published 11.3 GB/s and 90 Gbit/s, again in powers of 1,024.
    assert opt.bytes_of(512) * 10 / 2**30 == 11.25 and opt.bytes_of(512) * 10 * 8 / 2**30 == 90


def test_x4_and_x5_sizes() -> None:
    assert round(KvGeometry(80, 8, 128, "bf16").bytes_of(8192) / 1e9, 2) == 2.68
    qwen = KvGeometry(36, 8, 128, "bf16", tp=8)
    published_mib = {128: 20, 256: 38, 512: 74, 1024: 146, 2048: 290, 4096: 578, 8192: 1154, 16_384: 2306, 32_768: 4610}
    # What was transferred is the prompt in blocks of 16 and one block more.
    assert {n: int(qwen.bytes_of(n + 16) / 2**20) for n in published_mib} == published_mib


@pytest.mark.parametrize(
    ("config", "kv_layers", "window_layers"),
    [
        ({"num_hidden_layers": 4, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}, None, 2),
        ({"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}, 1, None),  # Qwen3-Next
        ({"num_hidden_layers": 48, "full_attention_interval": 4}, 12, None),
        ({"num_hidden_layers": 26, "sliding_window": 512, "sliding_window_pattern": 6}, None, 22),  # Gemma 3 1B: 4 full layers
        ({"num_hidden_layers": 42, "sliding_window": 4096, "model_type": "gemma2"}, None, 21),
        ({"num_hidden_layers": 32, "sliding_window": 4096, "model_type": "mistral"}, None, 32),
        (
            {"num_hidden_layers": 28, "sliding_window": 9, "use_sliding_window": False, "max_window_layers": 28},
            None,
            None,
        ),  # Qwen 2
        ({"num_hidden_layers": 28, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 20}, None, 8),
        ({"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4}, 4, None),  # Jamba
        ({"num_hidden_layers": 52, "hybrid_override_pattern": "M-M*-" * 2}, 2, None),  # Nemotron-H
        ({"num_hidden_layers": 32}, None, None),
        ({"num_hidden_layers": 4, "layer_types": [1, None]}, None, None),
    ],
)
def test_layers_that_keep_kv(tmp_path: Path, config: dict[str, Any], kv_layers: int | None, window_layers: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(tmp_path)
    assert (found.kv_layers, found.window_layers) == (kv_layers, window_layers)


def test_windows_hybrids_and_latent_attention() -> None:
    whole = Server(name="s", layers=4, kv_heads=2, head_size=8, kv_dtype="f16")
    each = 2 * 2 * 8 * 2
    windowed = geometry(whole.model_copy(update={"config": {"window_layers": 3, "window_tokens": 10}}))
    assert windowed is not None and windowed.bytes_per_token == 4 * each
    assert windowed.bytes_of(5) == 20 * each and windowed.bytes_of(100) == (100 + 3 * 10) * each
    hybrid = geometry(whole.model_copy(update={"config": {"kv_layers": 1}}))
    assert hybrid is not None and hybrid.bytes_of(7) == 7 * each
    # DeepSeek-V3 as config.json gives it: one latent vector of 576, not K and V of it.
    mla = Server(name="s", layers=61, kv_heads=1, head_size=576, kv_dtype="bf16", config={"mla": True})
    found = geometry(mla)
    assert found is not None and found.bytes_per_token == 70_272


def test_the_line_of_each_server() -> None:
    qwen = Server(name="q", model="Qwen3-235B-A22B", layers=94, kv_heads=4, head_size=128, kv_dtype="bf16", block_size_tokens=16,
                  config={"tensor_parallel_size": 8})  # fmt: skip
    lines = [g.says for g in server_kv(Manifest(origin="recorded", servers=[qwen, Server(name="bare", layers=2)]))]
    assert lines == [
        "q (Qwen3-235B-A22B): 376 KiB of KV a token (2 × 94 layers × 4 KV heads × 128 × bf16), ×2 of one copy: 8 tensor-parallel "
        "ranks hold 4 heads between them; a block of 16 tokens is 5.88 MiB.",
        "bare: the KV of a token is unknown (the manifest lacks kv_heads, head_size, kv_dtype).",
    ]
    mla = Server(name="d", layers=61, kv_heads=1, head_size=576, kv_dtype="bf16", config={"mla": True, "tensor_parallel_size": 8})
    (line,) = server_kv(Manifest(origin="recorded", servers=[mla]))
    assert line.as_dict()["kv"]["copies"] == 8.0 and "the latent vector each" in line.says


def test_a_hand_over_is_no_reuse() -> None:
    """Prefill on one server, decode on another, nothing in any cache: what vLLM's plug-in records of a NIXL pair."""
    stays = [
        stay(0, role="prefill", cached_tokens=0, end_reason="handed over"),
        {**stay(0, role="decode", cached_tokens=99, cached_peer_tokens=99), "stage": 1},
    ]
    book = ledger(MemoryTrace({"requests": asked(100), "stages": stays}, MANIFEST))
    r = book.reuse
    assert (r.share, r.prompt_tokens, r.cached_tokens, r.by_tier["peer"]) == (0.0, 100, 0, None)
    assert (r.handed_over_tokens, r.stays, r.stays_with_a_hit) == (99, 1, 0)
    assert book.upkeep is not None and book.upkeep.served_bytes == 0


def kept(*moves: dict[str, Any], **tables: list[dict[str, Any]]) -> Any:
    rows = [{"start_ns": 1, "object": "kv", "server": "s"} | m for m in moves]
    stays = [stay(0, cached_tokens=10, cached_host_tokens=10)]
    return ledger(MemoryTrace({"requests": asked(100), "stages": stays, "moves": rows, **tables}, MANIFEST)).upkeep


def test_what_an_offloading_connector_moves_is_upkeep() -> None:
    """The plug-in's moves name the tier `server:X/offload`; its events of the device's blocks say nothing of it."""
    down = {"src": "server:s", "dst": "server:s/offload", "bytes": 100 * KV, "basis": "counted"}
    up = {"src": "server:s/offload", "dst": "server:s", "bytes": 10 * KV, "basis": "counted"}
    device = {"time_ns": 1, "server": "s", "event": "stored", "hash": 1, "medium": "device", "bytes": 16 * KV}
    k = kept(down, up, blocks=[device])
    assert (k.moved_bytes, k.moved_basis, k.moved_from, k.at_least) == (110 * KV, "counted", "moves", False)
    assert k.moved_per_byte_served == 11.0


def test_upkeep_of_which_not_all_is_counted_is_a_lower_bound() -> None:
    ways = {"src": "hbm", "dst": "ram"}
    told = {**ways, "bytes": 1000, "basis": "counted"}
    assert not kept(told).at_least
    for more in (
        {**ways, "bytes": 500, "basis": "derived"},
        {**ways, "basis": "counted"},
        {**ways, "bytes": 7, "basis": "assumed"},
    ):
        k = kept(told, more)
        assert (k.moved_bytes, k.at_least) == (1000, True), "bases are never added up"
    # Moves that say nothing are no reason to take the blocks' word, which may not tell of that tier.
    assert kept({**ways, "basis": "counted"}).moved_bytes is None


def test_blocks_stored_outside_the_device_were_carried_there() -> None:
    host = {"time_ns": 1, "server": "s", "event": "stored", "hash": 1, "medium": "host", "bytes": 640}
    k = kept(blocks=[host])
    assert (k.moved_bytes, k.moved_basis, k.moved_from) == (640, "derived", "blocks")


def test_a_rate_of_which_nobody_recorded_the_hits_is_unknown() -> None:
    count = {"entity": "server:s", "semantics": "cumulative", "unit": "tokens"}
    asks = [count | {"name": "vllm:prefix_cache_queries_total", "time_ns": t, "value_int": 100 * t} for t in (0, 1)]
    assert engine_rates(MemoryTrace({"counters": asks})) == []
    still = [count | {"name": "vllm:prefix_cache_hits_total", "time_ns": 0, "value_int": 7}]
    assert engine_rates(MemoryTrace({"counters": asks + still}))[0].share == 0.0, "a counter that never moved"
