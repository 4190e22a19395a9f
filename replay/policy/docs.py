"""``docs/policies.md`` from the schema: ``python -m hoptrace.replay.policy.docs > docs/policies.md``."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from hoptrace.replay.policy import Policy, presets
from hoptrace.replay.policy.errors import allowed, sections
from hoptrace.replay.policy.refused import REFUSED

__all__ = ["EXAMPLES", "heading", "markdown"]

_INTRO = """# Policies

Generated from the schema by `python -m hoptrace.replay.policy.docs > docs/policies.md`; a test holds the two equal.

A policy file is TOML. It says what differs from the trace's own server: every table and every key may be left out, and what is
left out stays as it was recorded. What neither knows is taken as said below, and the replay's warnings say so. Keys that are
unknown, values that are not allowed and combinations that make no sense are refused with the key and its line.

`hoptrace policies` lists the ones that come with hoptrace, `--show NAME` prints one to start from, `--schema` prints the JSON
schema for editors. `hoptrace replay run.trace --policy FILE --set batching.max_sequences=64` sets a key on top
(`tiers.0.capacity_tokens` for the first of `[[tiers]]`).

What each part does, to the nanosecond: [replay-engine.md](replay-engine.md).
"""

EXAMPLES: tuple[tuple[str, str], ...] = (
    (
        "Eight places and finer chunks",
        """\
[batching]
max_sequences = 8
max_batched_tokens = 512
""",
    ),
    (
        "Two prompt servers, six token servers, each at its own link of 50 GB/s",
        """\
name = "pd-2-6-roce"

[split]
prefill = 2
decode = 6
start = "pull"
arrange_ms = 7
link = "nic"

[split.decode_server.batching]
max_sequences = 512

[routing]
kind = "least_load"

[routing.decode]
kind = "kv_use"
knowledge_age_ms = 5

[links.nic]
gbytes_per_s = 50
latency_us = 400
per_block_us = 1.5
mechanism = "rdma"
""",
    ),
    (
        "Host memory at each server, then a pool that all share",
        """\
[servers]
count = 4

[routing]
kind = "prefix_aware"
load_tokens = 1000

[prefix_cache]
enabled = true
kind = "pool"
reuse = "break_even"

[[tiers]]
kind = "dram"
capacity_bytes = 137438953472
write = "through"
link = "pcie"

[[tiers]]
kind = "cxl_pool"
capacity_tokens = 50_000_000
link = ["pcie", "pool"]

[links.pcie]
gbytes_per_s = 55.4
latency_us = 7

[links.pool]
gbytes_per_s = 1000
shared = true
""",
    ),
    (
        "Speculation that is switched off in large batches",
        """\
[speculation]
tokens = 3
acceptance = 0.7
kind = "draft_model"
draft_ms_per_token = 0.9
off_above = 32
""",
    ),
    (
        "What the host costs",
        """\
[ceilings]
host_cost = "zero"
""",
    ),
)
"""Policies that the page shows, each with what it is."""


def markdown() -> str:
    """The whole page."""
    return "\n".join([_INTRO, *_examples(), "## Keys\n", _top(), *_sections(), _refused(), _presets()])


def heading(section: str) -> str:
    """A table as a file writes it: ``[[tiers]]``, ``[links.NAME]``, ``[split.decode_server]``."""
    return {"tiers": "[[tiers]]", "links": "[links.NAME]"}.get(section, f"[{section}]")


def _examples() -> Iterator[str]:
    yield "## Examples\n"
    for what, text in EXAMPLES:
        yield f"{what}:\n\n```toml\n{text}```\n"


def _top() -> str:
    return "Above all tables: `name` and `description`, both text.\n"


def _sections() -> Iterator[str]:
    for name, model in sections(Policy).items():
        title = heading(name)
        if name == "split.prefill_server":
            title = "[split.prefill_server]` and `[split.decode_server]"
        elif name == "split.decode_server":
            continue
        yield f"### `{title}`\n\n{_one_line(model.__doc__)}\n\n{_keys(model)}"


def _keys(model: type[BaseModel]) -> str:
    lines = ["| key | allowed | meaning |", "| --- | --- | --- |"]
    for key, field in model.model_fields.items():
        lines.append(f"| `{key}` | {allowed(field)} | {_one_line(field.description)} |")
    return "\n".join(lines) + "\n"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _refused() -> str:
    lines = [
        "## What is refused by name\n",
        "A policy ships only with a reference that its test meets: another simulator's output, a real scheduler, a published",
        "check, or a closed form. These have none, and are not imitated:\n",
        "| what | why | what there is |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {r.what} | {r.why} | {r.instead} |" for r in REFUSED]
    return "\n".join(lines) + "\n"


def _presets() -> str:
    lines = ["## Those that come with hoptrace\n", "| name | what it is |", "| --- | --- |"]
    lines += [f"| `{p.name}` | {p.description} |" for p in presets().values()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
