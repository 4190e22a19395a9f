"""What `hoptrace replay` prints of a what-if."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoptrace.cli.figures import figure, percent_off

if TYPE_CHECKING:
    from hoptrace.comparison import Comparison
    from hoptrace.replay.run import Replayed

__all__ = ["as_dict", "show"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def as_dict(result: Replayed, out: Path) -> dict[str, Any]:
    """Plain values for ``--json``."""
    info = result.trace.manifest.replay
    assert info is not None

    def plain(c: Comparison | None) -> dict[str, Any] | None:
        return None if c is None else c.as_dict()

    return {
        "trace": str(out),
        "policy": info.policy,
        "cost_model": info.cost_model,
        "arrivals": {**result.arrivals.as_dict(), "label": result.arrivals.label},
        "requests": result.requests,
        "traffic": result.traffic,
        "own_policy": plain(result.own),
        "own_policy_recorded_arrivals": plain(result.own_recorded),
        "against_observed": plain(result.against),
        "change": plain(result.change),
        "intervals": None if result.intervals is None else result.intervals.as_dict(),
        "coverage": result.coverage.as_dict(),
        "warnings": info.warnings,
    }


def show(result: Replayed, out: Path, description: str) -> None:
    """The policy, on what it rests, the figures, and the notes."""
    from rich.markup import escape

    from hoptrace.cli.console import PlainConsole

    info = result.trace.manifest.replay
    assert info is not None
    console = PlainConsole(highlight=False)
    console.print(f"[bold]{escape(info.policy['name'])}[/bold]  {escape(description)}", soft_wrap=True)
    assumed = _assumptions(info.cost_model)
    for line in (*_policy(info.policy), _servers(result), _cost(info.cost_model), *(f"assumed: {x}" for x in assumed)):
        console.print(f"  {line}", soft_wrap=True, markup=False)
    why = f" ({result.arrivals.reason})" if result.arrivals.reason else ""
    console.print(f"  arrivals: {result.arrivals.label}{why}", soft_wrap=True, markup=False)
    covers = () if result.coverage.share is None else (f"domain: {result.coverage.sentence()}", result.coverage.remedy or "")
    for line in (*_traffic(result), *_ended(result), *(x for x in covers if x)):
        console.print(f"  {line}", soft_wrap=True, markup=False)
    if result.own is not None and result.against is not None:
        whole = "until_ns" not in (info.model_extra or {})  # else the what-if is not the run that its own policy is judged by
        same = not info.policy["changes"] and result.arrivals.same and whole and "recorded_on" not in info.cost_model
        _figures(console, result, same)
        if result.own_recorded is not None:
            console.print(_both(result.own, result.own_recorded), soft_wrap=True)
    else:
        console.print(_alone(result))
    for warning in dict.fromkeys(w for w in info.warnings if w not in assumed):
        console.print(f"[yellow]note[/yellow] {escape(warning)}", soft_wrap=True)
    console.print(f"Written: {out}", soft_wrap=True, markup=False)


def _figures(console: Any, result: Replayed, same: bool) -> None:
    """Observed, own policy and, unless it is the ``same``, the what-if."""
    from hoptrace.cli.replay_table import lines, under

    assert result.own is not None
    against, change = (None, None) if same else (result.against, result.change)
    if result.intervals:
        for line in lines(result.own, against, change, result.intervals):
            console.print(line, soft_wrap=True, markup=False)
    else:
        console.print(_table(result.own, against, change))
        if not same:
            console.print(
                "error: own policy against observed. change: what-if against own policy, like with like.", soft_wrap=True
            )
    if result.intervals is not None:
        for line in under(result.intervals, not same):
            console.print(line, soft_wrap=True, markup=False)


def _policy(policy: dict[str, Any]) -> list[str]:
    """One line a section; of a split's kinds of server what they have of their own."""
    lines = []
    for section, values in policy.items():
        if section in ("name", "description", "changes"):
            continue
        if isinstance(values, dict):
            own = {k: v for k, v in values.items() if k.endswith("_server") and isinstance(v, dict)}
            if inner := _flat({k: v for k, v in values.items() if k not in own}):
                lines.append(f"{section}: {inner}")
            for name, parts in own.items():
                if differs := _flat(_beyond(parts, policy)):
                    lines.append(f"{section}.{name}: {differs}")
        elif isinstance(values, list):
            lines += [f"{section}: {_flat(v) if isinstance(v, dict) else v}" for v in values]
        else:
            lines.append(f"{section}: {values}")
    return lines


