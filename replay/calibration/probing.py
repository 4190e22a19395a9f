"""Sending a probe: phase by phase, within its time, and stopped when it is asked to."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hoptrace.errors import EnvironmentProblem
from hoptrace.manifest import Server
from hoptrace.replay.calibration.design import Limits, Pace, Phase, design, paced
from hoptrace.replay.drive import DriveResult, Sent, drive_until_stopped
from hoptrace.replay.workload import Workload

__all__ = ["Probed", "limits_of", "probing", "work_of"]

_LEAST_S = 1.0  # a phase is not begun with less time than this left
_AROUND_S = 0.5  # of a phase, that its requests do not take: making the prompts, and the load generator's start


@dataclass
class Probed:
    """What a probe did. ``phases``: kind, requests, failed, expected_s, took_s of each that was sent; ``skipped``: kinds that
    time did not allow; ``stopped``: by Ctrl-C; ``planned``: requests."""

    limits: Limits
    pace: Pace | None = None
    planned: int = 0
    sent: int = 0
    failed: int = 0
    phases: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    stopped: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "planned": self.planned, "sent": self.sent, "failed": self.failed, "failures": self.failures, "stopped": self.stopped,
            "phases": self.phases, "skipped": self.skipped,
        }  # fmt: skip


def limits_of(server: Server) -> tuple[Limits, list[str]]:
    """What a server takes, and what had to be assumed of it, in sentences."""
    told = {
        "sequences": server.max_sequences,
        "budget": server.max_batched_tokens,
        "context": server.context_tokens,
        "kv_tokens": server.kv_capacity_tokens
        or (server.block_count * server.block_size_tokens if server.block_count and server.block_size_tokens else None),
    }
    names = {"sequences": "how many sequences it runs at once", "budget": "its token budget", "context": "its context"}
    known = {k: v for k, v in told.items() if v is not None and v > 0}
    base = Limits()
    said = [f"The server does not tell {what}: {getattr(base, k):,} is taken." for k, what in names.items() if k not in known]
    return Limits(**known), said


def work_of(phase: Phase, first: int) -> Workload:
    """A phase as the load generator takes it: requests numbered from ``first``, no two prompts alike."""
    n = len(phase.probes)
    order = sorted(phase.probes, key=lambda p: p.at_s)
    return Workload(
        request=_ints(range(first, first + n)),
        arrival_ns=_ints([round(p.at_s * 1e9) for p in order]),
        prompt_tokens=_ints([p.prompt_tokens for p in order]),
        output_tokens=_ints([p.output_tokens for p in order]),
        block_ptr=_ints([0] * (n + 1)),
        block_id=_ints([]),
        block_end=_ints([]),
        block_tokens=_ints([]),
    )


def _ints(values: Iterable[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(list(values), dtype=np.int64)


def probing(
    url: str,
    limits: Limits,
    *,
    requests: int = 60,
    at_most_s: float = 120.0,
    model: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Probed:
    """Send a probe to the server at ``url`` (or a proxy before it). Ctrl-C stops it: what was sent stands in the result.

    Two requests tell the pace, from which :func:`hoptrace.replay.calibration.design.design` makes the others. A phase that, by
    the pace so far, would end after ``at_most_s`` is left out; a request that is still running then is cut off.

    Args:
        progress: told the kind of the phase that begins, and requests sent of how many.

    Raises:
        EnvironmentProblem: nobody answers, or none of the first two requests succeeds.
    """
    out = Probed(limits, planned=2)
    begin = time.monotonic()
    # A prompt's words follow from its request's number: no other probe's are the same, so no cache has seen them.
    number = secrets.randbits(40) << 12

    def left() -> float:
        return at_most_s - (time.monotonic() - begin)

    def send(phase: Phase) -> DriveResult:
        nonlocal number
        if progress:
            progress(phase.kind, out.sent, out.planned)
        at = time.monotonic()
        result = drive_until_stopped(work_of(phase, number), url, model=model, timeout_s=max(_LEAST_S, left()))
        number += len(phase.probes)
        out.sent += result.sent
        out.failed += result.failed
        for why, n in result.failures.items():
            out.failures[why] = out.failures.get(why, 0) + n
        out.phases.append(
            {"kind": phase.kind, "requests": result.sent, "failed": result.failed, "expected_s": round(phase.expected_s, 3),
             "took_s": round(time.monotonic() - at, 3)}
        )  # fmt: skip
        out.stopped |= result.stopped
        return result

    told = send(paced(limits)).records
    if not out.stopped and (each := _pace(told)) is not None:
        told += send(paced(limits, token_s=each.prompt_token_s, at_most_s=at_most_s)).records
    if out.stopped:
        return out
    out.pace = _pace(told)
    if out.pace is None:
        why = next(iter(out.failures), "no token came")
        raise EnvironmentProblem(f"The server answers no request of a probe ({why}).", hint="See the server's log.")
    phases = design(limits, out.pace, requests=requests, at_most_s=max(left(), _LEAST_S))
    out.planned = 2 + sum(len(p.probes) for p in phases)
    slower = 1.0
    for phase in phases:
        if left() < max(_LEAST_S, slower * phase.expected_s):
            out.skipped.append(phase.kind)
            continue
        send(phase)
        if out.stopped:
            break
        # How much longer phases take than the pace of two requests says; what is begun is to end in time.
        took = sum(max(p["took_s"] - _AROUND_S, 0) for p in out.phases[2:])
        expected = sum(p["expected_s"] for p in out.phases[2:])
        slower = max(1.0, took / expected) if expected > 0 else 1.0
    return out


def _pace(told: list[Sent]) -> Pace | None:
    """Seconds for a prompt token and for a step, from a short and a longer prompt that were alone on the server."""
    seen: list[tuple[int, float]] = []  # prompt tokens, seconds to the first token
    steps = []
    for s in told:
        if s.error is not None or s.sent_ns is None or s.first_token_ns is None or s.finish_ns is None or not s.prompt_tokens:
            continue
        seen.append((s.prompt_tokens, (s.first_token_ns - s.sent_ns) / 1e9))
        if s.output_tokens is not None and s.output_tokens > 1:
            steps.append((s.finish_ns - s.first_token_ns) / 1e9 / (s.output_tokens - 1))
    if not seen:
        return None
    each = [first / tokens for tokens, first in seen]
    slope = min(each)
    if len(seen) == 2 and seen[1][0] > seen[0][0]:
        slope = (seen[1][1] - seen[0][1]) / (seen[1][0] - seen[0][0])
        # One of the two may have met a stall: never below a tenth of what the longer one says by itself.
        slope = max(slope, 0.1 * each[1])
    return Pace(max(slope, 1e-7), max(sum(steps) / len(steps) if steps else seen[0][1], 1e-5))
