"""A Prometheus text page as counter samples: names kept, semantics and units by a table, by the TYPE line where it is silent.

The TYPE line is not to be trusted for a name that is known: exporters have declared the same field a counter in one release and
a gauge in the next.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Kind", "Sample", "samples"]

Semantics = Literal["cumulative", "gauge"]
_NAME = re.compile(r"^[a-zA-Z_:][a-zA-Z0-9_:]*", re.MULTILINE)
_BY_TYPE: dict[str, Semantics] = {"counter": "cumulative", "histogram": "cumulative", "summary": "cumulative", "gauge": "gauge"}


@dataclass(frozen=True, slots=True)
class Kind:
    """How a metric reads; ``whole`` if its values are integers."""

    unit: str
    semantics: Semantics
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One value. ``kind`` is null where neither the table nor the TYPE line tells; ``value`` is null for NaN."""

    name: str
    value: float | None
    kind: Kind | None


def samples(text: str, known: Mapping[str, Kind]) -> Iterator[Sample]:
    """All samples of a page, labels as part of the name. ValueError if the page is not in the text format."""
    # The parser renames counters whose names do not end in _total: the page has the names as they are.
    told = set(_NAME.findall(text))
    for family in text_string_to_metric_families(text):
        by_type = _BY_TYPE.get(family.type)
        for s in family.samples:
            if s.name.endswith("_created"):
                continue
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(s.labels.items()))
            name = s.name if s.name in told else s.name.removesuffix("_total")
            kind = known.get(name) or (Kind(family.unit or "1", by_type) if by_type else None)
            value = None if math.isnan(s.value) else float(s.value)
            yield Sample(f"{name}{{{labels}}}" if labels else name, value, kind)