def _beyond(parts: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """What is not the same in ``base``."""
    found: dict[str, Any] = {}
    for key, value in parts.items():
        had = base.get(key)
        if isinstance(value, dict) and isinstance(had, dict):
            if inner := _beyond(value, had):
                found[key] = inner
        elif value != had:
            found[key] = value
    return found


def _flat(values: dict[str, Any], prefix: str = "") -> str:
    """``a = 1, b.c = 2``."""
    parts = []
    for key, value in values.items():
        if isinstance(value, dict):
            parts.append(_flat(value, f"{prefix}{key}."))
        else:
            parts.append(f"{prefix}{key} = {value}")
    return ", ".join(p for p in parts if p)


def _servers(result: Replayed) -> str:
    servers = result.trace.manifest.servers
    if len(servers) == 1:
        return f"servers: {servers[0].name}"
    roles: dict[str, int] = {}
    for s in servers:
        role = s.config.get("role")
        roles[f"for {role}" if isinstance(role, str) else "alike"] = roles.get(f"for {role}" if role else "alike", 0) + 1
    return f"servers: {len(servers):,} ({', '.join(f'{n:,} {role}' for role, n in roles.items())})"


def _cost(model: dict[str, Any]) -> str:
    fit = model["step"].get("error", {})
    known = ""
    if fit and "p50" in fit and "p95" in fit:
        known = f": a step is predicted to {100 * fit['p50']:.0f} % (median) and {100 * fit['p95']:.0f} % (p95)"
    platform = model.get("platform")
    on = platform.get("name") if isinstance(platform, dict) else platform
    return f"step cost: {model['kind']}{f' of {on}' if on else ''}{known}"


def _assumptions(model: dict[str, Any]) -> list[str]:
    found = model.get("assumed")
    return [found] if isinstance(found, str) else list(found or [])


def _traffic(result: Replayed) -> list[str]:
    lines = []
    for t in result.traffic:
        what = t["what"] if t["tier"] is None else f"{t['what']} {t['tier']}"
        mean = t["time_ns"] / t["moves"] / 1e6 if t["moves"] else 0
        lines.append(f"KV {what}: {_size(t['bytes'])} in {t['moves']:,} moves, {mean:,.2f} ms each on average")
    return lines


def _size(n: int) -> str:
    value, at = float(n), 0
    while value >= 1000 and at < len(_UNITS) - 1:
        value, at = value / 1000, at + 1
    return f"{value:.0f} {_UNITS[at]}" if at == 0 else f"{value:.1f} {_UNITS[at]}"


def _ended(result: Replayed) -> list[str]:
    r = result.requests
    words = [f"{r['done']:,} requests done"]
    words += [f"{r[k]:,} {k.replace('_', ' ')}" for k in ("refused", "unfinished", "not_arrived") if r[k]]
    return [", ".join(words)]


def _table(own: Comparison, against: Comparison | None, change: Comparison | None) -> Any:
    """Observed, the trace's own policy replayed, and the what-if (if it is another)."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("observed", "own policy", "error", *(("what-if", "change") if against else ())):
        table.add_column(name, justify="right")
    for d in own.differences:
        cells = [
            figure(d.observed, d.unit),
            figure(d.predicted, d.unit),
            percent_off(d.error_pct),
        ]
        if against:
            w = against.get(d.metric, d.statistic).predicted
            pct = None if change is None else change.get(d.metric, d.statistic).error_pct
            cells += [figure(w, d.unit), percent_off(pct)]
        table.add_row(f"{d.metric} {d.statistic}", *cells)
    return table


def _both(own: Comparison, recorded: Comparison) -> str:
    """The error with the trace's own arrivals, and with the recorded ones."""
    said = []
    for m, s in (("ttft", "mean"), ("tpot", "mean"), ("e2e", "mean"), ("e2e", "p95")):
        a, b = own.get(m, s).error_pct, recorded.get(m, s).error_pct
        if a is not None and b is not None:
            said.append(f"{m} {s} {percent_off(a)} ({percent_off(b)})")
    return "Error under its own policy with these arrivals (with the recorded ones): " + ", ".join(said) + "."


def _alone(result: Replayed) -> Any:
    """The replay's own figures, where nothing was observed to hold them against."""
    from rich.table import Table

    from hoptrace.metrics import summary

    table = Table(title="What-if", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("mean", "p50", "p95", "p99"):
        table.add_column(name, justify="right")
    s = summary(result.trace)
    for metric in ("ttft", "itl", "tpot", "e2e", "queue"):
        values = (getattr(s[metric], f"{x}_ns") for x in ("mean", "p50", "p95", "p99"))
        table.add_row(metric, *("unknown" if v is None else f"{v / 1e6:,.1f} ms" for v in values))
    return table
