"""All access paths, by the name of their mechanism."""

from __future__ import annotations

from types import MappingProxyType

from hoptrace.paths_far import far
from hoptrace.paths_hops import Mechanism
from hoptrace.paths_near import near

__all__ = ["MECHANISMS"]

MECHANISMS: MappingProxyType[str, Mechanism] = MappingProxyType({m.name: m for m in (*near(), *far())})
"""The mechanisms by name."""
