"""The replay engine in plain Python: slow, readable, and with parts that can be replaced by yours (docs/replay-plugins.md).

docs/replay-engine.md says what it does; :mod:`hoptrace.replay.compiled` does the same fast, and tests hold the rows equal.
One file per question: ``loop`` (what happens when), ``arrivals``, ``refusals``, ``routing``, ``passes`` (one scheduling pass),
``stepping`` (begin and end of a step), ``kv`` (room and prefix cache), ``slots``, ``tiers`` and ``loading`` from them,
``transfers``, ``handover``, ``rows``, ``parts`` (what can be replaced) and ``builtin`` (the parts that are here already).
"""

from __future__ import annotations

from hoptrace.replay.plain.loop import simulate
from hoptrace.replay.plain.parts import Parts

__all__ = ["Parts", "simulate"]
