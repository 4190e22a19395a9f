"""A Prometheus text page as counter samples: names kept, semantics and units by a table, by the TYPE line where it is silent.

The TYPE line is not to be trusted for a name that is known: exporters have declared the same field a counter in one release and
a gauge in the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Kind", "Sample", "samples"]

Semantics = Literal["cumulative", "gauge"]
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
    for family in text_string_to_metric_families(text):
        by_type = _BY_TYPE.get(family.type)
        for s in family.samples:
            if s.name.endswith("_created"):
                continue
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(s.labels.items()))
            kind = known.get(s.name) or (Kind(family.unit or "1", by_type) if by_type else None)
            value = None if math.isnan(s.value) else float(s.value)
            yield Sample(f"{s.name}{{{labels}}}" if labels else s.name, value, kind)
