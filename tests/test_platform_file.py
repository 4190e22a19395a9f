"""Platform files: what may stand in one, and what is said of what may not."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoptrace.errors import InputError, UsageError
from hoptrace.paths import system_of, way_of
from hoptrace.platform import catalogue, component, load_platform, platforms
from hoptrace.platform_file import CONSTANTS, LINKS, checked


def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("flop_per_s = 1e12", "there is no key flop_per_s. Did you mean flops_per_s?"),
        ("[constants]\ncopy_us = 6.5", "there is no key constants.copy_us. Did you mean constants.copy_ns?"),
        ("[constants]\ncopy_ns = -1", "constants.copy_ns must be a number of 0 or more, not -1"),
        ("[constants]\ncopy_ns = nan", "constants.copy_ns must be a number of 0 or more, not nan"),
        ("[constants]\ncopy_ns = true", "constants.copy_ns must be a number"),
        ("[constants]\ncopy_ns = {low = 1}", "constants.copy_ns has no value"),
        ("[constants]\ncopy_ns = {value = 5, low = 6}", "low, value and high must rise"),
        ("[constants]\ncopy_ns = {value = 5, unit = 'us'}", "there is no key constants.copy_ns.unit"),
        ("[constants]\ncache_hit_rate = 1.5", "is a share, at most 1"),
        ("[constants]\nscatter_entries = 0", "constants.scatter_entries must be a positive number"),
        ("[constants]\nscatter_entries = 1.5", "is a whole number"),
        ("[constants]\nmemcpy_bytes_per_s = 0", "must be a positive number"),
        ("constants = 3", "constants must be a table"),
        ("[links.nvlnk]\nbytes_per_s = 1", "there is no key links.nvlnk"),
        ("[links.pcie]\ngbytes_per_s = 1", "there is no key links.pcie.gbytes_per_s"),
        ("[links.pcie]\nbytes_per_s = 0", "links.pcie.bytes_per_s must be a positive number, not 0"),
        ("[links]\npcie = 1", "links.pcie must be a table"),
        ("kind = 'gpu'", "kind 'gpu' is unknown. There are: device, host, nic, cxl."),
        ("base = 'h100'", "there is no base 'h100'"),
        ("base = 3", "base must be text"),
        ("[[allreduce]]\nranks = 1\nbytes = [1, 2]\nns = [1, 2]", "allreduce.ranks must be a number of 2 or more"),
        ("[[allreduce]]\nranks = 2\nbytes = [1, 2]\nns = [1]", "equally many"),
        ("[[allreduce]]\nranks = 2\nbytes = [2, 1]\nns = [1, 2]", "allreduce.bytes of 2 ranks must rise"),
        ("[[allreduce]]\nranks = 2\nbytes = [1, 2]\nns = [0, 2]", "allreduce.ns must be a positive number"),
        ("allreduce = 3", "allreduce must be tables"),
        ("memory_bytes = 'much'", "memory_bytes must be a number of 0 or more, not 'much'"),
        ("= 3", "is not TOML"),
    ],
)
def test_what_may_not_stand_there(tmp_path: Path, text: str, says: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(InputError) as e:
        component(path)
    assert says in str(e.value) and "mine.toml" in str(e.value)


def test_a_file_laid_over_another(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        'base = "h100-sxm-80gb"\nnic = "nic-hdr200"\nmemory_bytes_per_s = 3000e9\n'
        "[constants]\ncopy_ns = 5000\npeer_load_ns = 700\n"
        "[links.pcie]\nattained_bytes_per_s = 40e9\n[links.peer]\nbytes_per_s = 100e9\n",
    )
    mine = load_platform(path)
    assert mine["name"] == "mine" and mine["flops_per_s"] == 989e12 and mine["memory_bytes_per_s"] == 3000e9
    assert mine["links"]["pcie"]["bytes_per_s"] == 63e9 and mine["links"]["peer"] == {"bytes_per_s": 100e9}
    system = system_of(path)
    copy = way_of(system, "copy_engine", "hbm", "dram", block_bytes=40_000)
    assert (copy.per_block_ns, copy.time_ns()) == (5000, 6000) and "copy_ns: as given (mine)" in copy.sources
    assert way_of(system, "peer_load_store", "peer_hbm", "hbm", block_bytes=64).time_ns() == 700
    assert way_of(system, "rdma_write", "dram", "remote_dram", block_bytes=1).bytes_per_s == 25_000_000_000
    # The catalogue is as it was.
    assert catalogue()["h100-sxm-80gb"]["constants"]["copy_ns"]["value"] == 6500


def test_only_devices_have_a_roofline(tmp_path: Path) -> None:
    assert set(platforms()) < set(catalogue())
    with pytest.raises(UsageError, match="nic-ndr400 is of kind nic"):
        load_platform("nic-ndr400")
    bare = file(tmp_path, "[constants]\ncopy_ns = 1\n")
    assert component(bare)["name"] == "mine"
    with pytest.raises(InputError, match="flops_per_s must be a positive number"):
        load_platform(bare)


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_every_entry_of_the_catalogue(name: str) -> None:
    data = catalogue()[name]
    assert data["name"] == name and data["description"].endswith(".")
    for part in ("host", "nic", "expander", "pool"):
        if part in data:
            assert catalogue()[data[part]]["kind"] == ("cxl" if part in ("expander", "pool") else part)
    system = system_of(name)
    assert system.name == name and system.parts


def test_the_file_in_the_docs(tmp_path: Path) -> None:
    docs = (Path(__file__).parents[1] / "docs" / "platforms.md").read_text(encoding="utf-8")
    text = docs.split("```toml\n")[1].split("```")[0]
    mine = system_of(file(tmp_path, text))
    assert tomllib.loads(text)["base"] == "h100-sxm-80gb"
    load = way_of(mine, "peer_load_store", "peer_hbm", "hbm", block_bytes=64)
    assert (load.time_ns(), load.range_ns()) == (700, (650, 900))
    assert all(f"`{k}`" in docs for k in ("device", "host", "nic", "cxl")) and all(k in docs for k in LINKS)


_VALUES = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
_KEYS = st.sampled_from([*CONSTANTS, *LINKS, "bytes_per_s", "source", "value", "low", "ranks", "bytes", "ns", "name", "x"])
_TREE = st.recursive(_VALUES, lambda v: st.dictionaries(_KEYS, v, max_size=3) | st.lists(v, max_size=2), max_leaves=8)


@given(
    st.dictionaries(st.sampled_from(["constants", "links", "allreduce", "name", "kind", "sources", "memory_bytes", "y"]), _TREE)
)
def test_hostile_files_are_refused_in_a_sentence_or_taken(data: dict[str, Any]) -> None:
    try:
        taken = checked(data, "F")
    except InputError as e:
        assert str(e).startswith("F: ")
    else:
        # Whatever is taken can be used.
        system_of({**taken, "name": "f"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("flops_per_s = " + "9" * 5000, "not TOML"),
        ("memory_bytes_per_s = 3350", r"memory_bytes_per_s is in bytes a second, 3350 .* 1 GB/s is 1e9"),
        ("flops_per_s = 989", r"flops_per_s is in FLOP a second, 989 .* 1 TFLOP/s is 1e12"),
        ("memory_bytes = 80", r"memory_bytes is in bytes, 80 .* 80e9"),
        ("step_overhead_ns = 1e29", "step_overhead_ns is in ns"),
        ("[links.nic]\nbytes_per_s = 50", r"links\.nic\.bytes_per_s is in bytes a second, 50 "),
        ("[links.nic]\nbytes_per_s = 1e-300", r"links\.nic\.bytes_per_s is in bytes a second"),
        ("[links.pcie]\nbytes_per_s = 10e9\nattained_bytes_per_s = 90e9", "attained_bytes_per_s = 9e.10 is above the peak"),
        ("[links.pcie]\nattained_bytes_per_s = 90e9", r"attained_bytes_per_s = 9e\+10 is above the peak .* 6\.3e\+10"),
        ("[links.pcie]\nbytes_per_s = 10e9\nboth_bytes_per_s = 21e9", "both_bytes_per_s = 2.1e.10 is above"),
        ("[constants]\ncopy_ns = 1e29", r"constants\.copy_ns is in ns, at most"),
        ("[[allreduce]]\nranks = 2\nbytes = [1, 2]\nns = [1, 1e20]", r"allreduce\.ns of 2 ranks is in ns"),
    ],
)  # fmt: skip
def test_what_is_in_another_unit_or_out_of_all_proportion_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """A link of 0 bytes a second, or steps beyond 64 bits, would have come of each."""
    file = tmp_path / "p.toml"
    file.write_text('base = "h100-sxm-80gb"\n' + text, encoding="utf-8")
    with pytest.raises(InputError, match=said) as caught:
        load_platform(str(file))
    assert "p.toml" in str(caught.value)
