"""The Fidelity page: what a replay predicts against what was measured, per metric and percentile, extrapolation marked."""

from __future__ import annotations

from typing import Any

import polars as pl
import streamlit as st

from hoptrace.analysis.text import count_text, duration_text
from hoptrace.app import charts_fidelity, data
from hoptrace.app.view_origin import badge
from hoptrace.app.words import per_second, plain, signed_percent

__all__ = ["show"]

_NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "end to end", "queue": "queue", "throughput": ""}
_TRUTHS = {None: "nothing", "step_time": "step times"}
_FRAME = {
    "figure": pl.String, "error_pct": pl.Float64, "low_pct": pl.Float64, "high_pct": pl.Float64, "noise_pct": pl.Float64,
    "beyond": pl.Boolean, "text": pl.String,
}  # fmt: skip
_NEGLIGIBLE = 0.01  # share of the step time: were its cost wrong by half, all would be right within half a percent


def show() -> None:
    """Draw the page."""
    st.title("Fidelity", anchor=False)
    st.caption(
        "The step cost is fitted to A. A is replayed under its own policy and under that of each other run, and each replay is "
        "held against what that run really did."
    )
    paths = [p for p in data.given() if data.opened(p).manifest.replay is None]
    if not paths:
        st.info("A prediction is held against a recording, and every trace here is a replay. Open a recorded one too.")
        return
    asked = _choose(paths)
    if st.button("Predict and compare", type="primary", icon=":material/science:"):
        st.session_state["fidelity asked"] = asked
    if st.session_state.get("fidelity asked") != asked:
        st.info("Replays the chosen runs: seconds for some hundred requests, minutes for very long captures.")
        return
    a, others, repeats, truth = asked
    study = data.study(a, others, repeats, truth)
    for case in study["cases"]:
        _case(case)
    _noise(study)
    for note in study["notes"]:
        st.caption(plain(note, 500))


def _choose(paths: list[str]) -> tuple[str, tuple[str, ...], tuple[str, ...], bool]:
    chosen = data.selected()
    left, middle, right = st.columns(3)
    with left:
        first = paths.index(chosen) if chosen in paths else 0
        a = st.selectbox("A: calibrated on", paths, index=first, format_func=data.name_of, key="fidelity a")
        badge(data.opened(a).manifest)
    rest = [p for p in paths if p != a]
    with middle:
        others = st.multiselect(
            "Runs under other policies", rest, format_func=data.name_of, key="fidelity others", help="Of the same work as A."
        )
    with right:
        free = [p for p in rest if p not in others]
        repeats = st.multiselect(
            "Repeats of A", free, format_func=data.name_of, key="fidelity repeats",
            help="More runs under A's policy, in the order in which they were made: how far runs differ that should be equal.",
        )  # fmt: skip
        truth = st.toggle("Tell where the error comes from", key="fidelity truth", help="Replays with recorded truth put in.")
    return a, tuple(others), tuple(repeats), bool(truth)


def _case(case: dict[str, Any]) -> None:
    own = case["own"]
    st.subheader(plain(case["trace"]), anchor=False)
    if own:
        st.markdown("Its own policy: predicted against observed.")
    else:
        changed = ", ".join(f"{s['name']} {s['a']} → {s['b']}" for s in case["settings"])
        st.markdown(
            f"Predicted from A. {plain(changed, 400) or 'No setting that both state differs.'} The error is that of B ÷ A."
        )
        _signs(case["signs"])
    share = case["domain"]["share"]
    beyond = share is not None and share > _NEGLIGIBLE
    rows = [_row(f, beyond) for f in case["figures"] if f["observed"] is not None or f["predicted"] is not None]
    shown = [r for r in rows if r["error_pct"] is not None]
    if shown:
        st.altair_chart(charts_fidelity.errors(pl.DataFrame(shown, schema=_FRAME), [r["figure"] for r in shown]))
    if beyond:
        st.warning(plain(" ".join(case["domain"]["beyond"]), 600), icon=":material/warning:")
    st.dataframe(pl.DataFrame([_cells(f) for f in case["figures"]]), hide_index=True, height="content")
    _own_terms(case["own_terms"])
    _sources(case["sources"])
    for note in case["notes"]:
        st.caption(plain(note, 500))


