"""Access logs by a mapping, nginx's and Envoy's by their usual names, and times in any format."""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.imports import rows, run, told

import hoptrace
from hoptrace.collectors.files.log_formats import line_format, sniff_line
from hoptrace.collectors.files.mapping import Field, parse_map
from hoptrace.collectors.files.values import Times, duration_ns, whole
from hoptrace.errors import HoptraceError, InputError, UsageError
from hoptrace.validate import validate

# 2026-10-10 13:55:36 UTC
AT_NS = 1_791_640_536_000_000_000


def _clean(folder: Path) -> None:
    """The trace keeps its laws."""
    assert not [f for f in validate(hoptrace.open(folder / "out.trace")) if f.level == "error"]


# -- the mapping --------------------------------------------------------------------------------------------------------


def test_a_mapping_is_read() -> None:
    text = 'prompt_tokens=Ctx, arrival=ts:iso8601,duration_ms=took,ttft="a,b=c:d":s,finish="end":"%d.%m.%Y, %H:%M:%S"'
    assert parse_map(text) == [
        Field("prompt_tokens", "Ctx"), Field("arrival", "ts", "iso8601"), Field("duration", "took", "ms"),
        Field("ttft", "a,b=c:d", "s"), Field("finish", "end", "%d.%m.%Y, %H:%M:%S"),
    ]  # fmt: skip
    assert parse_map("arrival_ns=t")[0] == Field("arrival", "t", "ns")
    assert parse_map("arrival=ts:%d/%b/%Y:%H:%M:%S %z")[0].form == "%d/%b/%Y:%H:%M:%S %z"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("promt_tokens=a", "there is no target 'promt_tokens'. Did you mean prompt_tokens?"),
        ("output=a", "There are: arrival|Did you mean output_tokens"),
        ("prompt_tokens", "names no column"),
        ("", "names no column"),
        ("duration=a", "duration needs its unit. Write duration_s"),
        ("duration=a:iso8601", "duration needs its unit"),
        ("arrival_ms=a:s", "says its unit twice"),
        ("arrival=a:isoo", "no time format 'isoo'"),
        ("prompt_tokens=a:s", "takes no format"),
        ("model=a,model=b", "names model twice"),
        ('model="a', "not closed"),
    ],
)
def test_a_wrong_mapping_names_the_remedy(text: str, says: str) -> None:
    with pytest.raises(UsageError) as e:
        parse_map(text)
    assert any(s in str(e.value) for s in says.split("|"))


CSV = """ts,Ctx,Gen,took,code,hit,conv,who
2026-10-10T13:55:36.25Z,100,20,1500,200,64,c1,gpt
2026-10-10T15:55:37+02:00,200,10,250.5,503,-,c1,gpt
2026-10-10 13:55:38,300,,oops,200,400,,gpt
never,1,1,1,200,1,,gpt
"""
MAP = (
    "arrival=ts:iso8601,prompt_tokens=Ctx,output_tokens=Gen,duration_ms=took,status=code,cached_tokens=hit,session=conv,model=who"
)


def _as_json(text: str) -> str:
    names, *lines = (line.split(",") for line in text.splitlines())
    return "".join(json.dumps(dict(zip(names, line, strict=True))) + "\n" for line in lines)


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl"])
def test_a_mapped_log(tmp_path: Path, form: str) -> None:
    text = {"csv": CSV, "tsv": CSV.replace(",", "\t"), "jsonl": _as_json(CSV)}[form]
    done = run(tmp_path, text, mapping=MAP)
    frame = rows(tmp_path)
    assert (done.read, done.written, done.rejected) == (4, 3, 1)
    assert done.first_rejects[0]["reason"] == "when it arrived cannot be told (ts, took)"
    assert (frame["arrival_ns"] - AT_NS).to_list() == [250_000_000, 1_000_000_000, 2_000_000_000]
    assert (frame["finish_ns"] - AT_NS).to_list() == [1_750_000_000, 1_250_500_000, None]
    assert frame["received_ns"].to_list() == frame["arrival_ns"].to_list()
    assert frame["prompt_tokens"].to_list() == [100, 200, 300]
    assert frame["output_tokens"].to_list() == [20, 10, None]
    assert frame["session"].to_list() == ["c1", "c1", None]
    assert frame["error"].to_list() == [None, "The log says status 503.", None]
    # 400 cached of 300 prompt tokens cannot be.
    assert rows(tmp_path, "stages")["cached_tokens"].to_list() == [64, None, None]
    assert told(done, "Requests with more cached tokens than their prompt has tokens (that value is left unknown): 1.")
    assert told(done, "Requests with a status of 400 or more, or 0 (they failed, and a replay leaves them out): 1.")
    assert done.manifest.values_dropped == {
        "requests.duration: took is not a length of time": 1, "stages.cached_tokens: more than the prompt": 1,
    }  # fmt: skip
    _clean(tmp_path)


