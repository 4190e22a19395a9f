"""Whether traces can be held against each other: the same work, by the same engine and model."""

from __future__ import annotations

import polars as pl

from hoptrace.analysis.compare.diff_pairs import finished, pair
from hoptrace.analysis.compare.diff_settings import settings
from hoptrace.analysis.compare.diff_work import Reason, reasons_text, unequal, work_of
from hoptrace.errors import InputError
from hoptrace.reader import Trace

__all__ = ["other_work", "require_latencies", "require_repeat"]


def require_latencies(trace: Trace) -> None:
    """InputError if no request of the trace is known to have ended: there is nothing to hold a prediction against."""
    done = pl.col("finish_ns").is_not_null() & pl.col("first_token_ns").is_not_null() & pl.col("error").is_null()
    if not bool(trace.table("requests").select(done.any()).collect(engine="streaming").item()):
        raise InputError(
            f"{trace.name} holds no observed latencies: no request has a first token and an end.",
            hint="Record it with `hoptrace attach` or `hoptrace drive`; `hoptrace validate` says what is in it.",
        )


def other_work(a: Trace, b: Trace) -> list[Reason]:
    """Every reason why ``b`` is no other policy's run of the work of ``a``; empty if it is one."""
    done = finished(a), finished(b)
    work = work_of(a, done[0]), work_of(b, done[1])
    found = unequal(a, b, work, done, pair(*done))
    engines = [sorted({s.engine for s in t.manifest.servers if s.engine}) for t in (a, b)]
    if all(engines) and engines[0] != engines[1]:
        text = f"another engine: {', '.join(engines[0])} against {', '.join(engines[1])}, whose steps cost something else"
        found.insert(0, Reason("engine", text))
    return found


def require_repeat(a: Trace, repeat: Trace, *, anyway: bool) -> list[str]:
    """What is odd about a repeat of ``a``, in sentences.

    Raises:
        InputError: it is ``a`` itself; or other work or other settings, and ``anyway`` is false.
    """
    if repeat.path.resolve() == a.path.resolve():
        raise InputError(f"{repeat.name} is given as a repeat of itself.", hint="A repeat is another run of the same policy.")
    require_latencies(repeat)
    differ = [f"{s.name} {s.a} against {s.b}" for s in settings(a.manifest, repeat.manifest)]
    why = "; ".join(x for x in (reasons_text(other_work(a, repeat)), *differ) if x)
    if why and not anyway:
        raise InputError(
            f"{repeat.name} is no repeat of {a.name}: {why}.",
            hint="A repeat is another run of the same work under the same settings. Add --anyway to take it nevertheless.",
        )
    return [f"{repeat.name} is no exact repeat of {a.name}: {why}."] if why else []