def _signs(signs: dict[str, Any]) -> None:
    if signs["wrong"]:
        st.error(plain(f"The other way than predicted: {', '.join(signs['wrong'])}."), icon=":material/error:")
    elif signs["right"]:
        st.success(f"All {signs['right']} changes beyond the noise go the predicted way.", icon=":material/check:")


def _name(figure: dict[str, Any]) -> str:
    return f"{_NAMES.get(figure['metric'], figure['metric'])} {figure['statistic']}".strip()


def _error(figure: dict[str, Any]) -> dict[str, Any]:
    """The headline's error and interval: of the ratio for a changed policy."""
    found: dict[str, Any] = figure["ratio"] or figure
    return found


def _row(figure: dict[str, Any], beyond: bool) -> dict[str, Any]:
    e = _error(figure)
    return {
        "figure": _name(figure), "error_pct": e["error_pct"], "low_pct": e["low_pct"], "high_pct": e["high_pct"],
        "noise_pct": figure["noise_pct"], "beyond": beyond, "text": _percent(e["error_pct"]),
    }  # fmt: skip


def _cells(figure: dict[str, Any]) -> dict[str, str]:
    e, ratio = _error(figure), figure["ratio"]
    between = "–" if e["low_pct"] is None else f"{_percent(e['low_pct'])} to {_percent(e['high_pct'])}"
    cells = {"figure": _name(figure), "observed": _value(figure, "observed"), "predicted": _value(figure, "predicted")}
    if ratio is not None:
        cells |= {"B ÷ A observed": _times(ratio["observed"]), "B ÷ A predicted": _times(ratio["predicted"])}
    cells |= {"error": _percent(e["error_pct"]), "95 % interval": between}
    if ratio is not None:
        cells |= {"of B alone": _percent(figure["error_pct"]), "at the machine's speed": _percent(figure["at_speed_pct"])}
    return cells | {"noise": "–" if figure["noise_pct"] is None else f"{figure['noise_pct']:.1f} %"}


def _value(figure: dict[str, Any], side: str) -> str:
    v, unit = figure[side], figure["unit"]
    return duration_text(v) if unit == "ns" else per_second(v, unit.removesuffix("/s"))


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"× {ratio:.3f}"


def _percent(pct: float | None) -> str:
    return "–" if pct is None else signed_percent(pct / 100)


def _own_terms(terms: dict[str, Any]) -> None:
    st.markdown("**In the trace's own terms**", help="What no machine's speed reaches: who ran in which step, what was found.")

    def row(name: str, counts: dict[str, Any] | None, share: float | None) -> dict[str, str]:
        c = counts or {}
        return {
            "": name, "observed": count_text(c.get("observed")), "predicted": count_text(c.get("predicted")),
            "equal": "–" if share is None else f"{share:.1%}",
        }  # fmt: skip

    steps, cached = terms["steps"], terms["cached_tokens"]
    rows = [
        row("steps", steps, steps["equal_share"]),
        row("cached tokens", cached, cached["equal_share"]),
        row("preemptions", terms["preemptions"], None),
        *(row(f"order of {n}", None, terms[k]["share"]) for k, n in _ORDERS.items() if terms[k] is not None),
    ]
    st.dataframe(pl.DataFrame(rows), hide_index=True, height="content")
    for note in terms["notes"]:
        st.caption(plain(note, 500))


_ORDERS = {"first_tokens": "first tokens", "finishes": "finishes"}


def _sources(sources: list[dict[str, Any]]) -> None:
    if not sources:
        return
    st.markdown("**Where the error comes from**", help="The error that is left with this recorded truth put in.")
    figures = [(m, s) for m, statistics in sources[0]["error_pct"].items() for s in statistics]
    rows = []
    for metric, statistic in figures:
        cells = {"": f"{_NAMES.get(metric, metric)} {statistic}"}
        for s in sources:
            title = _TRUTHS.get(s["truth"], s["truth"])
            cells[f"with recorded {title}"] = _percent(s["error_pct"].get(metric, {}).get(statistic))
        rows.append(cells)
    st.dataframe(pl.DataFrame(rows), hide_index=True, height="content")
    for s in sources:
        if s["why_not"]:
            st.caption(plain(f"{_TRUTHS.get(s['truth'], s['truth'])}: {s['why_not']}", 400))


def _noise(study: dict[str, Any]) -> None:
    if study["noise"] is None:
        st.caption("How far equal runs differ is not known: choose repeats of A.")
    st.caption("Intervals redraw requests; what the machine did between the runs is not in them. Grey: what repeats differ by.")