def test_nested_paths_and_keys_with_dots(tmp_path: Path) -> None:
    text = (
        '{"t": 1791640536.5, "usage": {"prompt": {"n": 7}}, "gen.ai": 3}\n{"t": 1791640537, "usage": null, "gen.ai": 4}\n'
        '{"t": 1791640538, "usage": {"prompt": 5}}\n'
    )
    done = run(tmp_path, text, mapping="arrival=t,prompt_tokens=usage.prompt.n,output_tokens=gen.ai")
    assert rows(tmp_path).select("prompt_tokens", "output_tokens").rows() == [(7, 3), (None, 4), (None, None)]
    assert rows(tmp_path)["arrival_ns"][0] == AT_NS + 500_000_000
    assert told(done, "t (arrival) was read as Unix seconds, by its looks.")


def test_an_arrival_from_its_end(tmp_path: Path) -> None:
    run(tmp_path, "end,took\n1791640540.25,1.5\n", mapping="finish_s=end,duration_s=took")
    row = rows(tmp_path).row(0, named=True)
    assert (row["arrival_ns"] - AT_NS, row["finish_ns"] - AT_NS) == (2_750_000_000, 4_250_000_000)


def test_of_intended_sent_and_received_the_earliest_is_the_arrival(tmp_path: Path) -> None:
    run(tmp_path, "i,s,r\n5,6,7\n,6,5.5\n", mapping="intended_s=i,sent_s=s,received_s=r")
    assert rows(tmp_path).select("arrival_ns", "arrival_of").rows() == [(5 * 10**9, "intended"), (5_500_000_000, "received")]
    _clean(tmp_path)


def test_times_that_contradict_each_other_are_left_unknown(tmp_path: Path) -> None:
    done = run(
        tmp_path, "a,f,t\n10,9,1\n10,20,11\n10,20,-1\n10,20,3\n", mapping="arrival_s=a,finish_s=f,ttft_s=t,server=a"
    )  # fmt: skip
    frame = rows(tmp_path)
    assert frame["finish_ns"].to_list() == [None, 20 * 10**9, 20 * 10**9, 20 * 10**9]
    assert frame["first_token_ns"].to_list() == [11 * 10**9, None, None, 13 * 10**9]
    assert told(done, "Requests that end before they arrive (their end is left unknown): 1.")
    assert told(done, "Requests whose first token lies outside of their time (it is left unknown): 1.")
    assert done.manifest.values_dropped["requests.ttft: negative"] == 1
    assert [s.name for s in done.manifest.servers] == ["10"]
    _clean(tmp_path)


