"""Policy files of several servers, tiers and links: errors that name key and line, nonsense that is refused, what is refused by
name, settings deep inside, and the page that is generated from the schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from hoptrace.cli.policies import command
from hoptrace.errors import HoptraceError, InputError, UsageError
from hoptrace.replay.policy import Policy, parse_policy, presets, with_settings
from hoptrace.replay.policy.docs import EXAMPLES, markdown
from hoptrace.replay.policy.errors import line_of, sections
from hoptrace.replay.policy.refused import REFUSED, refusal

DOCUMENT = Path(__file__).parents[1] / "docs" / "policies.md"
TIERS = '[[tiers]]\nkind = "dram"\ncapacity_tokens = 9\n'
PD = "[split]\nprefill = 1\ndecode = 1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            PD + "[split.decode_server.batching]\nmax_seq = 3",
            "line 5: max_seq is not a key of [split.decode_server.batching]. Did",
        ),
        ("[split]\nprefill = 1", "line 1: [split] lacks decode. Allowed: a whole number from 1 to 4096."),
        ("[split]\nprefill = 0\ndecode = 1", "line 2: prefill = 0 is not possible. Allowed: a whole number from 1 to 4096."),
        ("[split]\nprefil = 1", "line 2: prefil is not a key of [split]. Did you mean prefill?"),
        ("[[split]]\nprefill = 1", "line 1: split = [{'prefill': 1}] is not possible. Allowed: a table."),
        (TIERS + '[[tiers]]\nkind = "nvm"', "line 5: kind = 'nvm' is not possible. Allowed: \"dram\" or"),
        (TIERS + "[[tiers]]\ncapacity_tokens = 4", "line 4: [[tiers]] 2 lacks kind."),
        (TIERS + 'link = ["a", 4]', "line 4: link = ['a', 4] is not possible. Allowed: a name of"),
        ("tiers = 3", "line 1: tiers = 3 is not possible. Allowed: tables."),
        ("[links]\nnic = { gbytes_per_s = 0 }", "line 2: gbytes_per_s = 0 is not possible. Allowed: a number above 0, at most"),
        ("links.nic.gbytes = 3", "line 1: gbytes is not a key of [links.nic]. Did you mean gbytes_per_s?"),
        ('[links."a b"]\ngbytes_per_s = 1', "line 1: a b = 'a b' is not possible"),
        (
            "[speculation]\ntokens = 2\nacceptance = 1.5",
            'acceptance = 1.5 is not possible. Allowed: a number from 0 to 1 or "trace".',
        ),
        ("[overheads]\ngap_ms = -1", "line 2: gap_ms = -1 is not possible. Allowed: a number from 0 to 1,000,000,000."),
        ("[overheads]\ngap_ms = inf", "gap_ms = inf is not possible."),
        ("[servers]\ncount = 5000", "line 2: count = 5000 is not possible."),
    ],
)
def test_errors_inside_nested_tables(text: str, message: str) -> None:
    with pytest.raises(InputError) as e:
        parse_policy(text, "p.toml")
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PD + "[servers]\ncount = 2", "p.toml, line 5: [servers] count does not go with [split]"),
        ('[batching]\norder = "fcfs"\nslo_ttft_ms = 5', "p.toml, line 3: slo_ttft_ms decides nothing"),
        ('[routing]\nkind = "random"\nload_tokens = 3', "p.toml, line 3: load_tokens decides nothing"),
        (
            '[routing]\nkind = "prefix_aware"\n[prefix_cache]\nenabled = false',
            'p.toml, line 2: kind = "prefix_aware" needs a prefix',
        ),
        (PD + 'transfer = "per_layer"\nstart = "pull"', 'p.toml, line 5: start = "pull" does not go with transfer = "per_layer"'),
        (PD + 'transfer = "per_layer"\nfirst_token = "recompute"', "p.toml, line 5: first_token"),
        (PD + "layers = 32", "p.toml, line 4: layers decides nothing"),
        (PD + '[prefix_cache]\nkind = "slot"', "slots do not hand their KV over"),
        (PD + '[batching]\nmode = "static"', 'mode = "static" does not go with [split]'),
        (PD + '[split.decode_server.batching]\norder = "shortest"', "p.toml, line 5: The order is one for all servers."),
        (PD + '[split.decode_server.kv]\ndtype = "fp8"', "p.toml, line 5: KV has one type on both sides"),
        (PD + 'link = ["x", "x"]\n[links.x]\ngbytes_per_s = 1', "p.toml, line 4: A link is named twice"),
        (PD + 'link = "nic"', "p.toml, line 4: There is no link nic. [links.NAME] describes one; there are: none."),
        (
            PD + 'link = "x"\nmechanism = "rdma"\n[links.x]\ngbytes_per_s = 1',
            "p.toml, line 5: link and mechanism are both given.",
        ),
        ('[batching]\nmode = "static"\nchunked_prefill = true', "p.toml, line 3: static batching computes whole prompts."),
        (
            '[batching]\nmode = "static"\n[speculation]\ntokens = 1\nacceptance = 1.0',
            'mode = "static" does not go with [speculation]',
        ),
        ('[batching]\nmode = "static"\n' + TIERS, 'mode = "static" does not go with [[tiers]]'),
        ('[[tiers]]\nkind = "dram"', "p.toml, line 1: Tier dram has no capacity."),
        (TIERS + "capacity_bytes = 4", "p.toml, line 4: Tier dram has capacity_tokens and capacity_bytes."),
        (TIERS + TIERS, "p.toml, line 5: Two tiers are called dram."),
        (
            TIERS + '[[tiers]]\nkind = "nvme"\ncapacity_tokens = 1\nwrite = "through"',
            "p.toml, line 7: Tier nvme is not the first",
        ),
        (
            '[[tiers]]\nkind = "cxl_pool"\ncapacity_tokens = 1\n[[tiers]]\nkind = "nvme"\ncapacity_tokens = 1',
            "p.toml, line 4: Tier nvme is each server's own, and the one above it is shared",
        ),
        (TIERS + "[prefix_cache]\nenabled = false", "p.toml, line 1: [[tiers]] keep prefix blocks"),
        (
            "".join(f'[[tiers]]\nkind = "dram"\nname = "t{i}"\ncapacity_tokens = 1\n' for i in range(5)),
            "line 17: There are 5 tiers; 4",
        ),
        (
            '[speculation]\ntokens = 1\nacceptance = 0.5\nkind = "eagle"',
            'p.toml, line 4: kind = "eagle" needs draft_ms_per_token',
        ),
        (
            '[ceilings]\nkv = "infinite"\n[kv]\ncapacity_tokens = 5',
            "p.toml, line 2: kv.capacity_tokens sets what ceilings.kv takes away.",
        ),
        ('[ceilings]\nhost_cost = "zero"\n[overheads]\ngap_ms = 1', "p.toml, line 2: overheads.gap_ms sets what"),
        ('[ceilings]\nfront_cost = "zero"\n[overheads]\nbefore_ms = 1', "p.toml, line 2: [overheads] sets what"),
    ],
)
def test_nonsense_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(InputError) as e:
        parse_policy(text, "p.toml")
    assert message in str(e.value)
    assert e.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[batching]\npreemption = "swap"',
            'p.toml, line 2: preemption = "swap" is not modelled (preemption by swapping KV to the host): ',
        ),
        ('[prefix_cache]\neviction = "LFU"', 'line 2: eviction = "LFU" is not modelled'),
        (TIERS + "prefetch = true", "line 4: prefetch is not modelled"),
        (PD + "encode = 2", "line 4: encode is not modelled"),
        ("[afd]\nattention = 1", "line 1: afd is not modelled"),
        ("[role_switching]\nevery_ms = 5", "line 1: role_switching is not modelled"),
        ("[weights]\noffload = 0.5", "line 1: weights is not modelled"),
        ("[kv]\nsparse = 16", "line 2: sparse is not modelled"),
        ('[kv]\ndtype = "int8"', 'line 2: dtype = "int8" is not modelled'),
        ('[kv]\ndtype = "int4"', 'line 2: dtype = "int4" is not modelled'),
        ('[speculation]\ntokens = 2\nacceptance = 0.5\nkind = "lookahead"', 'line 4: kind = "lookahead" is not modelled'),
        ('[speculation]\nkind = "jacobi"', 'line 2: kind = "jacobi" is not modelled'),
        ("[servers]\npipeline_parallel = 2", "line 2: pipeline_parallel is not modelled"),
    ],
)
def test_what_has_no_reference_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InputError) as e:
        parse_policy(text, "p.toml")
    assert message in str(e.value)
    assert (e.value.hint or "").startswith("What there is: ")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ('[batching]\nmode = "continuous"', "mixed"),
        ('[batching]\norder = "sjf"', "shortest"),
        ('[routing]\nkind = "Round-Robin"', "round_robin"),
        ('[[tiers]]\nkind = "host_dram"\ncapacity_tokens = 1', "dram"),
        (PD + 'transfer = "per-layer"', "per_layer"),
        ('[kv]\ndtype = "bfloat16"', "bf16"),
    ],
)
def test_what_others_call_it_is_understood(text: str, meant: str) -> None:
    with pytest.raises(InputError) as e:
        parse_policy(text, "p.toml")
    assert str(e.value).endswith(f'Did you mean "{meant}"?')


def test_no_key_or_value_of_the_schema_is_refused() -> None:
    """The table may not shadow what there is."""
    keys = set(Policy.model_fields) | {k for m in sections(Policy).values() for k in m.model_fields}
    assert not keys & {k for r in REFUSED for k in r.keys}
    for model in sections(Policy).values():
        for key, field in model.model_fields.items():
            for value in (a for r in REFUSED for k, a in r.values if k == key):
                assert f'"{value}"' not in str(field.annotation) and f"'{value}'" not in str(field.annotation)
    for r in REFUSED:
        assert r.keys or r.values
        for text in (r.what, r.why, r.instead):
            assert text and not text.endswith(".") and "|" not in text
    assert refusal("max_sequences") is None and refusal("kind", "dram") is None and refusal("kind", 3) is None


def test_settings_reach_into_tables_and_arrays() -> None:
    p = parse_policy(TIERS)
    q = with_settings(p, ["tiers.0.capacity_tokens=5", "links.nic.gbytes_per_s=2", "tiers.0.link=nic", "routing.kind=session"])
    assert q.tiers[0].capacity_tokens == 5 and q.tiers[0].link == "nic"
    assert q.links["nic"].gbytes_per_s == 2 and q.routing.kind == "session"
    assert with_settings(Policy(), ["split.prefill=1", "split.decode=2"]).split.decode == 2  # type: ignore[union-attr]
    for bad in ("tiers.1.capacity_tokens=5", "tiers.x.capacity_tokens=5", "tiers.0=5", "batching.mode.x.y=1", "batching..mode=x"):
        with pytest.raises((UsageError, InputError)):
            with_settings(p, [bad])
    with pytest.raises(InputError, match="does not go with"):
        with_settings(p, ["split.prefill=1", "split.decode=2", "servers.count=2"])


def test_the_line_of_a_key_in_every_form_of_toml() -> None:
    text = """\
