"""The table in Markdown."""

from __future__ import annotations

from typing import Any

__all__ = ["SHOWN", "markdown"]

SHOWN = ("e2e p50", "e2e p95", "tpot p50", "tpot p95", "ttft p50", "ttft p95", "throughput output tokens")
"""The figures that have targets, in the order of the columns."""


def markdown(data: dict[str, Any]) -> str:
    """The text of ``results.md``."""
    lines: list[str] = []
    for use, title in (("report", "Cells to report"), ("develop", "Cells that were developed on")):
        cells = {n: c for n, c in data["cells"].items() if c["use"] == use}
        if not cells:
            continue
        lines += [
            f"## {title}",
            "",
            *_errors(cells),
            "",
            *_overall(data["overall"].get(use, {})),
            *_at_speed(cells),
            "",
            *_terms(cells),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n" if lines else "No cell has runs.\n"


def _errors(cells: dict[str, Any]) -> list[str]:
    heads = [n.removesuffix(" output tokens") for n in SHOWN]
    lines = ["| cell | policy | rounds | " + " | ".join(heads) + " |", "| --- | --- | ---: |" + " ---: |" * len(heads)]
    for name, cell in cells.items():
        for policy, s in cell["policies"].items():
            label = f"{policy} (own)" if s["kind"] == "own" else policy
            cols = [_figure(s["figures"][f]) for f in SHOWN]
            lines.append(f"| {name} | {label} | {s['rounds']} | " + " | ".join(cols) + " |")
            if s["kind"] == "own":
                same = [_range(s["figures"][f]["in_sample_pct"], sign="+") for f in SHOWN]
                lines.append(f"| {name} | *(in sample)* | {s['rounds']} | " + " | ".join(same) + " |")
    return [*lines, "", (
        "Error in %, median over the rounds (lowest … highest); `±` the noise floor; `!` beyond the target, `?` not measured: "
        "the noise floor exceeds twice the target, or is not known; `?!` beyond the target even with that floor taken off. "
        "Own policy: against the base policy's next run, with the machine's speed taken out; *(in sample)*: against the very run "
        "that was calibrated on, with its steps' own scatter in its order, so that next to none of the step cost's error shows. "
        "Others: the ratio to the base policy's run beside it."
    )]  # fmt: skip


def _figure(f: dict[str, Any]) -> str:
    if f["error_pct"] is None:
        return "–"
    text = _range(f["error_pct"], sign="+")
    noise = "" if f["noise_pct"] is None else f" ± {f['noise_pct']:.1f}"
    return text + noise + {"missed": " !", "not measured": " ?"}.get(f["verdict"], "") + "!" * f.get("beyond_noise", False)


def _at_speed(cells: dict[str, Any]) -> list[str]:
    heads = [n.removesuffix(" output tokens") for n in SHOWN]
    lines = ["| cell | policy | " + " | ".join(heads) + " |", "| --- | --- |" + " ---: |" * len(heads)]
    for name, cell in cells.items():
        for policy, s in cell["policies"].items():
            cols = [_range(s["figures"][f]["at_speed_pct"], sign="+") for f in SHOWN]
            lines.append(f"| {name} | {policy} | " + " | ".join(cols) + " |")
    return [*lines, "", (
        "The same in %, not as a ratio, with the machine's speed taken out: step costs times what the observed run's steps took "
        "more than those of the run that was calibrated on. That holds the step cost's error on the observed run's steps too, so "
        "what is left is no prediction's error. Of the base policy: against its next run."
    )]  # fmt: skip


_FURTHER = (
    ("covered_repeats", "with the machine's speed between runs of the base policy"),
    ("ratio_covered", "of the ratio to the base policy's run"),
    ("ratio_covered_repeats", "of that ratio, with the speed between runs"),
)


def _overall(o: dict[str, Any]) -> list[str]:
    lines = []
    for kind, title in (("own", "own policy"), ("changed", "changed policy")):
        if kind not in o:
            continue
        parts = [_median(n.removesuffix(" output tokens"), f) for n, f in o[kind]["figures"].items()]
        hit, of = o[kind]["covered"]
        text = f"Median over {len(o[kind]['cells'])} cells, {title}: {'; '.join(parts)}. "
        exact, told = o[kind]["cached_exact"]
        text += f"Cached tokens exact in {exact} of {told} that tell." if told else "Cached tokens are not told."
        text += f" Within the 90 % interval: {hit} of {of} figures ({hit / of:.0%})." if of else ""
        more = [(what, *(o[kind].get(key) or [0, 0])) for key, what in _FURTHER]
        said = "; ".join(f"{what} {h} of {n} ({h / n:.0%})" for what, h, n in more if n)
        text += f" {said[:1].upper()}{said[1:]}." if said else ""
        text += f" {o[kind]['without_interval']} more have no interval." if o[kind].get("without_interval") else ""
        if kind == "changed":
            text += " Signs: {right} right, {wrong} wrong, {within noise} within the noise.".format(**o[kind]["signs"])
        lines += [text, ""]
    return lines


def _median(name: str, f: dict[str, Any]) -> str:
    beyond = f", of these {f['beyond_noise']} beyond target and floor" if f["beyond_noise"] else ""
    if not f["cells"]:
        return f"{name} not measured{beyond.replace('of these ', '')}"
    rest = f"; {f['not_measured']} not measured{beyond}" if f["not_measured"] else ""
    return f"{name} {f['error_pct']:.1f} % ({f['met']} of {f['cells']} met{rest})"


def _terms(cells: dict[str, Any]) -> list[str]:
    lines = ["| cell | policy | equal steps % | steps % | cached observed, predicted | preemptions | speed | others' share |",
             "| --- | --- | ---: | ---: | --- | --- | --- | ---: |"]  # fmt: skip
    for name, cell in cells.items():
        for policy, s in cell["policies"].items():
            cached = "exact" if s["cached_exact"] else "; ".join(f"{_told(a)}, {_told(b)}" for a, b in s["cached_tokens"])
            out = "; ".join(sorted({f"{_told(a)}, {_told(b)}" for a, b in s["preemptions"]}))
            share = cell["gauges"]["foreign_share"]
            cols = [
                _range(s["steps_equal"]),
                _range(s["steps_pct"]),
                cached,
                out,
                _range(s["speed"], 3),
                f"{share['median']:.1%}" if share else "–",
            ]
            lines.append(f"| {name} | {policy} | " + " | ".join(cols) + " |")
        void = [f"{p}, round {i}: {why}" for p, s in cell["policies"].items() for i, why in s["void"].items()]
        lines += [""] * bool(void) + [f"{name} left out: {'; '.join(void)}."] * bool(void)
    return lines


def _told(n: int | None) -> str:
    return "unknown" if n is None else str(n)


def _range(s: dict[str, float] | None, digits: int = 1, sign: str = "") -> str:
    if s is None:
        return "–"
    median, low, high = (f"{s[k]:{sign}.{digits}f}" for k in ("median", "low", "high"))
    return median if low == high else f"{median} ({low} … {high})"
