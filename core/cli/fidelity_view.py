"""What `hoptrace fidelity` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoptrace.cli.figures import figure, percent_off

if TYPE_CHECKING:
    from rich.console import Console

    from hoptrace.analysis.fidelity.figures import Figure
    from hoptrace.analysis.fidelity.rules import Outcome
    from hoptrace.analysis.fidelity.study import Judged, Study

__all__ = ["show", "show_short"]

_TRUTHS = {None: "nothing", "step_time": "step time"}
_MOST = 999.95
_NEGLIGIBLE = 0.01  # share of the step time: were its cost wrong by half, all would be right within half a percent
_RATES = {"output tokens": "tokens/s", "requests": "requests/s"}


def show(study: Study, outcomes: list[Outcome]) -> None:
    """Every policy with its figures, and what a reader has to know."""
    from hoptrace.analysis.fidelity.text import EQUAL, noise_text

    console = _console()
    base = study.cases[0].trace
    said: set[str] = set()
    for case in study.cases:
        _case(console, case, base, said, noisy=study.noise is not None)
        console.print()
    console.print(noise_text(study), markup=False)
    console.print(f"95 %: interval in %, from redrawing requests; what the machine did between the runs is not in it. {EQUAL}")
    for note in study.notes:
        _note(console, note, said)
    _outcomes(console, outcomes)


def show_short(study: Study, outcomes: list[Outcome]) -> None:
    """A line for each policy, and the rules' outcomes."""
    from hoptrace.analysis.fidelity.text import headline

    console = _console()
    for case in study.cases:
        console.print(headline(case), markup=False, soft_wrap=True)
    _outcomes(console, outcomes)


def _case(console: Console, case: Judged, base: str, said: set[str], *, noisy: bool) -> None:
    from rich.markup import escape

    from hoptrace.analysis.fidelity.text import settings_text, signs_text, speed_text

    n, predicted = case.compared.requests
    over = f"over {n:,} requests" if n == predicted else f"over {n:,} requests, {predicted:,} in the prediction"
    if case.own:
        console.print(f"[bold]{escape(case.trace)}[/bold]  its own policy, {over}")
        console.print(_own(case, noisy))
    else:
        console.print(f"[bold]{escape(case.trace)}[/bold]  predicted from {escape(base)}, {over}")
        console.print(f"  {settings_text(case)}", markup=False)
        console.print(_changed(case, noisy))
        console.print("First three: B ÷ A. raw: of B alone. at speed: that with the machine's speed taken out.", markup=False)
        console.print(f"{signs_text(case)[:1].upper()}{signs_text(case)[1:]}.", markup=False)
        if fast := speed_text(case):
            console.print(fast, markup=False)
    console.print(_own_terms(case))
    if case.sources:
        console.print(_sources(case))
        for s in case.sources:
            if s.why:
                _note(console, f"The recorded {_TRUTHS.get(s.truth, s.truth or '')} is not told: {s.why}", said)
    for line in case.domain if (case.beyond or 0) > _NEGLIGIBLE else ():
        console.print(f"[yellow]domain[/yellow] {escape(line)}")
    if (case.beyond or 0) > _NEGLIGIBLE and case.remedy:
        console.print(case.remedy, markup=False)
    for note in (*case.own_terms.notes, *case.notes):
        _note(console, note, said)


def _own_terms(case: Judged) -> Any:
    from hoptrace.analysis.fidelity.text import own_terms_rows, share_text

    table = _table("in the trace's own terms", "observed", "predicted", "error", "equal")
    for name, count, share in own_terms_rows(case):
        off = None if count is None else _off(count.error_pct)
        numbers = ["", "", ""] if count is None else [_number(count.observed), _number(count.predicted), off]
        table.add_row(name, *numbers, "" if share is None else share_text(share))
    return table


def _number(n: int | None) -> str:
    return "unknown" if n is None else f"{n:,}"


def _own(case: Judged, noisy: bool) -> Any:
    table = _table("", "observed", "predicted", "error", "95 %", *(["noise"] if noisy else []))
    for f in case.figures:
        cells = [
            figure(f.raw.observed, f.raw.unit),
            figure(f.raw.predicted, f.raw.unit),
            _off(f.raw.error_pct),
            _between(f),
        ]
        table.add_row(_name(f), *cells, *([_floor(f)] if noisy else []))
    return table


def _changed(case: Judged, noisy: bool) -> Any:
    table = _table("", "observed", "predicted", "error", "95 %", *(["noise"] if noisy else []), "raw", "at speed")
    for f in case.figures:
        r = f.ratio
        cells = [
            _times(None if r is None else r.observed),
            _times(None if r is None else r.predicted),
            _off(f.error_pct),
            _between(f),
            *([_floor(f)] if noisy else []),
            _off(f.raw.error_pct),
            _off(f.at_speed_pct),
        ]
        table.add_row(_name(f), *cells)
    return table


def _sources(case: Judged) -> Any:
    from hoptrace.analysis.fidelity.sources import SHOWN

    table = _table("error with recorded", *(_TRUTHS.get(s.truth, s.truth or "") for s in case.sources))
    for metric, statistic in SHOWN:
        errors = (s.error_pct[metric, statistic] for s in case.sources)
        table.add_row(f"{metric} {statistic}", *("unknown" if e is None else _off(e) for e in errors))
    return table


def _table(first: str, *names: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column(first, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _name(f: Figure) -> str:
    return _RATES.get(f.statistic, f"{f.metric} {f.statistic}")


def _off(pct: float | None) -> str:
    """A signed percentage; of what was next to nothing only that it is far off."""
    return "> +999 %" if pct is not None and pct >= _MOST else percent_off(pct)


def _between(f: Figure) -> str:
    low, high = f.interval_pct
    if low is None or high is None:
        return ""
    return f"{low:+.1f}…>999" if high >= _MOST else f"{low:+.1f}…{high:+.1f}"


def _floor(f: Figure) -> str:
    return "" if f.floor is None else f"{f.floor.median_pct:.1f} %"


def _times(ratio: float | None) -> str:
    if ratio is None:
        return "unknown"
    return f"×{ratio:.3f}" if ratio < 10 else f"×{ratio:.2f}" if ratio < 100 else f"×{ratio:.0f}"


def _note(console: Console, note: str, said: set[str]) -> None:
    """Once, though it may hold for several policies."""
    from rich.markup import escape

    if note in said:
        return
    said.add(note)
    console.print(f"[yellow]note[/yellow] {escape(note)}")


def _outcomes(console: Console, outcomes: list[Outcome]) -> None:
    from hoptrace.analysis.fidelity.text import outcome_text

    for o in outcomes:
        console.print(outcome_text(o), markup=False, soft_wrap=True)


def _console() -> Console:
    import sys

    from hoptrace.cli.console import PlainConsole

    return PlainConsole(width=None if sys.stdout.isatty() else 80, highlight=False)
