"""Limits as people write them, and which requests meet them."""

from __future__ import annotations

import polars as pl
import pytest

from hoptrace.errors import UsageError
from hoptrace.slo import goodput, limits_text, parse_slo


def test_limits_are_read() -> None:
    assert parse_slo("ttft=500ms, TPOT=50ms,itl-p99=0.2s,e2e=1min") == {
        "ttft": 500_000_000, "tpot": 50_000_000, "itl_p99": 200_000_000, "e2e": 60_000_000_000,
    }  # fmt: skip
    assert limits_text(parse_slo("ttft=1500us,e2e=2s,queue=7ns")) == "ttft=1500us,e2e=2s,queue=7ns"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no limit"), ("ttft", "is no limit"), ("ttft=5", "no time with a unit"), ("ttft=", "Nothing is no time"),
        ("itl=50ms", "say which of them"), ("tbt=5ms", "No limit can be set on 'tbt'"), ("ttft=1s,ttft=2s", "two limits"),
        ("ttft=0ms", "above 0"), ("ttft=-5ms", "no time"), ("e2e=99999999999999999999s", "below 146 years"), ("ttft=1s,,",
        "no limit"), ("ttft=nans", "no time"), ("ttft=1e3ms", "no time"),
    ],
)  # fmt: skip
def test_what_is_no_limit_is_said(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as e:
        parse_slo(text)
    assert e.value.hint


ROWS = pl.DataFrame(
    {
        # met, late first token, slow tokens, unknown tpot, one token, at the limit
        "ttft": [100, 900, 100, 100, 100, 500],
        "tpot": [10, 10, 90, None, None, 50],
        "output_tokens": [5, 5, 5, 5, 1, 5],
    }
)


def test_goodput_by_hand() -> None:
    g = goodput(ROWS, {"ttft": 500, "tpot": 50}, arrived=10, duration_ns=2_000_000_000)
    assert (g.met, g.unknown, g.broke, g.not_recorded) == (3, 1, {"ttft": 1, "tpot": 1}, {"ttft": 0, "tpot": 1})
    # Two failed and two unfinished ones arrived too: they met nothing. One is unknown, so only bounds are known.
    assert g.share is None and g.per_s is None
    assert g.share_at_least == 0.3 and g.per_s_at_least == 1.5
    known = goodput(ROWS.drop_nulls("tpot"), {"ttft": 500, "tpot": 50}, arrived=8, duration_ns=None)
    assert known.share == 2 / 8 and known.per_s is None


def test_a_request_that_breaks_one_limit_is_not_unknown_for_another() -> None:
    frame = pl.DataFrame({"ttft": [900], "tpot": [None], "output_tokens": [5]}, schema_overrides={"tpot": pl.Int64})
    g = goodput(frame, {"ttft": 500, "tpot": 50}, arrived=1, duration_ns=1)
    assert (g.met, g.unknown) == (0, 0) and g.share == 0.0


def test_nobody_arrived() -> None:
    g = goodput(ROWS.clear(), {"ttft": 500}, arrived=0, duration_ns=None)
    assert g.share is None and g.share_at_least is None and g.as_dict()["met"] == 0
