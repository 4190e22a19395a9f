"""The Fidelity page without a browser: a real study of the samples, and studies made by hand."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from streamlit.testing.v1 import AppTest

from hoptrace.app import charts_fidelity, data, fidelity_run, view_fidelity
from hoptrace.cli.fidelity import command
from hoptrace.errors import InputError
from hoptrace.samples import samples

MAIN = str(files("hoptrace.app") / "main.py")
FOUR, ONE = (next(p for p in samples() if p.name == f"llamacpp-{n}.trace") for n in ("four-slots", "one-slot"))
HOSTILE = "<script>alert(1)</script> :red[no] **b**"


def _run(monkeypatch: pytest.MonkeyPatch, *traces: Path) -> AppTest:
    monkeypatch.setattr(sys, "argv", ["main.py", *map(str, traces)])
    data.st.cache_data.clear()
    at = AppTest.from_file(MAIN, default_timeout=120)
    at.run()
    at.switch_page("page_fidelity.py").run()
    return at


def _text(at: AppTest) -> str:
    kinds = (at.title, at.subheader, at.markdown, at.caption, at.info, at.warning, at.error, at.success)
    return " ".join(str(x.value) for kind in kinds for x in kind).replace("\\", "").replace("\u2060", "")


def _figure(metric: str, error: float, ratio: float | None = None, noise: float | None = None) -> dict[str, Any]:
    made = {"metric": metric, "statistic": "p50", "unit": "ns", "observed": 1e6, "predicted": 1e6 * (1 + error / 100), "n": None,
            "error_pct": error, "low_pct": error - 1, "high_pct": error + 1, "at_speed_pct": 0.5, "noise_pct": noise,
            "noise_largest_pct": noise, "sign": "right", "ratio": None}  # fmt: skip
    if ratio is not None:
        made["ratio"] = {
            "observed": 2.0,
            "predicted": 2 * (1 + ratio / 100),
            "error_pct": ratio,
            "low_pct": None,
            "high_pct": None,
        }
    return made


def _study(**more: Any) -> dict[str, Any]:
    count = {"observed": 10, "predicted": 11, "error_pct": 10.0}
    case = {
        "trace": HOSTILE, "own": False, "settings": [{"name": "max_sequences", "a": 4, "b": 1}],
        "signs": {"right": 3, "wrong": []},
        "figures": [_figure("e2e", 8.0, 3.0, 1.5)], "domain": {"share": 0.0, "beyond": []}, "sources": [], "notes": [HOSTILE],
        "own_terms": {"steps": {**count, "equal_share": 0.9}, "cached_tokens": {**count, "equal_share": None},
                      "preemptions": {"observed": None, "predicted": 0, "error_pct": None}, "first_tokens": None,
                      "finishes": {"share": 0.5}, "notes": []},
    }  # fmt: skip
    return {"format": "fidelity/1", "noise": {"runs": []}, "cases": [{**case, **more}], "notes": []}


def _asked(monkeypatch: pytest.MonkeyPatch, study: dict[str, Any] | Exception) -> AppTest:
    def given(*_: Any, **__: Any) -> dict[str, Any]:
        if isinstance(study, Exception):
            raise study
        return study

    monkeypatch.setattr(data, "run_study", given)
    at = _run(monkeypatch, FOUR, ONE)
    at.button[0].click().run()
    return at


def test_a_study_of_the_samples_shows_what_the_command_says(monkeypatch: pytest.MonkeyPatch) -> None:
    at = _run(monkeypatch, FOUR, ONE)
    assert "Replays the chosen runs" in _text(at) and not at.dataframe
    at.multiselect(key="fidelity others").set_value([str(ONE)])
    at.button[0].click().run()
    assert not at.exception and not at.error
    said = json.loads(
        CliRunner().invoke(command, ["--json", "--truth", "none", str(FOUR), str(ONE)], catch_exceptions=False).output
    )
    assert [x.value for x in at.subheader] == ["llamacpp\\-four\\-slots", "llamacpp\\-one\\-slot"]
    own, changed = said["cases"]
    shown = at.dataframe[0].value.set_index("figure")
    ttft = next(f for f in own["figures"] if f["metric"] == "ttft" and f["statistic"] == "p50")
    assert shown.loc["TTFT p50", "error"] == f"{ttft['error_pct'] / 100:+.1%}"
    shown = at.dataframe[2].value.set_index("figure")
    e2e = next(f for f in changed["figures"] if f["metric"] == "e2e" and f["statistic"] == "mean")
    assert shown.loc["end to end mean", "error"] == f"{e2e['ratio']['error_pct'] / 100:+.1%}"
    assert shown.loc["end to end mean", "of B alone"] == f"{e2e['error_pct'] / 100:+.1%}"
    assert "max_sequences 4 → 1" in _text(at)


def test_changed_choices_ask_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    at = _asked(monkeypatch, _study())
    assert at.dataframe
    at.multiselect(key="fidelity others").set_value([str(ONE)]).run()
    assert not at.dataframe and "Replays the chosen runs" in _text(at)


def test_extrapolation_wrong_signs_and_noise_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    beyond = {"share": 0.4, "beyond": ["decode_requests of 9 was asked for."]}
    at = _asked(monkeypatch, _study(domain=beyond, signs={"right": 1, "wrong": ["ttft p95"]}))
    said = _text(at)
    assert "decode_requests of 9 was asked for." in said and "The other way than predicted: ttft p95." in said
    cells = at.dataframe[0].value.iloc[0]
    assert (cells["error"], cells["B ÷ A predicted"], cells["noise"]) == ("+3.0%", "× 2.060", "1.5 %")
    assert at.dataframe[1].value["equal"].to_list() == ["90.0%", "–", "–", "50.0%"]
    frame = view_fidelity.pl.DataFrame([view_fidelity._row(_figure("e2e", 8.0, 3.0, 1.5), True)], schema=view_fidelity._FRAME)
    chart = charts_fidelity.errors(frame, ["end to end p50"]).to_dict()
    rows = next(iter(chart["datasets"].values()))
    assert {r.get("basis") for rows in chart["datasets"].values() for r in rows if "basis" in r} == {
        "rests on extrapolated step costs"
    }, rows


def test_hostile_text_is_shown_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    at = _asked(monkeypatch, _study())
    for element in (*at.subheader, *at.caption, *at.markdown):
        assert "<script>" not in str(element.value) and ":red[" not in str(element.value)


def test_what_cannot_be_studied_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    at = _asked(monkeypatch, InputError("one-slot is no run of the work of four-slots: other requests."))
    assert not at.exception and "is no run of the work" in at.error[0].value.replace("\\", "")


def test_the_command_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing"):
        fidelity_run.run_study(str(tmp_path / "missing.trace"), [], [], truth=False)
