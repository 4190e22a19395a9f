"""Policies: files, presets, errors that name key, line and remedy, and what a partial one means on top of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Server
from hoptrace.replay.policy import Policy, load_policy, parse_policy, presets, resolve, with_settings
from hoptrace.replay.policy.errors import sections
from hoptrace.replay.policy.resolve import resolve_server


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[batching]\n\nmax_sequnces = 1",
            "p.toml, line 3: max_sequnces is not a key of [batching]. Did you mean max_sequences?",
        ),
        ("[batchin]\nmax_sequences = 1", "p.toml, line 1: batchin is not a key of a policy. Did you mean batching?"),
        ("[kv]\nmax_sequences = 2", "p.toml, line 2: max_sequences is not a key of [kv]. It belongs into [batching]."),
        (
            "speed = 2",
            "p.toml, line 1: speed is not a key of a policy. Keys: name, description, batching, kv, prefix_cache, servers,",
        ),
        (
            '[batching]\nmode = "x"',
            'p.toml, line 2: mode = \'x\' is not possible. Allowed: "mixed" or "prefill_first" or "prompts_first" or',
        ),
        ("[batching]\nmax_sequences = 0", "p.toml, line 2: max_sequences = 0 is not possible."),
        ("[batching]\nmax_sequences = true", "p.toml, line 2: max_sequences = True is not possible."),
        ("[batching]\nmax_sequences = 1.5", "p.toml, line 2: max_sequences = 1.5 is not possible."),
        ('[kv]\ncapacity_tokens = "lots"', 'Allowed: a whole number from 1 to 1099511627776 or "unlimited".'),
        ("[batching]\nmax_sequences = 99999999999999", 'Allowed: a whole number from 1 to 65536 or "unlimited".'),
        ("[batching]\nmax_batched_tokens = 9223372036854775808", "max_batched_tokens = 9223372036854775808 is not possible."),
        ("[kv]\nblock_size_tokens = 99999999999999999999999", "Allowed: a whole number from 1 to 1099511627776."),
        ("[kv]\nblock_size_tokens = " + "9" * 5000, "p.toml is not TOML"),
        (
            '[batching]\nchunked_prefill = "yes"',
            "p.toml, line 2: chunked_prefill = 'yes' is not possible. Allowed: true or false.",
        ),
        ("batching.max_seqs = 1", "p.toml, line 1: max_seqs is not a key of [batching]."),
        ("batching = 3", "p.toml, line 1: batching = 3 is not possible. Allowed: a table."),
        ("name = 3", "p.toml, line 1: name = 3 is not possible. Allowed: text."),
        ("a = ", "p.toml is not TOML"),
    ],
)
def test_errors_name_key_line_and_remedy(text: str, message: str) -> None:
    with pytest.raises(InputError) as e:
        parse_policy(text, "p.toml")
    assert message in str(e.value)
    assert e.value.exit_code == 3


def test_every_preset_reads_has_a_line_and_survives_its_own_toml() -> None:
    found = presets()
    assert {"as-recorded", "one-slot", "vllm-default", "no-prefix-cache"} <= set(found)
    for name, p in found.items():
        assert p.name == name
        assert p.description.endswith(".") and len(p.description) < 130
        assert parse_policy(p.to_toml()) == p
    assert found["as-recorded"].changes() == {}
    assert found["one-slot"].changes() == {"batching": {"max_sequences": 1}}


def test_every_field_is_documented() -> None:
    for model in sections(Policy).values():
        assert model.__doc__
        for name, field in model.model_fields.items():
            assert field.description, name


def test_loading_by_name_and_by_path(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[batching]\nmax_sequences = 2\n")
    assert load_policy("one-slot").batching.max_sequences == 1
    assert load_policy(mine).batching.max_sequences == 2
    assert load_policy(mine).name == "mine"
    with pytest.raises(UsageError, match="Did you mean 'one-slot'"):
        load_policy("one-slt")
    with pytest.raises(UsageError, match="no policy file"):
        load_policy(tmp_path / "none.toml")


def test_settings_on_top() -> None:
    p = with_settings(
        load_policy("one-slot"), ["batching.max_sequences=3", "batching.mode=prefill_first", "kv.capacity_tokens=9"]
    )
    assert p.batching.max_sequences == 3
    assert p.batching.mode == "prefill_first"
    assert p.kv.capacity_tokens == 9
    assert p.name == "one-slot, batching.max_sequences=3, batching.mode=prefill_first, kv.capacity_tokens=9"
    with pytest.raises(InputError, match="Did you mean max_sequences"):
        with_settings(p, ["batching.max_sequence=1"])
    for bad in ("x", "batching=1", "name.x=1", "a.b.c=1"):
        with pytest.raises((UsageError, InputError)):
            with_settings(p, [bad])


def test_a_partial_policy_leaves_the_rest_as_the_server_had_it() -> None:
    own = Server(name="s", engine="vllm", max_sequences=8, max_batched_tokens=512, context_tokens=4096, block_count=100,
                 block_size_tokens=16, prefix_caching=True)  # fmt: skip
    r = resolve(load_policy("one-slot"), own)
    assert (r.max_sequences, r.max_batched_tokens, r.context_tokens) == (1, 512, 4096)
    assert (r.capacity_tokens, r.block_size_tokens, r.cache) == (1600, 16, "pool")
    assert (r.mode, r.chunked_prefill) == ("mixed", True)
    assert r.notes == ()
    assert resolve(load_policy("no-prefix-cache"), own).cache is None
    assert resolve(parse_policy('[kv]\ncapacity_tokens = "unlimited"'), own).capacity_tokens is None


@pytest.mark.parametrize(
    "told",
    [{"max_sequences": 0}, {"max_sequences": -3}, {"max_batched_tokens": 0}, {"context_tokens": -1}, {"kv_capacity_tokens": -1}],
)
def test_limits_that_no_server_runs_with_are_refused_by_name(told: dict[str, int]) -> None:
    own = Server(name="s", engine="vllm", **told)
    (key, value) = next(iter(told.items()))
    with pytest.raises(InputError, match=rf"\({key.removeprefix('kv_')}\) is {value} by the trace's manifest"):
        resolve(Policy(), own)


def test_what_is_unknown_is_said() -> None:
    r = resolve(Policy(), None)
    assert r.max_sequences is None and r.cache is None
    assert len(r.notes) == 5
    assert "How many requests run at once (max_sequences) is unknown: taken as unlimited." in r.notes
    assert r.as_dict()["batching"]["max_sequences"] == "unlimited"


def test_a_host_prompt_cache_that_is_not_modelled_is_said() -> None:
    def notes(**more: object) -> list[str]:
        own = Server(name="s", engine="llama.cpp", max_sequences=4, max_batched_tokens=2048, context_tokens=2048,
                     kv_capacity_tokens=8192, **more)  # type: ignore[arg-type]  # fmt: skip
        return [n for n in resolve(Policy(), own).notes if "--cache-ram" in n]

    rest = "and is not modelled: prompts that only it would find again are computed anew."
    assert notes(prefix_caching=True) == [f"llama.cpp's host prompt cache (--cache-ram) may be on (its size is unknown) {rest}"]
    assert notes(prefix_caching=True, config={"cache_ram_mib": 8192}) == [
        f"llama.cpp's host prompt cache (--cache-ram) is on {rest}"
    ]
    assert notes(prefix_caching=True, config={"cache_ram_mib": 0}) == []
    assert notes(prefix_caching=False) == []


def test_slots_that_cannot_be_modelled_are_refused_by_name() -> None:
    llama = Server(
        name="s", engine="llama.cpp", max_sequences=4, context_tokens=2048, kv_capacity_tokens=8192, prefix_caching=True
    )
    assert resolve(Policy(), llama).cache == "slot"
    assert resolve(load_policy("one-slot"), llama).cache == "slot"
    for change, message in (
        ("[kv]\ncapacity_tokens = 4096", "do not fit into 4096"),
        ('[batching]\nmax_sequences = "unlimited"', "needs batching.max_sequences"),
        ("[prefix_cache]\ncapacity_tokens = 5", "a slot keeps one prompt"),
    ):
        with pytest.raises(InputError, match=message):
            resolve(parse_policy(change), llama)


@pytest.mark.parametrize(
    ("config", "mode", "chunked"),
    [
        ({}, "prefill_first", True),
        ({"chunked_prefill_size": 2048}, "prefill_first", True),
        ({"chunked_prefill_size": -1}, "prefill_first", False),
        ({"enable_mixed_chunk": True, "chunked_prefill_size": 2048}, "mixed", True),
        ({"batching_mode": "mixed", "chunked_prefill": True}, "mixed", True),
    ],
)
def test_sglang_computes_prompts_apart_unless_told_to_mix(config: dict[str, object], mode: str, chunked: bool) -> None:
    own = Server(name="s", engine="sglang", max_sequences=8, max_batched_tokens=2048, config=config)
    found = resolve_server(Policy(), own)
    assert (found.mode, found.chunked_prefill) == (mode, chunked)
    assert resolve_server(Policy(), own.model_copy(update={"engine": "vllm", "config": {}})).mode == "mixed"
