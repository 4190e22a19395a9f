"""ServeGen: requests drawn from statistics."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support.imports import DATA, SHARED, rows, told

import hoptrace
from hoptrace.collectors.files.base import Options
from hoptrace.collectors.files.run import import_files
from hoptrace.collectors.files.servegen import renewal
from hoptrace.errors import InputError

PAIR = DATA / "import" / "servegen"
TRACE, DATASET = PAIR / "chunk-1-trace.csv", PAIR / "chunk-1-dataset.json"


def test_a_pair_becomes_requests_and_says_so(tmp_path: Path) -> None:
    done = import_files([TRACE], tmp_path / "out.trace", options=Options(seed=7))
    frame = rows(tmp_path)
    manifest = done.manifest
    # rate × 600 s over the cut's windows: 19,758 (see the file).
    assert told(done, "drawn with seed 7") and told(done, "(expected 19,758: rate × window, summed)")
    assert manifest.title == f"{frame.height:,} synthetic requests (seed 7) after chunk-1-trace.csv"
    assert abs(frame.height - 19_758) < 2_000
    assert (done.read, done.rejected) == (frame.height, 0)
    assert [e["file"] for e in manifest.imported_from] == ["chunk-1-trace.csv", "chunk-1-dataset.json"]
    assert frame["arrival_of"].unique().to_list() == ["intended"]
    # Windows of rate 0 (up to 31,800 s) have no arrivals.
    assert int(frame["arrival_ns"].min()) >= 31_800 * 10**9  # type: ignore[arg-type]
    assert int(frame["arrival_ns"].max()) < 42_000 * 10**9  # type: ignore[arg-type]


def test_lengths_are_those_of_the_window(tmp_path: Path) -> None:
    import ast
    import json

    import_files([TRACE], tmp_path / "out.trace")
    window = json.loads(DATASET.read_text())["21600"]
    for column, name in (("prompt_tokens", "input_tokens"), ("output_tokens", "output_tokens")):
        chances = ast.literal_eval(window[name])
        values = rows(tmp_path)[column].to_numpy()
        assert set(values.tolist()) <= set(chances)
        mean = sum(v * p for v, p in chances.items()) / sum(chances.values())
        spread = (sum((v - mean) ** 2 * p for v, p in chances.items()) / sum(chances.values())) ** 0.5
        assert abs(values.mean() - mean) < 5 * spread / len(values) ** 0.5


def test_the_same_seed_gives_the_same_requests(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        import_files([TRACE], tmp_path / f"{name}.trace", options=Options(seed=seed))
    a, b, c = (rows(tmp_path, out=f"{n}.trace") for n in "abc")
    assert a.equals(b) and not a.equals(c)


def test_both_files_named_are_one_import(tmp_path: Path) -> None:
    import_files([DATASET, TRACE], tmp_path / "a.trace")
    import_files([TRACE], tmp_path / "b.trace")
    drop = ["source", "hash_space"]
    assert rows(tmp_path, out="a.trace").drop(drop).equals(rows(tmp_path, out="b.trace").drop(drop))


def test_one_of_the_pair_is_missing_or_broken(tmp_path: Path) -> None:
    shutil.copy(TRACE, tmp_path)
    with pytest.raises(InputError, match=r"needs chunk-1-dataset.json beside it"):
        import_files([tmp_path / TRACE.name], tmp_path / "x.trace")
    for text, says in (
        ("{", "is not as ServeGen writes it"),
        ('{"0": {"input_tokens": "{}", "output_tokens": "{}"}}', "has no window with lengths"),
        ('{"0": {"text_tokens": "{1: 1.0}"}}', "no lengths of prompts and outputs in tokens"),
        ('{"0": {"input_tokens": "__import__(\'os\').abort()", "output_tokens": "{1: 1}"}}', "is not as ServeGen writes it"),
        ('{"0": {"input_tokens": "{1: -1.0}", "output_tokens": "{1: 1}"}}', "is not as ServeGen writes it"),
    ):
        (tmp_path / DATASET.name).write_text(text)
        with pytest.raises(InputError, match=says):
            import_files([tmp_path / TRACE.name], tmp_path / "x.trace")
    shutil.copy(TRACE, tmp_path / "renamed.csv")
    with pytest.raises(InputError, match=r"not named chunk-N-trace\.csv"):
        import_files([tmp_path / "renamed.csv"], tmp_path / "x.trace")
    assert not (tmp_path / "x.trace").exists()


def test_lines_that_are_none_are_rejected(tmp_path: Path) -> None:
    shutil.copy(DATASET, tmp_path)
    (tmp_path / TRACE.name).write_text(
        "21600,0.5,1,Gamma,1,1\n22200,x,1,Gamma,1,1\n22800,-1,1,Gamma,1,1\n23400,0.5,1,,0,0\n24000,0,0,,0,0\n"
    )
    done = import_files([tmp_path / TRACE.name], tmp_path / "out.trace")
    assert (done.rejected, done.read - done.written) == (3, 3)
    assert [r["row"] for r in done.first_rejects] == [2, 3, 4]
    # The window goes on to the next line that can be read.
    assert told(done, "(expected 1,200:")
    assert hoptrace.open(tmp_path / "out.trace").rows("requests") == done.written


@pytest.mark.parametrize(
    ("pattern", "shape"), [("Gamma", 0.3), ("Gamma", 1.0), ("Gamma", 4.0), ("Weibull", 0.5), ("Weibull", 2.0)]
)
def test_a_renewal_process_in_equilibrium_keeps_its_rate(pattern: str, shape: float) -> None:
    """The expected count of a short window is rate × window, however bursty: an ordinary renewal process would be off."""
    rng = np.random.default_rng(3)
    counts = np.array([len(renewal(rng, 2.0, pattern, shape, 1.5)) for _ in range(20_000)])
    assert abs(counts.mean() - 3.0) < 5 * counts.std() / len(counts) ** 0.5
    times = renewal(rng, 50.0, pattern, shape, 2_000.0)
    gaps = np.diff(times)
    assert (gaps >= 0).all() and times[0] >= 0 and times[-1] < 2_000
    cv2 = {"Gamma": lambda k: 1 / k, "Weibull": lambda k: {0.5: 5.0, 2.0: 4 / np.pi - 1}[k]}[pattern](shape)
    assert abs(gaps.var() / gaps.mean() ** 2 / cv2 - 1) < 0.1


def test_the_whole_client(tmp_path: Path) -> None:
    path = SHARED / "requests" / "servegen" / "language_m-large_chunk-1-trace.csv"
    if not path.exists():
        pytest.skip("extra check: needs ../shared, which a user's clone lacks")
    done = import_files([path], tmp_path / "out.trace")
    # INDEX.md: expected requests = sum(rate × 600 s) = 361631.0.
    assert told(done, "(expected 361,631: rate × window, summed)")
    assert abs(done.written - 361_631) < 0.05 * 361_631
