"""Run real servers from a recipe, record every run, and hold replays against them.

``python benchmarks/fidelity/run.py RECIPE.toml -o OUT [--only CELL] [--rounds N]``: each cell's policies by turns (A B1 B2 …
A B1 …), each run recorded into ``OUT/<cell>/<NN>-<policy>.trace`` with its gauges in ``….run.json``; a run above the recipe's
bounds is repeated. Then the table: ``OUT/results.json`` and ``OUT/results.md``. Killed, it goes on where it was.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from harness.fleet import Fleet
from harness.gauges import verdict
from harness.one import run_once
from harness.recipe import Recipe, read
from harness.rounds import Folder, Run, order
from harness.work import write

from hoptrace.errors import EnvironmentProblem, HoptraceError, UsageError


def main(arguments: list[str] | None = None) -> int:
    """The command; gives its exit code."""
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0], prog="run.py")
    p.add_argument("recipe", type=Path)
    p.add_argument("-o", "--output", dest="out", type=Path, required=True)
    p.add_argument("--only", metavar="CELL", action="append", help="only this cell (may be given again)")
    p.add_argument("--use", choices=("develop", "report"), help="only cells of this use")
    p.add_argument("--rounds", type=int, metavar="N", help="so many rounds instead of the recipe's")
    p.add_argument("--runs", type=int, metavar="N", help="so many runs at most; the same command goes on with the next")
    p.add_argument("--void-too", action="store_true", help="the table also of runs above the bounds (not for publication)")
    p.add_argument("--no-table", action="store_true", help="record only")
    p.add_argument("--table", action="store_true", help="record nothing: the table of what is there")
    a = p.parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)
    try:
        recipe = read(a.recipe)
        cells = _chosen(recipe, a.only, a.use)
        missing = [] if a.table else record(recipe, cells, a.recipe.parent, a.out, a.rounds, a.runs)
        if not a.no_table:
            from harness.table import tabulate

            sys.stdout.write(tabulate(recipe, cells, a.out, say, void_too=a.void_too))
        for line in missing:
            say(line)
        return 4 if missing else 0
    except HoptraceError as e:
        sys.stderr.write(f"Error: {e.message}\n" + (f"Hint: {e.hint}\n" if e.hint else ""))
        return e.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("Stopped. The same command goes on from here.\n")
        return 130


def record(recipe: Recipe, cells: list[str], beside: Path, out: Path, rounds: int | None, most: int | None = None) -> list[str]:
    """Run what is not done yet; gives a sentence on each policy that did not run."""
    missing: list[str] = []
    with Fleet(recipe, out / "servers", say) as fleet:
        for name in cells:
            done, failed = _cell(recipe, name, fleet, beside, out, rounds or recipe.rounds_of(name), most)
            missing += failed
            most = None if most is None else most - done
    return missing


def _cell(
    recipe: Recipe, name: str, fleet: Fleet, beside: Path, out: Path, rounds: int, most: int | None
) -> tuple[int, list[str]]:
    """How many runs were made, and a sentence on each policy that did not run."""
    cell, folder = recipe.cells[name], Folder(out / name)
    folder.same({p: recipe.told(name, p) for p in cell.policies})
    runs = order(cell.policies, rounds)
    left = [r for r in runs if folder.told(r) is None]
    say(f"{name}: {len(runs) - len(left)} of {len(runs)} runs are done")
    left = left[: max(0, most)] if most is not None else left
    if not left:
        return 0, []
    work = out / name / "work.trace"
    write(recipe.workloads[cell.workload], work, beside)
    failed: dict[str, str] = {}
    for k, run in enumerate(left):
        if run.policy in failed:
            continue
        try:
            _run(recipe, name, folder, run, fleet, work, f"{len(runs) - len(left) + k + 1}/{len(runs)}")
        except EnvironmentProblem as e:
            if run.policy == cell.policies[0]:
                raise
            failed[run.policy] = str(e)
            say(f"{name}: {run.policy} did not run: {e}")
            fleet.stop(run.policy)
    return len(left), [f"{name}: {policy} did not run: {why}" for policy, why in failed.items()]


def _run(recipe: Recipe, name: str, folder: Folder, run: Run, fleet: Fleet, work: Path, place: str) -> None:
    """One run, repeated while its gauges are above the bounds; the last attempt is kept whatever they say, and says so."""
    cell, most = recipe.cells[name], recipe.bounds.attempts
    for attempt in range(folder.rejected(run) + 1, most + 1):
        up = fleet.get(run.policy, cell.policies)
        try:
            gauges = run_once(recipe, cell, up, work, folder.begin(run))
        except EnvironmentProblem as e:
            fleet.stop(run.policy)
            if attempt == most:
                raise
            say(f"{name} {run.name}: {e}; again")
            folder.reject(run, {"policy": run.policy, "round": run.round, "attempt": attempt, "accepted": False, "why": str(e)})
            continue
        why = verdict(gauges, recipe.bounds)
        gauges |= {"round": run.round, "attempt": attempt, "accepted": not why, "why": "; ".join(why) or None}
        gauges |= {"cell": name, "engine": recipe.engine(name), "use": cell.use, "record": cell.record}
        apart = gauges["probe_after_ns"] / gauges["probe_before_ns"] - 1
        say(
            f"{place} {name} {run.name}: {gauges['duration_s']:.0f} s, {gauges['steps']} steps, "
            f"others {gauges['foreign_share']:.1%}, steal {gauges['steal_share']:.1%}, probe {apart:+.1%}"
            + (f"; {gauges['why']}" if why else "")
        )
        if not why or attempt == most:
            folder.keep(run, gauges)
            return
        folder.reject(run, gauges)


def _chosen(recipe: Recipe, only: list[str] | None, use: str | None) -> list[str]:
    for name in only or ():
        if name not in recipe.cells:
            raise UsageError(f"There is no cell {name!r} in the recipe.", hint=f"There are: {', '.join(recipe.cells)}.")
    return [n for n, c in recipe.cells.items() if (not only or n in only) and (use is None or c.use == use)]


def say(text: str) -> None:
    """A line for the screen, with the time."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
