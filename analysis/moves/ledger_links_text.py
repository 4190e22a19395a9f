"""The links on the terminal. A machine has hundreds: by kind, what matters first, and what was quiet in one line."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.moves.ledger_links import BUSY, LinkUse, LinkWay
from hoptrace.analysis.text import bytes_text, counted, duration_text, percent

__all__ = ["busy_lines", "links"]

_ROWS = 8  # of a kind
_SAID = 4  # sentences of a kind
_BUSY_LINES = 3
_QUIET = 3  # quiet ones of a kind from which they are told in one line
_QUIET_BYTES = 1 << 20
_QUIET_USE = 0.01
_ODD = 0.02  # share of what was counted from which unexplained bytes are told

_Shown = tuple[LinkUse, LinkWay]


def links(uses: Sequence[LinkUse]) -> list[RenderableType]:
    """A table with the links that matter, kind by kind, a line for the quiet ones of each kind, and sentences."""
    shown = [(u, w) for u in uses for w in u.ways]
    if not shown:
        return []
    kinds = dict.fromkeys(u.kind or "" for u, _ in shown)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("link")
    table.add_column("direction")
    for name in ("moves tell", "counted", "unexplained", "mean", "peak", "over 80 %"):
        table.add_column(name, justify="right", no_wrap=True)
    lines: list[RenderableType] = []
    for kind in kinds:
        mine = sorted((x for x in shown if (x[0].kind or "") == kind), key=_rank)
        few = len(mine) <= _ROWS and sum(_quiet(w) for _, w in mine) < _QUIET
        loud = mine if few else [x for x in mine if not _quiet(x[1])][:_ROWS]
        for u, w in loud:
            _row(table, u, w)
        told = [(u, w) for u, w in loud if w.counter is not None]
        lines += [Text(f"{u.link}, {w.way}: {w.says}", style="dim") for u, w in told[:_SAID]]
        if len(loud) < len(mine):
            loud_ids = {(u.link, w.way) for u, w in loud}
            lines.append(Text(_rest(kind, [x for x in mine if (x[0].link, x[1].way) not in loud_ids])))
    silent = [u for u in uses if not u.ways]
    if silent:
        lines.append(Text(f"{counted(len(silent), 'more link')}: no counter and no move ({_by_kind(silent)}).", style="dim"))
    return ([table] if table.row_count else []) + lines


def busy_lines(uses: Sequence[LinkUse]) -> list[str]:
    """The links that were over 80 % full, the longest first; of many only the first."""
    full = sorted(((u, w) for u in uses for w in u.ways if w.busy_ns), key=lambda x: -(x[1].busy_ns or 0))
    out = [
        f"Link {u.link}, {w.way}: over {BUSY:.0%} full for {duration_text(w.busy_ns)} (peak {percent(w.peak)}, "
        f"mean {percent(w.mean)}; by its {w.told_by})."
        for u, w in full[: _BUSY_LINES if len(full) > _BUSY_LINES + 1 else len(full)]
    ]
    if len(out) < len(full):
        rest = full[len(out) :]
        out.append(f"{counted(len(rest), 'more direction')} of links over {BUSY:.0%} full, for at most "
                   f"{duration_text(rest[0][1].busy_ns)} each ({_by_kind([u for u, _ in rest])}).")  # fmt: skip
    return out


def _rank(x: _Shown) -> tuple[float, ...]:
    """Busy ones first, then those whose bytes nobody explains, then those that carried most."""
    _, w = x
    return -(w.busy_ns or 0), -abs(w.unexplained_bytes or 0), -_carried(w)


def _carried(w: LinkWay) -> int:
    seen = 0 if w.counter is None else w.counter.counted_bytes or 0
    return max(seen, sum(w.moved_bytes.values()))


def _quiet(w: LinkWay) -> bool:
    if w.busy_ns or w.moved_bytes or w.bytes_unknown:
        return False
    if w.counter is not None and w.counter.counted_bytes is None:
        return True  # of no use: told together
    odd = abs(w.unexplained_bytes or 0) > max(_QUIET_BYTES, _ODD * _carried(w))
    return not odd and _carried(w) < _QUIET_BYTES and (w.peak or 0) < _QUIET_USE


def _row(table: Table, u: LinkUse, w: LinkWay) -> None:
    total = sum(w.moved_bytes.values())
    told = bytes_text(total if w.moved_bytes or not w.bytes_unknown else None)
    table.add_row(
        Text(u.link),
        Text(w.way),
        f"≥ {told}" if w.bytes_unknown and w.moved_bytes else told,
        bytes_text(None if w.counter is None else w.counter.counted_bytes),
        bytes_text(w.unexplained_bytes),
        percent(w.mean),
        percent(w.peak),
        duration_text(w.busy_ns),
    )


def _rest(kind: str, rest: Sequence[_Shown]) -> str:
    """What is not in the table, in one line: how many, what they carried together, and how full the fullest was."""
    useless = [w for _, w in rest if w.counter is not None and w.counter.counted_bytes is None]
    sizes = [_carried(w) for _, w in rest if w not in useless]
    peaks = [w.peak for _, w in rest if w.peak is not None]
    said = f"{f'{kind}: ' if kind else ''}{counted(len(rest), 'more direction')} of {_links(rest)}"
    if sizes:
        still = sum(not n for n in sizes)
        said += f" carried {bytes_text(sum(sizes))} together, at most {bytes_text(max(sizes))} each"
        said += f", {still:,} of them nothing" if still else ""
    said += f"; none over {percent(max(peaks))} full" if peaks else ""
    if useless:
        reasons = list(dict.fromkeys(w.counter.why for w in useless if w.counter is not None and w.counter.why))
        more = f" and {counted(len(reasons) - 1, 'other reason')}" if len(reasons) > 1 else ""
        said += f"; {counted(len(useless), 'counter')} of no use ({reasons[0]}{more})"
    return f"{said}."


def _links(rest: Sequence[_Shown]) -> str:
    return counted(len({u.link for u, _ in rest}), "link")


def _by_kind(uses: Sequence[LinkUse]) -> str:
    n: dict[str, int] = {}
    for u in uses:
        n[u.kind or "of no told kind"] = n.get(u.kind or "of no told kind", 0) + 1
    return ", ".join(f"{many} {kind}" for kind, many in sorted(n.items(), key=lambda x: (-x[1], x[0])))
