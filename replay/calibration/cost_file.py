"""``hoptrace-cost/1``: a calibrated step cost with the times outside steps, and what it was measured on, as one JSON file.

Its keys are in docs/calibrate.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hoptrace.errors import EnvironmentProblem, InputError
from hoptrace.manifest import Server
from hoptrace.replay.calibration.fitting import Calibrated
from hoptrace.replay.overheads import Overheads
from hoptrace.stepcost import StepCost

__all__ = ["FORMAT", "CostFile", "cost_file", "read_cost_file", "write_cost_file"]

FORMAT = "hoptrace-cost/1"
_NAME, _MAJOR = "hoptrace-cost", 1
_MOST_BYTES = 64 << 20
_AGAIN = "Write it again: hoptrace calibrate T.trace -o cost.json."
# Of the server only what a step's time may hang on: no path, host, process or URL of the machine that it ran on.
_SERVER = (
    "name", "engine", "engine_version", "model", "parameters", "weight_bytes", "layers", "kv_heads", "heads", "head_size",
    "hidden_size", "kv_dtype", "max_sequences", "max_batched_tokens", "context_tokens", "block_size_tokens", "block_count",
    "kv_capacity_tokens", "prefix_caching",
)  # fmt: skip
_CONFIG = (
    "dtype", "quantization", "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "async_scheduling",
    "enforce_eager", "attention_backend", "n_ubatch", "n_gpu_layers", "threads",
)  # fmt: skip


@dataclass(frozen=True)
class CostFile:
    """A cost file's content.

    Attributes:
        cost: of a step. outside: the times outside steps. server: what it was measured on. platform: the machine's name, or null.
        captures: what it was fitted to, one table each (trace, created_utc, steps, steps_origin, requests, duration_ns, speed,
            speed_error, quarters).
        stalls: what their steps took ÷ what the cost gives them, stalls included, which the cost is without.
        covers: settings and up to where they were measured (:meth:`hoptrace.replay.calibration.held.Held.covers`).
        held: quantities of the steps. notes: what cannot be told. made_utc, hoptrace_version: of the file.
    """

    cost: StepCost
    outside: Overheads
    server: Server
    platform: str | None
    captures: tuple[dict[str, Any], ...]
    covers: tuple[dict[str, Any], ...] = ()
    held: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    made_utc: str = ""
    hoptrace_version: str = ""
    stalls: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """The file's content, with its checksum."""
        server = {k: getattr(self.server, k) for k in _SERVER if getattr(self.server, k) is not None}
        config = {k: self.server.config[k] for k in _CONFIG if self.server.config.get(k) is not None}
        d: dict[str, Any] = {
            "format": FORMAT,
            "hoptrace_version": self.hoptrace_version,
            "made_utc": self.made_utc,
            "server": server | ({"config": config} if config else {}),
            "platform": self.platform,
            "captures": [dict(c) for c in self.captures],
            "cost": self.cost.to_dict(),
            "stalls": self.stalls,
            "outside_steps": self.outside.as_dict(),
            "held": self.held,
            "covers": [dict(c) for c in self.covers],
            "notes": list(self.notes),
        }
        # As it is read again: tuples are lists there.
        d = json.loads(json.dumps(d))
        return d | {"checksum": _checksum(d)}


def cost_file(made: Calibrated) -> CostFile:
    """What a calibration found, to be kept."""
    import hoptrace

    captures = tuple(
        {
            "trace": c.name, "created_utc": c.created_utc, "steps": c.steps.height, "steps_origin": c.origin,
            "requests": c.requests, "duration_ns": c.duration_ns, "speed": round(s.factor, 6),
            "speed_error": None if s.error is None else round(s.error, 6), "speed_told": s.told, "quarters": list(q),
        }
        for c, s, q in zip(made.captures, made.speeds, made.quarters, strict=True)
    )  # fmt: skip
    platforms = {c.platform for c in made.captures if c.platform}
    return CostFile(
        made.cost, made.outside, made.server, next(iter(platforms)) if len(platforms) == 1 else None, captures,
        tuple(made.held.covers(made.server)), made.held.as_dict(), made.notes,
        datetime.now(UTC).isoformat(timespec="seconds"), hoptrace.__version__, made.stalls,
    )  # fmt: skip


def write_cost_file(path: Path, content: CostFile) -> None:
    """Write it at one stroke. EnvironmentProblem: the disk refuses."""
    text = json.dumps(content.to_dict(), indent=1, allow_nan=False) + "\n"
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="ascii")
        os.replace(part, path)
    except OSError as e:
        part.unlink(missing_ok=True)
        raise EnvironmentProblem(f"{path} cannot be written: {e.strerror}.", hint="Choose another place after -o.") from None


