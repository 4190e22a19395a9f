"""ServeGen's client statistics (github alibaba/ServeGen): not requests but what they were drawn from, so requests are drawn here.

``chunk-N-trace.csv`` has no header: window start (s), rate (requests/s), coefficient of variation, pattern (Gamma, Weibull or
empty for none), and the pattern's two arguments, of which the first is its shape. ``chunk-N-dataset.json`` beside it: per window
of hours, the probability of each prompt and output length, as Python literals; a window of the one belongs to the latest
non-empty window of the other that began before it (as ServeGen's own reader has it).

Arrivals of a window are a renewal process in equilibrium with mean gap 1 ÷ rate and the pattern's shape k. Gaps X are Gamma(k) or
Weibull(k), scaled to that mean; the first arrival comes after U·Y, U uniform, Y drawn from x·f(x) ÷ E[X] (the gap that an
observer falls into: Gamma(k + 1), or for Weibull Y^k ~ Gamma(1 + 1/k)). So the expected count is rate × window, however bursty.
"""

from __future__ import annotations

import ast
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.checked import Requests
from hoptrace.errors import InputError

__all__ = ["IMPORTER", "ServeGen", "renewal"]

_PATTERNS = ("Gamma", "Weibull")
_TRACE, _DATASET = "-trace.csv", "-dataset.json"
_NS = 1_000_000_000
_WRITE_ROWS = 200_000


@dataclass(frozen=True, slots=True)
class _Window:
    start_s: float
    length_s: float
    rate: float
    pattern: str
    shape: float


class ServeGen(Importer):
    """One client's statistics, made into requests."""

    kind = "servegen"
    summary = (
        "ServeGen client statistics (chunk-N-trace.csv with chunk-N-dataset.json beside it): requests are drawn, with --seed"
    )

    def matches(self, path: Path, head: bytes) -> bool:
        fields = head.split(b"\n", 1)[0].decode(errors="replace").strip().split(",")
        if len(fields) == 6:
            return fields[3] in ("", *_PATTERNS) and all(_number(f) is not None for f in (*fields[:3], *fields[4:]))
        return path.name.endswith(_DATASET) and head.lstrip().startswith(b"{") and b'_tokens"' in head

    def companions(self, path: Path) -> list[Path]:
        return [p for p in _pair(path) if p != path]

    def read(self, path: Path, sink: Sink) -> None:
        """Draw the requests of all windows.

        Raises:
            InputError: the other file of the pair is missing, or one is not as ServeGen writes it.
        """
        trace, dataset = _pair(path)
        for p, what in ((trace, "the arrival rates"), (dataset, "the distributions of lengths")):
            if not p.exists():
                raise InputError(f"{path} needs {p.name} beside it ({what}).", hint="ServeGen's files come in pairs.")
        windows = _windows(sink, trace)
        lengths = _lengths(sink, dataset)
        rng = np.random.default_rng(sink.options.seed)
        requests = Requests(sink)
        waiting: list[pl.DataFrame] = []
        expected = without = 0.0
        for w in windows:
            found = next((both for start, both in reversed(lengths) if start <= w.start_s), None)
            if found is None:
                without += w.rate * w.length_s
                continue
            expected += w.rate * w.length_s
            at_s = w.start_s + renewal(rng, w.rate, w.pattern, w.shape, w.length_s)
            prompt, output = (rng.choice(v, len(at_s), p=p) for v, p in found)
            waiting.append(pl.DataFrame({"arrival_ns": (at_s * _NS).round().astype(np.int64), "prompt_tokens": prompt,
                                         "output_tokens": output}))  # fmt: skip
            if sum(f.height for f in waiting) >= _WRITE_ROWS:
                _write(sink, requests, waiting)
        _write(sink, requests, waiting)
        if not requests.next:
            raise InputError(f"{trace} has no window with a rate over 0: there is nothing to draw.")
        _say(sink, requests.next, expected, without)


def renewal(rng: np.random.Generator, rate: float, pattern: str, shape: float, length_s: float) -> np.ndarray[Any, Any]:
    """Arrival times in [0, length_s) of an equilibrium renewal process with ``rate`` per second (see the module)."""
    if pattern == "Gamma":
        scale = 1 / (rate * shape)
        first = rng.gamma(shape + 1, scale)
    else:
        scale = 1 / (rate * math.gamma(1 + 1 / shape))
        first = scale * rng.gamma(1 + 1 / shape) ** (1 / shape)
    at = float(rng.random() * first)
    pieces = [np.array([at])]
    while at < length_s:
        n = int((length_s - at) * rate * 1.2) + 32
        gaps = rng.gamma(shape, scale, n) if pattern == "Gamma" else scale * rng.weibull(shape, n)
        times = at + np.cumsum(gaps)
        pieces.append(times)
        at = float(times[-1])
    all_s = np.concatenate(pieces)
    return all_s[all_s < length_s]