name = "x"
batching.mode = "mixed"
split = { prefill = 1, decode = 2 }

[kv] # remark
capacity_tokens = 5

[[tiers]]
kind = "dram"
  [[tiers]]
kind = "nvme"
"capacity_tokens" = 4

[links."a.b"]
[ links . nic ]
gbytes_per_s = 3
"""
    for place, line in (
        (("name",), 1),
        (("batching", "mode"), 2),
        (("split", "decode"), 3),
        (("kv", "capacity_tokens"), 6),
        (("tiers", 0, "kind"), 9),
        (("tiers", 1, "capacity_tokens"), 12),
        (("tiers", 1), 10),
        (("links", "nic", "gbytes_per_s"), 16),
        (("nothing", "there"), None),
    ):
        assert line_of(text, place) == line, place


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text("abx[]=.\"'\n#", max_size=6),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "batching", "kv", "split", "tiers", "links", "prefill", "decode", "kind", "link", "mode", "speculation",
                 "routing", "tokens", "acceptance", "decode_server", "x"]
            ),
            inner, max_size=4,
        ),
        max_leaves=12,
    )
)  # fmt: skip
def test_any_table_is_a_policy_or_an_error_in_a_sentence(data: object) -> None:
    import tomli_w

    try:
        text = tomli_w.dumps(data)  # type: ignore[arg-type]
    except (TypeError, AttributeError, ValueError):
        return
    try:
        policy = parse_policy(text, "p.toml")
    except HoptraceError as e:
        assert e.message.startswith("p.toml") and "Traceback" not in e.message
    else:
        assert parse_policy(policy.to_toml()) == policy


def test_presets_stand_on_their_own() -> None:
    found = presets()
    wanted = {
        "static", "prefill-first", "priority", "pd-1-1", "pd-2-6", "pd-per-layer", "host-tier", "cxl-pool", "ngram-speculation",
        "four-servers-round-robin", "four-servers-least-load", "four-servers-kv-use", "four-servers-prefix-aware",
        "four-servers-session", "ceiling-host", "ceiling-kv", "ceiling-links",
    }  # fmt: skip
    assert wanted <= set(found)
    assert found["pd-2-6"].split.decode == 6  # type: ignore[union-attr]
    assert found["pd-per-layer"].changes()["links"] == found["pd-1-1"].changes()["links"]


def test_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == markdown(), "run: python -m hoptrace.replay.policy.docs > docs/policies.md"


def test_document_names_every_key_and_its_examples_are_policies() -> None:
    page = markdown()
    for model in sections(Policy).values():
        for key in model.model_fields:
            assert f"| `{key}` | " in page
    assert "|  |" not in page  # a cell without text
    for _, text in EXAMPLES:
        assert text in page
        assert parse_policy(text).changes()
    for r in REFUSED:
        assert r.what in page


def test_the_command_prints_schema_fields_and_what_is_refused() -> None:
    def out(*arguments: str) -> str:
        result = CliRunner().invoke(command, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    schema = json.loads(out("--schema"))
    assert set(schema["properties"]) == set(Policy.model_fields)
    fields = {(f["section"], f["key"]): f for f in json.loads(out("--fields", "--json"))}
    assert fields["split", "prefill"]["allowed"] == "a whole number from 1 to 4096"
    assert fields["tiers", "write"]["allowed"] == '"through" or "back"'
    assert "[[tiers]]" in out("--fields") and "[links.NAME]" in out("--fields")
    assert [r["what"] for r in json.loads(out("--refused", "--json"))] == [r.what for r in REFUSED]
    assert "Instead" in out("--refused")
    assert json.loads(out("--show", "pd-1-1", "--json"))["split"]["start"] == "pull"
    assert parse_policy(out("--show", "cxl-pool")) == presets()["cxl-pool"]
    assert json.loads(out("--json"))[0]["name"] == "as-recorded"
    with pytest.raises(UsageError):
        CliRunner().invoke(command, ["--fields", "--schema"], catch_exceptions=False, standalone_mode=False)