def test_every_moment_lies_between_those_around_it(tmp_path: Path) -> None:
    # arrival, queued, scheduled, first, last, end: as they should be, and then one at a time as it cannot be.
    text = (
        "a,q,s,f,l,e\n100,110,120,130,140,150\n100,110,120,130,125,150\n100,110,120,130,160,150\n100,90,120,130,140,150\n"
        "100,110,105,130,140,150\n100,110,140,130,145,150\n100,110,120,95,140,150\n100,135,,130,140,150\n100,110,120,,90,\n"
    )
    done = run(tmp_path, text, mapping="arrival_ms=a,queued_ms=q,scheduled_ms=s,first_token_ms=f,last_token_ms=l,finish_ms=e")
    names = ("queued_ns", "scheduled_ns", "first_token_ns", "last_token_ns", "finish_ns")
    ms = [tuple(None if t is None else t // 10**6 for t in r) for r in rows(tmp_path).select(names).rows()]
    assert ms == [
        (110, 120, 130, 140, 150), (110, 120, 130, None, 150), (110, 120, 130, None, 150), (None, 120, 130, 140, 150),
        (110, None, 130, 140, 150), (110, None, 130, 145, 150), (110, 120, None, 140, 150), (None, None, 130, 140, 150),
        (110, 120, None, None, None),
    ]  # fmt: skip
    assert told(done, "Requests whose last token lies outside of their time (it is left unknown): 3.")
    assert told(done, "Requests whose scheduling lies outside of their time (it is left unknown): 2.")
    assert done.manifest.values_dropped["requests.queued_ns: contradicts other times"] == 2
    _clean(tmp_path)


@given(st.lists(st.tuples(*[st.one_of(st.none(), st.integers(0, 9))] * 5), min_size=1, max_size=20))
def test_whatever_times_a_log_has_the_trace_keeps_their_order(table: list[tuple[int | None, ...]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        lines = [",".join("" if v is None else str(v) for v in (3, *r)) for r in table]
        text = "a,q,s,f,l,e\n" + "\n".join(lines) + "\n"
        run(Path(name), text, mapping="arrival_s=a,queued_s=q,scheduled_s=s,first_token_s=f,last_token_s=l,finish_s=e")
        _clean(Path(name))


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ("arrival=tss:iso8601", "no column 'tss' (--map, for arrival). Did you mean ts?"),
        ("prompt_tokens=Ctx", "is not told. Map arrival, or finish with duration_s"),
        ("finish=ts", "is not told"),
        ("arrival=ts,received=ts", "which are one"),
    ],
)
def test_a_mapping_that_does_not_fit(tmp_path: Path, mapping: str, says: str) -> None:
    for i, text in enumerate((CSV, _as_json(CSV))):
        with pytest.raises(UsageError) as e:
            run(tmp_path, text, f"f{i}", mapping=mapping)
        assert says in str(e.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f0", "f1"]


def test_a_context_of_ones_own(tmp_path: Path) -> None:
    done = run(
        tmp_path, "t,p,o,m\n1,5,5,10\n2,5,6,10\n3,5,,4\n4,5,5,\n",
        mapping="arrival_s=t,prompt_tokens=p,output_tokens=o,context_tokens=m",
    )  # fmt: skip
    assert told(done, "Requests longer than the context of their model, kept as they are: 2.")
    assert rows(tmp_path).height == 4


def test_a_json_array_names_the_way_out(tmp_path: Path) -> None:
    for more in ({}, {"mapping": "arrival_s=t"}):
        with pytest.raises(InputError, match=r"one JSON array.*jq -c"):
            run(tmp_path, '[{"t": 1}]', **more)


def test_a_unit_that_cannot_be_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the unit of '5' cannot be told. Say it: …=COLUMN:s"):
        run(tmp_path, "t\n5\n", mapping="arrival=t")
    with pytest.raises(UsageError, match="not for the kind azure"):
        run(tmp_path, "t\n5\n", mapping="arrival_s=t", kind="azure")
    # Of two units, and ns that count from the log's own start.
    for text in ("t\n1791590400\n1791590401000\n", "t\n0\n120000000\n3000000000\n"):
        with pytest.raises(InputError, match=r"the unit of .* cannot be told"):
            run(tmp_path, text, mapping="arrival=t")


def test_a_time_of_another_size_is_none_where_the_unit_was_told_by_size(tmp_path: Path) -> None:
    text = "t\n" + "1791640536\n" * 100 + "5\n1791640536000\n1791640537\n"
    done = run(tmp_path, text, mapping="arrival=t")
    assert (done.written, done.reasons) == (101, {"when it arrived cannot be told (t)": 2})
    assert set(rows(tmp_path)["arrival_ns"]) == {AT_NS, AT_NS + 10**9}


def test_a_zone_by_its_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"%Z, column t.*offsets \(%z\)"):
        run(tmp_path, "t\n2026-10-10 10:00:00 CET\n", mapping="arrival=t:%Y-%m-%d %H:%M:%S %Z")


# -- nginx and Envoy ----------------------------------------------------------------------------------------------------

NGINX = (
    '1.2.3.4 - - [10/Oct/2026:13:55:36 +0000] "POST /v1/chat/completions HTTP/1.1" 200 2326 "-" "curl/8"{}\n'
    '1.2.3.4 - - [10/Oct/2026:15:55:37 +0200] "GET /health HTTP/1.1" 200 2 "-" "kube-probe"{}\n'
    '1.2.3.4 - - [10/Oct/2026:13:55:38 +0000] "POST /v1/completions?a=1 HTTP/1.1" 499 0 "-" "x \\x22y\\x22"{}\n'
)


@pytest.mark.parametrize("times", [" 1.234 1.230", ' rt=1.234 urt="1.230"', " 1.234 -", ' "1.234" "1.230"'])
def test_nginx_combined_with_request_time(tmp_path: Path, times: str) -> None:
    done = run(tmp_path, NGINX.format(times, times, times) + "rubbish\n")
    frame = rows(tmp_path)
    # The line is written at the end: the request came $request_time before.
    assert (frame["arrival_ns"] - AT_NS).to_list() == [-1_234_000_000, 766_000_000]
    assert (frame["finish_ns"] - AT_NS).to_list() == [0, 2_000_000_000]
    assert frame["error"].to_list() == [None, "The log says status 499."]
    assert done.reasons == {"its path is none that generates tokens": 1, "the line is not of the format nginx": 1}
    assert [(r["row"], r["value"]) for r in done.first_rejects] == [(2, "/health"), (4, None)]
    assert told(done, "time_local is in whole seconds") and told(done, "(nginx: finish = time_local, duration = request_time")
    _clean(tmp_path)


def test_nginx_without_request_time_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Add \$request_time to nginx's log_format"):
        run(tmp_path, NGINX.format("", "", ""))


def test_nginx_json(tmp_path: Path) -> None:
    line = {
        "msec": "1791640536.123",
        "request_time": "0.123",
        "status": 200,
        "request": "POST /v1/completions HTTP/1.1",
        "request_id": "r",
    }
    run(tmp_path, json.dumps(line) + "\n")
    row = rows(tmp_path).row(0, named=True)
    assert (row["arrival_ns"], row["finish_ns"], row["request_id"]) == (AT_NS, AT_NS + 123_000_000, "r")


# Envoy's documentation has this line for its default format, and Istio's one with its own.
ENVOY = (
    '[2026-10-10T13:55:36.310Z] "POST {} HTTP/2" 200 - 154 0 226 100 "10.0.35.28" "nsq2http" "cc21d9b0" "locations" '
    '"tcp://10.0.2.1:80"\n'
)
ISTIO = (
    '[2026-10-10T13:55:36.310Z] "POST {} HTTP/1.1" 418 - via_upstream - "-" 0 135 226 4 "-" "curl/7.73.0-DEV" "cc21d9b0" '
    '"httpbin:8000" "127.0.0.1:80"\n'
)


@pytest.mark.parametrize(("text", "server"), [(ENVOY, "tcp://10.0.2.1:80"), (ISTIO, "127.0.0.1:80")])
def test_envoy_text(tmp_path: Path, text: str, server: str) -> None:
    done = run(tmp_path, text.format("/v1/completions") + text.format("/status/418"))
    row = rows(tmp_path).row(0, named=True)
    assert (row["arrival_ns"] - AT_NS, row["finish_ns"] - AT_NS, row["request_id"]) == (310_000_000, 536_000_000, "cc21d9b0")
    assert rows(tmp_path, "stages")["server"].to_list() == [server]
    assert (done.read, done.written) == (2, 1)
    _clean(tmp_path)


def test_envoy_json(tmp_path: Path) -> None:
    line = {
        "start_time": "2026-10-10T13:55:36.310Z",
        "duration": 226,
        "response_code": 0,
        "path": "/v1/messages",
        "upstream_host": None,
    }
    run(tmp_path, json.dumps(line) + "\n")
    row = rows(tmp_path).row(0, named=True)
    assert (row["finish_ns"] - AT_NS, row["error"]) == (536_000_000, "The log says status 0.")


def test_a_format_of_ones_own_and_a_mapping(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        '[10/Oct/2026:13:55:36 +0000] a "7" in 2.5\n[10/Oct/2026:13:55:37 +0000] b "8" in 3\nno\n',
        line_format='[$time_local] $name "$n" in $took',
        mapping="arrival=time_local:nginx,prompt_tokens=n,session=name,duration_s=took",
    )
    assert rows(tmp_path).select("session", "prompt_tokens").rows() == [("a", 7), ("b", 8)]
    assert (done.read, done.rejected) == (3, 1)
    run(
        tmp_path,
        '[2026-10-10T13:55:36Z] 7 "POST /generate"\n',
        line_format='[%START_TIME%] %DURATION% "%REQ(:METHOD)% %REQ(:PATH)%"',
        mapping="arrival=start_time:iso8601,duration_ms=duration",
        out="o2.trace",
    )
    assert rows(tmp_path, out="o2.trace").height == 1


@pytest.mark.parametrize("text", ["apache", "$a $a", "100 %"])
def test_a_wrong_format(text: str) -> None:
    with pytest.raises(UsageError):
        line_format(text)
    assert sniff_line("hello") is None


# -- times and numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("2026-10-10T13:55:36Z", None), ("2026-10-10 13:55:36", None), ("2026-10-10T13:55:36.000+00:00", None),
        ("2026-10-10T15:55:36+0200", None), ("2026-10-10T15:55:36+02", None), ("2026-10-10 13:55:36,000", None),
        ("2026-10-10 13:55:36 UTC", None), ("2026-10-10T13:55:36 +00:00", None), ("1791640536", None), ("1791640536000", None),
        ("1791640536000000", None), ("1791640536000000000", None), ("1791640536.0", "s"), ("1.791640536e9", "s"),
        ("10/Oct/2026:15:55:36 +0200", None), ("10.10.2026 13:55:36", "%d.%m.%Y %H:%M:%S"), (" 1791640536 ", "s"),
    ],
)  # fmt: skip
def test_one_moment_in_many_words(text: str, form: str | None) -> None:
    assert Times("t", form).read(pl.Series([text])).value.to_list() == [AT_NS]


