"""A fidelity study in sentences, for the terminal and the app. Tables are theirs."""

from __future__ import annotations

from hoptrace.analysis.fidelity.own_terms import Count
from hoptrace.analysis.fidelity.rules import Outcome
from hoptrace.analysis.fidelity.study import Judged, Study
from hoptrace.analysis.text import percent

__all__ = [
    "EQUAL", "headline", "noise_text", "outcome_text", "own_terms_rows", "settings_text", "share_text", "signs_text",
    "speed_text",
]  # fmt: skip

_MOST_SETTINGS = 4
_HEADLINES = (("e2e", "p50", "E2E p50"), ("ttft", "p50", "TTFT p50"), ("throughput", "output tokens", "tokens/s"))


def settings_text(case: Judged) -> str:
    """What is another setting than the base policy's: ``max_sequences 4 → 1``."""
    some = [f"{s.name} {s.a} → {s.b}" for s in case.settings[:_MOST_SETTINGS]]
    more = len(case.settings) - len(some)
    return ", ".join(some) + (f" and {more} more" if more > 0 else "") or "no setting that both state differs"


def headline(case: Judged) -> str:
    """One policy in a line: its largest figures with their intervals."""
    said = []
    for metric, statistic, name in _HEADLINES:
        f = case.figure(metric, statistic)
        low, high = f.interval_pct
        if f.error_pct is not None:
            between = "" if low is None or high is None else f" ({low:+.1f} to {high:+.1f})"
            said.append(f"{name} {f.error_pct:+.1f} %{between}")
    what = "own policy" if case.own else "B ÷ A"
    signs = "" if case.own else f"; {signs_text(case)}"
    return f"{case.trace}, error of its {what}: {', '.join(said) or 'unknown'}{signs}."


def own_terms_rows(case: Judged) -> list[tuple[str, Count | None, float | None]]:
    """The trace's own terms as (name, both sides' number, share that is equal); null where there is no such thing, or it is
    unknown. What is equal: :data:`EQUAL`."""
    t = case.own_terms
    return [
        ("steps", t.steps.count, t.steps.equal_share),
        ("steps of equal size", None, t.steps.alike_share),
        ("cached tokens", t.cached_tokens, t.cached_equal_share),
        ("preemptions", t.preemptions, None),
        ("order of first tokens", None, None if t.first_tokens is None else t.first_tokens.share),
        ("order of finishes", None, None if t.finishes is None else t.finishes.share),
    ]


EQUAL = (
    "Equal: steps in which the same requests compute as many tokens; of equal size, with as many prompts, prompt tokens and "
    "decoders; requests with as many cached tokens; pairs of requests in flight together that come in the recorded order."
)


def speed_text(case: Judged) -> str | None:
    """How fast the machine was, of a changed policy; null where it is not known."""
    if case.own or case.speed is None:
        return None
    off = 100 * (case.speed - 1)
    how = f"{abs(off):.1f} % {'longer' if off > 0 else 'less long'} than" if abs(off) >= 0.05 else "as long as"
    return f"Equal steps took {how} in A, by A's step cost: the machine, and the cost's error on B's steps."


def signs_text(case: Judged) -> str:
    """Of how many changes the sign is right."""
    s = case.signs
    judged = s["right"] + len(s["wrong"])
    if not judged:
        return f"no change is large enough to judge its sign ({s['within_noise']} within noise)"
    wrong = f" (wrong: {', '.join(s['wrong'])})" if s["wrong"] else ""
    return f"signs right for {s['right']} of {judged} changes{wrong}, {s['within_noise']} within noise"


def noise_text(study: Study) -> str:
    """What is known of the noise between runs."""
    if study.noise is None:
        return "Noise between runs is unknown: give another run of A with --repeat."
    said = []
    for metric, statistic, name in (("e2e", "p50", "E2E p50"), ("ttft", "p50", "TTFT p50"), ("tpot", "p50", "TPOT p50")):
        if floor := study.noise.get(metric, statistic):
            largest = f" (at most {floor.largest_pct:.1f})" if len(study.noise.runs) > 2 else ""
            said.append(f"{name} {floor.median_pct:.1f} %{largest}")
    apart = "a run of A against the one before"
    speeds = [s for s in study.noise.speeds[1:] if s is not None]
    fast = f" Equal steps took longer in the repeats by {', '.join(f'{100 * (s - 1):+.1f}' for s in speeds)} %." if speeds else ""
    return f"Noise ({apart}): {', '.join(said) or 'no latency is known in all'}.{fast}"


def outcome_text(o: Outcome) -> str:
    """A rule's outcome in a line."""
    word = {True: "FAILED", False: "ok", None: "UNKNOWN"}[o.failed]
    if o.value is None:
        value = "unknown"
    else:
        value = f"{o.value:g}" if o.rule.lstrip().removeprefix("changed.").startswith("wrong_signs") else f"{100 * o.value:.2f} %"
    return f"{word:7} {o.rule}: {value} in {o.trace}"


def share_text(share: float) -> str:
    """A share in %, never 100 where something is missing."""
    return percent(share) if share == 1 or share < 0.9995 else f"{100 * share:.3f}%"
