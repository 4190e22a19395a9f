"""The figures of two sides as changes, each with its interval over requests and the noise between runs."""

from __future__ import annotations

from hoptrace.analysis.compare.diff_change import Change
from hoptrace.analysis.compare.diff_figure import Figure
from hoptrace.analysis.compare.diff_figures import SECTIONS, figures
from hoptrace.analysis.compare.diff_intervals import Bounds, Own, intervals
from hoptrace.analysis.compare.diff_noise import Noise
from hoptrace.analysis.compare.diff_pairs import Pairing
from hoptrace.analysis.compare.diff_side import Side

__all__ = ["compare"]


def compare(a: Side, b: Side, pairs: Pairing | None, noise: Noise | None) -> tuple[dict[str, list[Change]], list[str]]:
    """Changes by section, and notes on figures that leave requests out."""
    own = figures(a), figures(b)
    bounds, notes = intervals(a, b, pairs, own)
    return _changes(own, bounds, noise), notes


def _changes(own: Own, bounds: Bounds, noise: Noise | None) -> dict[str, list[Change]]:
    out: dict[str, list[Change]] = {s: [] for s in SECTIONS}
    names = list(dict.fromkeys([*own[0], *own[1]]))
    for name in names:
        x, y = own[0].get(name), own[1].get(name)
        one = x if x is not None else y
        assert one is not None
        values = [None if f is None else f.value for f in (x, y)]
        # A way, a node or a link that only one side has carries nothing on the other, if the other knows its moves at all.
        if (x is None or y is None) and name.startswith(("bytes_per_token[", "queue_of.", "service_of.")):
            missing = 0 if x is None else 1
            values[missing] = 0.0 if _tells(own[missing], one) else None
        if values[0] is None and values[1] is None and one.section in ("parts", "shares"):
            continue
        low, high = bounds.get(name, (None, None)) if None not in values else (None, None)
        out[one.section].append(
            Change(
                name,
                one.unit,
                values[0],
                values[1],
                low,
                high,
                one.lower_is_better,
                None if noise is None else noise.limit(name),
                noise is not None,
                one.basis,
            )
        )
    return out


def _tells(figures_: dict[str, Figure], one: Figure) -> bool:
    """Whether a side without a figure knows others of its kind and basis, so that its absence means 0."""
    if one.section == "servers":
        return any(f.section == "servers" and f.value is not None for f in figures_.values())
    return any(n.startswith("bytes_per_token.") and f.basis == one.basis and f.value is not None for n, f in figures_.items())
