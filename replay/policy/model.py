"""The policy file as a whole."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hoptrace.replay.policy.parts import Batching, Kv, Part, PrefixCache
from hoptrace.replay.policy.places import (
    Ceilings,
    Link,
    Name,
    OverheadTimes,
    Routing,
    ServersPart,
    Speculation,
    Split,
    Tier,
)

__all__ = ["Policy"]


class Policy(Part):
    """A policy file."""

    name: str = Field(default="unnamed", description="Short name.")
    description: str = Field(default="", description="One line: what it is.")
    batching: Batching = Field(default_factory=Batching, description="How requests are put together into steps.")
    kv: Kv = Field(default_factory=Kv, description="The KV space.")
    prefix_cache: PrefixCache = Field(default_factory=PrefixCache, description="Reuse of prompts' beginnings.")
    servers: ServersPart = Field(default_factory=ServersPart, description="How many servers, and on what.")
    routing: Routing = Field(default_factory=Routing, description="Which server a request goes to.")
    split: Split | None = Field(default=None, description="Prompts on some servers, output tokens on others.")
    tiers: tuple[Tier, ...] = Field(default=(), description="Places for KV below the servers' own memory.", strict=False)
    links: dict[Name, Link] = Field(default_factory=dict, description="Links that [split] and [[tiers]] name.")
    speculation: Speculation | None = Field(default=None, description="Speculative decoding.")
    overheads: OverheadTimes = Field(default_factory=OverheadTimes, description="Time outside the engine's steps.")
    ceilings: Ceilings = Field(default_factory=Ceilings, description="One cost taken away.")

    def changes(self) -> dict[str, Any]:
        """What it sets, without name and description; empty if it leaves the trace's server as it was."""
        return _filled(self.model_dump(exclude_none=True, exclude={"name", "description"}))

    def to_toml(self) -> str:
        """As a file. :func:`hoptrace.replay.policy.parse_policy` gives the equal policy back."""
        import tomli_w

        head = {"name": self.name, "description": self.description}
        return tomli_w.dumps(head | self.changes())


def _filled(data: dict[str, Any]) -> dict[str, Any]:
    """Without the tables that say nothing."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            value = _filled(value)
        elif isinstance(value, tuple):
            value = list(value)
        if value not in ({}, []):
            found[key] = value
    return found