def _pair(path: Path) -> tuple[Path, Path]:
    stem = path.name
    for suffix in (_TRACE, _DATASET):
        stem = stem.removesuffix(suffix)
    if stem == path.name:
        raise InputError(
            f"{path} looks like ServeGen's arrival statistics, but is not named chunk-N{_TRACE}.",
            hint="Keep the names of its pair, or force another kind with --kind.",
        )
    return path.with_name(stem + _TRACE), path.with_name(stem + _DATASET)


def _windows(sink: Sink, path: Path) -> list[_Window]:
    """Windows with a rate over 0. Lines that cannot be read are rejected (and count as records)."""
    found: list[tuple[float, float, str, float]] = []
    with sink.open(path) as f:
        for number, raw in enumerate(f, 1):
            fields = raw.decode(errors="replace").strip().split(",")
            if fields == [""]:
                continue
            numbers = [_number(x) for x in (*fields[:3], *fields[4:6])]
            if len(fields) != 6 or None in numbers or fields[3] not in ("", *_PATTERNS):
                sink.count()
                sink.reject(number, "it is not start, rate, cv, pattern and two arguments", raw.decode(errors="replace").strip())
                continue
            start, rate, _, shape, _ = (float(x or 0) for x in numbers)
            if rate < 0 or (rate > 0 and (not fields[3] or shape <= 0)):
                sink.count()
                sink.reject(number, "its rate is negative, or it has a rate but no pattern", raw.decode(errors="replace").strip())
                continue
            found.append((start, rate, fields[3], shape))
    found.sort(key=lambda w: w[0])
    windows = []
    for i, (start, rate, pattern, shape) in enumerate(found):
        after = found[i + 1][0] - start if i + 1 < len(found) else (start - found[i - 1][0] if i else 0)
        if rate > 0 and after > 0:
            windows.append(_Window(start, after, rate, pattern, shape))
    return windows


def _lengths(sink: Sink, path: Path) -> list[tuple[float, tuple[Any, Any]]]:
    """Per non-empty window, ascending: (start s, ((prompt lengths, probabilities), (output lengths, probabilities)))."""
    found: list[tuple[float, tuple[Any, Any]]] = []
    try:
        with sink.open(path) as f:
            data = json.load(f)
        for start, fields in data.items():
            if "input_tokens" not in fields or "output_tokens" not in fields:
                raise InputError(
                    f"{path} has no lengths of prompts and outputs in tokens (it has {', '.join(fields)}).",
                    hint="Only ServeGen's language and reason clients can be imported.",
                )
            both = [ast.literal_eval(fields[n]) for n in ("input_tokens", "output_tokens")]
            if all(both):
                pairs = tuple((np.array(list(d), dtype=np.int64), np.array(list(d.values()), dtype=np.float64)) for d in both)
                if any((v < 0).any() or (p < 0).any() or not p.sum() > 0 for v, p in pairs):
                    raise ValueError("a length or a probability is negative")
                found.append((float(start), (_normal(*pairs[0]), _normal(*pairs[1]))))
    except InputError:
        raise
    except (ValueError, TypeError, AttributeError, SyntaxError) as e:
        raise InputError(
            f"{path} is not as ServeGen writes it ({str(e).splitlines()[0] if str(e) else type(e).__name__})."
        ) from None
    if not found:
        raise InputError(f"{path} has no window with lengths.")
    return sorted(found, key=lambda w: w[0])


def _normal(values: Any, chances: Any) -> tuple[Any, Any]:
    return values, chances / chances.sum()


def _write(sink: Sink, requests: Requests, waiting: list[pl.DataFrame]) -> None:
    if not waiting:
        return
    frame = pl.concat(waiting)
    waiting.clear()
    # A prompt of no tokens asks nothing.
    empty = frame["prompt_tokens"] < 1
    sink.tally("Drawn prompts of length 0 (they count as 1 token): {n}.", int(empty.sum()))
    frame = frame.with_columns(
        pl.col("prompt_tokens").clip(1), pl.col("arrival_ns").alias("intended_ns"), pl.lit("intended").alias("arrival_of")
    )
    sink.count(frame.height)
    requests.write(requests.number(frame))


def _say(sink: Sink, n: int, expected: float, without: float) -> None:
    sink.epoch = "relative"
    sink.manifest.title = f"{n:,} synthetic requests (seed {sink.options.seed}) after {sink.path.name}"
    sink.note(
        f"Synthetic: {n:,} requests were drawn with seed {sink.options.seed} from one client's statistics "
        f"(expected {expected:,.0f}: rate × window, summed). Gaps have the window's rate, pattern and shape; prompt and output "
        "lengths are drawn independently."
    )
    if without:
        sink.note(f"Windows before the first one with lengths would have given {without:,.0f} requests: they were left out.")


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


IMPORTER = ServeGen()