@given(st.integers(0, 4 * 10**18), st.sampled_from(["s", "ms", "us", "ns"]))
def test_epochs_are_exact_to_the_ns(ns: int, unit: str) -> None:
    digits = {"s": 9, "ms": 6, "us": 3, "ns": 0}[unit]
    text = f"{ns // 10**digits}.{ns % 10**digits:0{digits}d}" if digits else str(ns)
    assert duration_ns(pl.Series([text]), unit).value.to_list() == [ns]


@given(st.integers(10**9, 7 * 10**9), st.integers(0, 999_999), st.integers(-14 * 60, 14 * 60), st.sampled_from("T "))
def test_iso_times_with_any_offset(second: int, micros: int, minutes: int, between: str) -> None:
    utc = moment = datetime.fromtimestamp(second, UTC).replace(microsecond=micros)
    expected = (utc - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000
    sign, away = "-" if minutes < 0 else "+", abs(minutes)
    text = f"{moment:%Y-%m-%d}{between}{moment:%H:%M:%S}.{moment.microsecond:06d}{sign}{away // 60:02d}:{away % 60:02d}"
    read = Times("t", "iso8601").read(pl.Series([text, "2026-10-10 13:55:36"]))
    assert read.value.to_list() == [expected - minutes * 60_000_000_000, AT_NS]


@given(st.lists(st.one_of(st.none(), st.text(max_size=8), st.integers().map(str), st.floats().map(str))))
def test_whole_numbers_are_read_or_marked_or_missing(texts: list[str | None]) -> None:
    read = whole(pl.Series(texts, dtype=pl.String))
    bad = read.bad.to_list() if read.bad is not None else [False] * len(texts)
    for text, value, wrong in zip(texts, read.value.to_list(), bad, strict=True):
        if value is not None:
            assert text is not None and float(text) == value and not wrong
        elif not wrong:
            assert text is None or text.strip().casefold() in ("", "nan", "null", "none", "na", "n/a", "-")


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.sampled_from(["s", "ms", "us", "ns"]))
def test_whole_lengths_of_time_are_exact_or_not_taken(numbers: list[int], unit: str) -> None:
    per = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[unit]
    read = duration_ns(pl.Series([str(n) for n in numbers]), unit)
    bad = read.bad.to_list() if read.bad is not None else [False] * len(numbers)
    for n, value, wrong in zip(numbers, read.value.to_list(), bad, strict=True):
        fits = -(2**63) <= n * per < 2**63
        assert (value == n * per and not wrong) if fits else (value is None and wrong)


