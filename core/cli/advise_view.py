"""What `hoptrace advise` prints: the decision, the few changes behind it, what to type, how to prove it, what was left out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hoptrace.replay.advise import Advice
    from hoptrace.replay.advise.model import Verdict

__all__ = ["as_dict", "proof", "show"]

_ROWS = 8


def as_dict(advice: Advice, trace: Path, rate: str) -> dict[str, Any]:
    """Plain values for ``--json``."""
    return {
        "format": "advise/1",
        "trace": str(trace),
        "engine": advice.engine,
        "objective": advice.objective.name,
        "slo_ns": dict(advice.objective.slo),
        "arrivals": advice.arrivals,
        "rate": rate,
        "cost": advice.cost,
        "draws": advice.draws,
        **advice.decision.as_dict(),
        "proof": proof(advice, trace, rate),
        "changes": [v.as_dict() for v in advice.verdicts],
        "without_gain": [v.as_dict() for v in advice.idle],
        "left_out": [{"flag": x.flag, "kind": x.kind, "why": x.why} for x in advice.left],
        "own_policy": {f"{m} {s}": round(v, 3) for (m, s), v in advice.own.items()},
        "own_policy_error": None if advice.error is None else advice.error.as_dict(),
        "evidence": _evidence(advice),
        "notes": list(advice.notes),
    }


def _evidence(advice: Advice) -> dict[str, Any]:
    from dataclasses import asdict

    found = asdict(advice.evidence)
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in found.items()}


def proof(advice: Advice, trace: Path, rate: str) -> list[dict[str, str]]:
    """The commands that would prove the decision's change, each with the flags that the server has meanwhile (``now``,
    ``changed``, or empty where none is asked); empty where nothing is to be changed.

    A trace of other traffic than a drive's (its clients' clocks, its vantage) cannot be held against a drive: then the same work
    is driven under the present flags first, which also lets both runs have the machine in like mood.
    """
    v = advice.decision.verdict
    if v is None:
        return []
    name = re.sub(r"[^A-Za-z0-9.]+", "-", v.text).strip("-").lower()[:60]
    stem = trace.name.removesuffix(".trace") or "run"
    plain = rate.strip().lower() in ("1x", "1", "1.0x")
    faster = "" if plain else f" --rate {shlex.quote(rate)}"
    url = shlex.quote(advice.url or "http://127.0.0.1:8000")

    def drive(flags: str, out: str) -> dict[str, str]:
        command = f"hoptrace drive {shlex.quote(str(trace))} --against {url}{faster} -o {shlex.quote(out)}"
        return {"flags": flags, "command": command}

    before, after = str(trace), f"{stem}-{name}.trace"
    found = []
    if not (advice.driven and plain):
        before = f"{stem}-now.trace"
        found.append(drive("now", before))
    found.append(drive("changed", after))
    return [*found, {"flags": "", "command": f"hoptrace fidelity {shlex.quote(before)} {shlex.quote(after)}"}]


def show(advice: Advice, trace: Path, rate: str) -> None:
    """The whole screen."""
    from rich.markup import escape

    from hoptrace.cli.console import PlainConsole

    console = PlainConsole(highlight=False)

    def line(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    console.print(f"[bold]{escape(advice.decision.sentence)}[/bold]")
    for sentence in advice.decision.also:
        console.print(sentence, markup=False)
    if advice.verdicts:
        console.print(_table(advice))
    if advice.idle:
        console.print(f"Tried without gain: {_idle(advice)}.", markup=False)
    _type_it(advice, line)
    titles = {"now": "with the flags as they are now:", "changed": "with that typed:"}
    for i, step in enumerate(proof(advice, trace, rate)):
        if step["flags"]:
            line(f"{'then ' if i else 'To prove it, '}{titles[step['flags']]}".capitalize())
        line(f"  {step['command']}")
    idle = [x for x in advice.left if x.kind == "cannot matter"]
    if idle:
        line("Cannot matter here:")
    for x in idle:
        line(f"  {x.flag}: {x.why}.")
    unjudged = "; ".join(f"{x.flag} ({x.why})" for x in advice.left if x.kind == "not judged")
    if unjudged:
        console.print(f"Not judged: {unjudged}.", markup=False)
    console.print(_rests(advice), markup=False)
    for note in dict.fromkeys((*(advice.decision.verdict.notes if advice.decision.verdict else ()), *advice.notes)):
        console.print(f"[yellow]note[/yellow] {escape(note)}")


def _table(advice: Advice) -> Any:
    from rich.markup import escape
    from rich.table import Table

    from hoptrace.replay.advise.decide import plain_gain, range_of

    table = Table(box=None, pad_edge=False)
    table.add_column("change", overflow="fold", min_width=30)
    table.add_column(advice.objective.short, justify="right", no_wrap=True)
    table.add_column("90 % interval", justify="right", no_wrap=True)
    table.add_column("worse", overflow="fold")
    table.add_column("trust", overflow="fold")
    needs = ""
    ranked = sorted(advice.verdicts, key=lambda v: (v.needs, -(v.gain if v.gain is not None else -1e9)))
    for v in ranked[:_ROWS]:
        if v.needs != needs:
            table.add_row(f"with {escape(v.needs)}:")
            needs = v.needs
        table.add_row(
            escape(v.text), plain_gain(advice.objective, v.gain), range_of(advice.objective, v),
            v.worse[0] if v.worse else "-", escape(_trust(v)),
        )  # fmt: skip
    return table


def _idle(advice: Advice) -> str:
    """``--max-num-seqs 2, 4; -b 128``: by flag."""
    found: dict[str, list[str]] = {}
    for v in advice.idle:
        c = v.changes[0]
        name, _, value = (c.label, "", "") if c.label else c.typed[0].partition(" ")
        found.setdefault(name, []).append(value)
    return "; ".join(f"{name} {', '.join(values)}".strip() for name, values in found.items())


def _trust(v: Verdict) -> str:
    said = ["at best"] if v.bound else []
    if v.low is None:
        said.append("no interval")
    elif not v.low > 0:
        said.append("noise")
    if v.extrapolated is None:
        said.append("unknown reach")
    elif v.extrapolated >= 0.005:
        said.append(f"{100 * v.extrapolated:.0f} % unseen")
    if v.lost:
        said.append(f"{v.lost} requests lost")
    return ", ".join(said) or "recorded steps"


def _type_it(advice: Advice, line: Any) -> None:
    v = advice.decision.verdict
    if v is None:
        return
    for change in v.changes:
        line(f"Type: {' '.join(change.typed)}    (now {change.now})")


def _rests(advice: Advice) -> str:

    e = advice.evidence
    said = f"{advice.engine}, {e.requests:,} requests, {e.mean_running:.1f} at once on average, step cost {advice.cost}"
    if advice.draws:
        said += f", {advice.draws} draws"
    if advice.error is None:
        return f"{said}. Nothing was observed that the replay of the own policy could be held against."
    keys = [k for k in (*advice.objective.keys, ("ttft", "p50"), ("e2e", "p50"), ("e2e", "p95")) if k in advice.error.of]
    off = ", ".join(
        f"{m.upper() if m != 'e2e' else 'end to end'} {s} {100 * advice.error.of[(m, s)]:+.1f} %" for m, s in dict.fromkeys(keys)
    )
    return f"{said}. The replay under the own policy against what was observed: {off}."
