"""`hoptrace sql` and `hoptrace.open` as somebody uses them who does not know the tables yet."""

from __future__ import annotations

import csv
import io
import json

import polars as pl
import pytest
from click.testing import CliRunner, Result

import hoptrace
from hoptrace.analysis.terms import terms
from hoptrace.cli.sql import command
from hoptrace.errors import UsageError
from hoptrace.metrics import summary
from hoptrace.samples import sample
from hoptrace.schema import TABLES, table

TRACE = str(sample("llamacpp-four-slots"))


def run(*words: str, given: str | None = None) -> Result:
    return CliRunner().invoke(command, [TRACE, *words], input=given)


@pytest.mark.parametrize("query", ["SHOW TABLES", "SELECT table_name AS name FROM information_schema.tables", "show all tables"])
def test_what_tables_there_are(query: str) -> None:
    assert set(hoptrace.open(TRACE).sql(query)["name"]) == set(TABLES)


def test_what_columns_there_are() -> None:
    trace = hoptrace.open(TRACE)
    assert trace.sql("DESCRIBE waits")["column_name"].to_list() == list(table("waits").names)
    found = trace.sql("SELECT column_name FROM information_schema.columns WHERE table_name = 'blocks' ORDER BY ordinal_position")
    assert found["column_name"].to_list() == list(table("blocks").names)


def test_a_table_that_is_named_beside_a_listing_keeps_its_rows() -> None:
    query = "SELECT count(*) AS n, (SELECT count(*) FROM information_schema.tables) AS t FROM requests"
    assert hoptrace.open(TRACE).sql(query).row(0) == (48, len(TABLES))


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT * FROM request", "There is no table request. Did you mean requests?"), ("SELECT * FROM zzz",
        "There is no table zzz. Tables:"), ("SELECT tok FROM tokens", "tok"), ("SELEC", "syntax error"), ("   ", "empty"),
    ],
)  # fmt: skip
def test_errors_are_a_sentence(query: str, said: str) -> None:
    error = run(query).exception
    assert isinstance(error, UsageError) and said in str(error)


def test_sums_beyond_64_bits_keep_their_digits() -> None:
    query = "SELECT sum(9223372036854775807::BIGINT) AS s, sum(request) AS n FROM requests"
    assert hoptrace.open(TRACE).sql(query).row(0) == (48 * (2**63 - 1), 1128)
    assert json.loads(run(query, "--json").stdout) == [{"s": 48 * (2**63 - 1), "n": 1128}]
    assert str(48 * (2**63 - 1)) in run(query).stdout and str(48 * (2**63 - 1)) in run(query, "--csv").stdout


def test_json_and_csv_give_every_row() -> None:
    query = "SELECT request, index, time_ns, count FROM tokens ORDER BY request, index"
    rows = json.loads(run(query, "--json").stdout)
    read = list(csv.reader(io.StringIO(run(query, "--csv").stdout)))
    assert len(rows) == 736 == len(read) - 1
    assert [str(v) for v in rows[5].values()] == read[6]
    assert json.loads(run("SELECT 'nan'::DOUBLE AS x, [1, NULL] AS l", "--json").stdout) == [{"x": None, "l": [1, None]}]
    assert json.loads(run("SELECT * FROM tokens WHERE false", "--json").stdout) == []


def test_from_standard_input_and_to_the_terminal() -> None:
    assert "48" in run("-", given="SELECT count(*) AS n FROM requests").stdout
    long = run("FROM tokens")
    assert "686 more rows; --csv or --json prints all." in long.stderr and run("FROM tokens", "-q").stderr == ""
    assert isinstance(run("SELECT 1", "--json", "--csv").exception, UsageError)


def test_what_explain_prints_can_be_run() -> None:
    found = json.loads(run(terms()["ttft"].sql, "--json").stdout)
    assert found == [summary(hoptrace.open(TRACE))["ttft"].as_dict()]


def test_open_gives_lazy_frames_and_duckdb() -> None:
    trace = hoptrace.open(TRACE)
    assert all(isinstance(trace.table(name), pl.LazyFrame) for name in TABLES)
    with trace.duckdb("requests", "tokens") as con:
        joined = con.sql("SELECT count(*) FROM tokens JOIN requests USING (request)").fetchall()
    assert joined == [(736,)]
    with pytest.raises(KeyError, match="no table 'token'; tables: requests"):
        trace.table("token")