def read_cost_file(path: Path) -> CostFile:
    """Read one. InputError: it is none, newer than this hoptrace, or damaged; says what is wrong, and the remedy."""
    d = _content(path)
    named = d.get("format")
    match = re.fullmatch(rf"{_NAME}/(\d{{1,9}})(?:\.\d{{1,9}})?", named) if isinstance(named, str) else None
    if match is None:
        said = f"its format is {str(named)[:40]!r}" if named is not None else "it names no format"
        raise InputError(f"{path} is not a cost file: {said}, not {FORMAT!r}.", hint=_AGAIN)
    if int(match[1]) > _MAJOR:
        raise InputError(
            f"{path} is a {named}, newer than this hoptrace reads ({FORMAT}).", hint="Upgrade: pip install -U hoptrace."
        )
    if int(match[1]) < 1:
        raise InputError(f"{path}: there is no format {named!r}.", hint=_AGAIN)
    told = d.pop("checksum", None)
    if told is not None and told != _checksum(d):
        raise InputError(
            f"{path} is damaged, or was changed by hand: its checksum is not that of its content.",
            hint=f"{_AGAIN} Whoever changed it on purpose takes the key `checksum` out.",
        )
    try:
        return _parsed(d)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(x) for x in ("server", *first["loc"]))
        raise InputError(f"{path}: {where}: {first['msg']}.", hint=_AGAIN) from None
    except InputError as e:
        raise InputError(f"{path}: {e.message}", hint=e.hint or _AGAIN) from None
    except (KeyError, TypeError, ValueError) as e:
        what = f"it has no {e.args[0]}" if isinstance(e, KeyError) else str(e)
        raise InputError(f"{path} is damaged: {what}.", hint=_AGAIN) from None


def _content(path: Path) -> dict[str, Any]:
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder, not a cost file.", hint="Of a trace: hoptrace calibrate T.trace -o cost.json.")
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path} is too large for a cost file.", hint=_AGAIN)
        raw = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"There is no cost file at {path}.", hint=_AGAIN) from None
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a cost file: it is not text in UTF-8.", hint=_AGAIN) from None
    try:
        d = json.loads(raw, parse_constant=_no_number)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path} is damaged: it is no JSON ({str(e)[:120]}).", hint=_AGAIN) from None
    if not isinstance(d, dict):
        raise InputError(f"{path} is not a cost file: it holds a {type(d).__name__}, not a table.", hint=_AGAIN)
    return d


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _parsed(d: Mapping[str, Any]) -> CostFile:
    step = _table(d["cost"], "cost")
    for name in ("coefficients_ps", "compute_ps", "residuals", "domain", "error"):
        _table(step.get(name, {}), f"cost.{name}")
    cost = StepCost.from_dict(step)
    if not cost.coefficients_ps and not cost.pieces:
        raise ValueError("cost.coefficients_ps is empty, so that every step would cost nothing")
    if cost.covariance_ps2 is not None and not all(math.isfinite(v) for row in cost.covariance_ps2 for v in row):
        raise ValueError("cost.covariance_ps2 holds what is no number")
    for name, (low, high) in cost.domain.items():
        if low > high:
            raise ValueError(f"cost.domain.{name} begins at {low} and ends at {high}")
    captures, covers, notes = (_list(d.get(k, []), k) for k in ("captures", "covers", "notes"))
    platform = d.get("platform")
    if platform is not None and not isinstance(platform, str):
        raise ValueError("platform is no name")
    held = d.get("held")
    stalls = d.get("stalls", 1.0)
    if isinstance(stalls, bool) or not isinstance(stalls, int | float) or not 0.1 <= stalls <= 100:
        raise ValueError("stalls is no ratio")
    return CostFile(
        cost,
        _outside(_table(d["outside_steps"], "outside_steps")),
        Server.model_validate(_table(d["server"], "server")),
        platform,
        tuple(_table(c, "captures") for c in captures),
        tuple(_table(c, "covers") for c in covers),
        None if held is None else _table(held, "held"),
        tuple(str(n) for n in notes),
        str(d.get("made_utc", "")),
        str(d.get("hoptrace_version", "")),
        float(stalls),
    )


def _outside(d: Mapping[str, Any]) -> Overheads:
    """The reverse of :meth:`hoptrace.replay.overheads.Overheads.as_dict`: what is missing or null is unknown."""
    values: dict[str, Any] = {}
    counts: list[int] = []
    for f in fields(Overheads):
        if f.name == "n":
            continue
        figure = _table(d.get(f.name, {}), f"outside_steps.{f.name}")
        ns, n = figure.get("ns"), figure.get("n", 0)
        if type(n) is not int or n < 0 or (n and (type(ns) is not int or not 0 <= ns < 1 << 61)):
            raise ValueError(f"outside_steps.{f.name} is no time of so many ns, from n values")
        values[f.name] = ns if n else 0
        counts.append(n)
    return Overheads(**values, n=tuple(counts))


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a {type(value).__name__}, not a table")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is a {type(value).__name__}, not a list")
    return value


def _checksum(d: Mapping[str, Any]) -> str:
    """SHA-256 of the content without the checksum, keys sorted, no spaces."""
    plain = {k: v for k, v in d.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
