"""Predicted against observed: literal figures, pairing, and what is said of unequal work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.workloads import MS, store

from hoptrace.comparison import compare
from hoptrace.reader import Trace


def capture(path: Path, *requests: tuple[int, int, int, int, int]) -> Trace:
    """A trace of (number, arrival ms, first token ms, finish ms, output tokens)."""
    rows: list[dict[str, Any]] = []
    tokens: list[dict[str, Any]] = []
    for number, arrival, first, finish, output in requests:
        rows.append({
            "request": number, "arrival_ns": arrival * MS, "arrival_of": "received", "received_ns": arrival * MS,
            "scheduled_ns": (arrival + 1) * MS, "first_token_ns": first * MS, "last_token_ns": finish * MS,
            "finish_ns": finish * MS, "prompt_tokens": 5, "output_tokens": output, "source": "t",
        })  # fmt: skip
        for i in range(output):
            at = first * MS + (finish - first) * MS * i // max(1, output - 1)
            tokens.append(
                {"request": number, "sequence": 0, "index": i, "time_ns": at, "count": 1, "vantage": "proxy", "source": "t"}
            )
    return store(path, {"requests": pl.DataFrame(rows), "tokens": pl.DataFrame(tokens)})


def test_literal_figures(tmp_path: Path) -> None:
    a = capture(tmp_path / "a.trace", (0, 0, 100, 300, 3), (1, 0, 200, 400, 3))
    b = capture(tmp_path / "b.trace", (0, 0, 110, 330, 3), (1, 0, 220, 400, 3))
    c = compare(a, b)
    assert c.paired and c.requests == (2, 2) and c.notes == ()
    ttft = c.get("ttft", "mean")
    assert (ttft.observed, ttft.predicted, ttft.error, ttft.error_pct) == (150 * MS, 165 * MS, 15 * MS, 10.0)
    assert c.get("e2e", "p50").error == 15 * MS
    assert c.get("itl", "mean").observed == 100 * MS
    assert c.get("throughput", "requests").observed == 5.0
    assert c.per_request["ttft"] == {"n": 2, "p50": 10.0, "p95": 10.0}
    assert c.errors()["ttft"] == {"mean": 0.1, "p50": 0.1, "p95": 0.1, "p99": 0.1}
    with pytest.raises(KeyError):
        c.get("ttft", "p1")


def test_a_trace_against_itself_has_no_error(tmp_path: Path) -> None:
    a = capture(tmp_path / "a.trace", (0, 0, 100, 300, 3), (1, 0, 200, 400, 1))
    assert all(v == 0 for m in compare(a, a).errors().values() for v in m.values())


def test_only_twins_are_compared_if_nearly_all_have_one(tmp_path: Path) -> None:
    rows = [(i, 0, 100, 300, 3) for i in range(20)]
    a = capture(tmp_path / "a.trace", *rows)
    b = capture(tmp_path / "b.trace", *rows[:19])
    c = compare(a, b)
    assert c.paired and c.requests == (19, 19)
    assert c.notes == ("19 requests are on both sides (observed 20, predicted 19); only they are compared.",)


def test_unequal_work_is_said(tmp_path: Path) -> None:
    a = capture(tmp_path / "a.trace", (0, 0, 100, 300, 120), (1, 0, 100, 300, 120))
    b = capture(tmp_path / "b.trace", (0, 0, 100, 300, 111), (1, 0, 100, 300, 111))
    c = compare(a, b)
    assert not c.paired and c.per_request == {}
    assert "They do unequal work: 240 output tokens observed, 222 predicted." in c.notes


def hide(trace: Trace, path: Path, numbers: list[int]) -> Trace:
    """The same without token times of some requests, as of answers that were not streamed."""
    gone = pl.col("request").is_in(numbers)
    tables = {n: trace.table(n).collect() for n in ("requests", "tokens")}
    tables["requests"] = tables["requests"].with_columns(
        pl.when(~gone).then(c).alias(c) for c in ("first_token_ns", "last_token_ns")
    )
    tables["tokens"] = tables["tokens"].filter(~gone)
    return store(path, tables)


def test_a_metric_is_taken_over_the_requests_that_know_it_on_both_sides(tmp_path: Path) -> None:
    """The two slow requests show no tokens when observed: their predicted ones must not enter the mean of the others."""
    rows = [(0, 0, 100, 300, 3), (1, 0, 100, 300, 3), (2, 0, 900, 2900, 3), (3, 0, 900, 2900, 3)]
    full = capture(tmp_path / "b.trace", *rows)
    c = compare(hide(full, tmp_path / "a.trace", [2, 3]), full)
    assert c.paired and c.requests == (4, 4)
    for metric, value in (("ttft", 100), ("itl", 100), ("tpot", 100)):
        for statistic in ("mean", "p50", "p95", "p99"):
            d = c.get(metric, statistic)
            assert (d.observed, d.predicted, d.n) == (value * MS, value * MS, 2), (metric, statistic)
            assert d.as_dict()["n"] == 2
    assert c.get("e2e", "mean").n is None and c.get("e2e", "mean").observed == 1600 * MS
    assert c.notes == ("TTFT, ITL, TPOT: compared over 2 of 4 requests; for the others it is not known on both sides.",)
    assert all(e == 0 for m in c.errors().values() for e in m.values())


def test_a_single_token_has_no_gap_and_that_is_no_gap_in_what_is_known(tmp_path: Path) -> None:
    a = capture(tmp_path / "a.trace", (0, 0, 100, 300, 3), (1, 0, 100, 100, 1))
    c = compare(a, a)
    assert c.notes == () and c.get("itl", "mean").n is None and c.get("tpot", "mean").n is None


def test_a_metric_known_on_one_side_only_has_no_error_but_keeps_its_figure(tmp_path: Path) -> None:
    full = capture(tmp_path / "b.trace", (0, 0, 100, 300, 3), (1, 0, 100, 300, 3))
    d = compare(hide(full, tmp_path / "a.trace", [0, 1]), full).get("ttft", "mean")
    assert (d.observed, d.predicted, d.error) == (None, 100 * MS, None)


def test_metrics_known_for_other_requests_on_each_side_are_not_compared(tmp_path: Path) -> None:
    full = capture(tmp_path / "f.trace", (0, 0, 100, 300, 3), (1, 0, 900, 2900, 3))
    c = compare(hide(full, tmp_path / "a.trace", [0]), hide(full, tmp_path / "b.trace", [1]))
    d = c.get("ttft", "mean")
    assert (d.observed, d.predicted, d.error_pct, d.n) == (None, None, None, 0)
    assert "TTFT, ITL, TPOT: compared over 0 of 2 requests; for the others it is not known on both sides." in c.notes


def test_distributions_that_hold_part_of_the_requests_say_so(tmp_path: Path) -> None:
    a = capture(tmp_path / "f.trace", (0, 0, 100, 300, 3), (1, 0, 900, 2900, 3))
    b = capture(tmp_path / "b.trace", (0, 0, 100, 300, 4), (1, 0, 900, 2900, 4))
    c = compare(hide(a, tmp_path / "a.trace", [1]), b)
    assert not c.paired
    assert "TTFT, ITL, TPOT: known only for 1 of 2 requests observed; the sides may differ by that alone." in c.notes


def named(trace: Trace, path: Path, ids: list[str | None]) -> Trace:
    tables = {n: trace.table(n).collect() for n in ("requests", "tokens")}
    tables["requests"] = tables["requests"].with_columns(pl.Series("request_id", ids, dtype=pl.String))
    return store(path, tables)


def test_twins_are_found_by_their_ids_where_every_request_has_its_own(tmp_path: Path) -> None:
    """Two requests of the same lengths arrive together and swap their numbers."""
    a = capture(tmp_path / "1.trace", (0, 0, 100, 300, 3), (1, 0, 200, 600, 3))
    b = capture(tmp_path / "2.trace", (0, 0, 200, 600, 3), (1, 0, 100, 300, 3))
    by_id = compare(named(a, tmp_path / "a.trace", ["x", "y"]), named(b, tmp_path / "b.trace", ["y", "x"]))
    assert by_id.paired and by_id.per_request["ttft"] == {"n": 2, "p50": 0.0, "p95": 0.0}
    for k, ids in enumerate((["y", "y"], ["y", None], ["u", "v"])):
        c = compare(named(a, tmp_path / f"a{k}.trace", ["x", "y"]), named(b, tmp_path / f"b{k}.trace", ids))
        assert c.paired and c.per_request["ttft"]["p95"] > 0, ids


def test_the_same_id_with_other_lengths_is_no_twin(tmp_path: Path) -> None:
    a = capture(tmp_path / "1.trace", (0, 0, 100, 300, 3))
    b = capture(tmp_path / "2.trace", (0, 0, 100, 300, 4))
    assert not compare(named(a, tmp_path / "a.trace", ["x"]), named(b, tmp_path / "b.trace", ["x"])).paired


def test_what_is_unknown_stays_unknown(tmp_path: Path) -> None:
    a = capture(tmp_path / "a.trace", (0, 0, 100, 300, 1))
    c = compare(a, a)
    assert c.get("itl", "p50").observed is None
    assert c.get("tpot", "mean").error_pct is None
    assert "itl" not in c.errors()


def test_two_replays_are_compared_over_what_the_recording_knows_of_both(tmp_path: Path) -> None:
    """TTFT of request 1 was not observed: it is in neither replay's column beside the recording, nor in their difference."""
    seen = hide(capture(tmp_path / "s.trace", (0, 0, 100, 300, 3), (1, 0, 200, 400, 3)), tmp_path / "h.trace", [1])
    own = capture(tmp_path / "o.trace", (0, 0, 100, 300, 3), (1, 0, 200, 400, 3))
    what_if = capture(tmp_path / "w.trace", (0, 0, 120, 320, 3), (1, 0, 900, 1100, 3))
    both = compare(own, what_if, known=seen)
    assert both.get("ttft", "mean").error_pct == pytest.approx(20.0)
    assert compare(own, what_if).get("ttft", "mean").error_pct == pytest.approx(240.0)
    assert both.get("ttft", "mean").predicted == compare(seen, what_if).get("ttft", "mean").predicted
    # Of what the recording knows of nobody, all are compared.
    none = hide(seen, tmp_path / "n.trace", [0, 1])
    assert compare(own, what_if, known=none).get("ttft", "mean").error_pct == pytest.approx(240.0)