@pytest.mark.parametrize(
    ("form", "texts", "expected"),
    [
        (None, ["2262-04-11T23:47:16Z", "2262-04-12T00:00:00Z", "2300-10-10T00:00:10Z"], [9_223_372_036 * 10**9, None, None]),
        (None, ["1677-01-01 00:00:00", "1600-01-01 00:00:00", "1970-01-01 00:00:01"], [None, None, 10**9]),
        ("%d.%m.%Y %H:%M:%S", ["10.10.2300 00:00:10", "10.10.2026 13:55:36"], [None, AT_NS]),
        ("nginx", ["10/Oct/2300:13:55:36 +0000", "10/Oct/2026:13:55:36 +0000"], [None, AT_NS]),
    ],
)
def test_years_that_64_bits_of_ns_do_not_reach_are_no_times(form: str | None, texts: list[str], expected: list[int]) -> None:
    read = Times("t", form).read(pl.Series(texts))
    assert read.value.to_list() == expected
    assert read.bad is not None and read.bad.to_list() == [e is None for e in expected]


def test_a_format_that_does_not_exist() -> None:
    with pytest.raises(HoptraceError, match="no time format 'x'"):
        Times("t", "x")
    with pytest.raises(InputError, match="no time that hoptrace knows"):
        Times("t").read(pl.Series(["yesterday"]))
