"""The figures of `hoptrace replay`, each with its interval, in 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoptrace.cli.figures import amount, span

if TYPE_CHECKING:
    from hoptrace.comparison import Comparison, Difference
    from hoptrace.replay.uncertainty import Interval, Intervals

__all__ = ["lines", "under"]


def lines(own: Comparison, against: Comparison | None, change: Comparison | None, bounds: Intervals) -> list[str]:
    """Header and one line a figure: observed; the own-policy replay, its error and where another run's would lie; the what-if
    (if it is another) and where a run of it would lie; the change and its interval."""
    share = f"{100 * bounds.level:.0f} %"
    rows = [["", "observed", "own", "error", share, *(("what-if", share, "change", share) if against else ())]]
    for d in own.differences:
        key = (d.metric, d.statistic)
        cells = [
            _name(d),
            amount(d.observed, d.unit),
            amount(d.predicted, d.unit),
            _percent(d.error_pct),
            _error(bounds.get("own", *key), d),
        ]
        if against is not None:
            w = against.get(*key)
            c = None if change is None else change.get(*key)
            cells += [amount(w.predicted, d.unit), _range(bounds.get("what_if", *key), w.predicted, d)]
            cells += [_percent(c.error_pct if c else None), _ratio(bounds.get("change", *key))]
        rows.append(cells)
    width = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    left = {0, 4, 6, 8}  # the label, and intervals right behind their figure
    return [
        " ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(r, width, strict=True))).rstrip()
        for r in rows
    ]


def under(bounds: Intervals, several: bool) -> list[str]:
    """What the intervals are, and on what they rest."""
    if not bounds:
        return list(bounds.notes)
    share = f"{100 * bounds.level:.0f} %"
    said = [f"error: own policy against observed. {share}: where so many further runs of the same requests would lie."]
    if several:
        said[0] += (
            " change: what-if against own policy; its interval is for one machine in one mood, without the noise of two runs."
        )
    said.append(f"{bounds.draws} draws of: {'; '.join(bounds.sources)}.")
    if bounds.carried and several:
        names = ", ".join(f"{m} {s}" for m, s in bounds.carried)
        said.append(f"Wider by what the intervals of the own policy miss of what was observed: {names}.")
    return said + list(bounds.notes)


def _name(d: Difference) -> str:
    return f"{d.statistic.removeprefix('output ')}/s" if d.metric == "throughput" else f"{d.metric} {d.statistic}"


def _range(i: Interval | None, value: float | None, d: Difference) -> str:
    return "" if i is None or value is None else span(i.low, i.high, value, d.unit)


def _error(i: Interval | None, d: Difference) -> str:
    if i is None or not d.observed:
        return ""
    return _pair(i.low / d.observed, i.high / d.observed)


def _ratio(i: Interval | None) -> str:
    return "" if i is None else _pair(i.low, i.high)


def _pair(low: float, high: float) -> str:
    return f"{_signed(low)}…{_signed(high)}"


def _percent(pct: float | None) -> str:
    if pct is None:
        return ""
    said = _signed(1 + pct / 100)
    return said if said.startswith("×") else f"{said}%"


def _signed(ratio: float) -> str:
    """A ratio as signed percent: +52, −3.1; from elevenfold on the factor."""
    if ratio >= 99.5:
        return "×>99"
    if ratio >= 10.995:
        return f"×{ratio:.0f}"
    pct = 100 * (ratio - 1)
    if abs(pct) < 0.05:
        return "0"
    return f"{pct:+.0f}" if abs(pct) >= 9.95 else f"{pct:+.1f}"
